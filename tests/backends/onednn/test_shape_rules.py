"""Precisions chosen by shape and layout, in graphs about to run and in converted models."""

import mxnet as mx
import pytest

import mxamp as amp
from helpers import chosen, kept, substitutions, with_avx512
from mxamp.backends import Site, backend_of, shape_checks
from mxamp.graph.casts.insert import rewrite
from mxamp.graph.ir import Graph, Usage

B = amp.Policy.default("bfloat16")
X = mx.sym.var("data")
MODES = pytest.mark.parametrize("training", [True, False])


def conv(name, data, filters=16, **attrs):
    attrs = {"kernel": (3, 3), "pad": (1, 1), "no_bias": True, **attrs}
    return mx.sym.Convolution(data, num_filter=filters, name=name, **attrs)


def precisions(symbol, shape):
    """Return the precision of each operator in inference, by its name."""
    plan = amp.explain(symbol, policy=B, mode="inference", input_shapes={"data": shape})
    return {node.name: node.precision for node in plan.nodes}


def test_the_lists_use_every_rule():
    lists = [amp.Policy.default("bfloat16", "cpu"), amp.Policy.default("float16", "gpu")]
    named = {
        one.name for policy in lists for rule in policy.rules.values() for one in rule.by_shape
    }
    assert named == {*shape_checks()}


@MODES
@pytest.mark.parametrize("kernel, stride, pad, dilate, side, low", [
    (3, 2, 1, 1, 1, False), (3, 4, 1, 1, 3, False), (5, 1, 2, 1, 2, False), (3, 1, 2, 2, 2, False),
    (3, 1, 1, 1, 2, True), (3, 2, 1, 1, 3, True), (1, 1, 0, 1, 1, True), (1, 3, 0, 1, 2, False),
])  # fmt: skip
def test_kernels_that_read_only_padding_train_in_float32(
    kernel, stride, pad, dilate, side, low, training
):
    sizes = {"kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate}
    layer = conv("conv", X, **{name: (size, size) for name, size in sizes.items()})
    expected = [] if low or not training else ["conv"]
    for policy in (B, B.untuned()):
        usage = {"shapes": {"data": (64, 16, side, side)}, "training": training}
        assert kept(layer, policy, {"padded_kernel"}, **usage) == expected
        shapes = [usage["shapes"]["data"], (16, 16, kernel, kernel)]
        attrs = layer.attr_dict()["conv"]
        rule = policy.untuned().rule("Convolution")
        site = Site("Convolution", attrs, shapes, training, in_call=True)
        reason = backend_of("cpu").reason_by_shapes(rule, site)
        assert (reason is not None) == bool(expected)


# ---------------------------------------------------------------------- few rows, few columns


@pytest.mark.parametrize("kind, rows, weight, low", [
    *[("few_columns", rows, (units, 64), low) for rows, units, low in (
        (2048, 1, False), (256, 10, False), (128, 31, False), (2048, 32, True), (64, 10, True))],
    *[("few_rows", *more) for more in (
        (8, (1024, 1024), False), (64, (1024, 1024), True), (64, (3072, 768), False),
        (128, (3072, 768), True), (256, (4096, 4096), False), (320, (4096, 4096), True),
        (64, (4096, 4096), False), (2, (4096, 25088), False), (2048, (2304, 768), True),
        (64, (10, 64), True))],
])  # fmt: skip
def test_dense_layers_of_few_outputs_or_rows_stay_in_float32(kind, rows, weight, low):
    layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=weight[0], name="fc")
    for training in [True] if kind == "few_rows" else [True, False]:
        usage = {"shapes": {"data": (rows, weight[1])}, "training": training}
        assert kept(layer, kinds={kind}, **usage) == ([] if low else ["fc"])


@pytest.mark.parametrize("count, low", [(1, False), (15, False), (16, True), (20, True)])
def test_layers_that_share_a_weight_train_in_bfloat16_if_they_are_many(count, low):
    weight = mx.sym.var("weight")
    net = mx.sym.Group([dense(f"fc{k}", 1024, weight) for k in range(count)])
    found = kept(net, shapes={"data": (8, 256)}, training=True)
    assert len(found) == (0 if low else count)


def test_dense_layers_whose_weight_is_cast_for_few_rows_run_in_float32():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4096, name="fc")

    def kept_for(rows, **usage):
        return kept(net, shapes={"data": (rows, 512)}, **usage)

    assert kept_for(1) == kept_for(24) == ["fc"]
    assert kept_for(25) == []
    assert kept_for(1, stored=frozenset({"fc_weight"})) == []
    assert kept_for(1, dtypes={"fc_weight": "bfloat16"}) == []
    # One cast for all that read it.
    weight = mx.sym.var("weight")
    net = mx.sym.Group([dense(f"fc{k}", 4096, weight) for k in range(3)])
    assert len(kept_for(8)) == 3
    assert kept_for(9) == []


# ---------------------------------------------------------------------- small layers


def dense(name, units, weight=None):
    """A dense layer; on 256 rows of 64, one of 122 units has just under two million products."""
    return mx.sym.FullyConnected(X, weight, num_hidden=units, no_bias=True, name=name)


def layers(*units, side=None):
    """Dense layers, and a convolution of maps of 26 x `side`: of 25, just under three million."""
    made = [dense(f"fc{k}", each) for k, each in enumerate(units)]
    return mx.sym.Group(made + [conv("conv", mx.sym.var("maps"), 32, num_group=2)] * bool(side))


def small(symbol, policy=B, data=(256, 64), side=None, **usage):
    """Return which operators stay in float32 because all layers are small."""
    usage["shapes"] = {"data": data, **({"maps": (1, 32, 26, side)} if side else {})}
    found = kept(symbol, policy, {"small_layers"}, **usage)
    assert kept(symbol, policy, **usage) == found
    return sorted(found)


@MODES
@pytest.mark.parametrize("units, side, names", [
    ([122], None, ["fc0"]), ([123], None, []), ([64, 180], None, ["fc0", "fc1"]),
    ([64, 181], None, []), ([64, 64, 64, 1024], None, []), ([], 25, ["conv"]), ([], 26, []),
    ([147], 15, ["conv", "fc0"]), ([180], 15, []),
])  # fmt: skip
def test_layers_that_are_small_on_average_stay_in_float32(units, side, names, training):
    net, data = layers(*units, side=side), (512 if training else 256, 64)
    assert small(net, data=data, side=side, training=training) == names
    assert small(net, B.untuned(), side=side, training=training) == []
    assert small(net, side=side, converting=True) == []


@MODES
def test_layers_do_not_count_as_small_without_a_cast_or_a_shape(training):
    weights = frozenset({"fc0_weight", "fc1_weight"})
    for usage in ({"stored": weights}, {"dtypes": dict.fromkeys(weights, "bfloat16")}):
        assert small(layers(64, 64), training=training, **usage) == []
    # Maps of unknown shape: in training the convolution stays for its padding, and does not count.
    unknown = kept(layers(64, side=25), shapes={"data": (256, 64)}, training=training)
    assert unknown == (["fc0", "conv"] if training else [])
    by_name = B.override(fp32_layers=["fc1"])
    assert small(layers(64, 1024), by_name, training=training) == ["fc0"]


@pytest.mark.parametrize("count, units, training, low", [
    (16, 256, True, True), (15, 256, True, False), (16, 255, True, False), (16, 256, False, False),
])  # fmt: skip
def test_layers_that_share_a_large_weight_do_not_train_as_small_ones(count, units, training, low):
    weight = mx.sym.var("weight")
    net = mx.sym.Group([dense(f"fc{k}", units, weight) for k in range(count)])
    assert len(small(net, data=(8, 256), training=training)) == (0 if low else count)


@MODES
@pytest.mark.parametrize("channels, side, low", [
    (3, 16, False), pytest.param(3, 128, True, marks=with_avx512), (16, 16, False), (16, 128, True),
])  # fmt: skip
def test_what_surrounds_small_convolutions_stays_in_float32_too(channels, side, low, training):
    net = conv("b", mx.sym.relu(mx.sym.BatchNorm(conv("a", X), name="norm")))
    usage = {"shapes": {"data": (1, channels, side, side)}, "training": training}
    assert kept(net, **usage) == ([] if low else ["a", "norm", "b"])
    assert ("image_convolution" in substitutions(net, **usage)) == (channels == 3 and low)
    result = rewrite(Graph.from_symbol(net), B, Usage(**usage), chosen(net, **usage))
    assert ("amp_cast" in result.graph.operators) == low


@MODES
@pytest.mark.parametrize("operator, attrs, shapes, small", [
    ("FullyConnected", {}, [(1024, 64), (244, 64)], True),
    ("FullyConnected", {}, [(1024, 64), (245, 64)], False),
    ("Convolution", {"num_group": "2"}, [(1, 32, 26, 200), (32, 16, 3, 3)], True),
    ("Convolution", {"num_group": "2"}, [(1, 32, 26, 201), (32, 16, 3, 3)], False),
])  # fmt: skip
def test_calls_count_as_small_up_to_eight_times_the_size(operator, attrs, shapes, small, training):
    site = Site(operator, attrs, shapes, training, in_call=True)
    reason = backend_of("cpu").reason_by_shapes(B.rule(operator), site)
    assert (reason and reason.kind) == ("small_layers" if small else None)


# ---------------------------------------------------------------------- layouts


# `low`: computed in bfloat16 in neither mode, in inference alone, or in training too.
@pytest.mark.parametrize("channels, kernel, groups, norm, low", [
    ((16, 32), 1, 1, True, 2), ((32, 24), 1, 1, True, 0), ((24, 32), 1, 1, True, 0),
    ((40, 33), 1, 1, True, 0), ((40, 33), 1, 1, False, 1), ((48, 56), 1, 1, False, 2),
    ((32, 40), 3, 1, False, 1), ((40, 40), 3, 1, False, 2), ((24, 40), 3, 1, False, 0),
    ((32, 31), 1, 1, False, 0), ((32, 31), 3, 1, False, 2), ((40, 47), 1, 1, False, 1),
    ((8, 8), 3, 1, False, 0), ((16, 16), 3, 1, False, 2), ((20, 40), 3, 1, False, 2),
    ((32, 32), 1, 32, True, 2), ((24, 24), 1, 24, True, 0), ((1, 32), 1, 1, False, 0),
    ((3, 24), 3, 1, False, 0), ((64, 32), 1, 2, True, 2),
])  # fmt: skip
def test_convolutions_by_channels(channels, kernel, groups, norm, low):
    net = conv("conv", X, channels[1], kernel=(kernel, kernel), num_group=groups)
    net = mx.sym.BatchNorm(mx.sym.LeakyReLU(net), name="norm") if norm else mx.sym.Flatten(net)
    shape = (64, channels[0], 64, 64)
    found = precisions(net, shape)
    assert found["conv"] == ("bfloat16" if low else "float32")
    assert ("conv" in kept(net, shapes={"data": shape}, training=True)) == (low != 2)
    assert found.get("norm", found["conv"]) == found["conv"]


@pytest.mark.parametrize("how, precision", [
    (lambda F, a, b: a, "bfloat16"),
    (lambda F, a, b: F.elemwise_add(a, b), "bfloat16"),
    (lambda F, a, b: F.concat(a, b), "bfloat16"),
    (lambda F, a, b: F.Pooling(a, kernel=(2, 2)), "bfloat16"),
    (lambda F, a, b: F.concat(a, b, dim=2), "float32"),
    (lambda F, a, b: F.reshape(a, shape=(0, 0, -1)), "float32"),
    (lambda F, a, b: F.slice_axis(a, axis=1, begin=0, end=8), "float32"),
    (lambda F, a, b: F.elemwise_add(a, F.reshape(b, shape=(0, 0, 0, 0))), "float32"),
])  # fmt: skip
def test_norms_by_what_is_before_them(how, precision):
    net = mx.sym.BatchNorm(how(mx.sym, conv("a", X), conv("b", X)), name="norm")
    assert precisions(net, (64, 16, 64, 64))["norm"] == precision


# ---------------------------------------------------------------------- transposed convolutions

TAKEN = mx.sym.var("weight")
UP = mx.sym.Deconvolution(X, TAKEN, kernel=(2, 2), num_filter=16, no_bias=True, name="up")
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
