"""scripts/check_gpu from end to end on simulated GPUs, and what it makes of planted faults."""

import json
import os
import time

import pytest

from helpers import load_script

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("simulated")]
PLANTED = {"relu": "crash", "tanh": "hang", "sigmoid": "wrong"}


@pytest.fixture(scope="module")
def gpu_report():
    return load_script("gpu_report.py")


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_planted(fault):
    """What the next test runs."""
    if os.environ.get("MXAMP_PLANTED") == fault:
        os.abort() if fault == "crash" else time.sleep(1e4)


def test_a_test_that_crashes_and_one_that_hangs_are_named(gpu_report, monkeypatch):
    for fault in ("crash", "hang"):
        monkeypatch.setenv("MXAMP_PLANTED", fault)
        part = gpu_report.tests(f"{__file__}::test_planted", of_each=20)
        assert part["status"] == f"failed: tests/gpu/test_check_gpu.py::test_planted[{fault}]"
        assert part["passed"] == 1


def test_planted_faults_of_operators_are_named(gpu_report, monkeypatch, tmp_path):
    faults = ",".join(f"{name}={fault}" for name, fault in PLANTED.items())
    monkeypatch.setenv("MXAMP_PLANTED", faults)
    names = ["exp", "relu", "sin", "tanh", "sigmoid", "cos"]
    todo = {
        "doctor": lambda: {"status": "fine"},
        "operators": lambda: gpu_report.operators(names, seconds=30),
    }
    found = gpu_report.write_report(todo, tmp_path / "report.json", simulated=True)
    rows = {row["operator"]: row for row in found["parts"]["operators"]["rows"]}
    assert rows.keys() == set(names)
    assert rows["relu"]["error"] == "crash: SIGABRT"
    assert rows["tanh"]["error"] == "hang: longer than 30 s"
    assert rows["sigmoid"]["error"] is None and rows["sigmoid"]["difference"] > 0.1
    assert all(rows[name]["difference"] < gpu_report.LARGEST for name in ("exp", "sin", "cos"))
    said = "\n".join(gpu_report.conclusions(found))
    assert all(f"override(fp32=['{name}'])" in said for name in PLANTED)


def test_from_end_to_end(gpu_report, tmp_path):
    path = tmp_path / "report.json"
    outcome = gpu_report.run(
        ["scripts/gpu_report.py", "--simulated", "--fast", "--out", str(path)], 600
    )
    found = json.loads(path.read_text())
    assert outcome.status == "fine", (outcome, found)
    assert (found["schema"], found["simulated"], found["finished"]) == (2, True, True)
    assert all(part["status"] == "fine" for part in found["parts"].values())
    assert len(found["parts"]["operators"]["rows"]) > 25
    assert not any(row["milliseconds"] for row in found["parts"]["timings"]["rows"])
    ways = {row["way"] for row in found["parts"]["smoke"]["rows"]}
    assert ways == {"fusion", "no fusion", "one by one"}
    shown = gpu_report.run(["scripts/gpu_report.py", "--show", str(path)], 60)
    assert "on simulated GPUs: values, no speeds" in shown.lines
    assert not any("sums in float16" in line for line in shown.lines)
