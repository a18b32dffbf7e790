"""Nodes are known by index: a block that is called twice gives two nodes of one name."""

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

import mxamp as amp
from helpers import initialized, randn
from mxamp.backends import NONE, backend_of
from mxamp.graph.ir import Graph, Usage

B = amp.Policy.default("bfloat16")


class Twice(gluon.HybridBlock):
    """A dense layer, and one block that is called twice behind it, on other shapes."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(32, flatten=False, in_units=24)
            self.mean = nn.HybridLambda(lambda F, x: F.mean(x, axis=1))

    def hybrid_forward(self, F, x):
        return self.mean(self.mean(self.dense(x)))


def test_only_the_call_whose_shape_fits_is_substituted():
    net, x = initialized(Twice(), hybridize=True, init=mx.init.Xavier()), randn(3, 4, 5, 24)
    plain = net(x).asnumpy()
    plan = amp.explain(net, policy=B, mode="inference", input_shapes={"data": x.shape})
    first, last = (node for node in plan.nodes if node.name == plan.nodes[-1].name)
    assert (first.operator, last.operator) == ("Reshape", "mean")  # 1,920 elements, and 480
    assert plan[first.name] is first
    low = amp.convert_hybrid_block(net, "bfloat16")
    with amp.autocast("bfloat16"):
        for block in (net, low):
            np.testing.assert_allclose(block(x).asnumpy(), plain, atol=0.02)


def two_loops(F, x):
    """Two loops and no loop around one activation."""
    with mx.name.Prefix("same_"):
        once = F.tanh(x, name="gate")
        outputs = [
            F.contrib.foreach(lambda row, s, k=k: (F.tanh(row * k + s, name="gate"), s), once, s)[0]
            for k, s in ((1, F.sum(x, axis=0)), (2, F.max(x, axis=0)))
        ]
    return F.concat(*outputs, dim=1)


def test_bodies_of_loops_have_choices_of_their_own():
    net, x = initialized(nn.HybridLambda(two_loops), hybridize=True), randn(3, 4)
    plain = net(x).asnumpy()
    graph = Graph.from_symbol(net._cached_graph[1])
    choices = backend_of("cpu").choose(graph, B, Usage())
    loops = [i for i, node in enumerate(graph.nodes) if node.op == "_foreach"]
    assert sorted(key for key, _ in choices.bodies) == [(i, 0) for i in loops]
    for _, body in choices.bodies:
        assert [name for _, (name, _) in body.substituted] == ["tanh"]
        assert body != NONE
    plan = amp.explain(net, policy=B, mode="inference")
    assert sum("stands in for tanh" in node.reason for node in plan.nodes) == 3
    with amp.autocast("bfloat16"):
        np.testing.assert_allclose(net(x).asnumpy(), plain, rtol=1e-5)
