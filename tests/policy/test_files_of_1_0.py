"""Policy files of mxamp 1.0 are full lists; they load, and mean what they meant."""

import json
from pathlib import Path

import pytest

from mxamp.framework import machine
from mxamp.framework.operators import registry
from mxamp.policy.decision import decide
from mxamp.policy.policy import Policy
from mxamp.policy.rules import SUBSTITUTIONS

FOLDER = Path(__file__).parent / "files_of_1_0"
#: What 1.0 made of its files: a letter for each operator of a CPU build, sorted by name.
MEANT = json.loads((FOLDER / "meaning.json").read_text())
OPERATORS = [name for name in sorted(registry()) if not name.startswith("CuDNN")]
LETTERS = {"low": "l", "fp32": "f", "widest": "w", "neutral": "n", "untouched": "u", "conditional": "c"}  # fmt: skip


def letter(decision, target):
    if not decision.changes:
        return "-"
    return "m" if decision.through else {"float32": "f", target: "l"}[decision.precision]


def decided(policy, dtype):
    made = (decide(name, {}, [dtype] * 3, policy) for name in OPERATORS)
    return "".join(letter(decision, policy.target_dtype) for decision in made)


def by_operator(policy, values):
    found = ((name, values(policy.rule(name))) for name in OPERATORS)
    return {name: value for name, value in found if value}


def conditions(rule):
    return [[one.attribute, list(one.values), one.beyond_range] for one in rule.conditions]


@pytest.mark.skipif(len(OPERATORS) != MEANT["operators"], reason="another build of MXNet")
@pytest.mark.parametrize("features", ["none", "avx512_bf16"])
@pytest.mark.parametrize("name", MEANT["files"])
def test_a_file_means_what_it_meant(monkeypatch, name, features):
    usable = frozenset() if features == "none" else frozenset({"avx512", features})
    monkeypatch.setattr(machine, "onednn_features", lambda: usable)
    policy, meant = Policy.load(FOLDER / f"{name}.txt"), MEANT["files"][name]
    assert "".join(LETTERS[policy.rule(one).shown_class] for one in OPERATORS) == meant["classes"]
    assert decided(policy, "float32") == meant[f"wide, {features}"]
    assert decided(policy, policy.target_dtype) == meant[f"half, {features}"]
    assert by_operator(policy, conditions) == meant["conditional"]
    assert (
        by_operator(policy, lambda rule: [one.name for one in rule.by_shape]) == meant["by_shape"]
    )
    assert list(by_operator(policy, lambda rule: rule.given)) == meant["given"]
    assert list(policy.fp32_layers) == meant["layers"]
    kept = [one for one in meant["substitutions"] if one in SUBSTITUTIONS]
    assert sorted(policy.substitutions) == kept
