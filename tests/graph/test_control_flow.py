"""Bodies of loops and branches in rewritten graphs."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.graph.casts.insert import rewrite
from mxamp.graph.ir import Graph, Usage
from nets import Control


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["foreach", "cond", "while_loop"])
def test_operators_in_bodies_follow_their_loop(name, training):
    graph = Graph.from_symbol(Control(name)(mx.sym.var("data")))
    result = rewrite(graph, amp.Policy.default("float16", "cpu"), Usage(training=training))
    inside = [node.name for holder, node, _ in result.decided() if holder is not result.graph]
    assert bool(inside) == (not training or name == "foreach")
