"""scripts/check_gpu as far as it goes without a GPU: what it refuses, and the file it writes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from clones import BASH, Clone
from helpers import ROOT

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


@pytest.mark.parametrize(
    "said, status, words",
    [
        (None, 0, "there is no nvidia-smi here"),
        ("NVIDIA-SMI has failed: no driver", 9, "nvidia-smi fails, so MXNet can't use a GPU here. It said: NVIDIA-SMI has failed: no driver"),
        ("No devices were found", 0, "nvidia-smi finds no GPU here"),
        (H100, 0, "code for compute capability 5.0 to 8.6, which 8.9 runs too, and none for what is here: NVIDIA H100 (compute capability 9.0)"),
        ("Tesla K80, 3.7, 470.57.02", 0, "none for what is here: Tesla K80 (compute capability 3.7)"),
        ("Tesla T4, 7.5, 440.33.01", 0, "the driver is 440.33.01, and mxnet-cu112 needs 450.80.02 or later"),
    ],
)  # fmt: skip
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

CASES = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_gpu" name="test_right"/>
<testcase classname="tests.gpu.test_gpu" name="test_wrong"><failure message="assert 1 == 2">{prefix}/x.py:3</failure></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_two"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""
ROWS = [
    {"model": "bert-16", "mode": "training", "contender": "float32", "ratio": 1.0},
    {"model": "bert-16", "mode": "training", "contender": "mxamp", "ratio": 2.5},
    {"model": "bert-16", "mode": "training", "contender": "stock", "failure": "it died"},
]


@pytest.fixture(scope="module")
def gpu_report():
    path = ROOT / "scripts" / "gpu_report.py"
    spec = importlib.util.spec_from_file_location("gpu_report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(command):
    """Write what the parts write."""
    options = dict(zip(command, command[1:]))
    status = 0
    if "pytest" in command:
        [path] = [one.split("=", 1)[1] for one in command if one.startswith("--junitxml=")]
        text, status = CASES.format(prefix=sys.prefix), 1
    elif "scripts/main_job.py" in command:
        path, text = options["--json"], json.dumps({"rows": [], "problems": []})
    else:
        path, text = options["--json"], json.dumps({"rows": ROWS})
    with open(path, "w") as file:
        file.write(text)
    return subprocess.CompletedProcess(command, status, "", "")


def test_the_report_holds_all_parts(gpu_report, tmp_path):
    todo = gpu_report.parts(True, written, tmp_path)
    assert list(todo) == ["doctor", "tests", "main_job", "benchmark"]
    todo["doctor"] = lambda: {"facts": {"GPU": "Tesla T4"}}
    found = gpu_report.write_report(todo, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert (found["schema"], found["finished"]) == (1, True)
    tests = found["parts"]["tests"]
    assert (tests["passed"], tests["status"]) == (1, 1)
    assert tests["failed"] == {"test_gpu::test_wrong": "assert 1 == 2\n.../x.py:3"}
    assert tests["skipped"] == {"test_gpu::test_two": "needs two GPUs"}
    assert all(part["seconds"] >= 0 for part in found["parts"].values())
    assert gpu_report.summary(found) == [
        "GPU: Tesla T4",
        "tests: 1 passed, 1 failed, 1 skipped",
        "tests: failed, status 1",
        "bert-16 training, mxamp: 2.50 times float32's speed",
        "bert-16 training, stock: it died",
    ]


def run_script(*command):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
def test_without_a_gpu_it_says_so():
    done = run_script("scripts/gpu_report.py")
    assert done.returncode == 1
    assert "MXNet sees no GPU here, though nvidia-smi may list one" in done.stderr


@pytest.mark.slow
def test_the_tests_for_gpus_run_on_cpus():
    """With float16 as CPUs compute it: what they ask of a GPU is right in itself."""
    done = run_script("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu",
                      "--gpu-tests-on-cpu", "tests/gpu")  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_the_benchmark_knows_what_gpus_have():
    refused = run_script("scripts/bench/models", "--device=gpu")
    assert "MXNet has no bfloat16 kernels on GPUs: give --dtype float16" in refused.stderr
