"""The examples run as a reader would run them, in both precisions, and learn what they say."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import NEEDS_HOROVOD, ROOT, horovodrun

EXAMPLES = ROOT / "examples"
# Both precisions in one process, as the imports take longer than the training.
DRIVER = """
import runpy, sys
for dtype in ("float16", "bfloat16"):
    sys.argv = ["example", "--dtype", dtype, *{arguments!r}]
    runpy.run_path({path!r}, run_name="__main__")
    print("----")
"""
NUMBER = r"([\d,.e+]*\d)"


def number(pattern, text):
    found = re.search(pattern.replace("#", NUMBER), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return tuple(float(group.replace(",", "")) for group in found.groups())


def has_learned(text, accuracy=None, factor=0.3):
    before, after = number("loss # -> #", text)
    assert after < factor * before
    if accuracy:
        assert number("accuracy #%", text)[0] > accuracy


def scale_and_skips(text, start, steps):
    """The scale is where the skips have left it, and every step is counted."""
    scale, done, skipped = number("loss scale #, # steps, # skipped", text)
    assert scale == start / 2**skipped
    assert done + skipped == steps
    return skipped


def check_train_classifier(text, dtype):
    has_learned(text, accuracy=90)
    skipped = scale_and_skips(text, 2**24 if dtype == "float16" else 1, 40)
    assert (skipped > 0) == (dtype == "float16")


def check_convert_and_serve(text, dtype):
    before, after = number("# -> # bytes", text)
    assert 0.5 < after / before < 0.55
    assert number("relative error #,", text)[0] < 0.02
    same, total = number("# of # predictions", text)
    assert same >= total - 1
    assert "outputs are float32; mixed precision on: False" in text


def check_module_fit(text, dtype):
    has_learned(text, accuracy=95)
    scale_and_skips(text, 2**15, 60)
    assert "saved parameters are float32" in text


def check_train_on_workers(text, dtype):
    has_learned(text, factor=0.5)
    skipped = scale_and_skips(text, 2**20 if dtype == "float16" else 1, 80)
    assert (skipped > 0) == (dtype == "float16")


def check_tensorboard(text, dtype):
    has_learned(text)
    folder = re.search(r"--logdir (\S+)", text)[1]
    written = b"".join(path.read_bytes() for path in Path(folder).iterdir())
    for tag in (b"loss", b"loss_scale", b"skipped", b"gradient/norm", b"gradient/exponent"):
        assert tag in written


CHECKS = {
    name[len("check_"):]: check for name, check in list(globals().items()) if name.startswith("check_")
}  # fmt: skip


def test_every_example_is_checked():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CHECKS, "launch_workers"}


ARGUMENTS = {"train_classifier": ["--epochs=2"]}  # shorter than by default


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_example_runs_and_learns(name, tmp_path, tmp_path_factory):
    arguments = ARGUMENTS.get(name, [])
    if name == "tensorboard":
        arguments = [f"--folder={tmp_path_factory.mktemp('events')}"]
    driver = DRIVER.format(path=str(EXAMPLES / f"{name}.py"), arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", driver],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for dtype, text in zip(("float16", "bfloat16"), done.stdout.split("----")):
        assert text.strip().startswith(f"{dtype}: ")
        CHECKS[name](text, dtype)
    assert not list(tmp_path.iterdir()), "an example leaves files behind"


def launched(*command):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "launch_workers.py"), "-n", "2", sys.executable, *command],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, launch, prefix",
    [
        ([], launched, "[worker {}] "),
        pytest.param(["--horovod"], horovodrun, "[{}]<stdout>:", marks=NEEDS_HOROVOD),
    ],
)
def test_the_example_with_workers_runs_on_two(arguments, launch, prefix):
    done = launch(str(EXAMPLES / "train_on_workers.py"), "--dtype", "float16", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    results = []
    for rank in range(2):
        start = prefix.format(rank)
        lines = [line[len(start):] for line in done.stdout.splitlines() if line.startswith(start)]  # fmt: skip
        *_, first, second = lines
        assert "2 workers" in first
        check_train_on_workers(f"{first}\n{second}", "float16")
        results.append(second)
    assert results[0] == results[1], "the same scale, steps and skips"


@pytest.mark.parametrize("name", [*CHECKS, "launch_workers"])
def test_example_is_short_and_says_what_it_shows(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 100
    assert f"python examples/{name}.py" in ast.get_docstring(ast.parse(text))
