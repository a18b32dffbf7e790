import threading

import mxnet as mx
import pytest
from mxnet import nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import kind, parallel, randn
from mxamp.policy import active
from mxamp.policy.policy import PLAIN_FLOAT32

FLOAT16, BFLOAT16 = amp.Policy.default("float16", "cpu"), amp.Policy.default("bfloat16")


def product():
    return kind(nd.dot(randn(2, 3), randn(3, 2)))


def test_init_and_shutdown():
    assert not amp.is_enabled()
    assert amp.current_policy() is None
    amp.init(ctx=mx.cpu())
    assert amp.is_enabled()
    with amp.autocast():
        amp.shutdown()
        amp.shutdown()
        assert product() == "float16"  # in the region
    assert product() == "float32"
    assert_unpatched()


@pytest.mark.parametrize("first, second, words", [
    ({}, {"target_dtype": "bfloat16"}, "Policy float16 on cpu> instead of <Policy bfloat16.*"),
    ({"target_dtype": "bfloat16"}, {"target_dtype": "bfloat16", "tuned": False}, ".*untuned.*"),
    ({}, {"policy": FLOAT16.override(fp32=["dot"])}, r"fp32=\(\'dot\',\)>"),
])  # fmt: skip
def test_a_second_init_says_what_differs(first, second, words):
    here = {"ctx": "cpu"}
    amp.init(**first, **here)
    policy = amp.current_policy()
    if "policy" not in second:
        second = {**here, **second}
    words = rf"another policy than .*\(.*{words}\)\. Call"
    with pytest.raises(amp.StateError, match=words) as raised:
        amp.init(**second)
    assert len(str(raised.value)) < 500
    assert amp.current_policy() == policy


@pytest.mark.parametrize("arguments, error, words", [
    ({"target_precision_ops": ["Convolutoin"]}, amp.UnknownNameError, "'Convolution'"),
    ({"fp32_ops": ["dot"], "target_precision_ops": ["dot"]}, amp.ArgumentError, "as low and as fp32"),
    ({"target_dtype": "bfloat16", "ctx": mx.gpu()}, amp.ArgumentError, "bfloat16 kernels"),
])  # fmt: skip
@pytest.mark.backend
def test_bad_arguments_leave_nothing_behind(arguments, error, words):
    with pytest.raises(error, match=words):
        amp.init(**arguments)
    assert not amp.is_enabled()
    assert_unpatched()


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


def test_autocast_auto_says_that_it_is_float32(caplog, on_machine):
    on_machine()
    amp.init("float32", tuned=False)
    with amp.autocast("auto"):
        assert active.nearest_policy() is PLAIN_FLOAT32
        assert not amp.is_enabled()
    (line,) = caplog.messages
    assert line.startswith("'auto' is float32 here: ") and "stays off" in line


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


def test_autocast_is_a_threads_own():
    inside, checked = threading.Event(), threading.Event()

    def work():
        with amp.autocast("float16"):
            inside.set()
            checked.wait(10)
            assert product() == "float16"

    with parallel(work):
        inside.wait(10)
        assert not amp.is_enabled()
        assert product() == "float32"
        checked.set()
    assert_unpatched()
