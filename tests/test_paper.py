"""The paper's experiments in miniature come out as the paper says, and its page shows what did."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from helpers import ROOT

PAPER = ROOT / "examples" / "paper"
sys.path.append(str(PAPER))
import run as paper  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", paper.NAMES)
def test_the_fast_version_comes_out_as_the_paper_says(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PAPER / "run.py"), name, "--fast", "--seeds=1",
         f"--json={tmp_path / 'r.json'}"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert set(json.loads((tmp_path / "r.json").read_text())) == {name}


def test_verdicts_follow_from_the_numbers():
    common = pytest.importorskip("common")
    rows = {"a": [90, 92], "b": [89, 92.5], "c": [70, 91], "d": [1, np.nan]}
    found = {name: np.array(row) for name, row in rows.items()}
    assert common.matches(found, "b", "a", 0.5)[1]
    assert not common.matches(found, "b", "a", 0.2)[1]
    assert not common.matches(found, "d", "a", 5)[1]
    assert not common.differs(found, "c", "a", -5)[1], "one seed is hardly worse"
    assert common.differs(found, "c", "a", -0.5)[1]
    assert common.differs(found, "d", "a", -5)[1], "NaN is worse"
    assert common.differs(found, "a", "c", 0.5)[1]


def test_the_page_shows_what_was_measured():
    measured = json.loads((ROOT / "docs" / "measured" / "paper.json").read_text())
    page = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert tuple(measured) == paper.NAMES
    for found in measured.values():
        assert f"{paper.shown(found, 2)} |" in page or f"{paper.shown(found, 1)} |" in page
