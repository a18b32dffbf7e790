"""What "auto" means on each machine, and where it is an error."""

import re
import threading

import mxnet as mx
import pytest
from click.testing import CliRunner
from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, randn
from mxamp.cli.main import main
from mxamp.framework import machine
from mxamp.policy.active import FLOAT32, nearest_policy

BF16 = frozenset({"avx512", "avx512_bf16"})
#: How many GPUs, what the CPU has, and what "auto" is there.
MACHINES = {
    "gpu": (1, frozenset(), "float16"), "gpu and bfloat16": (2, BF16, "float16"), "avx512_bf16": (0, BF16, "bfloat16"),
    "amx_bf16": (0, frozenset({"avx512", "amx_bf16"}), "bfloat16"), "avx512": (0, frozenset({"avx512"}), "float32"),
    "old": (0, frozenset(), "float32"),
}  # fmt: skip


def on_machine(monkeypatch, name):
    """Let this machine look like another; return what "auto" is there."""
    gpus, features, dtype = MACHINES[name]
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "_gpu_count", lambda: gpus)
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    return dtype


@pytest.fixture(params=MACHINES)
def expected(request, monkeypatch):
    return on_machine(monkeypatch, request.param)


@pytest.fixture
def float32(monkeypatch):
    on_machine(monkeypatch, "old")


@pytest.fixture
def bfloat16(monkeypatch):
    on_machine(monkeypatch, "avx512_bf16")


def product():
    return kind(nd.FullyConnected(randn(32, 3), randn(2, 3), num_hidden=2, no_bias=True))


def test_each_machine(expected):
    assert machine.fast_dtype() == expected
    assert machine.fast_dtype("gpu") == "float16"
    amp.init("auto")
    policy = amp.current_policy()
    assert amp.is_enabled() == (expected != "float32")
    if policy is None:
        assert_unpatched()
    else:
        device = "gpu" if expected == "float16" else "cpu"
        assert policy is amp.Policy.default(expected, device)


@pytest.mark.parametrize(
    "limit, dtype",
    [("AVX2", "float32"), ("AVX512_CORE", "float32"), ("AVX512_CORE_BF16", "bfloat16"), ("ALL", "bfloat16")],
)  # fmt: skip
def test_onednns_limit_counts(bfloat16, monkeypatch, limit, dtype):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
    assert machine.fast_dtype() == dtype
    if dtype == "float32":
        assert machine.why_float32().startswith(f"DNNL_MAX_CPU_ISA={limit} keeps oneDNN from")


def test_float32_is_said_once(float32, caplog):
    for _ in range(2):
        amp.init("auto")
        amp.init("auto", ctx=mx.cpu())
        with amp.autocast("auto"):
            pass
        amp.shutdown()
    (line,) = caplog.messages
    assert line == (
        f"'auto' is float32 here, and mixed precision stays off: this CPU ({machine.cpu_name()}) "
        "computes no bfloat16 in hardware. To turn it on all the same, give 'bfloat16' in place of "
        "'auto'"
    )


def test_shutdown_after_float32_forgets_it(float32):
    amp.init("auto")
    amp.shutdown()
    assert nearest_policy() is None
    amp.init("bfloat16")
    assert amp.current_policy().target_dtype == "bfloat16"


def test_ctx_says_which_device(monkeypatch):
    on_machine(monkeypatch, "gpu and bfloat16")
    for ctx, dtype in ((mx.cpu(), "bfloat16"), (mx.gpu(), "float16"), ([mx.gpu(0)], "float16")):
        amp.init("auto", ctx=ctx)
        assert amp.current_policy().target_dtype == dtype
        amp.shutdown()
    on_machine(monkeypatch, "gpu")
    amp.init("auto", ctx=mx.cpu())
    assert not amp.is_enabled()


def test_lists_and_tuning_beside_it(monkeypatch):
    for name, dtype in (("avx512_bf16", "bfloat16"), ("gpu", "float16"), ("old", None)):
        on_machine(monkeypatch, name)
        amp.init("auto", fp32_ops=["dot"], tuned=False)
        policy = amp.current_policy()
        if dtype:
            assert (policy.target_dtype, policy.rule("dot").op_class) == (dtype, "fp32")
            assert not policy.substitutions
        assert (policy is None) == (dtype is None)
        amp.shutdown()


def test_a_policy_beside_it(monkeypatch):
    on_machine(monkeypatch, "avx512_bf16")
    mine = amp.Policy.default("bfloat16").override(fp32=["dot"])
    amp.init("auto", policy=mine)
    assert amp.current_policy() is mine
    amp.shutdown()
    with amp.autocast("auto", policy=mine):
        assert amp.current_policy() is mine
    half = amp.Policy.default("float16", "cpu")
    words = "'auto' is bfloat16 on the CPU here, but the policy is for float16 on the CPU"
    for use in (amp.init, amp.autocast):
        with pytest.raises(amp.ArgumentError, match=words):
            use("auto", policy=half)
    on_machine(monkeypatch, "gpu")
    with pytest.raises(amp.ArgumentError, match="is float16 on the GPU here, .* bfloat16 on the C"):
        amp.init("auto", policy=mine)
    with pytest.raises(
        amp.ArgumentError, match="is float16 on the GPU here, .* float16 on the CPU"
    ):
        amp.init("auto", policy=half)
    on_machine(monkeypatch, "old")
    for policy in (mine, half):
        amp.init("auto", policy=policy)
        with amp.autocast("auto", policy=policy):
            assert not amp.is_enabled()
    assert_unpatched()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"fp32_ops": ["Convolutoin"]}, amp.UnknownNameError, "'Convolution'"), ({"ctx": "tpu"}, amp.ArgumentError, "tpu"),
        ({"policy": "mine"}, amp.ArgumentError, "mxamp.Policy"),
        ({"policy": amp.Policy.default("bfloat16"), "ctx": "gpu"}, amp.ArgumentError, "gpu|GPU"),
        ({"policy": amp.Policy.default("bfloat16"), "fp32_ops": ["dot"]}, amp.ArgumentError, "policy contains operator lists"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors_on_every_machine(expected, arguments, error, words):
    with pytest.raises(error, match=words):
        amp.init("auto", **arguments)
    assert nearest_policy() is None


def test_another_init(float32, monkeypatch):
    amp.init("auto")
    with pytest.raises(amp.StateError, match=r"'auto' has chosen float32 here.*shutdown\(\)"):
        amp.init("bfloat16")
    assert nearest_policy() is FLOAT32
    amp.shutdown()
    amp.init("float16", ctx=mx.cpu())
    with pytest.raises(amp.StateError, match="target_dtype: float16 instead of float32"):
        amp.init("auto")
    assert amp.current_policy().target_dtype == "float16"
    amp.shutdown()
    on_machine(monkeypatch, "avx512_bf16")
    amp.init("auto")
    amp.init("bfloat16")
    with pytest.raises(amp.StateError, match="target_dtype: bfloat16 instead of float16"):
        amp.init("float16", ctx=mx.cpu())


def test_regions_in_float32_are_off_and_patch_nothing(float32):
    with amp.autocast("auto"):
        assert_unpatched()
        assert not amp.is_enabled()
        with amp.autocast():  # the dtype around it
            assert product() == "float32"
            assert_unpatched()
        with amp.autocast("float16"):
            assert product() == "float16"
            with amp.autocast("auto"):
                assert product() == "float32"
                assert amp.current_policy() is None
            with amp.autocast(enabled=False), amp.autocast():
                assert product() == "float16"
        with amp.autocast(enabled=False), amp.autocast():
            assert product() == "float32"
    amp.init("float16", ctx=mx.cpu())
    with amp.autocast("auto"):
        assert product() == "float32"
    assert product() == "float16"
    amp.shutdown()
    amp.init("auto")
    with amp.autocast():
        assert product() == "float32"
        assert_unpatched()
    assert repr(amp.autocast("auto")) == "<autocast auto>"


def test_regions_elsewhere_are_on(bfloat16):
    around = amp.Policy.default("bfloat16").untuned()
    with amp.autocast("auto"):
        assert amp.current_policy() is amp.Policy.default("bfloat16")
    with amp.autocast(policy=around), amp.autocast("auto"):
        assert amp.current_policy() is around
    with amp.autocast("float16"), amp.autocast("auto"):
        assert amp.current_policy().target_dtype == "bfloat16"
    with amp.autocast("auto", enabled=False):
        assert not amp.is_enabled()


def test_one_region_entered_in_several_threads_and_functions(float32):
    region, seen = amp.autocast("auto"), []

    @region
    def other():
        with region:
            seen.append(product())

    with amp.autocast("float16"):
        with region:
            threads = [threading.Thread(target=other) for _ in range(2)]
            for thread in threads:
                thread.start()
            other()
            for thread in threads:
                thread.join()
        assert product() == "float16"
    assert seen == ["float32"] * 3
    assert_unpatched()


NET = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")


@pytest.mark.parametrize(
    "use",
    [
        amp.Policy.default, lambda dtype: amp.explain(NET, dtype), lambda dtype: amp.convert_symbol(NET, dtype),
        lambda dtype: amp.convert_model(NET, {}, {}, dtype),
        lambda dtype: amp.debugging.compare(mx.gluon.nn.Dense(1), nd.ones((1, 1)), dtype=dtype), amp.list_lp16_ops,
        lambda dtype: amp.debugging.check_numerics(dtype=dtype).__enter__(),
    ],
)  # fmt: skip
def test_what_needs_one_dtype_says_so(use, expected):
    words = f"'auto' is for programs .* 'float16' or 'bfloat16' ({expected} is the fast dtype on"
    with pytest.raises(amp.ArgumentError, match=re.escape(words).replace(r"\.\*", ".*")):
        use("auto")


def test_saved_models_and_the_command_need_one_dtype(tmp_path, float32):
    mx.model.save_checkpoint(
        str(tmp_path / "m"), 0, NET, {"fc_weight": nd.ones((2, 3)), "fc_bias": nd.ones(2)}, {}
    )
    with pytest.raises(amp.ArgumentError, match="'auto' is for programs"):
        amp.convert_files(str(tmp_path / "m"), str(tmp_path / "out"), target_dtype="auto")
    for command in ("convert m --out out --dtype", "explain m --dtype", "operators --dtype"):
        done = CliRunner().invoke(
            main, [*command.replace(" m ", f" {tmp_path}/m ").split(), "auto"]
        )
        assert done.exit_code == 2
        words = "error: 'auto' is for programs .*float32 is the fast dtype on this machine.*\n"
        assert re.fullmatch(words, done.output)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m-0000.params", "m-symbol.json"]


def test_comparing_where_float32_was_chosen(float32):
    amp.init("auto")
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    with pytest.raises(amp.ArgumentError, match="has chosen float32 here: give the target dtype"):
        amp.debugging.compare(net, nd.ones((4, 3)))
    assert amp.debugging.compare(net, nd.ones((4, 3)), dtype="bfloat16").outputs


def test_functions_of_the_users_own_run_as_they_are(float32):
    amp.init("auto")
    for decorator in (amp.half_function, amp.float_function, amp.promote_function):
        assert decorator(lambda x: kind(x))(nd.ones(1)) == "float32"


def test_contrib_amp_in_float32(float32):
    amp.patch_contrib()
    from mxnet.contrib import amp as contrib

    contrib.init("auto")
    assert not contrib._amp_initialized
    amp.shutdown()
    amp.shutdown()
