"""Log lines that say what is slow, or off, on this machine."""

import mxnet as mx
import pytest

import mxamp as amp


@pytest.mark.backend
def test_a_policy_for_gpus_where_there_is_none(caplog, on_machine):
    on_machine(gpus=0)
    amp.init("float16", ctx=mx.gpu())
    (line,) = caplog.messages
    assert "MXNet sees no GPU" in line
    assert "ctx=mx.cpu()" in line
    amp.shutdown()
    caplog.clear()
    on_machine(gpus=1)
    amp.init("float16", ctx=mx.gpu())
    assert not caplog.messages


CHOOSES_FLOAT16 = {
    "init": lambda: amp.init("float16", ctx=mx.cpu()),
    "convert_symbol": lambda: amp.convert_symbol(mx.sym.relu(mx.sym.var("x"))),
}


@pytest.mark.skipif(amp.Policy.default().device == "gpu", reason="float16 is for the GPU")
@pytest.mark.parametrize("name", CHOOSES_FLOAT16)
@pytest.mark.backend
def test_float16_on_a_cpu_is_warned_of_once(name, caplog):
    for _ in range(2):
        CHOOSES_FLOAT16[name]()
    (said,) = caplog.messages
    assert said.startswith("float16 on a CPU is for trying and testing")
    assert ("Policy.default('float16', 'gpu')" in said) == (name != "init")
