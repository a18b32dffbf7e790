"""Faster equivalents of operators: the same values and gradients, in graphs that run, only there."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import casting_small_layers, substitutions
from mxamp.errors import UnknownNameError
from mxamp.graph.ir import Graph

S = mx.sym
X = S.var("data")
CASES = {
    "relu": ("relu", {}),
    "relu6": ("clip", {"a_min": 0, "a_max": 6}),
    "sigmoid": ("sigmoid", {}),
    "tanh": ("tanh", {}),
    "layer_norm": ("LayerNorm", {}),
    "mean": ("mean", {"axis": 1}),
    "sum": ("sum", {"axis": 1}),
}
#: A convolution of color images, whose substitution needs known shapes.
OF_IMAGES = ("Convolution", {"kernel": (3, 3), "num_filter": 16, "name": "conv"})


def symbol_of(name, **more):
    operator, attrs = CASES.get(name, OF_IMAGES)
    return getattr(S, operator)(X, **{**attrs, **more})


def operators(symbol, policy=None, mode="inference", **options):
    policy = policy or amp.Policy.default("bfloat16")
    plan = amp.explain(symbol, policy=policy, mode=mode, **options)
    return [node.operator for node in plan.nodes]


@pytest.mark.parametrize("name", CASES)
def test_explain_shows_them_and_the_switch_takes_them_out(name):
    symbol, policy = symbol_of(name), amp.Policy.default("bfloat16")
    options = {"mode": "training", "input_shapes": {"data": (6, 8, 48)}}
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


IMAGES = (1, 3, 9, 9)


@pytest.mark.parametrize("name, changes, shape, policy", [
    ("relu6", {"a_max": 5}, (2, 3), {}), ("layer_norm", {"axis": 0}, (48, 64), {}),
    ("layer_norm", {"output_mean_var": True}, (64, 48), {}),
    ("mean", {}, (2, 3, 4), {}), ("mean", {"axis": None}, (40, 40), {}),
    ("mean", {"axis": 2}, (70, 20, 1), {}), ("mean", {"axis": (0, 2)}, (12, 13, 14), {}),
    ("sum", {"axis": 0}, (2**16 + 1, 2), {}), ("mean", {"exclude": True}, (12, 13, 14), {}),
    *[("tanh", {}, (2, 3), {kind: ["tanh"]}) for kind in ("low", "fp32", "widest")],
    # Convolutions of images get a fourth channel.
    ("images", {}, (1, 1, 9, 9), {}), ("images", {}, (1, 4, 9, 9), {}),
    ("images", {"layout": "NHWC"}, (1, 9, 9, 3), {}), ("images", {"kernel": (3,)}, (1, 3, 9), {}),
    ("images", {"kernel": (3, 3, 3)}, (1, 3, 9, 9, 9), {}), ("images", {"num_filter": 24}, IMAGES, {}),
    ("images", {"kernel": (3, 9)}, IMAGES, {}), ("images", {"num_filter": 48, "num_group": 3}, IMAGES, {}),
    ("images", {}, IMAGES, {"low": ["Convolution"]}), ("images", {}, IMAGES, {"fp32_layers": ["conv"]}),
    ("images", {}, IMAGES, {"low": [], "replace_lists": True}),
    ("images", {}, IMAGES, {"substitutions": ["split"]}),
])  # fmt: skip
def test_where_they_do_not_apply(name, changes, shape, policy):
    symbol, chosen = symbol_of(name, **changes), casting_small_layers().override(**policy)
    assert not substitutions(symbol, chosen, shapes={"data": shape}, training=True)


def grouped(data):
    return S.Flatten(S.Convolution(data, kernel=(3, 3), num_filter=32, num_group=8, name="c"))


NORM, GROUPS = S.LayerNorm(X), grouped(X)


@pytest.mark.parametrize("symbol, shapes, training, made", [
    (NORM, {"data": (32, 64)}, True, True), (NORM, {"data": (31, 66)}, True, False),
    (NORM, {}, True, True), (NORM, {"data": (32, 64)}, False, False), (GROUPS, {"c_weight": (32, 4, 3, 3)}, False, True),
    (GROUPS, {"data": (1, 32, 11, 331)}, False, True), (GROUPS, {"data": (1, 32, 10, 364)}, False, False),
    (GROUPS, {"data": (1, 32, 6, 76)}, True, True), (GROUPS, {"data": (1, 32, 5, 91)}, True, False),
])  # fmt: skip
def test_the_least_sizes(symbol, shapes, training, made):
    assert bool(substitutions(symbol, shapes=shapes, training=training)) == made


def test_an_unknown_name_is_an_error():
    with pytest.raises(UnknownNameError, match="'relu6'"):
        amp.Policy.default("bfloat16").override(substitutions=["relu7"])


@mx.util.use_np_shape
@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_empty_arrays_are_clipped_by_mxnets_operator(shape):
    symbol = symbol_of("relu6")
    assert bool(substitutions(symbol, shapes={"data": shape})) == (0 not in shape)


# ---------------------------------------------------------------------- groups behind a Concat
# oneDNN can't cut blocks of channels at any place.
