"""The two commands of the README, and what they say when they can't."""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from helpers import ROOT
from mxamp.framework.machine import features

BASH = shutil.which("bash")
BENCH = ROOT / "scripts" / "bench"
FIGURES = ROOT / "docs" / "measured" / "avx512_bf16.json"


def script(name, *arguments, cwd=None, env=None):
    return subprocess.run(
        [BASH, str(ROOT / "scripts" / name), *arguments], capture_output=True, text=True,
        cwd=cwd, env={**os.environ, **(env or {})}, check=False, timeout=600,
    )  # fmt: skip


def in_project_environment():
    return os.path.realpath(sys.prefix) == os.path.realpath(ROOT / ".venv")


@pytest.mark.slow
def test_the_main_job_from_another_directory(tmp_path):
    if not in_project_environment():
        pytest.skip("runs in another environment than the project's own")
    done = script("quickstart", "--fast", cwd=tmp_path, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    speed = (
        "Here bfloat16 runs this net" if "avx512" in features() else "Speed is not measured here"
    )
    for words in ("accuracy", "trained float16", "trained bfloat16", "converted float16",
                  "All within 0.5", speed):  # fmt: skip
        assert words in done.stdout


@pytest.fixture(scope="module")
def main_job():
    spec = importlib.util.spec_from_file_location("main_job", ROOT / "scripts" / "main_job.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "inference, training, found, words",
    [
        (
            1.9,
            1.8,
            {"avx512", "avx512_bf16"},
            ["1.90 times", "1.80 times", "has bfloat16 arithmetic."],
        ),
        (0.3, 0.4, {"avx512"}, ["0.30 times", "slower because", "no bfloat16 arithmetic"]),
        (0.3, 0.4, set(), ["slower because", "no bfloat16 arithmetic"]),
        (0.7, 1.3, {"avx512", "amx_bf16"}, ["0.70 times", "1.30 times", "not expected"]),
        (1.4, 1.1, {"avx512"}, ["1.40 times", "no bfloat16 arithmetic: the gain"]),
        (
            1.01,
            0.98,
            {"avx512"},
            ["about float32's speed, and trains it at about float32's speed."],
        ),
    ],
)
def test_the_main_job_says_what_it_has_measured(main_job, inference, training, found, words):
    said = main_job.verdict(inference, training, found)
    assert all(part in said for part in words), said
    assert ("slower because" in said) == (
        min(inference, training) < 0.95 and "amx_bf16" not in found
    )


def test_the_main_job_fits_into_80_columns(main_job):
    rows = [main_job.Row("converted bfloat16", 0.9844, 16_777_216, 120, 55_400, 0.00012)]
    speeds = {
        name: main_job.Speed(name, 12_345.6, 10.25)
        for name in ("float32", "bfloat16", "converted to bfloat16")
    }
    console = Console(width=80, file=io.StringIO())
    main_job.show(rows, console)
    main_job.show_speeds(speeds, speeds, console)
    text = console.file.getvalue()
    for heading in ("accuracy", "scale", "skipped", "bytes", "max diff", "speed against float32"):
        assert heading in text
    assert "\u2026" not in text
    assert "inference, converted to bfloat16" in text


@pytest.mark.parametrize(
    "name, options",
    [("test", ["--setup-only", "--python"]), ("quickstart", ["--fast", "--python"])],
)
def test_usage(name, options):
    done = script(name, "--help", env={"PATH": os.path.dirname(shutil.which("cat"))})
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: scripts/{name}")
    for option in (*options, "--help"):
        assert f"\n  {option} " in done.stdout


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_scripts_can_be_executed(name):
    assert os.access(ROOT / "scripts" / name, os.X_OK)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


BENCHMARKS = sorted(path.name for path in BENCH.iterdir() if path.is_file() and not path.suffix)


def test_these_are_the_benchmarks():
    assert BENCHMARKS == [
        "convert",
        "debugging",
        "dist",
        "finite",
        "kernels",
        "models",
        "overhead",
        "plot",
        "probe_loss_outputs",
        "probe_operators",
        "trace",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_explain_themselves(name):
    done = subprocess.run([str(BENCH / name), "--help"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_explain_themselves_where_nothing_is_installed(name, tmp_path):
    shutil.copytree(BENCH, tmp_path / "scripts" / "bench")

    def bare(*arguments):
        command = [sys.executable, "-S", str(tmp_path / "scripts" / "bench" / name), *arguments]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    done = bare("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] in (BENCH / name).read_text()
    assert bare().stderr.startswith("error: this needs mxamp and its tools: run scripts/test")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    assert bare("--rounds", "1").stdout.endswith(f"bench/{name} --rounds 1\n")


def test_every_supported_python_runs_both_commands():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    supported = re.search(r'supported="(.*)"', (ROOT / "scripts" / "setup.sh").read_text())[1]
    assert re.search(r"python: \[(.*)\]", text)[1].replace('"', "") == supported.replace(" or", ",")
    for command in ("scripts/quickstart --python python --fast", "scripts/test --python python\n"):
        assert command in text


def test_make_names_only_files_that_exist():
    text = (ROOT / "Makefile").read_text()
    for name in re.findall(r"(?:scripts|tests|docs)/[\w./]+\w", text):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"make ([a-z]+(?: [a-z]+)*)", (ROOT / "CONTRIBUTING.md").read_text()):
        for word in target.split()[:1]:
            assert f"\n{word}:" in text, word


def test_peak_memory_is_the_process_s_own():
    """getrusage's maximum, in a child of a process that held 400 MB, is 400 MB."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs Linux's /proc")
    child = "import models_worker; print(models_worker.peak_memory())"
    parent = f"import subprocess, sys; x = b'x' * (400 << 20); del x; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(BENCH)},
    )  # fmt: skip
    assert 5e6 < int(done.stdout) < 200e6


def test_plot_draws_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    subprocess.run(
        [sys.executable, str(BENCH / "plot"), str(FIGURES), str(picture), "--contender", "mxamp"],
        check=True,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_published_figures_are_whole():
    """Every model in both modes has a figure or a failure for every contender."""
    found = json.loads(FIGURES.read_text())
    rows = {(r["model"], r["mode"], r["contender"]): r for r in found["rows"]}
    contenders = {"inference": 8, "training": 6}
    for model in {r["model"] for r in found["rows"]}:
        for mode, count in contenders.items():
            assert sum(key[:2] == (model, mode) for key in rows) == count
    assert all("failure" in r or r["least"] <= r["ratio"] <= r["greatest"] for r in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("overhead", ["--rounds", "1", "--calls", "200"],
         ["relu", "broadcast_add", "FullyConnected", "ResNet-50"]),
        ("convert", ["--rounds", "1"], ["resnet152_v1", "chain 50,000"]),
        ("models", ["--rounds", "1", "--model", "lstm-8"], ["mxamp, fused", "training", "float32"]),
        ("trace", ["--rounds", "1", "--steps", "3"], ["with a trace", "scale_loss"]),
        ("kernels", ["--rounds", "1"], ["layer_norm", "sgd", "training"]),
    ],
)  # fmt: skip
def test_benchmarks_run(name, arguments, words):
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *arguments],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout


@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_files():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "kill_test"), "--kills", "6", "--megabytes", "2"],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for kind in ("ConvertFiles", "SaveStates"):
        assert f"{kind}: 6 kills" in done.stdout


@pytest.mark.slow
def test_the_probe_says_what_works_and_what_does_not(tmp_path):
    out = tmp_path / "probe.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCH / "probe_operators"),
         "Activation", "transpose", "dot", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["operators"]
    assert set(found) == {"Activation", "transpose", "dot"}
    assert "failure" in found["transpose"]["plain"]
    assert "failure" in found["dot"]["plain"]
    if "avx512" in features():
        assert found["Activation"]["blocked"]["output_error"] < 0.01
        assert found["Activation"]["plain"]["forward_speed"] > 0
