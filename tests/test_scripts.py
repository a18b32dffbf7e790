"""The commands of the README, and the benchmarks."""

import importlib.util
import io
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from helpers import ROOT, load_script
from mxamp.backends.onednn.cpu import onednn_features
from mxamp.tools.tuning.benchmark import Benchmark
from mxamp.tools.tuning.forms import Timing

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
        "bfloat16 trains this model"
        if "avx512" in onednn_features()
        else "Speed is not measured here"
    )
    trained = "accuracy", "trained float16", "trained bfloat16", "converted float16"
    for words in (*trained, "All within 0.5", speed):
        assert words in done.stdout


@pytest.fixture(scope="module")
def main_job():
    return load_script("main_job.py")


def test_the_main_job_fits_into_80_columns(main_job):
    rows = [main_job.Row("converted bfloat16", 0.9844, 16_777_216, 120, 55_400, 0.00012)]
    ways = {"autocast": 1.9, "fused": 10.0}
    timings = [
        Timing("inference", way, "bfloat16", 1_234.5, ratio, (ratio - 0.1, ratio + 0.1))
        for way, ratio in ways.items()
    ]
    speeds = Benchmark("bfloat16", tuple(timings))
    console = Console(width=80, file=io.StringIO())
    main_job.show(rows, console)
    main_job.show_speeds(speeds, console)
    text = console.file.getvalue()
    for heading in ("accuracy", "scale", "skipped", "bytes", "max diff", "times as fast"):
        assert heading in text
    assert "\u2026" not in text
    assert "inference, fused" in text
    assert "For serving, convert the model" in " ".join(text.split())


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
    for target in re.findall(r"make ([a-z]+(?: [a-z]+)*)", (ROOT / "CONTRIBUTING.md").read_text()):
        for word in target.split()[:1]:
            assert f"\n{word}:" in text, word


@pytest.mark.slow
def test_plot_draws_the_readme_s_bars(tmp_path):
    picture = tmp_path / "speed.svg"
    models = re.findall(r"--model (\S+-\d+)", (ROOT / "Makefile").read_text())
    chosen = [part for model in models for part in ("--model", model)]
    subprocess.run(
        [sys.executable, str(BENCH / "plot"), str(FIGURES), str(picture), *chosen],
        check=True,
    )
    drawn, kept = (
        re.findall(r">([^<>]+)</text>", path.read_text())
        for path in (picture, ROOT / "docs" / "speed.svg")
    )
    assert drawn == kept, "make pictures draws the README's anew"
    assert len([text for text in drawn if re.match(r"[\d.]+x", text)]) == len(models) == 5


def test_published_figures_are_whole():
    """Every model in both modes has a figure or a failure for every contender."""
    found = json.loads(FIGURES.read_text())
    rows = {(r["model"], r["mode"], r["contender"]): r for r in found["rows"]}
    contenders = {"inference": 6, "training": 4}
    for model in {r["model"] for r in found["rows"]}:
        for mode, count in contenders.items():
            assert sum(key[:2] == (model, mode) for key in rows) == count
    assert all("failure" in r or r["least"] <= r["ratio"] <= r["greatest"] for r in rows.values())


proof = pytest.mark.proof


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, arguments, words",
    [
        pytest.param("models", ["--rounds", "1", "--model", "lstm-8"],
                     ["mxamp, fused", "training", "float32"], marks=proof),
        ("models", ["--memory", "--model", "lstm-8", "--only", "mxamp"], ["peak MB", "mxamp", "1.00"]),
        ("small", ["--rounds", "1", "--program", "call"], ["one dense call", "added, us"]),
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


@pytest.fixture
def models(monkeypatch):
    """The benchmark as a module, in which each measurement is one row."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = SimpleNamespace(**runpy.run_path(str(BENCH / "models")))
    measured = []

    def measure(model, mode, *_):
        measured.append((model, mode))
        return [{"model": model, "mode": mode, "contender": "mxamp", "ratio": 1.0}]

    names = module.main.callback.__globals__
    for name, value in {
        "measure": measure,
        "show": lambda *_: None,
        "library_versions": lambda _: {},
    }.items():
        monkeypatch.setitem(names, name, value)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return SimpleNamespace(main=module.main, names=names, measured=measured, measure=measure)


@pytest.mark.parametrize("options, said", [
    (["--only", "mxamp,tourch"], "unknown contender 'tourch'; the closest are 'torch', "),
    (["--torch-python", sys.executable], "has no torch, torchvision: give --torch-python one"),
    (["--only", "openvino"], "has no openvino: give --openvino-python one that has"),
])  # fmt: skip
def test_models_refuses_before_it_measures(models, options, said, tmp_path, monkeypatch):
    for module in ("torch", "openvino"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('none here')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = CliRunner().invoke(models.main, options)
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    assert models.measured == []


def test_figures_of_a_run_that_is_cut_off_are_kept(models, monkeypatch, tmp_path):
    path = tmp_path / "figures.json"

    def cut_off(model, mode, *rest):
        if model == "bert-4" and mode == "training":
            raise KeyboardInterrupt
        return models.measure(model, mode, *rest)

    monkeypatch.setitem(models.names, "measure", cut_off)
    options = "--model mlp-64 --model bert-4 --only mxamp --json".split()
    done = CliRunner().invoke(models.main, [*options, str(path)])
    assert done.exit_code == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(r["model"], r["mode"]) for r in rows] == [
        ("mlp-64", mode) for mode in ("inference", "training")
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_only_some_contenders_run(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    contenders = importlib.import_module("contenders")
    only = contenders.parse_only(" mxamp,fused")
    setup = contenders.Setup("bfloat16", False, only, {})
    assert list(contenders.runnable_contenders("inference", setup)) == ["float32", "mxamp", "fused"]
    assert list(contenders.runnable_contenders("training", setup)) == ["float32", "mxamp"]
    all_here = setup._replace(only=(), pythons={"openvino": "/elsewhere/python"})
    found = contenders.runnable_contenders("inference", all_here)
    assert list(found)[-3:] == ["fused", "openvino32", "openvino"]
    assert (found["openvino"], found["mxamp"]) == ("/elsewhere/python", sys.executable)


def test_peak_memory_of_a_contender_is_the_kernel_s_own_figure(monkeypatch, tmp_path):
    """Another process can read it too: it is no more than the process has held since then."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs Linux's /proc")
    monkeypatch.syspath_prepend(str(BENCH))
    contenders = importlib.import_module("contenders")
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "from models_worker import peak_memory, print_json\n"
        "held = b'x' * (50 << 20); del held\n"
        "print_json(memory=peak_memory())\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(contenders, "WORKER", worker)
    own = bytearray(300 << 20)  # a child that is forked starts with its parent's ru_maxrss
    setup = contenders.Setup("bfloat16", False, (), {})
    contender = contenders.Contender("mxamp", "mlp-64", "training", setup, sys.executable, tmp_path)
    try:
        status = pathlib.Path(f"/proc/{contender.process.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    finally:
        contender.close()
    assert 50 << 20 < contender.description["memory"] <= peak < len(own)
