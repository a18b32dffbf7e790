"""Choices by inferred shapes: equal for a symbol's graph and for a copy without its symbol."""

from dataclasses import replace

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import NONE, choose

S = mx.sym
B = amp.Policy.default("bfloat16")


def reduced(x):
    """An operator whose substitution depends on the shape of `x`."""
    return S.mean(S.reshape(x, shape=(6, -1)), axis=1)


def parts_named_like_their_source():
    """A split's outputs begin with the name of a BatchNorm, which hides two of three outputs."""
    norm = S.BatchNorm(S.var("x"), name="a")
    return S.Group([reduced(part) for part in S.split(norm, num_outputs=4, axis=1, name="a_s")])


def equal_names():
    a = S.relu(S.var("x"), name="a")
    b = S.BatchNorm(a, name="a")
    return reduced(S.BatchNorm(S.BatchNorm(b, name="a"), name="a_output"))


def hidden_outputs():
    x = S.var("x")
    rows = S.reshape(x, shape=(6, -1))
    return S.Group([
        reduced(one)
        for one in (
            S.Dropout(x, name="d"),
            S.LayerNorm(rows, name="l"),
            S.BatchNorm(x, output_mean_var=True, name="b")[0],
            S.topk(rows, k=300, ret_typ="both", name="t")[0],
            S.RNN(S.reshape(x, shape=(6, 8, -1)), state_size=40, num_layers=1, mode="lstm", name="r"),
            S.Pooling(x, kernel=(2, 2), name="p"),
            S.GroupNorm(x, num_groups=2, name="g"),
        )
    ])  # fmt: skip


@pytest.mark.parametrize("make", [parts_named_like_their_source, equal_names, hidden_outputs])
def test_choices_do_not_depend_on_the_symbol(make):
    graph = Graph.from_symbol(make())
    usage = Usage(shapes={"x": (6, 8, 16, 16)})
    chosen = choose(graph, B, usage)
    assert chosen != NONE
    means = {i for i, node in enumerate(graph.nodes) if node.op == "mean"}
    assert means <= {i for i, _ in chosen.substituted}
    assert choose(replace(graph), B, usage) == chosen
