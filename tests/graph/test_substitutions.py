"""Faster equivalents of operators: the same values and gradients, in graphs that run, only there."""

import re

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from helpers import randn, values
from mxamp.errors import UnknownNameError
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import choose

#: Substitutions made, and everything in float32.
FLOAT32 = amp.Policy.default("bfloat16").override(low=[], replace_lists=True)


class Call(gluon.HybridBlock):
    """One operator, between parameters called gamma and beta if it takes them."""

    def __init__(self, name, parameters=False, **attrs):
        super().__init__()
        self.operator, self.attrs, self.more = name, attrs, parameters
        if parameters:
            with self.name_scope():
                self.gamma = self.params.get("gamma", shape=(48,))
                self.beta = self.params.get("beta", shape=(48,))

    def hybrid_forward(self, F, x, **params):
        rest = [params["gamma"], params["beta"]] if self.more else []
        return getattr(F, self.operator)(x, *rest, **self.attrs)


def run(block, x, policy=None, weight=None, training=True):
    """Return the output, in training with the gradients of input and parameters."""
    x = x.copy()
    x.attach_grad()
    block.hybridize()
    with amp.autocast(policy=policy) if policy else amp.autocast(enabled=False):
        if not training:
            return values(block(x))
        with autograd.record():
            out = block(x)
            loss = (out * (randn(*out.shape, seed=3) if weight is None else weight)).sum()
        loss.backward()
        params = [p for p in block.collect_params().values() if p.grad_req != "null"]
        return values(out), values(x.grad), *(values(p.grad()) for p in params)


CASES = {
    "relu": (Call, {"name": "relu"}, 0),
    "relu6": (Call, {"name": "clip", "a_min": 0, "a_max": 6}, 0),
    "sigmoid": (Call, {"name": "sigmoid"}, 2e-7),
    "tanh": (Call, {"name": "tanh"}, 3e-7),
    "layer_norm": (Call, {"name": "LayerNorm", "parameters": True, "eps": 1e-4}, 2e-6),
    "mean": (Call, {"name": "mean", "axis": 1}, 5e-7),
    "sum": (Call, {"name": "sum", "axis": 1}, 5e-7),
}


def made(name, **more):
    kind, options, tolerance = CASES[name]
    mx.random.seed(1)
    block = kind(**{**options, **more})
    block.initialize(mx.init.Uniform(1))
    return block, tolerance


def grouped(narrow, bias=True, kernel=3, channels=32):
    """Return a grouped convolution behind a BatchNorm that keeps its running statistics."""
    mx.random.seed(1)
    conv = nn.Conv2D(
        channels, kernel, 1, 1, groups=channels // narrow, in_channels=channels, use_bias=bias
    )
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(momentum=1, in_channels=channels), conv, nn.Activation("relu"))
    net.initialize(mx.init.Uniform(0.3))
    return net


CONVOLUTION = {"kernel": (3, 3), "num_filter": 16, "name": "conv"}


@pytest.mark.parametrize(
    "shape, changes, policy",
    [
        ((1, 1, 9, 9), {}, {}),
        ((1, 4, 9, 9), {}, {}),
        ((1, 3, 9, 9), {"num_filter": 24}, {}),
        ((1, 3, 9, 9), {"kernel": (3, 9)}, {}),
        ((1, 3, 9, 9), {"num_filter": 48, "num_group": 3}, {}),
        ((1, 9, 9, 3), {"layout": "NHWC"}, {}),
        ((1, 3, 9), {"kernel": (3,)}, {}),
        ((1, 3, 9, 9, 9), {"kernel": (3, 3, 3)}, {}),
        ((1, 3, 9, 9), {}, {"low": ["Convolution"]}),
        ((1, 3, 9, 9), {}, {"fp32_layers": ["conv"]}),
        ((1, 3, 9, 9), {}, {"low": [], "replace_lists": True}),
        ((1, 3, 9, 9), {}, {"substitutions": ["split"]}),
    ],
)
def test_which_convolutions_get_no_fourth_channel(shape, changes, policy):
    symbol = mx.sym.Convolution(mx.sym.var("data"), **{**CONVOLUTION, **changes})
    chosen = amp.Policy.default("bfloat16").override(**policy)
    options = {"mode": "training", "input_shapes": {"data": shape}}
    assert operators(symbol, chosen, **options) == ["Convolution"]


def operators(symbol, policy=None, mode="inference", **options):
    policy = policy or amp.Policy.default("bfloat16")
    plan = amp.explain(symbol, policy=policy, mode=mode, **options)
    return [node.operator for node in plan.nodes]


def symbol_of(name, **more):
    return made(name, **more)[0](mx.sym.var("data"))


@pytest.mark.parametrize("name", CASES)
def test_explain_shows_them_and_the_switch_takes_them_out(name):
    symbol, policy = symbol_of(name), amp.Policy.default("bfloat16")
    shapes = {"input_shapes": {"data": (6, 7, 48)}}
    # As an output of the graph, a clip is trained as it is.
    mode = "inference" if name == "relu6" else "training"
    plan = amp.explain(symbol, policy=policy, mode=mode, **shapes)
    assert all(f"stands in for {Graph.from_symbol(symbol).nodes[-1].op}" in n.reason for n in plan.nodes)  # fmt: skip
    assert plan.nodes[-1].name == Graph.from_symbol(symbol).nodes[-1].name
    plain = [Graph.from_symbol(symbol).nodes[-1].operator]
    assert [node.operator for node in plan.nodes] != plain
    for off in (policy.untuned(), policy.override(substitutions=())):
        assert operators(symbol, off, "training", **shapes) == plain
    others = [other for other in policy.substitutions if other != name]
    assert operators(symbol, policy.override(substitutions=others), "training", **shapes) == plain
    assert operators(symbol, policy, "converted", **shapes) == plain


@pytest.mark.parametrize(
    "name, changes, mode, shape",
    [
        ("relu6", {"a_max": 5}, "training", (2, 3)),
        ("layer_norm", {}, "inference", (2, 48)),
        ("layer_norm", {"axis": 0}, "training", (48, 2)),
        ("layer_norm", {"output_mean_var": True}, "training", (2, 48)),
        ("mean", {}, "training", (2, 3, 4)),
        ("mean", {"axis": None}, "training", (40, 40)),
        ("mean", {"axis": 2}, "training", (70, 20, 1)),
        ("mean", {"axis": (0, 2)}, "training", (12, 13, 14)),
        ("mean", {"exclude": True}, "training", (12, 13, 14)),
        ("sum", {"axis": 0}, "training", (2**16 + 1, 2)),
    ],
)  # fmt: skip
def test_where_they_do_not_apply(name, changes, mode, shape):
    symbol = symbol_of(name, **changes)
    left = operators(symbol, mode=mode, input_shapes={"data": shape})
    assert left == [Graph.from_symbol(symbol).nodes[-1].operator]


def test_what_a_user_has_classed_stays():
    symbol = mx.sym.tanh(mx.sym.var("data"))
    policy = amp.Policy.default("bfloat16")
    for kind in ("low", "fp32", "widest"):
        assert operators(symbol, policy.override(**{kind: ["tanh"]})) == ["tanh"]
    with pytest.raises(UnknownNameError, match="'relu6'"):
        policy.override(substitutions=["relu7"])


def chain_of_norms(count):
    net = mx.sym.var("data")
    for _ in range(count):
        net = mx.sym.LayerNorm(net)
    return net


def sums_of_temporaries(count):
    data = mx.sym.var("data")
    return mx.sym.Group([mx.sym.sum(data + k, axis=1) for k in range(count)])


@pytest.mark.parametrize("build, most", [(chain_of_norms, 2), (sums_of_temporaries, 0)])
def test_tensors_kept_for_the_backward_pass(build, most):
    """MXNet's memory plan grows by so many tensors of 1 MB with each operator."""

    def megabytes(count):
        with amp.autocast(policy=FLOAT32):
            executor = build(count).simple_bind(mx.cpu(), data=(1024, 256))
        return int(re.search(r"Total (\d+) MB allocated", executor.debug_str())[1])

    assert megabytes(12) - megabytes(4) <= most * 8 + 1


@mx.util.use_np_shape
@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_empty_arrays_are_clipped_by_mxnets_operator(shape):
    symbol = symbol_of("relu6")
    found = choose(Graph.from_symbol(symbol), FLOAT32, Usage(shapes={"data": shape}))
    assert bool(found.substituted) == (0 not in shape)
