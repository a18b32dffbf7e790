"""Arithmetic with repeated arrays, and averages of whole maps, whose gradients are products."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import randn, values

FLOAT32 = amp.Policy.default("bfloat16").in_float32()


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
    shapes = {"x": large, "y": small}
    symbol = mx.sym.broadcast_mul(mx.sym.var("x"), mx.sym.var("y"))
    plan = amp.explain(symbol, policy=FLOAT32, mode="training", input_shapes=shapes)
    assert [node.operator for node in plan.nodes] == ["broadcast_mul"]


# ---------------------------------------------------------------------- averages of maps

MAPS = [
    ((2, 64, 14, 14), ["Pooling", "Pooling"]), ((2, 32, 56, 6), ["Pooling", "Pooling"]),
    ((2, 64, 4, 4), ["Pooling"]), ((2, 24, 14, 14), ["Pooling"]), ((2, 32, 1, 9), "product"),
    ((2, 16, 14, 14), "product"), ((2, 64, 7, 13), "product"), ((2, 32, 1, 1), ["Pooling"]),
]  # fmt: skip


@pytest.mark.parametrize("shape, expected", MAPS)
def test_averages_of_maps_by_their_shape(shape, expected):
    pooled = mx.sym.Pooling(mx.sym.var("x"), global_pool=True, pool_type="avg", kernel=(1, 1))
    results = []
    for enabled in (False, True):
        with amp.autocast(enabled=enabled, policy=FLOAT32):
            bound = pooled.bind(mx.cpu(), {"x": randn(*shape)}, {"x": mx.nd.zeros(shape)})
            [out] = bound.forward(is_train=True)
            bound.backward([randn(*out.shape, seed=3)])
            results.append([values(out), values(bound.grad_dict["x"])])
    for theirs, mine in zip(*results):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    plan = amp.explain(pooled, policy=FLOAT32, mode="training", input_shapes={"x": shape})
    found = [node.operator for node in plan.nodes]
    assert found == expected if expected != "product" else "batch_dot" in found
