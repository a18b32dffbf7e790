"""Equivalents of operators: softmax of rows with lengths, and large batched products."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxamp as amp
from helpers import operators_of, randn, values, with_avx512

B = amp.Policy.default("bfloat16")
FLOAT32 = B.in_float32()
WITHOUT = B.override(substitutions=set(B.substitutions) - {"batch_dot"})


def softmax(x, lengths, policy=FLOAT32, **attrs):
    """Return the output of a hybridized softmax, and the operators that ran."""
    block = nn.HybridLambda(lambda F, x, ends: F.softmax(x, ends, use_length=True, **attrs))
    block.hybridize()
    if policy is None:
        with amp.autocast(enabled=False):
            return values(block(x, lengths)), ["softmax"]
    with amp.autocast(policy=policy):
        out = values(block(x, lengths))
    return out, [node.operator for node in amp.explain(block).nodes]


def test_what_stands_past_a_length_is_not_read():
    x = randn(2, 3, 8)
    lengths = mx.nd.array([[0, 3, 5], [8, 1, 2]], dtype="int32")
    clean, _ = softmax(x, lengths)
    for poison in (np.nan, np.inf, -np.inf):
        x[0, 1, 3:], x[1, 2, 5] = poison, poison
        np.testing.assert_array_equal(softmax(x, lengths)[0], clean)
    x[0, 1, 0] = np.nan
    assert np.isnan(softmax(x, lengths)[0][0, 1]).any()


@pytest.mark.parametrize("attrs", [{"axis": 1}, {"temperature": 2.0}, {"dtype": "float64"}])
def test_other_softmaxes_stay(attrs):
    x, lengths = randn(2, 3, 3), mx.nd.array([[1, 2, 3]] * 2, dtype="int32")
    out, operators = softmax(x, lengths, **attrs)
    assert "where" not in operators
    np.testing.assert_array_equal(out, softmax(x, lengths, policy=None, **attrs)[0])


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min, -3.3e38])
def test_scores_as_low_as_masks_are_scores(low):
    x = mx.nd.array([[low, low, 5, 5], [low, 1, low, 9], [low, low, low, low]])
    lengths = mx.nd.array([2, 3, 0], dtype="int32")
    found, plain = softmax(x, lengths)[0], softmax(x, lengths, policy=None)[0]
    np.testing.assert_allclose(found, plain, atol=3e-7)


# ----------------------------------------------------------- large batched products


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


@with_avx512
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


@with_avx512
@pytest.mark.parametrize("columns, count", [(127, 0), (128, 2)])
def test_only_large_products_are_replaced(columns, count):
    block, arrays = product(), arrays_of(2, 256, 256, columns)
    trained(block, B, *arrays)
    assert products_of(block, B, *arrays) == count
    assert products_of(block, B.override(fp32=["batch_dot"]), *arrays) == 0
    assert products_of(block, B.override(fp32=["FullyConnected"]), *arrays) == 0
    with amp.autocast(policy=B):
        assert "batch_dot" in operators_of(block._cached_op.select(arrays).symbol)
