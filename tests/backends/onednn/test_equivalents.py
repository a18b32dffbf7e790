"""Softmax of rows with lengths: oneDNN's softmax between masks gives MXNet's values."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import mxamp as amp
from helpers import randn, values

FLOAT32 = amp.Policy.default("bfloat16").in_float32()


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
