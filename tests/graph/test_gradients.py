"""Biases beside weights without gradients: MXNet's dense layer computes none for them."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, kind, leaf, randn, stacked, untuned
from mxamp.graph.ir import Graph
from mxamp.patches.symbolic import scaled_executors

DATA = randn(4, 6)
LOW = [untuned("float16"), untuned("bfloat16")]
SMALL_IN_FLOAT32 = amp.Policy.default("bfloat16")


SMALL = pytest.param(SMALL_IN_FLOAT32, marks=pytest.mark.backend)


@pytest.fixture(params=[*LOW, SMALL, SMALL_IN_FLOAT32.in_float32()], ids=repr)
def policy(request):
    return request.param


def biases_only(net, *data, pattern="weight"):
    net.initialize(mx.init.Uniform(0.5))
    net(*data)
    for param in net.collect_params().values():
        if param.name.endswith(pattern):
            param.grad_req = "null"
    return {name: param for name, param in net.collect_params().items() if "bias" in name}


def by_hand(net):
    """Return the gradients of a net of two dense layers."""
    hidden = DATA.asnumpy() @ net[0].weight.data().asnumpy().T + net[0].bias.data().asnumpy()
    behind = net[1].weight.data().asnumpy().sum(axis=0)
    return (np.where(hidden > 0, behind, 0).sum(axis=0), np.full(3, float(len(DATA))))


@pytest.mark.parametrize("static", [None, False, True])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_they_get_theirs(policy, static, request_):
    net = stacked(nn.Dense(5, activation="relu", in_units=6), nn.Dense(3, in_units=5))
    biases = biases_only(net, DATA)
    for bias in biases.values():
        bias.grad_req = request_
    wanted, passes = by_hand(net), 2
    if static is not None:
        net.hybridize(static_alloc=static, static_shape=static)
    with amp.autocast(policy=policy):
        with autograd.record():  # a call without any gradient
            nd.FullyConnected(DATA, net[0].weight.data(), nd.zeros(5), num_hidden=5)
        for _ in range(passes):
            backpropagate(lambda: net(DATA).astype("float32").sum())
    times = passes if request_ == "add" else 1
    for bias, gradient in zip(biases.values(), wanted):
        np.testing.assert_allclose(bias.grad().asnumpy(), gradient * times, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("shape, flatten", [((4, 2, 3), True), ((2, 4, 6), False), ((6,), False)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_eager_calls_with_computed_weights(policy, shape, flatten, dtype, monkeypatch):
    """The tape behind the weight is not read: that would take as long as all that computed it."""
    monkeypatch.setattr(Graph, "from_symbol", None)
    data = randn(*shape).astype(dtype)
    weight, bias = (leaf(randn(*size, seed=2).astype(dtype)) for size in ((3, 6), (3,)))

    def run():
        long = weight
        for _ in range(20):
            long = long * 1.0
        return nd.FullyConnected(data, long, bias, num_hidden=3, flatten=flatten)

    wanted = [a.asnumpy() for a in (backpropagate(run), weight.grad, bias.grad)]
    with amp.autocast(policy=policy):
        found = backpropagate(run), weight.grad, bias.grad
        low = dtype == "float32" and policy in LOW
        assert kind(found[0]) == (policy.target_dtype if low else dtype)
        for one, other in zip(found, wanted):
            assert one.shape == other.shape
            np.testing.assert_allclose(one.asnumpy(), other, rtol=0.03, atol=0.03)


def test_modules(policy):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    symbol = mx.sym.MakeLoss(mx.sym.sum(symbol))
    with amp.autocast(policy=policy), scaled_executors():
        module = mx.mod.Module(symbol, label_names=None, fixed_param_names=["fc_weight"])
        module.bind([("data", DATA.shape)])
        module.init_params()
        module.forward_backward(mx.io.DataBatch([DATA], []))
        gradient = module._exec_group.execs[0].grad_dict["fc_bias"].asnumpy()
    np.testing.assert_allclose(gradient, [4, 4, 4])


class Steps(gluon.HybridBlock):
    """A dense layer, or one in a loop of its own, that a loop runs over four rows."""

    def __init__(self, nested):
        super().__init__()
        self.nested = nested
        self.dense = nn.Dense(3, in_units=6, flatten=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        def step(row, state):
            return self.dense(row), state

        def outer(row, state):
            return F.contrib.foreach(step, F.expand_dims(row, axis=0), state)

        return F.contrib.foreach(outer if self.nested else step, x, F.ones((1,)))[0]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("static", [None, False, True])
def test_loops(policy, static, frozen, nested):
    net, data = Steps(nested), DATA.expand_dims(1)
    (bias,) = biases_only(net, data, pattern="weight" if frozen else "nothing").values()
    if static is not None:
        net.hybridize(static_alloc=static)
    with amp.autocast(policy=policy):
        for _ in range(2):
            bias.grad()[:] = 9
            backpropagate(lambda: net(data).astype("float32").sum())
            assert bias.grad().asnumpy().tolist() == [4, 4, 4]
