"""The paper's experiments in miniature come out as the paper says, and its page shows what did."""

import json
import sys

import pytest

from helpers import ROOT, python

PAPER = ROOT / "examples" / "paper"
sys.path.append(str(PAPER))
import run as paper  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", paper.NAMES)
def test_the_fast_version_comes_out_as_the_paper_says(name, tmp_path):
    options = ["--fast", "--seeds=1", f"--json={tmp_path / 'r.json'}"]
    done = python(PAPER / "run.py", name, *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert set(json.loads((tmp_path / "r.json").read_text())) == {name}
