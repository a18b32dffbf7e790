"""The public dtype for bfloat16, where MXNet takes dtypes."""

import mxnet as mx
from mxnet import gluon, nd
from mxnet.contrib import amp as stock

import mxamp as amp
from helpers import initialized


def test_mxnet_takes_it():
    net = initialized(gluon.nn.Dense(2, in_units=3))
    net.cast(amp.bfloat16)
    arrays = [
        net.weight.data(), nd.ones(2).astype(amp.bfloat16), nd.amp_cast(nd.ones(2), dtype=amp.bfloat16),
        nd.full(2, 3, dtype=amp.bfloat16), nd.arange(2, dtype=amp.bfloat16),
    ]  # fmt: skip
    assert {array.dtype for array in arrays} == {amp.bfloat16}
    array = nd.array([1.5, -3]).astype(amp.bfloat16).astype("float32")
    assert array.asnumpy().tolist() == [1.5, -3]


def test_symbols_take_it():
    data = mx.sym.var("data", dtype=amp.bfloat16)
    assert mx.sym.cast(data, dtype="float32").infer_type()[0] == [amp.bfloat16]
    assert mx.sym.cast(data, dtype=amp.bfloat16).infer_type()[1] == [amp.bfloat16]


def test_it_is_the_dtype_of_contrib_amp_and_of_mxamp():
    assert amp.bfloat16 == stock.amp.bfloat16
    with amp.autocast(amp.bfloat16):
        assert amp.current_policy().target_dtype == "bfloat16"
