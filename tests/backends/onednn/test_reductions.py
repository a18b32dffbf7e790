"""Arithmetic with repeated arrays, and averages of whole maps, whose gradients are products."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import randn, substitutions, values

FLOAT32 = amp.Policy.default("bfloat16").in_float32()


@pytest.mark.parametrize("large, small", [
    ((8, 16, 64), (1, 1, 64)),  # too few elements
    ((16, 12, 16, 16), (16, 1, 1, 16)),  # repeated in between
    ((16, 12, 16, 16), (1, 12, 1, 16)),
    ((64, 1, 64, 16), (64, 8, 64, 1)),  # both are repeated
    ((64, 64, 16), (1,)),
    ((64, 64, 16), (64, 64, 16)),
])  # fmt: skip
def test_others_are_left_alone(large, small):
    symbol = mx.sym.broadcast_mul(mx.sym.var("x"), mx.sym.var("y"))
    assert not substitutions(symbol, FLOAT32, shapes={"x": large, "y": small}, training=True)


# ---------------------------------------------------------------------- averages of maps

#: Shapes, and the number of poolings with AVX2 (blocks of 8 channels) and avx512 (16): 0 is a product.
MAPS = [
    ((2, 32, 56, 6), 2, 2), ((2, 24, 14, 14), 2, 1), ((2, 32, 1, 9), 2, 0), ((2, 16, 14, 14), 2, 0),
    ((2, 64, 7, 13), 0, 0), ((2, 32, 1, 1), 1, 1), ((2, 64, 7, 7), 1, 0), ((2, 20, 9, 9), 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("features", [[], ["avx512"]])
@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("shape, avx2, avx512", MAPS)
def test_averages_of_maps_by_their_shape(shape, avx2, avx512, adapts, features, on_machine):
    on_machine(features=features)
    pooled = mx.sym.Pooling(mx.sym.var("x"), global_pool=True, pool_type="avg", kernel=(1, 1))
    if adapts:
        pooled = mx.sym.contrib.AdaptiveAvgPooling2D(mx.sym.var("x"), output_size=1)
        avx2, avx512 = 0 if shape[1] % 8 else avx2, 0
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
    assert found.count("Pooling") == (avx512 if features else avx2)
