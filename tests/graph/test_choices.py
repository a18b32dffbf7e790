"""Nodes are known by index: a block that is called twice gives two nodes of one name."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from helpers import randn
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import NONE, choose

B = amp.Policy.default("bfloat16")


class GLU(gluon.HybridBlock):
    """Halves the last axis."""

    def hybrid_forward(self, F, x):
        a, gate = F.split(x, num_outputs=2, axis=-1)
        return a * F.sigmoid(gate)


class Mean(gluon.HybridBlock):
    """Removes axis 1."""

    def hybrid_forward(self, F, x):
        return F.mean(x, axis=1)


class Twice(gluon.HybridBlock):
    """A dense layer, and one block that is called twice behind it."""

    def __init__(self, inner):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(32, flatten=False, in_units=24)
            self.inner = inner()

    def hybrid_forward(self, F, x):
        return self.inner(self.inner(self.dense(x)))


def twice(inner):
    mx.random.seed(3)
    net = Twice(inner)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def gradients(net, x):
    with autograd.record():
        out = net(x)
        loss = (out * randn(*out.shape, seed=4)).sum()
    loss.backward()
    return [out.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]


def close(found, expected):
    assert [a.shape for a in found] == [b.shape for b in expected]
    for a, b in zip(found, expected):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


@pytest.mark.parametrize("how", ["hybridized", "converted"])
@pytest.mark.parametrize("inner, shape", [(GLU, (6, 5, 24)), (Mean, (3, 4, 5, 24))])
def test_a_block_called_twice_on_other_shapes(inner, shape, how):
    net, x = twice(inner), randn(*shape)
    plain, trained = net(x).asnumpy(), gradients(net, x)
    if how == "converted":
        low = amp.convert_hybrid_block(net, "bfloat16")
        close([low(x).asnumpy()], [plain])
        close(gradients(low, x), trained)
        return
    with amp.autocast("bfloat16"):
        close([net(x).asnumpy()], [plain])
        close(gradients(net, x), trained)


def test_only_the_call_whose_shape_fits_is_substituted():
    net, x = twice(Mean), randn(3, 4, 5, 24)
    net(x)
    plan = amp.explain(net, policy=B, mode="inference", input_shapes={"data": x.shape})
    first, last = (node for node in plan.nodes if node.name == plan.nodes[-1].name)
    assert (first.operator, last.operator) == ("Reshape", "mean")  # 1,920 elements, and 480
    assert plan[first.name] is first
    graph = Graph.from_symbol(net._cached_graph[1])
    choices = choose(graph, B, Usage(shapes={"data": x.shape, "twice0_dense0_weight": (32, 24)}))
    ((position, _),) = choices.substituted
    means = [i for i, node in enumerate(graph.nodes) if node.op == "mean"]
    assert means[0] == position < means[1]


class Loops(gluon.HybridBlock):
    """Two loops and no loop around one activation."""

    def hybrid_forward(self, F, x):
        with mx.name.Prefix("same_"):
            once = F.tanh(x, name="gate")
            outputs = [
                F.contrib.foreach(
                    lambda row, s, k=k: (F.tanh(row * k + s, name="gate"), s), once, s
                )[0]
                for k, s in ((1, F.sum(x, axis=0)), (2, F.max(x, axis=0)))
            ]
        return F.concat(*outputs, dim=1)


def test_bodies_of_loops_have_choices_of_their_own():
    net, x = Loops(), randn(3, 4)
    net.hybridize()
    plain = net(x).asnumpy()
    graph = Graph.from_symbol(net._cached_graph[1])
    choices = choose(graph, B, Usage())
    loops = [i for i, node in enumerate(graph.nodes) if node.op == "_foreach"]
    assert sorted(key for key, _ in choices.bodies) == [(i, 0) for i in loops]
    for _, body in choices.bodies:
        assert [name for _, (name, _) in body.substituted] == ["tanh"]
        assert body != NONE
    plan = amp.explain(net, policy=B, mode="inference")
    assert sum("stands in for tanh" in node.reason for node in plan.nodes) == 3
    with amp.autocast("bfloat16"):
        np.testing.assert_allclose(net(x).asnumpy(), plain, rtol=1e-5)
