import logging
import threading

import mxnet as mx
import pytest
from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, randn
from mxamp.framework import machine
from mxamp.patches import table

FLOAT16, BFLOAT16 = amp.Policy.default("float16", "cpu"), amp.Policy.default("bfloat16")


def product():
    return kind(nd.dot(randn(2, 3), randn(3, 2)))


def test_init_and_shutdown():
    assert not amp.is_enabled()
    assert amp.current_policy() is None
    amp.init(ctx=mx.cpu())
    assert amp.is_enabled()
    assert product() == "float16"
    amp.shutdown()
    amp.shutdown()
    assert product() == "float32"
    assert_unpatched()


def test_a_repeated_init_does_nothing(caplog):
    amp.init("float16", ctx=mx.cpu())
    with caplog.at_level(logging.DEBUG, "mxamp"):
        amp.init("float16", ctx=[mx.cpu(0), mx.cpu(1)])
    assert "same policy" in caplog.text
    amp.shutdown()
    assert_unpatched()


@pytest.mark.parametrize(
    "first, second, words",
    [
        ({}, {"target_dtype": "bfloat16"}, "Policy float16 on cpu> instead of <Policy bfloat16.*"),
        ({}, {"tuned": False}, None),
        ({"target_dtype": "bfloat16"}, {"target_dtype": "bfloat16", "tuned": False}, ".*untuned.*"),
        ({}, {"ctx": "gpu"}, "on cpu> instead of <Policy float16 on gpu>"),
        ({}, {"policy": FLOAT16.override(fp32=["dot"])}, r"fp32=\(\'dot\',\)>"),
        ({}, {"policy": FLOAT16.override(fp32_layers=["a"])}, r"fp32_layers=\(\'a\',\)>"),
        (
            {"conditional_fp32_ops": [("Activation", "act_type", ["relu"])]},
            {"conditional_fp32_ops": [("Activation", "act_type", ["tanh"])]}, "conditional=.*relu.* instead of .*tanh.*",
        ),
    ],
)  # fmt: skip
def test_a_second_init_says_what_differs(first, second, words):
    here = {"ctx": "cpu"}
    amp.init(**first, **here)
    policy = amp.current_policy()
    if "policy" not in second:
        second = {**here, **second}
    if words is None:
        amp.init(**second)
        return
    with pytest.raises(
        amp.StateError, match=rf"another policy than .*\(.*{words}\)\. Call"
    ) as raised:
        amp.init(**second)
    assert len(str(raised.value)) < 500
    assert amp.current_policy() == policy


def test_a_policy_for_gpus_where_there_is_none(caplog, monkeypatch):
    monkeypatch.setattr(machine, "_gpu_count", lambda: 0)
    amp.init("float16", ctx=mx.gpu())
    (line,) = caplog.messages
    assert "MXNet sees no GPU" in line
    assert "ctx=mx.cpu()" in line
    amp.shutdown()
    caplog.clear()
    monkeypatch.setattr(machine, "_gpu_count", lambda: 1)
    amp.init("float16", ctx=mx.gpu())
    assert not caplog.messages


def test_a_dtype_beside_a_policy():
    with amp.autocast("float16", policy=FLOAT16):
        assert amp.current_policy() is FLOAT16
    with pytest.raises(amp.ArgumentError, match="the policy is for float16, but bfloat16"):
        amp.autocast("bfloat16", policy=FLOAT16)
    with pytest.raises(amp.ArgumentError, match="the policy is for bfloat16, but float16"):
        amp.init("float16", policy=BFLOAT16)
    amp.init(policy=BFLOAT16)
    assert amp.current_policy() is BFLOAT16


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"target_dtype": "float8"}, amp.ArgumentError, "'float8'"),
        ({"target_dtype": "int32"}, amp.ArgumentError, "'float16', 'bfloat16' or 'auto'"),
        ({"target_dtype": None}, amp.ArgumentError, "the target dtype must be"),
        ({"target_precision_ops": ["Convolutoin"]}, amp.UnknownNameError, "'Convolution'"),
        ({"fp32_ops": ["Conv2D"]}, amp.UnknownNameError, "Conv2D"),
        ({"fp32_ops": "Convolution"}, amp.ArgumentError, "list of names"),
        ({"fp32_ops": [3]}, amp.UnknownNameError, "3"),
        (
            {"fp32_ops": ["dot"], "target_precision_ops": ["dot"]},
            amp.ArgumentError, "as low and as fp32",
        ),
        ({"fp32_ops": ["concat"], "widest_ops": ["Concat"]}, amp.ArgumentError, "'Concat'"),
        ({"conditional_fp32_ops": [("Activation",)]}, amp.ArgumentError, "operator, attribute"),
        ({"conditional_fp32_ops": [("Activation", "act_type", "tanh")]}, amp.ArgumentError, "list"),
        (
            {"conditional_fp32_ops": [("dot", "transpose_a", ["b"])], "fp32_ops": ["dot"]},
            amp.ArgumentError, "conditionally",
        ),
        ({"ctx": "tpu"}, amp.ArgumentError, "'tpu'"),
        ({"ctx": [mx.cpu(), mx.gpu()]}, amp.ArgumentError, "one kind"),
        ({"target_dtype": "bfloat16", "ctx": mx.gpu()}, amp.ArgumentError, "bfloat16 kernels"),
        ({"policy": "float16"}, amp.ArgumentError, "mxamp.Policy"),
    ],
)  # fmt: skip
def test_bad_arguments_leave_nothing_behind(arguments, error, words):
    with pytest.raises(error, match=words):
        amp.init(**arguments)
    assert not amp.is_enabled()
    assert_unpatched()


def test_a_failed_patch_rolls_back(monkeypatch):
    before = dict(vars(mx.sym.Symbol))
    broken = table.Row(mx, "no_such_attribute", lambda f: f, "fails")
    monkeypatch.setattr(table, "ALL", (*table.ALL, broken))
    with pytest.raises(KeyError):
        amp.init(ctx=mx.cpu())
    assert not amp.is_enabled()
    assert dict(vars(mx.sym.Symbol)) == before
    monkeypatch.undo()
    assert_unpatched()
    amp.init(ctx=mx.cpu())
    assert product() == "float16"


def test_somebody_elses_patch_is_left_in_place(caplog):
    amp.init(ctx=mx.cpu())
    ours = mx.sym.Symbol.bind
    original = ours.__wrapped__

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    mx.sym.Symbol.bind = theirs
    amp.shutdown()
    assert mx.sym.Symbol.bind is theirs
    assert "patched by other code" in caplog.text
    mx.sym.Symbol.bind = original


def test_autocast_nests():
    with amp.autocast("float16") as outer:
        with amp.autocast(enabled=False):
            assert not amp.is_enabled()
            assert product() == "float32"
            with amp.autocast():
                assert product() == "float16"
            with amp.autocast("bfloat16"):
                assert product() == "float32"
                assert amp.current_policy().target_dtype == "bfloat16"
        assert product() == "float16"
        with outer:
            assert product() == "float16"
    assert_unpatched()


def test_autocast_restores_after_an_error():
    with pytest.raises(ZeroDivisionError), amp.autocast("float16"):
        raise ZeroDivisionError
    assert not amp.is_enabled()
    assert_unpatched()


def test_autocast_decorates():
    @amp.autocast("float16")
    def low(depth=0):
        """Its words."""
        return low(depth + 1) if depth < 3 else product()

    @amp.autocast(enabled=False)
    def plain():
        return product()

    assert low() == "float16"
    assert low.__doc__ == "Its words."
    amp.init(ctx=mx.cpu())
    assert plain() == "float32"


@pytest.mark.parametrize(
    "arguments", [(True,), (lambda: None,), ("float64",), ("float16", True, "policy")]
)
def test_bad_autocast_arguments(arguments):
    with pytest.raises(amp.ArgumentError):
        amp.autocast(*arguments)


def test_autocast_is_a_threads_own():
    inside, checked = threading.Event(), threading.Event()
    seen = []

    def work():
        with amp.autocast("float16"):
            inside.set()
            checked.wait(10)
            seen.append(product())

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(10)
    assert not amp.is_enabled()
    assert product() == "float32"
    checked.set()
    thread.join()
    assert seen == ["float16"]
    assert_unpatched()


def test_shutdown_inside_a_region():
    amp.init(ctx=mx.cpu())
    with amp.autocast():
        amp.shutdown()
        assert product() == "float16"
    assert product() == "float32"
    assert_unpatched()


def test_log_lines_say_once_what_has_not_changed(caplog, monkeypatch):
    monkeypatch.setattr(machine, "computes_bfloat16", lambda: False)
    caplog.set_level("INFO", logger="mxamp")
    for dtype in ("bfloat16", "bfloat16", "float16", "bfloat16"):
        amp.init(dtype, ctx=mx.cpu())
        amp.shutdown()
    assert caplog.text.count("no bfloat16 in hardware") == 1
    assert caplog.text.count("is for trying") == 1
    assert caplog.text.count("mixed precision is on") == 4


def _dense():
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    return net


CHOOSES_FLOAT16 = {
    "init": lambda: amp.init("float16", ctx=mx.cpu()),
    "autocast": lambda: amp.autocast("float16")(_dense)(),
    "explain": lambda: amp.explain(mx.sym.relu(mx.sym.var("x")), "float16"),
    "convert_symbol": lambda: amp.convert_symbol(mx.sym.relu(mx.sym.var("x"))),
    "convert_hybrid_block": lambda: amp.convert_hybrid_block(
        _dense(), "float16", example_inputs=mx.nd.ones((1, 3))
    ),
    "benchmark": lambda: amp.benchmark(
        _dense(), mx.nd.ones((1, 3)), target_dtype="float16", budget=0.01
    ),
}


@pytest.mark.skipif(amp.Policy.default().device == "gpu", reason="float16 is for the GPU")
@pytest.mark.parametrize("name", CHOOSES_FLOAT16)
def test_float16_on_a_cpu_is_warned_of_once(name, caplog):
    for _ in range(2):
        CHOOSES_FLOAT16[name]()
    (said,) = [said for said in caplog.messages if "at least 5 rounds" not in said]
    assert said.startswith("float16 on a CPU is for trying and testing")
    assert ("policy=Policy.default('float16', 'gpu')" in said) == (name in ("explain", "convert_symbol", "convert_hybrid_block"))  # fmt: skip
