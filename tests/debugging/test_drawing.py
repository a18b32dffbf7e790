"""Errors and gains that tuning has measured, in plans and in drawings."""

import json
import math
import re
from dataclasses import replace

import mxnet as mx
import pytest

import mxamp as amp
from helpers import float16_policy
from mxamp.tools.debugging.drawing import scale_of, to_dot
from mxamp.tools.debugging.explain import NodePlan, Plan
from mxamp.tools.tuning.tuning import LayerCost
from tuned import TUNING

S = mx.sym
BASE = float16_policy()


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
    assert "<th scope=col>error</th>" in plan._repr_html_()
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


def test_pictures_by_error(plan):
    dot = to_dot(plan, "error")
    assert '[label="error 1e-3 to 1e-2: 1" shape=note fillcolor="#ffffb2"]' in dot
    assert '[label="error 0: 1" shape=note fillcolor="#ffffff"]' in dot
    assert '[label="error infinite: 1" shape=note fillcolor="#000000" fontcolor="#ffffff"]' in dot
    assert '[label="not measured: 1" shape=note fillcolor="#e8e8e8"]' in dot
    assert '[label="stays in float32: 2" shape=note fillcolor="white" penwidth=4]' in dot
    boxes = dict(re.findall(r'^  "(\w+)" (\[label.*\])$', dot, re.M))
    assert boxes["fc"].endswith('error 0.002; gain 1.5 ms" penwidth=4]')
    assert 'fillcolor="#ffffb2"' in boxes["fc"]
    assert "penwidth" not in boxes["last"]
    assert 'fillcolor="#000000" fontcolor="#ffffff"' in boxes["last"]
    assert 'fillcolor="#e8e8e8"' in boxes["soft"]


def test_pictures_by_gain_and_by_precision(plan):
    dot = to_dot(plan, "gain")
    for label in ("gain -0.5 to 0 ms: 1", "gain 0.5 to 1 ms: 1", "gain 1.5 to 2 ms: 1"):
        assert f'label="{label}"' in dot
    assert 'label="1 in float16" shape=note fillcolor="#8fd18f"' in to_dot(plan)
    assert (
        to_dot(plan).count("penwidth=4") == 3
    )  # the legend's, the layer that is kept, and its relu


def plan_of(**values):
    nodes = [
        NodePlan(f"n{i}", "relu", "float16", "", (), error, gain)
        for i, (error, gain) in enumerate(zip(*values.values()))
    ]
    return Plan("float16", "cpu", tuple(nodes), ())


def brightness(colour):
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


SEVERAL = [10.0**-k for k in range(30)]


@pytest.mark.parametrize("colour", ["error", "gain"])
@pytest.mark.parametrize(
    "values",
    [
        [1e-3], SEVERAL, SEVERAL[:6], [0.1, 0.2, 0.3], [5e-324, 1e300], [1e-5, 9.99e-5, 1e-4],
        [0.0, 0.0], [3.0] * 4, [1e-9, 1e-9 * (1 + 1e-12)],
    ],
)  # fmt: skip
def test_darker_is_more_and_every_value_is_in_its_range(colour, values):
    values = values if colour == "error" else [*values, *(-value / 3 for value in values)]
    scale = scale_of(plan_of(error=values, gain=values), colour)
    nodes = [NodePlan("n", "relu", "float16", "", (), one, one) for one in sorted(values)]
    shades = [brightness(scale.of(node).fill) for node in nodes]
    assert shades == sorted(shades, reverse=True)
    assert len(scale.legend) <= 7
    steps = [brightness(one.fill) for _, one in scale.legend]
    assert all(before - after > 15 for before, after in zip(steps, steps[1:]))
    assert sum(int(label.rpartition(": ")[2]) for label, _ in scale.legend) == len(values)
    for node in nodes:
        (label,) = (label for label, one in scale.legend if one == scale.of(node))
        low, _, high = re.sub(" ms", "", label.split(" ", 1)[1].rpartition(": ")[0]).partition(
            " to "
        )
        low, high = float(low), float(high or 0)
        room = 1e-3 * max(abs(low), abs(high))  # labels have four digits
        assert low - room <= node.error <= high + room
        text = brightness(scale.of(node).text)
        assert abs(text - brightness(scale.of(node).fill)) > 100


@pytest.mark.parametrize("colour", ["error", "gain"])
def test_without_costs_it_says_to_tune_first(colour, tmp_path):
    plan = amp.explain(net(), policy=BASE)
    with pytest.raises(amp.ArgumentError, match=f"no {colour}s of layers .* tune the model"):
        amp.draw(plan, tmp_path / "net.dot", colour=colour)
    with pytest.raises(amp.ArgumentError, match="'precision', 'error' or 'gain', not 'hue'"):
        amp.draw(plan, tmp_path / "net.dot", colour="hue")
    assert not list(tmp_path.iterdir())
