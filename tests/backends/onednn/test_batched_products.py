"""Large batched products in training: the same values and gradients, in bfloat16."""

import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxamp as amp
from helpers import operators_of, randn, values, with_avx512

pytestmark = with_avx512

B = amp.Policy.default("bfloat16")
WITHOUT = B.override(substitutions=set(B.substitutions) - {"batch_dot"})


def product(**attrs):
    block = nn.HybridLambda(lambda F, a, b: F.batch_dot(a, b, **attrs))
    block.hybridize()
    return block


def trained(block, policy, *arrays):
    for array in arrays:
        array.attach_grad()
    with amp.autocast(policy=policy), autograd.record():
        out = block(*arrays)
    out.backward(randn(*out.shape, seed=5))
    assert out.dtype == np.float32
    return [values(array) for array in (out, *(array.grad for array in arrays))]


def products_of(block, policy, *arrays):
    with amp.autocast(policy=policy), autograd.record():
        symbol = block._cached_op.select(arrays).symbol
    return operators_of(symbol).count("FullyConnected")


def arrays_of(groups, rows, sums, columns, transpose_a=False, transpose_b=False):
    a = (groups, sums, rows) if transpose_a else (groups, rows, sums)
    b = (groups, columns, sums) if transpose_b else (groups, sums, columns)
    return randn(*a), randn(*b, seed=1)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_values_and_gradients(transpose_a, transpose_b):
    block = product(transpose_a=transpose_a, transpose_b=transpose_b)
    arrays = arrays_of(3, 260, 250, 130, transpose_a, transpose_b)
    mine = trained(block, B, *arrays)
    assert products_of(block, B, *arrays) == 3
    for one, other in zip(mine, trained(block, WITHOUT, *arrays)):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(other)


@pytest.mark.parametrize("columns, count", [(127, 0), (128, 2)])
def test_only_large_products_are_replaced(columns, count):
    block, arrays = product(), arrays_of(2, 256, 256, columns)
    trained(block, B, *arrays)
    assert products_of(block, B, *arrays) == count
    assert products_of(block, B.override(fp32=["batch_dot"]), *arrays) == 0
    assert products_of(block, B.override(fp32=["FullyConnected"]), *arrays) == 0
    with amp.autocast(policy=B):
        assert "batch_dot" in operators_of(block._cached_op.select(arrays).symbol)
