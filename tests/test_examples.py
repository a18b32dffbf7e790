"""The examples run as a reader would run them, in both precisions, and learn what they say."""

import re
import sys
from pathlib import Path

import pytest

from helpers import NEEDS_HOROVOD, ROOT, horovodrun, python

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


#: By training example: the loss falls by this factor, to an accuracy above this one; the first loss
#: scales of float16 and bfloat16, and the steps.
LEARNED = {
    "train_classifier": (0.3, 90, (2**24, 1), 40),
    "module_fit": (0.3, 95, (2**15, 2**15), 60),
    "train_on_workers": (0.5, None, (2**20, 1), 80),
    "tensorboard": (0.3, None, None, None),
}


def check_learned(name, text, dtype):
    factor, least, scales, steps = LEARNED[name]
    before, after = number("loss # -> #", text)
    assert after < factor * before
    assert least is None or number("accuracy #%", text)[0] > least
    if scales:
        # The scale is where the skips have left it, and every step is counted.
        first = scales[dtype == "bfloat16"]
        scale, done, skipped = number("loss scale #, # steps, # skipped", text)
        assert scale == first / 2**skipped and done + skipped == steps
        assert skipped or first < 2**20
        assert first > 1 or not skipped
    if name == "tensorboard":
        folder = re.search(r"--logdir (\S+)", text)[1]
        written = b"".join(path.read_bytes() for path in Path(folder).iterdir())
        for tag in (b"loss", b"loss_scale", b"skipped", b"gradient/norm", b"gradient/exponent"):
            assert tag in written


def check_served(_name, text, _dtype):
    before, after = number("# -> # bytes", text)
    assert 0.5 < after / before < 0.55
    assert number("relative error #,", text)[0] < 0.02
    same, total = number("# of # predictions", text)
    assert same >= total - 1
    assert "outputs are float32; mixed precision on: False" in text


CHECKS = {**dict.fromkeys(LEARNED, check_learned), "convert_and_serve": check_served}


ARGUMENTS = {"train_classifier": ["--epochs=2"]}  # shorter than by default


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_example_runs_and_learns(name, tmp_path, tmp_path_factory):
    arguments = ARGUMENTS.get(name, [])
    if name == "tensorboard":
        arguments = [f"--folder={tmp_path_factory.mktemp('events')}"]
    driver = DRIVER.format(path=str(EXAMPLES / f"{name}.py"), arguments=arguments)
    done = python("-c", driver, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    for dtype, text in zip(("float16", "bfloat16"), done.stdout.split("----")):
        assert text.strip().startswith(f"{dtype}: ")
        CHECKS[name](name, text, dtype)
    assert not list(tmp_path.iterdir()), "an example leaves files behind"


def launched(*command):
    launcher = EXAMPLES / "launch_workers.py"
    return python(launcher, "-n", 2, sys.executable, *command, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("arguments, launch, prefix", [
    ([], launched, "[worker {}] "),
    pytest.param(["--horovod"], horovodrun, "[{}]<stdout>:", marks=NEEDS_HOROVOD),
])  # fmt: skip
def test_the_example_with_workers_runs_on_two(arguments, launch, prefix):
    done = launch(str(EXAMPLES / "train_on_workers.py"), "--dtype", "float16", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    results = []
    for rank in range(2):
        start = prefix.format(rank)
        said = [line for line in done.stdout.splitlines() if line.startswith(start)]
        lines = [line[len(start) :] for line in said]
        *_, first, second = lines
        assert "2 workers" in first
        check_learned("train_on_workers", f"{first}\n{second}", "float16")
        results.append(second)
    assert results[0] == results[1], "the same scale, steps and skips"


def test_every_example_is_checked():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*CHECKS, "launch_workers"}
