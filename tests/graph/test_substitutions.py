"""Faster equivalents of operators: the same values and gradients, in graphs that run, only there."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.errors import UnknownNameError
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import choose

#: Substitutions made, and everything in float32.
FLOAT32 = amp.Policy.default("bfloat16").override(low=[], replace_lists=True)


CASES = {
    "relu": ("relu", {}),
    "relu6": ("clip", {"a_min": 0, "a_max": 6}),
    "sigmoid": ("sigmoid", {}),
    "tanh": ("tanh", {}),
    "layer_norm": ("LayerNorm", {}),
    "mean": ("mean", {"axis": 1}),
    "sum": ("sum", {"axis": 1}),
}


def symbol_of(name, **more):
    operator, attrs = CASES[name]
    return getattr(mx.sym, operator)(mx.sym.var("data"), **{**attrs, **more})


CONVOLUTION = {"kernel": (3, 3), "num_filter": 16, "name": "conv"}


@pytest.mark.parametrize("shape, changes, policy", [
    ((1, 1, 9, 9), {}, {}), ((1, 4, 9, 9), {}, {}), ((1, 9, 9, 3), {"layout": "NHWC"}, {}),
    ((1, 3, 9), {"kernel": (3,)}, {}), ((1, 3, 9, 9, 9), {"kernel": (3, 3, 3)}, {}),
    ((1, 3, 9, 9), {"num_filter": 24}, {}), ((1, 3, 9, 9), {"kernel": (3, 9)}, {}),
    ((1, 3, 9, 9), {"num_filter": 48, "num_group": 3}, {}),
    ((1, 3, 9, 9), {}, {"low": ["Convolution"]}), ((1, 3, 9, 9), {}, {"fp32_layers": ["conv"]}),
    ((1, 3, 9, 9), {}, {"low": [], "replace_lists": True}),
    ((1, 3, 9, 9), {}, {"substitutions": ["split"]}),
])  # fmt: skip
def test_which_convolutions_get_no_fourth_channel(shape, changes, policy):
    symbol = mx.sym.Convolution(mx.sym.var("data"), **{**CONVOLUTION, **changes})
    chosen = amp.Policy.default("bfloat16").override(**policy)
    options = {"mode": "training", "input_shapes": {"data": shape}}
    assert operators(symbol, chosen, **options) == ["Convolution"]


def operators(symbol, policy=None, mode="inference", **options):
    policy = policy or amp.Policy.default("bfloat16")
    plan = amp.explain(symbol, policy=policy, mode=mode, **options)
    return [node.operator for node in plan.nodes]


@pytest.mark.parametrize("name", CASES)
def test_explain_shows_them_and_the_switch_takes_them_out(name):
    symbol, policy = symbol_of(name), amp.Policy.default("bfloat16")
    options = {"mode": "training", "input_shapes": {"data": (6, 7, 48)}}
    # As an output of the graph, a clip is trained as it is.
    mode = "inference" if name == "relu6" else "training"
    last = Graph.from_symbol(symbol).nodes[-1]
    plan = amp.explain(symbol, policy=policy, **{**options, "mode": mode})
    assert all(f"stands in for {last.op}" in node.reason for node in plan.nodes)
    assert plan.nodes[-1].name == last.name
    assert operators(symbol, policy, "training")  # of unknown shapes
    for off in (policy.untuned(), policy.override(substitutions={*policy.substitutions} - {name})):
        assert operators(symbol, off, **options) == [last.operator]
    assert operators(symbol, policy, **{**options, "mode": "converted"}) == [last.operator]


@pytest.mark.parametrize("name, changes, mode, shape", [
    ("relu6", {"a_max": 5}, "training", (2, 3)), ("layer_norm", {}, "inference", (2, 48)),
    ("layer_norm", {"axis": 0}, "training", (48, 2)),
    ("layer_norm", {"output_mean_var": True}, "training", (2, 48)),
    ("mean", {}, "training", (2, 3, 4)), ("mean", {"axis": None}, "training", (40, 40)),
    ("mean", {"axis": 2}, "training", (70, 20, 1)),
    ("mean", {"axis": (0, 2)}, "training", (12, 13, 14)),
    ("sum", {"axis": 0}, "training", (2**16 + 1, 2)),
    ("mean", {"exclude": True}, "training", (12, 13, 14)),
])  # fmt: skip
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


@mx.util.use_np_shape
@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_empty_arrays_are_clipped_by_mxnets_operator(shape):
    symbol = symbol_of("relu6")
    found = choose(Graph.from_symbol(symbol), FLOAT32, Usage(shapes={"data": shape}))
    assert bool(found.substituted) == (0 not in shape)
