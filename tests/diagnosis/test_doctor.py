"""The commands `mxamp doctor` and `mxamp info`, and where they work that nothing else does."""

import getpass
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import mxamp as amp
from helpers import ROOT, run_python
from installations import CU112, H100, HEALTHY, SEES_ONE, T4, cpu, speeds
from mxamp.cli import doctor as module
from mxamp.cli.main import main
from mxamp.cli.starting import without_mxnet
from mxamp.tools.doctor.collect import collect
from mxamp.tools.doctor.facts import Setting

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
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles[:6] == [
        "Versions", "MXNet's features", "Machine", "A program that starts now", "Environment variables that matter", "Speed of a dense layer",
    ]  # fmt: skip
    assert f"mxamp   {amp.__version__}" in text
    assert "GFLOP/s" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert getpass.getuser() not in text.split()
    assert done.exit_code == (1 if "Problems" in titles else 0)


@pytest.mark.slow
def test_json_has_the_documented_keys(here, monkeypatch):
    data = json.loads(run(monkeypatch, here, "doctor", "--json").stdout)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented = page.split("### As JSON")[1].split("\n## ")[0]
    assert data["schema"] == 2
    for key in data:
        assert f"`{key}`" in documented, key
    assert list(data["cpu"]) == [
        "name", "instructions", "usable", "processors", "physical", "quota", "threads", "virtual",
    ]  # fmt: skip
    assert data["mxnet"]["version"] == "1.9.1"
    assert [speed["dtype"] for speed in data["speed"]][:1] == ["float32"]
    assert data["speed_error"] == ""


def test_json_holds_what_was_found(monkeypatch):
    facts = replace(HEALTHY, wheels=CU112, gpus=(H100,), mxnet=SEES_ONE, numpy="1.26.4")
    result = run(monkeypatch, facts, "doctor", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert data["gpus"] == [
        {"name": "NVIDIA H100 PCIe", "capability": "9.0", "driver": "535.104.05"}
    ]
    assert [problem["name"] for problem in data["problems"]] == ["gpu_without_code"]
    assert [note["name"] for note in data["notes"]] == ["numpy_restored"]
    assert set(data["notes"][0]) == {"name", "what", "advice"}


def test_the_exit_status_tells_problems_from_notes(monkeypatch):
    assert run(monkeypatch, HEALTHY, "doctor").exit_code == 0
    assert "No problem found." in run(monkeypatch, HEALTHY, "doctor").output
    noted = run(monkeypatch, replace(HEALTHY, numpy="1.26.4"), "doctor")
    assert noted.exit_code == 0
    assert "Notes\n  1. NumPy 1.26.4" in noted.output
    broken = run(monkeypatch, replace(HEALTHY, python="3.14.0"), "doctor")
    assert broken.exit_code == 1
    assert "What to do: use Python 3.11" in broken.output


def test_everything_that_is_known_is_shown(monkeypatch):
    facts = replace(
        HEALTHY, wheels=CU112, gpus=(T4, H100, replace(T4, capability=None), replace(T4, capability="6.1")),
        mxnet=replace(SEES_ONE, gpus=3, on="float16", patched=("dot",)),
        variables={"A_VERY_LONG_NAME_OF_A_VARIABLE": Setting("x" * 90, "nothing")},
        **speeds("gpu", "float16", 3.5),
    )  # fmt: skip
    text = run(monkeypatch, facts, "doctor").output
    assert "compute capability 7.5: float16 on tensor cores, no bfloat16" in " ".join(text.split())
    assert "compute capability 6.1: float16 without tensor cores" in " ".join(text.split())
    assert "compute capability 9.0: MXNet's wheels have no code for it" in " ".join(text.split())
    assert "compute capability unknown" in text
    assert "on in float16" in text
    assert "350 GFLOP/s, 3.50 times float32" in text
    assert "default device     gpu" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "facts, shown",
    [
        (HEALTHY, ["MXNet                1.9.1 (mxnet 1.9.1)", "bfloat16 on the CPU  in hardware", "none found"]),
        (replace(HEALTHY, mxnet=None, wheels=()), ["can't be imported (no wheel is installed)"]),
        (replace(HEALTHY, mxnet=SEES_ONE, gpus=(T4,)), ["GPU 0                Tesla T4, driver 470.57.02"]),
        (replace(HEALTHY, **cpu(usable=("avx512",))), ["right, but slower than float32"]),
        (replace(HEALTHY, fast_dtype="float32"), ["float32, mixed precision off"]),
        (replace(HEALTHY, **cpu(usable=())), ["no kernels", "no avx512"]),
    ],
)  # fmt: skip
def test_info_is_the_short_form(monkeypatch, facts, shown):
    result = run(monkeypatch, facts, "info")
    assert result.exit_code == 0
    auto = f"dtype 'auto'         {facts.fast_dtype}"
    for words in ("mxamp", "CPU", "bfloat16 on the CPU", "default device", auto, *shown):
        assert words in result.output
    assert "GFLOP" not in result.output


@pytest.mark.slow
def test_where_the_import_kills_the_process():
    done = command("doctor", OMP_NUM_THREADS="4,2")
    assert done.returncode == 1
    assert "MXNet can't be imported: Invalid Parameter format for OMP_NUM_THREADS" in done.stdout
    assert "set OMP_NUM_THREADS to one number" in done.stdout


@pytest.mark.slow
def test_without_mxnet(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MXNET)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("doctor", PYTHONPATH=path)
    assert done.stderr == ""
    assert done.returncode == 1
    assert "MXNet can't be imported: MXNet is not installed" in done.stdout
    assert 'What to do: pip install "mxamp[cpu]"' in done.stdout


def test_wrong_usage_is_one_line():
    done = command("doctor", "--wrong")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "argv, given, without",
    [
        (["/usr/bin/mxamp", "doctor"], None, True),
        (["-m", "doctor", "--json"], ["python", "-m", "mxamp", "doctor", "--json"], True),
        (["-m", "doctor"], ["python", "-m", "hospital", "doctor"], False),
        (["-m", "doctor"], None, True),
        (["/usr/bin/mxamp", "run", "doctor"], None, False),
        (["/usr/bin/mxamp"], None, True),
        (["/usr/bin/mxamp", "--help"], None, True),
        (["/usr/bin/mxamp", "explain", "--help"], None, False),
        (["-m"], ["python", "-m", "mxamp"], True),
        (["-m"], ["python", "-m", "hospital"], False),
        (["-m", "--help"], None, False),
        (["-m"], None, False),
        (["train.py", "doctor"], None, False),
        (["-c"], None, False),
        ([], None, False),
    ],
)
def test_only_these_commands_start_without_mxnet(monkeypatch, argv, given, without):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", given, raising=False)
    assert without_mxnet() is without


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
