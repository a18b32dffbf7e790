"""scripts/check_gpu as far as it goes without a GPU: what it refuses, and the file it writes."""

import json
import math
import os

import click
import pytest

from clones import BASH, Clone
from helpers import ROOT, load_script, python

T4, A100 = "Tesla T4, 7.5, 470.57.02", "NVIDIA A100, 8.0, 450.80.02"
L4, H100 = "NVIDIA L4, 8.9, 535.104.05", "NVIDIA H100, 9.0, 535.104.05"


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def check(clone, *arguments, said=None, status=0, python="3.11"):
    """Run scripts/check_gpu where nvidia-smi says this, or, for None, is not there."""
    path = os.pathsep.join(["/usr/bin", "/bin"])
    if said is not None:
        tool = clone.bin / "nvidia-smi"
        tool.write_text(f"#!{BASH}\nprintf '%b\\n' \"{said}\"\nexit {status}\n")
        tool.chmod(0o755)
        path = f"{clone.bin}{os.pathsep}{path}"
    return clone.run("--python", clone.python(python), *arguments, name="check_gpu", PATH=path)


@pytest.mark.parametrize("said, status, words", [
    (None, 0, "there is no nvidia-smi here"),
    ("NVIDIA-SMI has failed: no driver", 9, "nvidia-smi fails, so MXNet can't use a GPU here. It said: NVIDIA-SMI has failed: no driver"),
    ("No devices were found", 0, "nvidia-smi finds no GPU here"),
    (H100, 0, "code for compute capability 5.0 to 8.6, which 8.9 runs too, and none for what is here: NVIDIA H100 (compute capability 9.0)"),
    ("Tesla K80, 3.7, 470.57.02", 0, "none for what is here: Tesla K80 (compute capability 3.7)"),
    ("Tesla T4, 7.5, 440.33.01", 0, "the driver is 440.33.01, and mxnet-cu112 needs 450.80.02 or later"),
])  # fmt: skip
def test_a_machine_that_can_not_run_it_is_told_before_the_installation(clone, said, status, words):
    done = check(clone, said=said, status=status)
    assert done.returncode == 1
    assert words in done.error
    assert len(done.error.strip().splitlines()) == 1
    assert clone.installs() == []
    assert not (clone.path / ".venv-gpu").exists()


@pytest.mark.parametrize("said", [T4, A100, L4, f"{H100}\\n{T4}"])
def test_it_runs_in_an_environment_of_its_own(clone, said):
    done = check(clone, "--fast", "--out", "a b.json", said=said)
    assert done.returncode == 0, done.error
    assert done.said == f"ran {clone.path}/scripts/gpu_report.py --fast --out a b.json\n"
    assert "making .venv-gpu with Python 3.11" in done.error
    assert any(".[cu112,demo,test]" in call for call in clone.installs())
    assert not (clone.path / ".venv").exists()


# ---------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def gpu_report():
    return load_script("gpu_report.py")


def test_what_a_report_says(gpu_report, tmp_path, monkeypatch):
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    parts = json.loads((ROOT / "tests" / "gpu" / "report.json").read_text())
    path = tmp_path / "report.json"
    todo = {name: lambda part=part: part for name, part in parts.items()}
    found = gpu_report.write_report(todo, path, simulated=False)
    assert os.environ["MXNET_USE_FUSION"] == "0"  # the others can run without it
    assert json.loads(path.read_text()) == found
    assert (found["schema"], found["finished"], found["simulated"]) == (2, True, False)
    assert gpu_report.conclusions(found) == [
        "GPU: Tesla T4",
        "smoke: failed: fusion", "operators: failed: relu, tanh", "models: failed: bert stock",
        "set MXNET_USE_FUSION=0: fused kernels fail here",
        "relu: crash: SIGABRT; override(fp32=['relu'])",
        "tanh: 5.0e-01 from float32; override(fp32=['tanh'])",
        "batch_dot sums in float16 over K",
        "4 GPUs, nccl: weights 1.0e-01 apart",
        "from a scale of 2**24: 9 skips, loss 0.5 for 0.49",
        "override(fp32=['RNN']) is faster: 2.00 ms for 3.00",
        "bert, float32: 1.00 times float32's speed, 5.0 ms on the host a step, 1.0 GiB",
        "bert, mxamp: 2.00 times float32's speed, 5.0 ms on the host a step, 1.0 GiB",
    ]  # fmt: skip


def test_a_process_that_crashes_or_hangs_leaves_what_it_printed(gpu_report):
    for code, status in (
        ("pass", "fine"), ("raise SystemExit(3)", "status 3"),
        ("import os; os.abort()", "crash: SIGABRT"),
        ("import time; time.sleep(60)", "hang: longer than 2 s"),
    ):  # fmt: skip
        begin = "print('name', flush=True); print('{\"a\": 1}', flush=True); "
        outcome = gpu_report.run(["-c", begin + code], 2)
        assert (outcome.status, outcome.found, outcome.lines) == (status, [{"a": 1}], ["name"])


@pytest.mark.parametrize("text, words", [
    ('{"schema": 1}', "has format 1, and this reads format 2"),
    ('{"schema": 2, "par', "is no report"), ("", "is no report"), ("[]", "is no report"),
])  # fmt: skip
def test_what_is_no_report_is_refused(gpu_report, tmp_path, text, words):
    path = tmp_path / "old.json"
    path.write_text(text)
    done = python("scripts/gpu_report.py", "--show", path)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_unfinished_reports_and_nan(gpu_report, tmp_path):
    path = tmp_path / "report.json"
    nan = {"operator": "relu", "error": None, "difference": math.nan}

    def end():
        raise KeyboardInterrupt

    todo = {"operators": lambda: {"status": "failed: relu", "rows": [nan]}, "sums": end}
    with pytest.raises(KeyboardInterrupt):
        gpu_report.write_report(todo, path, simulated=True)
    said = gpu_report.conclusions(gpu_report.read(path))
    assert "unfinished: it ended after operators" in said
    assert any(line.startswith("relu: nan from float32") for line in said)
    assert gpu_report.conclusions({"schema": 2}) == ["unfinished: it ended after its start"]
    with pytest.raises(click.ClickException, match="there is no folder"):
        gpu_report.write_report({}, tmp_path / "missing" / "report.json", simulated=True)


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = python("scripts/gpu_report.py")
    assert done.returncode == 1
    assert "MXNet sees no GPU here, though nvidia-smi may list one" in done.stderr


@pytest.mark.slow
def test_the_tests_for_gpus_run_on_cpus():
    """With float16 as CPUs compute it: what they ask of a GPU is right in itself."""
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", "--gpu-tests-on-cpu"]
    done = python("-m", "pytest", *options, "tests/gpu")
    assert done.returncode == 0, done.stdout[-3000:]
