"""The command `mxamp doctor`, and where it works that nothing else does."""

import getpass
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import mxamp as amp
from helpers import ROOT, run_python
from installations import H100, HEALTHY, ON_T4, T4, cpu
from mxamp.cli import doctor as module
from mxamp.cli.main import main
from mxamp.tools.doctor.collect import collect

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
    monkeypatch.setattr(module, "collect", lambda measure: facts)
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def here():
    """The facts of this machine."""
    return collect()


@pytest.mark.slow
def test_the_report_is_fit_to_paste(here, monkeypatch):
    done = run(monkeypatch, here, "doctor")
    text = done.output
    first, *lines = text.splitlines()
    assert re.match(r"This machine (gains|computes fastest) .*\(measured: [\d.]+ times", first)
    assert max(map(len, lines)) <= 100
    assert any(re.fullmatch(rf"mxamp +{re.escape(amp.__version__)}", line) for line in lines)
    assert "GFLOP/s" in text
    assert "\x1b" not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert getpass.getuser() not in text.split()
    assert done.exit_code == (1 if "Problems" in lines else 0)


@pytest.mark.slow
def test_json_has_the_documented_keys(here, monkeypatch):
    data = json.loads(run(monkeypatch, here, "doctor", "--json").stdout)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented = page.split("### As JSON")[1].split("\n## ")[0]
    assert data["schema"] == 3
    for key in (*data, *data["cpu"], *data["mxnet"]):
        assert f"`{key}`" in documented, key
    assert data["mxnet"]["version"] == "1.9.1"
    assert [speed["dtype"] for speed in data["speed"]][:1] == ["float32"]
    assert data["speed_error"] == ""


def test_json_holds_what_was_found(monkeypatch):
    facts = replace(HEALTHY, **{**ON_T4, "gpus": (H100,)}, numpy="1.26.4")
    result = run(monkeypatch, facts, "doctor", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert data["verdict"].startswith("This machine gains")
    assert data["gpus"] == [
        {"name": "NVIDIA H100 PCIe", "capability": "9.0", "driver": "535.104.05"}
    ]
    assert [problem["name"] for problem in data["problems"]] == ["gpu_without_code"]
    assert [note["name"] for note in data["notes"]] == ["numpy_restored"]
    assert set(data["notes"][0]) == {"name", "what", "advice"}


@pytest.mark.parametrize(
    "changes, status, words",
    [
        ({}, 0, "\n\nNo problem found.\nNext: amp.benchmark(net, batch) times your model"),
        ({}, 0, "mxamp run train.py"),
        (cpu(instructions=("avx512",), usable=("avx512",)), 0, "\n\nNo problem found.\nNext: mxamp tune model looks for"),
        ({"numpy": "1.26.4"}, 0, "Notes\n  1. MXNet can't be imported with NumPy 1.26.4"),
        ({"python": "3.14.0"}, 1, "Problems\n  1. Python 3.14.0"),
        ({"python": "3.14.0"}, 1, "\n     What to do: use Python 3.11"),
        ({"variables": {"A_VERY_LONG_NAME_OF_A_VARIABLE": "x" * 90}}, 0, "A_VERY_LONG_NAME_OF_A_VARIABLE"),
    ],
)  # fmt: skip
def test_the_exit_status_counts_problems_alone(monkeypatch, changes, status, words):
    done = run(monkeypatch, replace(HEALTHY, **changes), "doctor")
    assert done.exit_code == status
    assert words in done.output
    assert ("Next: " in done.output) == (status == 0)
    assert max(map(len, done.output.splitlines())) <= 100


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({}, ["in bfloat16 on the CPU", "1.9.1 (mxnet 1.9.1)", "avx512_bf16", "none found"]),
        ({"mxnet": None, "wheels": {}}, ["can't be imported (no wheel is installed)"]),
        (ON_T4, ["Tesla T4, driver 470.57.02, compute capability 7.5", "default device  gpu"]),
        ({"gpus": (H100, replace(T4, capability=None))}, ["wheels have no code", "capability unknown"]),
        ({"fast_dtype": "float32"}, ["dtype 'auto'    float32"]),
        (cpu(usable=(), quota=1.5, virtual=True), ["no avx512", "may use 1.5", "a virtual one"]),
    ],
)  # fmt: skip
def test_the_facts_are_shown(monkeypatch, changes, shown):
    result = run(monkeypatch, replace(HEALTHY, **changes), "doctor")
    for words in ("mxamp", "CPU", "default device", *shown):
        assert words in " ".join(result.output.split()) or words in result.output


@pytest.mark.slow
def test_where_the_import_kills_the_process():
    done = command("doctor", OMP_NUM_THREADS="4,2")
    assert done.returncode == 1
    assert "MXNet can't be imported: Invalid Parameter format for OMP_NUM_THREADS" in done.stdout
    assert "set that environment variable" in done.stdout


@pytest.mark.slow
def test_without_mxnet(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MXNET)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("doctor", PYTHONPATH=path)
    assert done.stderr == ""
    assert done.returncode == 1
    assert "MXNet can't be imported: MXNet is not installed" in done.stdout
    assert "What to do: pip install" in done.stdout


def test_wrong_usage_is_one_line():
    done = command("doctor", "--wrong")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_other_commands_say_why_mxnet_is_not_there(tmp_path):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("raise OSError('libcudnn.so.8: not there')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = command("operators", "dot", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: MXNet is installed, but can't be imported: libcudnn.so.8: not there. `mxamp doctor` "
        "says what to do."
    )
    code = "try:\n    import mxamp\nexcept ImportError as error:\n    print(type(error.__cause__))"
    assert "OSError" in run_python(code, env={"PYTHONPATH": path}).stdout
