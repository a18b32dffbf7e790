"""Errors and gains that tuning has measured, in plans and in drawings."""

import json
import math
import re
from dataclasses import replace

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.tools.debugging.drawing import colors_of, to_dot
from mxamp.tools.debugging.explain import NodePlan, Plan
from mxamp.tools.tuning.tuning import LayerCost
from tuned import TUNING

S = mx.sym
BASE = amp.Policy.default("float16", "cpu")


def net(prefix="", hidden=4):
    made = S.FullyConnected(S.var("data"), num_hidden=hidden, name=f"{prefix}fc")
    made = S.relu(made, name=f"{prefix}act")
    made = S.FullyConnected(made, num_hidden=3, name=f"{prefix}last")
    return S.softmax(made, name=f"{prefix}soft")


def tuned(symbol, **costs):
    """A plan with an error and a gain by layer, those with a third True kept in float32."""
    layers = tuple(
        LayerCost(name, "any", kept, error, gain) for name, (error, gain, kept) in costs.items()
    )
    policy = BASE.override(fp32_layers=[layer.name for layer in layers if layer.kept])
    return replace(TUNING, layers=layers).annotated(amp.explain(symbol, policy=policy))


COSTS = {
    "fc": (2e-3, 1.5, True), "act": (0.0, -0.25, False), "last": (math.inf, 0.75, False),
}  # fmt: skip


@pytest.fixture
def plan():
    return tuned(net(), **COSTS)


def test_a_plan_has_what_was_measured(plan):
    assert [(node.name, node.error, node.gain) for node in plan] == [
        ("fc", 2e-3, 1.5), ("act", 0.0, -0.25), ("last", math.inf, 0.75), ("soft", None, None),
    ]  # fmt: skip
    lines = str(plan).splitlines()
    assert lines[0].split() == ["name", "operator", "precision", "error", "gain", "ms", "reason"]
    assert lines[1].split()[:5] == ["fc", "FullyConnected", "float32", "0.002", "1.5"]
    assert ">error</th>" in plan._repr_html_()
    nodes = json.loads(plan.to_json())["nodes"]
    assert [(one["error"], one["gain"]) for one in nodes] == [
        (0.002, 1.5), (0.0, -0.25), ("inf", 0.75), (None, None),
    ]  # fmt: skip


def test_plans_without_measurements_have_no_columns_for_them():
    plan = tuned(net("other_"), **COSTS)
    assert not plan.is_tuned
    assert str(plan).splitlines()[0].split() == ["name", "operator", "precision", "reason"]
    keys = {"name", "operator", "precision", "reason", "inputs"}
    assert all(set(node) == keys for node in json.loads(plan.to_json())["nodes"])
    assert "penwidth" not in to_dot(plan)


def test_layers_that_were_not_reached_have_no_error():
    plan = tuned(
        net(), fc=(math.nan, None, False), act=(math.nan, 0.5, False), last=(0.5, None, True)
    )
    assert [(node.error, node.gain) for node in plan][:3] == [
        (None, None),
        (None, 0.5),
        (0.5, None),
    ]


@pytest.mark.parametrize(
    "color, legend",
    [
        ("precision", ["in float16: 1", "in float32: 3", "stays in float32: 2"]),
        ("error", [
            "error 0: 1", "error 0.002 to 0.002: 1", "error infinite: 1", "not measured: 1",
            "stays in float32: 2",
        ]),
        ("gain", [
            "gain -0.25 to 0.0417 ms: 1", "gain 0.625 to 0.917 ms: 1", "gain 1.21 to 1.5 ms: 1",
            "not measured: 1", "stays in float32: 2",
        ]),
    ],
)  # fmt: skip
def test_pictures(plan, color, legend):
    dot = to_dot(plan, color)
    assert sorted(re.findall(r'^  "legend (.*?)"', dot, re.M)) == sorted(legend)
    assert dot.count("penwidth=4") == 3  # the legend's, the layer that is kept, and its relu
    boxes = dict(re.findall(r'^  "(\w+)" (\[label.*\])$', dot, re.M))
    assert boxes["fc"].endswith('error 0.002; gain 1.5 ms" penwidth=4]')
    assert "penwidth" not in boxes["last"]
    if color == "error":
        assert 'fillcolor="#000000" fontcolor="#ffffff"' in boxes["last"]


def brightness(color):
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


SEVERAL = [10.0**-k for k in range(30)]


@pytest.mark.parametrize("color", ["error", "gain"])
@pytest.mark.parametrize(
    "values",
    [[1e-3], SEVERAL, [0.1, 0.2, 0.3], [5e-324, 1e300], [1e-5, 9.99e-5, 1e-4], [0.0, 0.0]],
)
def test_darker_is_more_and_every_value_is_in_its_range(color, values):
    values = values if color == "error" else [*values, *(-value / 3 for value in values)]
    nodes = [NodePlan("n", "relu", "float16", "", (), one, one) for one in sorted(values)]
    colors = colors_of(Plan("float16", "cpu", tuple(nodes), ()), color)
    shades = [brightness(one.fill) for one in colors]
    assert shades == sorted(shades, reverse=True)
    for node, one in zip(nodes, colors):
        assert abs(brightness(one.text) - brightness(one.fill)) > 100
        low, _, high = one.label.replace(" ms", "").split(" ", 1)[1].partition(" to ")
        low, high = float(low), float(high or 0)
        room = 1e-2 * max(abs(low), abs(high))  # labels have three digits
        assert low - room <= node.error <= high + room


@pytest.mark.parametrize("color, words", [
    ("error", "no errors of layers .* tune the model"), ("gain", "no gains"), ("hue", "not 'hue'"),
])  # fmt: skip
def test_wrong_colors(color, words, tmp_path):
    with pytest.raises(amp.ArgumentError, match=words):
        amp.draw(amp.explain(net(), policy=BASE), tmp_path / "net.dot", color=color)
    assert not list(tmp_path.iterdir())
