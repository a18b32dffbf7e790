"""Arithmetic with repeated arrays, and averages of whole maps, whose gradients are products."""

import itertools

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxamp as amp
from helpers import operators_of, randn, values, with_avx512

FLOAT32 = amp.Policy.default("bfloat16").in_float32()


class Arithmetic(nn.HybridBlock):
    def __init__(self, name):
        super().__init__()
        self.operator = name

    def hybrid_forward(self, F, x, y):
        if self.operator.startswith("_np_"):
            return {"_np_add": F.np.add, "_np_multiply": F.np.multiply,
                    "_np_true_divide": F.np.true_divide}[self.operator](x, y)  # fmt: skip
        return getattr(F, self.operator)(x, y)


def run(block, arrays, policy=None, weight=None):
    """Return the output and the gradients, and the operators that ran."""
    arrays = [array.copy() for array in arrays]
    for array in arrays:
        array.attach_grad()
    block.hybridize()
    with amp.autocast(policy=policy) if policy else amp.autocast(enabled=False):
        with autograd.record():
            out = block(*arrays)
            weight = randn(*out.shape, seed=3) if weight is None else weight
            loss = (out * (weight.as_np_ndarray() if mx.util.is_np_array() else weight)).sum()
        loss.backward()
        op = block._cached_op
        params = [p.data() for p in block.collect_params().values()]
        with autograd.record():
            ran = operators_of(op.graph_of([*arrays, *params])[0]) if policy else ()
    return [values(out), *(values(array.grad) for array in arrays)], ran


@pytest.mark.parametrize(
    "large, small",
    [
        ((8, 16, 64), (1, 1, 64)),  # too few elements
        ((16, 12, 16, 16), (16, 1, 1, 16)),  # repeated in between
        ((16, 12, 16, 16), (1, 12, 1, 16)),
        ((64, 1, 64, 16), (64, 8, 64, 1)),  # both are repeated
        ((64, 64, 16), (1,)),
        ((64, 64, 16), (64, 64, 16)),
    ],
)
def test_others_are_left_alone(large, small):
    block = Arithmetic("broadcast_mul")
    shapes = {"x": large, "y": small}
    symbol = block(mx.sym.var("x"), mx.sym.var("y"))
    plan = amp.explain(symbol, policy=FLOAT32, mode="training", input_shapes=shapes)
    assert [node.operator for node in plan.nodes] == ["broadcast_mul"]


SUMS = {
    "one": lambda F, x, w: F.broadcast_add(x, w),
    "swapped, squared": lambda F, x, w: F.square(F.broadcast_add(w, x)),
    "two heads": lambda F, x, w: [F.broadcast_add(w, x), w * 2],
    "residual": lambda F, x, w: F.broadcast_add(F.relu(x), F.broadcast_add(x, w)),
    "chain": lambda F, x, w: F.broadcast_add(F.broadcast_add(F.broadcast_add(x, w), x), w),
    "inside": lambda F, x, w: F.exp(F.broadcast_add(F.tanh(x), F.tanh(F.broadcast_add(x, w)))),
    "view": lambda F, x, w: F.reshape(F.broadcast_add(F.reshape(x, shape=(-1, 100)), F.reshape(w, shape=(-1, 100))), shape=(-1,)),
}  # fmt: skip


class Summed(nn.HybridBlock):
    def __init__(self, name, shape, grad_req):
        super().__init__()
        self.sum = SUMS[name]
        self.w = self.params.get("w", shape=shape, init="ones", grad_req=grad_req)

    def hybrid_forward(self, F, x, w):
        return self.sum(F, x, w)


def accumulated(name, shapes, requests, flags, policy):
    """Return the gradients after two passes."""
    net = Summed(name, shapes[1], requests[1])
    net.initialize()
    net.hybridize(**flags)
    x = randn(*shapes[0])
    x.attach_grad(requests[0])
    for _ in range(2):
        with amp.autocast(policy=policy, enabled=policy is not None):
            with autograd.record():
                out = net(x)
            autograd.backward(out)
    mx.nd.waitall()
    return [x.grad.asnumpy()] + ([net.w.grad().asnumpy()] if requests[1] != "null" else [])


@pytest.mark.matrix
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "shapes", [((64, 17, 100), (100,)), ((100,), (8, 100, 100)), ((30, 100), (30, 100))]
)
@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_sums_share_no_memory_of_the_callers(name, shapes, static):
    """Those of elemwise_add share it: they were lost, doubled or garbage at the edges of graphs."""
    flags = {"static_alloc": True, "static_shape": True} if static else {}
    for requests in itertools.product(("write", "add"), ("write", "add", "null")):
        plain = accumulated(name, shapes, requests, {}, None)
        for policy in (FLOAT32, amp.Policy.default("bfloat16")):
            found = accumulated(name, shapes, requests, flags, policy)
            for mine, theirs in zip(found, plain):
                assert np.abs(mine - theirs).max() <= 2e-2 * np.abs(theirs).max(), (
                    requests,
                    policy,
                )


# ---------------------------------------------------------------------- averages of maps


class Pooled(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))


MAPS = [
    ((2, 64, 14, 14), ["Pooling", "Pooling"]), ((2, 32, 56, 6), ["Pooling", "Pooling"]),
    ((2, 64, 4, 4), ["Pooling"]), ((2, 24, 14, 14), ["Pooling"]), ((2, 32, 1, 9), "product"),
    ((2, 16, 14, 14), "product"), ((2, 64, 7, 13), "product"), ((2, 32, 1, 1), ["Pooling"]),
]  # fmt: skip


@with_avx512
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("shape, expected", MAPS)
def test_averages_of_maps_by_their_shape(shape, expected, low):
    policy, data = amp.Policy.default("bfloat16") if low else FLOAT32, [randn(*shape)]
    plain, _ = run(Pooled(), data)
    found, operators = run(Pooled(), data, policy)
    if expected == "product":
        assert "Pooling" not in operators and "batch_dot" in operators
    else:
        assert [name for name in operators if name == "Pooling"] == expected
    for mine, theirs in zip(found, plain):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() <= (0.01 if low else 1e-5) * np.abs(theirs).max()
