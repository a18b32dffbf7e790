"""Errors and gains that tuning has measured, in plans."""

import math
from dataclasses import replace

import mxnet as mx
import pytest

import mxamp as amp
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
    nodes = plan.to_dict()["nodes"]
    assert [(one["error"], one["gain"]) for one in nodes] == [
        (0.002, 1.5), (0.0, -0.25), ("inf", 0.75), (None, None),
    ]  # fmt: skip


def test_plans_without_measurements_have_no_columns_for_them():
    plan = tuned(net("other_"), **COSTS)
    assert not plan.is_tuned
    assert str(plan).splitlines()[0].split() == ["name", "operator", "precision", "reason"]
    keys = {"name", "operator", "precision", "reason", "inputs"}
    assert all(set(node) == keys for node in plan.to_dict()["nodes"])


def test_layers_that_were_not_reached_have_no_error():
    plan = tuned(
        net(), fc=(math.nan, None, False), act=(math.nan, 0.5, False), last=(0.5, None, True)
    )
    assert [(node.error, node.gain) for node in plan][:3] == [
        (None, None),
        (None, 0.5),
        (0.5, None),
    ]
