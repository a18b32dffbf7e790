"""What "auto" means on each machine, and where it is an error."""

import mxnet as mx
import pytest
from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, randn
from mxamp.backends import backend_of
from mxamp.backends.onednn import cpu
from mxamp.policy.active import nearest_policy
from mxamp.policy.policy import PLAIN_FLOAT32

BF16 = {"avx512", "avx512_bf16"}
#: How many GPUs, what the CPU has, and what "auto" is there.
AMX = BF16 | {"amx_bf16"}
MACHINES = {
    "gpu": (1, (), "float16"), "gpu and bfloat16": (2, BF16, "float16"), "avx512_bf16": (0, BF16, "bfloat16"),
    "amx_bf16": (0, AMX, "float32"), "avx512": (0, {"avx512"}, "float32"), "old": (0, (), "float32"),
}  # fmt: skip


@pytest.fixture(params=MACHINES)
def expected(request, on_machine):
    """What "auto" is on each of the machines."""
    *features, dtype = MACHINES[request.param]
    on_machine(*features)
    return dtype


@pytest.fixture
def float32(on_machine):
    on_machine()


def product():
    return kind(nd.FullyConnected(randn(32, 3), randn(2, 3), num_hidden=2, no_bias=True))


def test_each_machine(expected):
    assert backend_of("gpu").fast_dtype() == "float16"
    amp.init("auto")
    assert amp.is_enabled() == (expected != "float32")
    device = "gpu" if expected == "float16" else "cpu"
    assert amp.current_policy() is amp.Policy.default(expected, device)


@pytest.mark.parametrize("limit, dtype", [
    ("AVX2", "float32"), ("AVX512_CORE", "float32"), ("AVX512_CORE_BF16", "bfloat16"), ("ALL", "bfloat16"),
])  # fmt: skip
def test_onednns_limit_counts(monkeypatch, on_machine, caplog, limit, dtype):
    on_machine(0, BF16)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
    assert backend_of("cpu").fast_dtype() == dtype
    amp.convert_symbol(mx.sym.relu(mx.sym.var("data")), "bfloat16")
    assert ("convert it on a CPU with avx512" in caplog.text) == (limit == "AVX2")
    if dtype == "float32":
        assert cpu.why_float32().startswith(f"DNNL_MAX_CPU_ISA={limit} keeps oneDNN from")


@pytest.mark.parametrize("allowed", [True, False])
def test_amx_needs_onednns_limit_and_linuxs_permission(monkeypatch, on_machine, caplog, allowed):
    on_machine(0, AMX)
    monkeypatch.setattr(cpu, "_may_use_amx", lambda: allowed)
    assert cpu.onednn_features() == BF16
    amp.init("bfloat16")
    assert f"is fast in bfloat16 if {cpu.FOR_AMX} is set" in caplog.text
    monkeypatch.setenv(*cpu.FOR_AMX.split("="))
    assert cpu.onednn_features() == (AMX if allowed else BF16)
    assert backend_of("cpu").fast_dtype() == ("bfloat16" if allowed else "float32")


def test_float32_is_said_once(float32, caplog):
    for _ in range(2):
        amp.init("auto")
        amp.init("auto", ctx=mx.cpu())
        with amp.autocast("auto"):
            pass
        amp.shutdown()
    (line,) = caplog.messages
    assert line.startswith("'auto' is float32 here: ") and "faster equivalents" in line


def test_ctx_says_which_device(on_machine):
    on_machine(2, BF16)
    for ctx, dtype in ((mx.cpu(), "bfloat16"), (mx.gpu(), "float16"), ([mx.gpu(0)], "float16")):
        amp.init("auto", ctx=ctx)
        assert amp.current_policy().target_dtype == dtype
        amp.shutdown()
    on_machine(1)
    amp.init("auto", ctx=mx.cpu())
    assert not amp.is_enabled()


def test_a_policy_beside_it(on_machine, caplog):
    mine = amp.Policy.default("bfloat16").override(fp32=["dot"])
    half = amp.Policy.default("float16", "cpu")
    on_machine(0, BF16)
    with amp.autocast("auto", policy=mine):
        assert amp.current_policy() is mine
    words = "'auto' is bfloat16 on the CPU here: the policy is for float16, but bfloat16"
    for use in (amp.init, amp.autocast):
        with pytest.raises(amp.ArgumentError, match=words):
            use("auto", policy=half)
    on_machine(1)
    with pytest.raises(amp.ArgumentError, match="is float16 on the GPU here: the policy is for"):
        amp.init("auto", policy=half)
    on_machine()
    with pytest.raises(amp.UnknownNameError, match="'Convolution'"):
        amp.init("auto", fp32_ops=["Convolutoin"])
    with amp.autocast("auto", policy=mine):
        assert not amp.is_enabled()
    assert "Graphs get faster equivalents" in caplog.text
    assert_unpatched()


def test_another_init(float32):
    amp.init("auto")
    with pytest.raises(amp.StateError, match=r"Policy float32 on cpu.*shutdown\(\)"):
        amp.init("bfloat16")
    amp.shutdown()
    amp.init("auto", tuned=False)
    assert nearest_policy() is PLAIN_FLOAT32
    assert_unpatched()
    amp.shutdown()
    amp.init("float16", ctx=mx.cpu())
    with pytest.raises(amp.StateError, match="Policy float16 on cpu> instead of <Policy float32"):
        amp.init("auto")
    assert amp.current_policy().target_dtype == "float16"


def test_regions_in_float32_lower_nothing(float32):
    amp.init("auto")
    with amp.autocast():  # the dtype around it
        assert product() == "float32"
    with amp.autocast("float16"):
        assert product() == "float16"
        with amp.autocast("auto"):
            assert product() == "float32"
            assert not amp.is_enabled()
        with amp.autocast(enabled=False), amp.autocast():
            assert product() == "float16"
