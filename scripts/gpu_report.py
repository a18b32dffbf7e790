"""Check mxamp on a GPU, and write one JSON file of results. Run by `scripts/check_gpu`.

    gpu_report.py [--fast] [--out FILE]

Each part is a separate process, so a crash is a result too. The file is written after each part.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence
from xml.etree import ElementTree

import click

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
#: Of the benchmark: models, and rounds.
MODELS = ("resnet50-16", "mobilenet_v2-8", "bert-16", "mlp-64", "lstm-8")
FAST_MODELS = ("resnet50-16", "bert-16")
NO_GPU = (
    "MXNet sees no GPU here, though nvidia-smi may list one: `{python} -m mxamp doctor` says "
    "what is wrong"
)
#: How much of what a part printed is kept, from its end.
_KEPT = 4000

#: Runs a command; returns its exit status and output.
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_shown(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command in the clone; print its output while it runs, and return it."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    lines: List[str] = []
    for line in process.stdout or ():
        sys.stderr.write(line)
        lines.append(line)
    return subprocess.CompletedProcess(command, process.wait(), "".join(lines), "")


def without_paths(text: str) -> str:
    """Return the end of a text without this machine's folders: the file is made to be sent in."""
    for folder in (sys.prefix, str(ROOT), str(Path.home())):
        text = text.replace(folder, "...")
    return text[-_KEPT:]


def run_doctor() -> Dict[str, Any]:
    """Return what `mxamp doctor` finds."""
    command = [sys.executable, "-m", "mxamp", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"failure": without_paths(done.stderr)}


def run_tests(run: Run, folder: Path) -> Dict[str, Any]:
    """Run the tests marked gpu; return their counts and failures."""
    path = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-rs"]
    done = run([*command, "-o", "junit_family=xunit2", f"--junitxml={path}", "tests/gpu"])
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {"status": done.returncode, "failure": without_paths(done.stdout)}
    messages: Dict[str, Dict[str, str]] = {"failure": {}, "error": {}, "skipped": {}}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for child in case:
            if child.tag in messages:
                text = f"{child.get('message', '')}\n{child.text or ''}".strip()
                messages[child.tag][name] = without_paths(text)
    failed = {**messages["error"], **messages["failure"]}
    return {
        "status": done.returncode,
        "passed": len(cases) - len(failed) - len(messages["skipped"]),
        "failed": failed,
        "skipped": messages["skipped"],
    }


def run_script(run: Run, folder: Path, name: str, *command: str) -> Dict[str, Any]:
    """Run a script with `--json`; return the JSON and the exit status, or the output."""
    path = folder / f"{name}.json"
    done = run([sys.executable, "-W", "ignore", *command, "--json", str(path)])
    try:
        return {"status": done.returncode, **json.loads(path.read_text())}
    except (OSError, ValueError):
        return {"status": done.returncode, "failure": without_paths(done.stdout)}


def parts(fast: bool, run: Run, folder: Path) -> Dict[str, Callable[[], Dict[str, Any]]]:
    """Return the parts of the check by name: functions that return the part's results."""
    models = [f"--model={name}" for name in (FAST_MODELS if fast else MODELS)]
    benchmark = [
        "scripts/bench/models", "--device=gpu", "--dtype=float16", "--only=stock,mxamp,converted",
        f"--rounds={3 if fast else 7}", *models,
    ]  # fmt: skip
    job = ["scripts/main_job.py", "--device=gpu", *(["--fast"] if fast else [])]
    return {
        "doctor": run_doctor,
        "tests": partial(run_tests, run, folder),
        "main_job": partial(run_script, run, folder, "main_job", *job),
        "benchmark": partial(run_script, run, folder, "benchmark", *benchmark),
    }


def write_report(todo: Dict[str, Callable[[], Dict[str, Any]]], path: Path) -> Dict[str, Any]:
    """Run all parts, write the file after each, and return the report."""
    found: Dict[str, Any] = {"schema": SCHEMA, "finished": False, "parts": {}}
    for name, part in todo.items():
        sys.stderr.write(f"\n== {name}\n")
        began = time.time()
        result = part()
        found["parts"][name] = {**result, "seconds": round(time.time() - began, 1)}
        found["finished"] = len(found["parts"]) == len(todo)
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def summary(found: Dict[str, Any]) -> List[str]:
    """Return the GPU, the counts of tests, failed parts and speeds in a report as lines."""
    done = found["parts"]
    lines = [f"GPU: {done['doctor'].get('facts', {}).get('GPU', 'unknown')}"]
    if "passed" in done["tests"]:
        counts = done["tests"]
        lines.append(
            f"tests: {counts['passed']} passed, {len(counts['failed'])} failed, "
            f"{len(counts['skipped'])} skipped"
        )
    lines += [
        f"{name}: failed, status {part['status']}"
        for name, part in done.items()
        if part.get("status")
    ]
    rows = done["benchmark"].get("rows", ())
    lines += [
        f"{row['model']} {row['mode']}, {row['contender']}: "
        + (row.get("failure") or f"{row['ratio']:.2f} times float32's speed")
        for row in rows
        if row["contender"] != "float32"
    ]
    return lines


@click.command()
@click.option("--fast", is_flag=True, help="A shorter benchmark.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default="gpu-report.json",
    show_default=True,
)  # fmt: skip
def main(fast: bool, out: Path) -> None:
    """Check mxamp on this machine's GPU, and write the results to one JSON file."""
    try:
        from mxamp.framework.machine import default_device  # noqa: PLC0415
    except ImportError as error:  # no driver, or another library of CUDA's
        raise click.ClickException(str(error)) from None
    if default_device() != "gpu":
        raise click.ClickException(NO_GPU.format(python=os.path.relpath(sys.executable)))
    out = out.absolute()
    with tempfile.TemporaryDirectory() as place:
        found = write_report(parts(fast, run_shown, Path(place)), out)
    click.echo("\n".join(summary(found)))
    click.echo(f"All is in {out}. Please send it in: open an issue with it.")
    if any(part.get("status") for part in found["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
