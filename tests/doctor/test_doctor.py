"""The command `mxamp doctor`, and where it works that nothing else does."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

import mxamp as amp
from helpers import ROOT
from installations import H100, HEALTHY, ON_T4
from mxamp.cli import doctor as module
from mxamp.cli.main import main

WITHOUT_MXNET = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "mxnet" else real(name, package)
"""


def command(*arguments, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mxamp", *arguments],
        capture_output=True, text=True, check=False, cwd=str(ROOT), env={**os.environ, **env},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def run(monkeypatch, facts, *arguments):
    monkeypatch.setattr(module, "collect", lambda: facts)
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.slow
def test_the_report_of_this_machine_has_its_versions():
    done = command("doctor", "--json")
    data = json.loads(done.stdout)
    assert data["mxamp"] == amp.__version__ and data["mxnet"] == "1.9.1"
    assert data["verdict"].startswith("This machine ")
    assert done.returncode == any(one["level"] == "problem" for one in data["findings"])


def test_json_holds_what_was_found(monkeypatch):
    facts = replace(HEALTHY, **{**ON_T4, "gpus": (H100,)}, physical=8)
    result = run(monkeypatch, facts, "doctor", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1 and data["verdict"].startswith("This machine gains")
    assert data["gpus"] == [vars(H100)]
    assert [one["level"] for one in data["findings"]] == ["problem", "note"]
    assert set(data["findings"][0]) == {"level", "what", "advice"}


SLOW = {"instructions": ("avx512",), "usable": ("avx512",)}


@pytest.mark.parametrize(
    "changes, status, words",
    [
        ({}, 0, "No problem found. Next: amp.benchmark(net, batch) times your model"),
        (SLOW, 0, "1. note: this CPU, or its virtual machine, has no bfloat16 instructions"),
        (SLOW, 0, "No problem found. Next: mxamp tune model looks for"),
        ({"threads": 16}, 1, "1. problem: MXNet's kernels run on 16 threads"),
        ({"mxnet": "", "wheels": {}, "mxnet_error": "no"}, 1, "not importable (no wheel is installed)"),
        (ON_T4, 0, "Tesla T4, driver 470.57.02, compute capability 7.5"),
        ({"variables": {"A_VERY_LONG_NAME_OF_A_VARIABLE": "x" * 90}}, 0, "A_VERY_LONG_NAME_OF_A_VARIABLE"),
    ],
)  # fmt: skip
def test_the_exit_status_counts_problems_alone(monkeypatch, changes, status, words):
    done = run(monkeypatch, replace(HEALTHY, **changes), "doctor")
    assert done.exit_code == status
    assert words in " ".join(done.output.split())
    assert ("Next: " in done.output) == (status == 0)
    assert max(map(len, done.output.splitlines())) <= 100


@pytest.mark.slow
def test_where_the_import_kills_the_process():
    done = command("doctor", OMP_NUM_THREADS="4,2")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "MXNet can't be imported: Invalid Parameter format for OMP_NUM_THREADS" in said
    assert "set that environment variable" in said


@pytest.mark.slow
def test_without_mxnet(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MXNET)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("doctor", PYTHONPATH=path)
    assert (done.stderr, done.returncode) == ("", 1)
    said = " ".join(done.stdout.split())
    assert "MXNet can't be imported: MXNet is not installed" in said and "What to do: pip" in said
