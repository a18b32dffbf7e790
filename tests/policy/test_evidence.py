"""What is kept of a tuning: values that compare, copy and show themselves."""

import copy
import pickle
from dataclasses import replace

import pytest

from mxamp.policy.evidence import LayerCost
from tuned import EVIDENCE, FAST, FASTER, INF, NAN


def test_they_are_values_with_nan_too():
    one = replace(EVIDENCE, error=NAN, layers=(LayerCost("a", "dot", 1, True, NAN, NAN),))
    for other in (
        replace(EVIDENCE, error=-NAN, layers=(LayerCost("a", "dot", 1, True, float("nan"), NAN),)),
        pickle.loads(pickle.dumps(one)),  # noqa: S301
        copy.deepcopy(one),
    ):
        assert other == one
        assert hash(other) == hash(one)
    assert one != replace(one, error=INF)
    assert one != replace(one, layers=(LayerCost("a", "dot", 1, True, NAN, None),))
    assert EVIDENCE != 3
    with pytest.raises(AttributeError):
        one.error = 3


def test_numbers_are_floats():
    layer = LayerCost("a", "dot", 1, True, 0, 3)
    assert (type(layer.error), type(layer.gain), type(layer.position)) == (float, float, int)


def test_the_ranking_is_by_error_then_by_gain():
    assert [layer.name for layer in EVIDENCE.ranking] == ["d", "b<i>", "c", "a"]


@pytest.mark.parametrize(
    "changes, chosen",
    [({}, FAST), ({"error": INF}, FASTER), ({"error": 3}, FAST), ({"way": "fused"}, None)],
)
def test_the_trial_that_was_chosen(changes, chosen):
    assert replace(EVIDENCE, **changes).chosen == chosen


def test_a_report():
    first, *tables = str(EVIDENCE).split("\n\n")
    assert first.splitlines() == [
        "Tuned for inference, within a relative error of 0.01.",
        "Chosen: autocast in bfloat16 with relu, tanh, 1.9 times as fast as plain float32 (2.1 ms a run, "
        "interquartile range 0.05 ms).",
        "2 layers stay in float32, of a model with 12 operators.",
        "The largest relative error of an output is 0.004.",
        "The metric is 0.91, of at least 0.9.",
        "7 accuracy tests; 33.25 seconds in all, with seed 0.",
        "The search ended early: there may be a better policy.",
    ]
    assert [table.splitlines()[0] for table in tables] == [
        "Trials", "Layers, largest error first", "Machine", "Inputs", "Notes",
    ]  # fmt: skip
    assert [line.split()[0] for line in tables[1].splitlines()[2:]] == ["d", "b<i>", "c", "a"]
    assert "1x3x8x8" in tables[3]
    assert tables[4].endswith("One & only.")


def test_a_report_of_nothing_faster_and_nothing_timed():
    text = str(replace(EVIDENCE, way="plain", error=0.0))
    assert "Chosen: float32 as it is, 4 ms a run." in text
    untimed = tuple(replace(layer, gain=None) for layer in EVIDENCE.layers)
    assert "gain ms" in text
    assert "gain ms" not in str(replace(EVIDENCE, layers=untimed))


def test_one_turn_has_no_spread():
    once = replace(FAST, milliseconds=1.25, spread=0.0)
    report = str(replace(EVIDENCE, trials=(once,)))
    assert report.split("1.25")[-1].split()[0] == "1.9"


def test_a_report_of_little():
    layers = tuple(LayerCost(f"l{i}", "dot", i, False, i) for i in range(25))
    little = replace(
        EVIDENCE, tolerance=None, metric=None, gradient_error=0.5, complete=True, notes=(), trials=(),
        layers=layers,
    )  # fmt: skip
    text = str(little)
    assert "Tuned for inference, without a tolerance.\nChosen: autocast.\n0 layers stay" in text
    assert "of an output is 0.004, and of a gradient 0.5." in text
    assert "Layers: the first 20 of 25, largest error first" in text
    assert "l24" in text and "l4 " not in text
    assert not any(word in text for word in ("metric", "Notes", "ended early", "Trials"))


def test_a_report_in_notebooks():
    page = EVIDENCE._repr_html_()
    assert page.count("<table>") == 4
    assert "<td>b&lt;i&gt;</td>" in page and "<i>" not in page
    assert "<li>One &amp; only.</li>" in page
