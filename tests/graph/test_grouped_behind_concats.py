"""Grouped convolutions behind a Concat: oneDNN can't cut blocks of channels at any place."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import choose

S = mx.sym
X = S.var("data")


def grouped(data):
    return S.Convolution(data, kernel=(3, 3), num_filter=32, num_group=8, name="c")


def joined(axis=1):
    return S.Concat(X, X, dim=axis)


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
def test_which_are_merged(name, training):
    data, merged = PLACES[name]
    graph = Graph.from_symbol(grouped(data))
    usage = Usage(shapes={"c_weight": (32, 4, 3, 3)}, training=training)
    choices = choose(graph, amp.Policy.default("bfloat16").in_float32(), usage)
    names = {substitution for _, (substitution, _) in choices.substituted}
    assert ("merged_groups" in names) == (merged or not training)
