"""The precision of the user's own functions and custom operators."""

import types
from typing import ClassVar

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import (
    backpropagate,
    custom_operator,
    down,
    kind,
    randn,
    rounded,
    same,
    untuned,
    up,
    values,
)


def kinds_of(*arrays):
    return [kind(a) for a in arrays]


def test_functions_of_the_users_own(dtype):
    seen = []

    def record(a, b, extra=None):
        seen.append(kinds_of(a, *b))
        return a

    x, index = randn(2, 3), nd.array([1], dtype="int32")
    for wrap, wanted in ((amp.half_function, dtype), (amp.float_function, "float32")):
        wrapped = wrap(record)
        assert wrapped.__name__ == "record"
        seen.clear()
        assert wrapped(x, [x, index]) is x
        with amp.autocast(policy=untuned(dtype)):
            low = nd.FullyConnected(x, x, no_bias=True, num_hidden=2)
            wrapped(low, [x, index], extra={"more": (x,)})
        assert seen == [["float32", "float32", "int32"], [wanted, wanted, "int32"]]
    seen.clear()
    promoted = amp.promote_function(record)
    with amp.autocast(policy=untuned(dtype)):
        promoted(low, [low, index])
        promoted(low, [x, index])
    assert seen == [[dtype, dtype, "int32"], ["float32", "float32", "int32"]]


def test_registered_functions():
    module = types.ModuleType("layers")
    module.attention = lambda a: kind(a)
    module.loss = lambda a: kind(a)
    originals = module.attention, module.loss
    amp.register_half_function(module, "attention")
    amp.register_float_function(module, "loss")
    with amp.autocast("float16"):
        assert module.attention(randn(1)) == "float16"
        assert module.loss(randn(1).astype("float16")) == "float32"
    amp.shutdown()
    assert (module.attention, module.loss) == originals
    with pytest.raises(amp.ArgumentError, match="'nothing'; there are 'attention'"):
        amp.register_promote_function(module, "nothing")


@custom_operator("mxamp_probe")
class Probe(mx.operator.CustomOp):
    seen: ClassVar = []

    def forward(self, is_train, req, in_data, out_data, aux):
        Probe.seen.append(kind(in_data[0]))
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@pytest.mark.parametrize("registered, wanted", [
    (None, "float32"), ("half", "float16"), ("float", "float32"), ("promote", "float16"),
])  # fmt: skip
def test_custom_operators(registered, wanted):
    if registered:
        amp.register_custom_operator("mxamp_probe", registered)
    x = randn(2, 3)
    with amp.autocast("float16"):
        low = nd.FullyConnected(x, x, no_bias=True, num_hidden=2)
        Probe.seen.clear()
        out = nd.Custom(low, op_type="mxamp_probe")
        out.wait_to_read()
    assert Probe.seen == [wanted]
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    symbol = mx.sym.Custom(symbol, op_type="mxamp_probe", name="probe")
    plan = amp.explain(symbol, policy=amp.Policy.default("float16", "gpu"))
    assert plan["probe"].precision == wanted


def test_custom_operators_are_registered_before_mixed_precision_is_on():
    amp.register_custom_operator("mxamp_probe", "half")
    amp.init("float16", ctx=mx.cpu())
    amp.register_custom_operator("mxamp_probe", "half")  # as it is known
    for arguments in (("mxamp_probe", "float"), ("other", "half")):
        with pytest.raises(amp.StateError, match=f"does not know .*'{arguments[0]}'.*before init"):
            amp.register_custom_operator(*arguments)
    with amp.autocast(enabled=False):
        amp.register_custom_operator("other", "half")


class Product(autograd.Function):
    """Records the dtypes that it is given."""

    def forward(self, one, other):
        self.given = [kind(one), kind(other)]
        self.save_for_backward(one, other)
        return one * other

    def backward(self, gradient):
        one, other = self.saved_tensors
        return gradient * other, gradient * one


class HalfProduct(Product):
    @amp.half_function
    def forward(self, one, other):
        return super().forward(one, other)


@pytest.mark.parametrize("function", [Product, HalfProduct])
def test_functions_with_their_own_gradient_take_float32_unless_they_are_half(on, function):
    one, other = randn(4, 3), down(randn(4, 3, seed=1), on.dtype)
    for array in (one, other):
        array.attach_grad()
    product = function()
    backpropagate(lambda: product(one, other))
    assert product.given == ["float32" if function is Product else on.dtype] * 2
    assert (kind(one.grad), kind(other.grad)) == ("float32", on.dtype)
    assert same(up(other.grad), rounded(one, on.dtype))
    tolerance = 0 if function is Product else 0.01
    np.testing.assert_allclose(values(one.grad), values(up(other)), rtol=tolerance)
