"""Convolutions of narrow groups, merged where oneDNN can cut blocks of channels."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import substitutions

S = mx.sym


X = S.var("data")


def joined(axis=1):
    return S.Concat(X, X, dim=axis)


def grouped(data):
    return S.Flatten(S.Convolution(data, kernel=(3, 3), num_filter=32, num_group=8, name="c"))


PLACES = {
    "nothing": (X, True),
    "a convolution": (S.Convolution(joined(), kernel=(1, 1), num_filter=32), True),
    "a concatenation": (joined(), False),
    "one of rows": (joined(2), True),
    "a chain": (S.Pooling(S.relu(S.BatchNorm(joined())), kernel=(2, 2)), False),
    "a sum": (S.elemwise_add(S.relu(joined()), joined()), False),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_groups_are_not_merged_behind_a_concat(name, training):
    data, merged = PLACES[name]
    float32, shapes = amp.Policy.default("bfloat16").in_float32(), {"c_weight": (32, 4, 3, 3)}
    names = substitutions(grouped(data), float32, shapes=shapes, training=training)
    assert ("merged_groups" in names) == (merged or not training)
