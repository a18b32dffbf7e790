"""Shapes asked of the symbol that a graph was read from: the same as of one made of the graph."""

import mxnet as mx
import pytest

from mxamp.graph.ir import Graph
from mxamp.graph.speed.shapes import _infer, _visible_outputs

S = mx.sym
X = {"x": (6, 8, 4, 4)}


def parts_named_like_their_source():
    """A split's outputs begin with the name of a BatchNorm, which hides two of three outputs."""
    norm = S.BatchNorm(S.var("x"), name="a")
    return S.Group(list(S.split(norm, num_outputs=4, axis=1, name="a_s")))


def equal_names():
    a = S.relu(S.var("x"), name="a")
    b = S.BatchNorm(a, name="a")
    return S.BatchNorm(S.BatchNorm(b, name="a"), name="a_output")


def every_kind():
    x = S.var("x")
    rows = S.reshape(x, shape=(6, -1))
    return S.Group([
        S.Dropout(x, name="d"),
        S.LayerNorm(rows, name="l"),
        S.LayerNorm(rows, output_mean_var=True, name="l_output")[1],
        S.BatchNorm(x, output_mean_var=True, name="b")[2],
        S.topk(rows, k=3, ret_typ="both", name="t")[1],
        S.RNN(S.reshape(x, shape=(6, 8, 16)), state_size=5, num_layers=1, mode="lstm", state_outputs=True, name="r")[2],
        S.Pooling(x, kernel=(2, 2), name="p"),
        S.SoftmaxOutput(rows, name="s"),
        S.GroupNorm(x, num_groups=2, name="g"),
    ])  # fmt: skip


@pytest.mark.parametrize("make", [parts_named_like_their_source, equal_names, every_kind])
def test_shapes_are_those_of_a_symbol_made_of_the_graph(make):
    symbol = make()
    graph = Graph.from_symbol(symbol)
    outputs = _visible_outputs(graph)
    assert len(outputs) == len(symbol.get_internals().list_outputs())
    loaded = Graph.from_symbol(symbol)
    loaded.symbol = None
    expected = _infer(loaded, outputs, X)
    assert len(expected) > len(graph.nodes) / 2
    assert _infer(graph, outputs, X) == expected
