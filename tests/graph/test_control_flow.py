"""Bodies of loops and branches in rewritten graphs."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.graph.casts.insert import rewrite, rewritten_symbol
from mxamp.graph.ir import UNSAFE_LOOPS, Graph, Usage
from nets import Control

CPU = amp.Policy.default("float16", "cpu")


def graph_of(name):
    return Graph.from_symbol(Control(name)(mx.sym.var("data")))


@pytest.mark.parametrize("name", ["foreach", "cond", "while_loop"])
def test_control_flow_round_trips(name):
    symbol = Control(name)(mx.sym.var("data"))
    rewritten = rewritten_symbol(Graph.from_symbol(symbol), type(symbol), CPU, Usage())
    assert rewritten is not None
    assert "amp_cast" in rewritten.tojson(remove_amp_cast=False)
    assert rewritten.list_inputs() == symbol.list_inputs()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["foreach", "cond", "while_loop"])
def test_operators_in_bodies_follow_their_loop(name, training):
    graph = graph_of(name)
    result = rewrite(graph, CPU, Usage(training=training))
    inside = [node.name for holder, node, _ in result.decided() if holder is not result.graph]
    unsafe = not UNSAFE_LOOPS.isdisjoint(graph.operators)
    assert unsafe == (name != "foreach")
    assert bool(inside) == (not (training and unsafe))
