"""Grouped convolutions behind a Concat: oneDNN can't cut blocks of channels at any place."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import check_python
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import choose

S = mx.sym
X = S.var("data")
CODE = """
import sys
import mxamp as amp, mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
channels, between, first = int(sys.argv[1]), sys.argv[2], sys.argv[3]

class Net(gluon.HybridBlock):
    def hybrid_forward(self, F, x, w):
        a, b = F.split(x, num_outputs=2, axis=1)
        h = F.concat(b, a, dim=1)
        h = F.relu(h) if between == "relu" else h
        n = channels // 4
        return F.Convolution(h, w, kernel=(3, 3), num_filter=channels, num_group=n, no_bias=True)

def run():
    net = Net()
    net.hybridize()
    with autograd.record():
        out = net(x, w)
    out.backward()
    return x.grad.asnumpy(), w.grad.asnumpy()

random = np.random.RandomState(0)
x, w = nd.array(random.randn(2, channels, 9, 10)), nd.array(random.randn(channels, 4, 3, 3))
x.attach_grad()
w.attach_grad()
wanted = run()
policy = amp.Policy.default("bfloat16")
amp.init(policy=policy.in_float32() if first == "float32" else policy)
for got, value in zip(run(), wanted):
    assert np.linalg.norm(got - value) < 0.01 * np.linalg.norm(value)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("between", ["nothing", "relu"])
@pytest.mark.parametrize("channels", [16, 48])
def test_they_train(channels, between, dtype):
    # In a process of its own: where oneDNN can't cut a gradient, it may divide by zero.
    code = f"import sys; sys.argv = ['', '{channels}', '{between}', '{dtype}']\n{CODE}"
    check_python(code)


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
