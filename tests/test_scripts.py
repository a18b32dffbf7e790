"""The commands of the README, and the benchmarks."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, python
from mxamp.backends.onednn.cpu import onednn_features

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
    is_fast = "avx512" in onednn_features()
    speed = "bfloat16 trains this model" if is_fast else "Speed is not measured here"
    trained = "accuracy", "trained float16", "trained bfloat16", "converted float16"
    for words in (*trained, "All within 0.5", speed):
        assert words in done.stdout


BENCHMARKS = sorted(path.name for path in BENCH.iterdir() if path.is_file() and not path.suffix)


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


def test_ci_proves_covers_simulates_and_installs():
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    for command in ("test --python python --all", "test --python python --gpu", "nox -s coverage"):
        assert f"{command}\n" in text
    version, numpy = re.search(r'nox -s "smoke\((.+)-(.+)\)"', text).groups()
    noxfile = (ROOT / "noxfile.py").read_text()
    assert f'("{version}", "{numpy}")' in noxfile and "\ndef coverage(" in noxfile


def test_make_names_only_files_that_exist():
    text = (ROOT / "Makefile").read_text()
    for name in re.findall(r"(?:scripts|tests|docs)/[\w./]+\w", text):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_plot_draws_the_readme_s_bars(tmp_path):
    picture = tmp_path / "speed.svg"
    models = re.findall(r"--model (\S+-\d+)", (ROOT / "Makefile").read_text())
    chosen = [part for model in models for part in ("--model", model)]
    assert python(BENCH / "plot", FIGURES, picture, *chosen).returncode == 0
    drawn, kept = (
        re.findall(r">([^<>]+)</text>", path.read_text())
        for path in (picture, ROOT / "docs" / "speed.svg")
    )
    assert drawn == kept, "make pictures draws the README's anew"
    assert len([text for text in drawn if re.match(r"[\d.]+x", text)]) == len(models) == 5


proof = pytest.mark.proof


@pytest.mark.slow
@pytest.mark.parametrize("name, arguments, words", [
    pytest.param("models", ["--rounds", "1", "--model", "lstm-8"],
                 ["mxamp, fused", "training", "float32"], marks=proof),
    ("models", ["--memory", "--model", "lstm-8", "--only", "mxamp"], ["peak MB", "mxamp", "1.00"]),
    ("small", ["--rounds", "1", "--program", "call"], ["one dense call", "added, us"]),
])  # fmt: skip
def test_benchmarks_run(name, arguments, words):
    done = python(BENCH / name, *arguments)
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
