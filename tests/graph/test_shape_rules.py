"""Precisions chosen by shape and layout, in graphs about to run and in converted models."""

import mxnet as mx
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import RULES, choose
from mxamp.policy.rules import SHAPE_RULES

B = amp.Policy.default("bfloat16")


def sequential(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Xavier())
    return net


def precisions(net, shape, mode="inference", policy=B):
    """Return the precision of each operator, in order, by its type."""
    data = nd.zeros(shape)
    plan = amp.explain(
        net, policy=policy, example_inputs=data, mode=mode, input_shapes={"data": shape}
    )
    return [(node.operator, node.precision) for node in plan.nodes]


def chosen(symbol, policy=B, **usage):
    return choose(Graph.from_symbol(symbol), policy, Usage(**usage))


def kept(symbol, policy=B, **usage):
    """Return the names of the operators that a choice keeps in float32."""
    graph = Graph.from_symbol(symbol)
    return [graph.nodes[i].name for i, _ in choose(graph, policy, Usage(**usage)).kept]


def test_the_rules_are_those_that_lists_may_name():
    assert tuple(RULES) == SHAPE_RULES


# ---------------------------------------------------------------------- few rows, few columns


@pytest.mark.parametrize("rows, units, low", [
    (2048, 1, False), (256, 10, False), (128, 31, False), (2048, 32, True), (64, 10, True),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_dense_layers_of_few_outputs_run_in_float32(rows, units, low, training):
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=units, name="fc")
    found = kept(layer, shapes={"data": (rows, 64)}, training=training)
    assert found == ([] if low else ["fc"])


@pytest.mark.parametrize("rows, weight, low", [
    (8, (1024, 1024), False), (64, (1024, 1024), True), (64, (3072, 768), False),
    (128, (3072, 768), True), (256, (4096, 4096), False), (320, (4096, 4096), True),
    (64, (4096, 4096), False), (2, (4096, 25088), False), (2048, (2304, 768), True),
    (64, (10, 64), True),
])  # fmt: skip
def test_dense_layers_of_few_rows_train_in_float32(rows, weight, low):
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=weight[0], name="fc")
    shapes = {"data": (rows, weight[1])}
    assert ("fc" in kept(layer, shapes=shapes, training=True)) == (not low)


@pytest.mark.parametrize("count, low", [(1, False), (15, False), (16, True), (20, True)])
def test_layers_that_share_a_weight_train_in_bfloat16_if_they_are_many(count, low):
    data, weight = mx.sym.var("data"), mx.sym.var("weight")
    net = mx.sym.Group([
        mx.sym.FullyConnected(data * k, weight, num_hidden=1024, no_bias=True, name=f"fc{k}")
        for k in range(count)
    ])  # fmt: skip
    found = kept(net, shapes={"data": (8, 256)}, training=True)
    assert len(found) == (0 if low else count)


def test_dense_layers_whose_weight_is_cast_for_few_rows_run_in_float32():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4096, name="fc")

    def kept_for(rows, **usage):
        return kept(net, shapes={"data": (rows, 512)}, **usage)

    assert kept_for(1) == kept_for(24) == ["fc"]
    assert kept_for(25) == []
    assert kept_for(1, stored=frozenset({"fc_weight"})) == []
    # One cast for all that read it.
    data, weight = mx.sym.var("data"), mx.sym.var("weight")
    net = mx.sym.Group([
        mx.sym.FullyConnected(data * k, weight, num_hidden=4096, no_bias=True, name=f"fc{k}")
        for k in (1, 2, 3)
    ])  # fmt: skip
    assert len(kept_for(8)) == 3
    assert kept_for(9) == []


# ---------------------------------------------------------------------- layouts


@pytest.mark.parametrize("channels, groups, norm, low", [
    ((16, 32), 1, True, True), ((32, 24), 1, True, False), ((24, 32), 1, True, False),
    ((32, 24), 1, False, False), ((40, 33), 1, False, True), ((32, 32), 32, True, True), ((24, 24), 24, True, False),
    ((1, 32), 1, False, False), ((3, 24), 1, False, False), ((64, 32), 2, True, True),
])  # fmt: skip
def test_convolutions_by_channels(channels, groups, norm, low):
    layers = [nn.Conv2D(channels[1], 1, groups=groups, in_channels=channels[0])]
    layers += [nn.LeakyReLU(0.1), nn.BatchNorm()] if norm else [nn.Flatten()]
    found = dict(precisions(sequential(*layers), (2, channels[0], 4, 4)))
    assert found["Convolution"] == ("bfloat16" if low else "float32")
    if norm:
        assert found["BatchNorm"] == found["Convolution"]


class Joined(gluon.HybridBlock):
    """Convolutions joined in some way before a BatchNorm."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        with self.name_scope():
            self.a = nn.Conv2D(16, 1, in_channels=16)
            self.b = nn.Conv2D(16, 1, in_channels=16)
            self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        return self.norm(self.how(F, self.a(x), self.b(x)))


@pytest.mark.parametrize(
    "how, precision",
    [
        (lambda F, a, b: a, "bfloat16"),
        (lambda F, a, b: F.elemwise_add(a, b), "bfloat16"),
        (lambda F, a, b: F.concat(a, b), "bfloat16"),
        (lambda F, a, b: F.Pooling(a, kernel=(2, 2)), "bfloat16"),
        (lambda F, a, b: F.concat(a, b, dim=2), "float32"),
        (lambda F, a, b: F.reshape(a, shape=(0, 0, -1)), "float32"),
        (lambda F, a, b: F.slice_axis(a, axis=1, begin=0, end=8), "float32"),
        (lambda F, a, b: F.elemwise_add(a, F.reshape(b, shape=(0, 0, 0, 0))), "float32"),
    ],
)
def test_norms_by_what_is_before_them(how, precision):
    net = Joined(how)
    net.initialize()
    assert dict(precisions(net, (2, 16, 4, 4)))["BatchNorm"] == precision


# ---------------------------------------------------------------------- transposed convolutions

TAKEN = mx.sym.var("weight")
UP = mx.sym.Deconvolution(
    mx.sym.var("data"), TAKEN, kernel=(2, 2), num_filter=16, no_bias=True, name="up"
)
TIED = mx.sym.Group([UP, mx.sym.relu(TAKEN)])
WEIGHT = frozenset({"weight"})


@pytest.mark.parametrize(
    "symbol, usage, low",
    [
        (UP, {}, True),
        (UP, {"training": True}, False),
        (UP, {"training": True, "stored": WEIGHT}, True),
        (UP, {"training": True, "dtypes": {"weight": "bfloat16"}}, True),
        (UP, {"training": True, "dtypes": {"weight": "float16"}}, False),
        (UP, {"training": True, "dtypes": {"data": "bfloat16"}}, False),
        (UP, {"converting": True}, False),
        (UP, {"converting": True, "offline": WEIGHT}, True),
        (TIED, {"converting": True, "offline": WEIGHT}, False),
        (mx.sym.relu(mx.sym.relu(UP)), {}, True),
    ],
)
def test_transposed_convolutions_are_not_trained_through_a_cast_of_their_weight(symbol, usage, low):
    assert kept(symbol, **usage) == ([] if low else ["up"])
    assert kept(symbol, policy=B.untuned(), **usage) == kept(symbol, **usage)


def test_the_weight_of_a_transposed_convolution_in_a_loop_is_never_known_to_be_stored():
    def step(data, states):
        up = mx.sym.Deconvolution(data, states[0], kernel=(1, 1), num_filter=4, no_bias=True)
        return up, states

    out, _ = mx.sym.contrib.foreach(step, mx.sym.var("data"), [mx.sym.var("weight")])
    for usage in ({}, {"training": True, "stored": WEIGHT}):
        inner = dict(chosen(out, **usage).bodies)
        assert bool(inner) == bool(usage)
