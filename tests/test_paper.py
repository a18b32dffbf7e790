"""The paper's experiments in miniature: the fast versions come out as the paper says."""

import importlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from helpers import ROOT

PAPER = ROOT / "examples" / "paper"
MEASURED = ROOT / "docs" / "measured" / "paper"
NAMES = ("classification", "detector", "language_model", "master_weights", "gan")


@pytest.fixture
def load(monkeypatch):
    """Import a module of the examples; its neighbours are found beside it."""
    monkeypatch.syspath_prepend(str(PAPER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name in (*NAMES, "common", "run_all"):
            del sys.modules[name]


def differences(results, name, reference="float32"):
    return results.mean(name) - results.mean(reference)


def check_classification(results):
    for kind in ("plain", "residual"):
        assert results.mean(f"{kind}, float32") > 60
        assert abs(differences(results, f"{kind}, float16", f"{kind}, float32")) < 3
        assert all(run.facts["skipped"] == 0 for run in results.of(f"{kind}, float16"))


def check_detector(results):
    assert results.mean("float32") > 2.5
    assert results.mean("float16") < 1
    assert results.mean("float16, scaled by 8") > 2.5
    facts = results.of("float32")[0].facts
    assert facts["zero in float16"] > 0.6
    assert facts["zero in float16, scaled by 8"] < facts["zero in float16"] - 0.2


def check_language_model(results):
    assert results.mean("float16") > 1.05 * results.mean("float32")
    assert results.mean("float16, scaled by 128") < 1.1 * results.mean("float32")


def check_master_weights(results):
    facts = results.of("float32")[0].facts
    assert facts["over 2048"] > 0.5
    assert results.mean("float16 weights alone") < results.mean("float32") - 2
    assert abs(differences(results, "float16 weights, float32 masters")) < 3


def check_gan(results):
    start = results.runs[0].curve[0][1]
    assert all(run.curve[0][1] == start for run in results.runs), "all start from the same weights"
    for config in results.experiment.configs:
        assert results.mean(config.name) < start


CHECKS = {name: globals()[f"check_{name}"] for name in NAMES}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accumulating with float16")  # what the experiment shows
@pytest.mark.parametrize("name", NAMES)
def test_the_fast_version_comes_out_as_the_paper_says(name, load, tmp_path):
    module, common = load(name), load("common")
    results = common.measure(module.EXPERIMENT, [0], fast=True)
    CHECKS[name](results)
    checks = module.EXPERIMENT.verdict(results)
    assert checks
    assert [check.claim for check in checks if not check.holds] == []
    found = json.loads(json.dumps(common.as_dict(results, checks)))
    assert len(found["runs"]) == len(module.EXPERIMENT.configs)
    common.figure_of(results).savefig(tmp_path / "plot.png")


def fake_results(common, values):
    """An experiment of which the runs are given: by config, one value a seed."""
    experiment = common.Experiment(
        "fake", "says so", "points", tuple(common.Config(name) for name in values), {}, None, None, None
    )  # fmt: skip
    runs = [
        common.Run(name, seed, value, [(1, value)])
        for name, column in values.items()
        for seed, value in enumerate(column)
    ]
    return common.Results(experiment, runs, False)


def test_verdicts_follow_from_the_numbers(load):
    results = fake_results(
        load("common"), {"a": [90, 92], "b": [89, 92.5], "c": [70, 91], "d": [1, np.nan]}
    )
    assert results.text("a") == "91.00 ± 1.41"
    assert results.matches("b", "a", 0.5).holds
    assert not results.matches("b", "a", 0.2).holds
    assert not results.worse("c", "a", 5).holds, "one seed is hardly worse"
    assert results.worse("c", "a", 0.5).holds
    assert results.worse("d", "a", 5).holds, "NaN is worse"
    assert not results.matches("d", "a", 5).holds
    assert results.worse("a", "c", 0.5, higher_is_better=False).holds


@pytest.mark.parametrize("seeds", ["0", "-1"])
def test_bad_options_are_one_sentence(seeds):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PAPER / "run_all.py"), "--seeds", seeds],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--seeds must be 1 or more" in done.stderr


@pytest.mark.slow
def test_a_command_writes_its_numbers_and_fails_where_the_paper_is_not_met(tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(PAPER)!r}); import common, master_weights as m; "
        "m.FAST_MARGIN = 1000; m.EXPERIMENT.sizes[True].update(steps=20); "
        "common.main(m.EXPERIMENT, m.__doc__)"
    )
    files = tmp_path / "r.json", tmp_path / "r.png"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, "--fast", "--seeds", "1",
         "--json", str(files[0]), "--png", str(files[1])],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-2000:]
    assert "NO  float16 weights alone is worse" in done.stdout
    assert json.loads(files[0].read_text())["fast"] is True
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_the_page_has_the_table_of_what_was_measured(load):
    found = {name: json.loads((MEASURED / f"{name}.json").read_text()) for name in NAMES}
    page = (ROOT / "docs" / "paper.md").read_text()
    assert load("run_all").table(found) in page
    for name, result in found.items():
        assert not result["fast"]
        assert {run["seed"] for run in result["runs"]} == {0, 1, 2}
        assert all(check["holds"] for check in result["checks"]), name
        assert f"paper-{name}.png" in page
        assert (ROOT / "docs" / f"paper-{name}.png").stat().st_size < 150_000


def test_the_measured_experiments_are_those_of_the_code(load):
    for name in NAMES:
        result, experiment = (
            json.loads((MEASURED / f"{name}.json").read_text()),
            load(name).EXPERIMENT,
        )
        assert result["settings"] == experiment.sizes[False]
        assert list(result["summary"]) == [config.name for config in experiment.configs]
