"""Check mxamp on a GPU, and write one JSON file of results. Run by `scripts/check_gpu`.

    gpu_report.py [--fast] [--simulated] [--out FILE]
    gpu_report.py --show FILE

Every part is a process of its own with a time limit, and the file is written after each: what
crashes or hangs costs one test, and is a result too. On simulated GPUs there are values, but no
speeds.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
from measuring import OUT, save  # noqa: E402

SCHEMA = 2  #: the version of the file's format
MODELS = (
    "resnet50-64", "mobilenet_v2-128", "bert_base-32", "bert_base_512-8", "lstm_650-64", "vgg16-32",
)  # fmt: skip
FAST_MODELS, SIMULATED_MODELS = ("resnet50-64", "bert_base-32"), ("bert-2",)
#: One after another, so that each has the GPU's memory to itself; float32 again at the end.
CONTENDERS = ("float32", "stock", "mxamp", "cast by hand", "mxamp unfused", "float32 again")
#: Operators in one process of the sweep.
BATCH = 25
#: The largest relative difference of a float16 operator from float32.
LARGEST = 3e-3
#: The most error of a sum of 8192 numbers that was not made in float16, and was rounded once.
ROUNDED = 2e-3
NO_GPU = (
    "MXNet sees no GPU here, though nvidia-smi may list one: `{python} -m mxamp doctor` says "
    "what is wrong"
)
#: How much of what a part printed is kept, from its end.
_KEPT = 4000

Json = Dict[str, Any]


class Outcome(NamedTuple):
    """How a process has ended: "fine" or why not; what it printed, as it is and by lines."""

    status: str
    text: str
    found: List[Json]  #: the lines that are JSON
    lines: List[str]  #: the others
    errors: str


def run(command: Sequence[str], seconds: float, **environment: str) -> Outcome:
    """Run a Python program in the clone for some seconds at most."""
    # A pytest that runs this must not pass for the one that this runs.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        argv, env = [sys.executable, "-W", "ignore", *command], {**own, **environment}
        process = subprocess.Popen(
            argv, stdout=out, stderr=errors, text=True, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            status = f"status {code}" if code else "fine"
            status = f"crash: {signal.Signals(-code).name}" if code < 0 else status
        except subprocess.TimeoutExpired:
            status = f"hang: longer than {seconds:g} s"
        finally:  # also after Ctrl-C: it would keep the GPU's memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0), errors.seek(0)
        outcome = Outcome(status, out.read(), [], [], without_paths(errors.read()))
    for line in outcome.text.splitlines():
        try:
            outcome.found.append({**json.loads(line)})
        except (ValueError, TypeError):
            outcome.lines.append(line)
    return outcome


def without_paths(text: str) -> str:
    """Return the end of a text without this machine's folders: the file is made to be sent in."""
    for folder in (sys.prefix, str(ROOT), str(Path.home())):
        text = text.replace(folder, "...")
    return text[-_KEPT:]


def status_of(failed: Sequence[str]) -> str:
    """Return the status of a part whose pieces with these names failed."""
    return f"failed: {', '.join(failed)}" if failed else "fine"


def part_of(outcome: Outcome, **others: Any) -> Json:
    """Return a part of the report: its status, its rows, and what it said if it is not fine."""
    said = {} if outcome.status == "fine" else {"errors": outcome.errors}
    return {"status": outcome.status, "rows": outcome.found, **said, **others}


# ---------------------------------------------------------------------- the parts


def doctor() -> Json:
    """Return what `mxamp doctor` finds."""
    outcome = run(["-m", "mxamp", "doctor", "--json"], 300)
    try:
        return {"status": "fine", **json.loads(outcome.text)}
    except ValueError:
        return {"status": f"no report, {outcome.status}", "errors": outcome.errors}


def clocks() -> Json:
    """Return the clocks, power and temperature that nvidia-smi knows."""
    names = (
        "name,driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu,"
        "clocks_throttle_reasons.active"
    )
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"status": "fine", "rows": [], "errors": str(error)}
    rows = [dict(zip(names.split(","), line.split(", "))) for line in done.stdout.splitlines()]
    return {"status": "fine", "rows": rows}


def smoke(options: Sequence[str]) -> Json:
    """Train a small hybridized net with MXNet's fusion of operators, without, and one by one."""
    ways = {
        "fusion": {"MXNET_USE_FUSION": "1"},
        "no fusion": {"MXNET_USE_FUSION": "0"},
        "one by one": {"MXNET_ENGINE_TYPE": "NaiveEngine"},
    }
    rows = []
    for way, variables in ways.items():
        outcome = run(["scripts/gpu_checks.py", "smoke", *options], 180, **variables)
        rows.append({"way": way, **part_of(outcome)})
    bad = [
        row["way"]
        for row in rows
        if row["status"] != "fine" or not row["rows"] or not row["rows"][0]["fine"]
    ]
    return {"status": status_of(bad), "rows": rows}


def operator_names() -> List[str]:
    """Return the operators that may run in float16 on GPUs, without those that MXNet can't run."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    from test_operators import names  # noqa: PLC0415

    return list(names())


def operators(names: Sequence[str], seconds: float = 180) -> Json:
    """Call each operator on the GPU in float16, forward and backward, beside the CPU in float32.

    The operator that ends its process, or does not end, is named; the others go on without it.
    """
    rows: Dict[str, Json] = {}
    waiting = list(names)
    while waiting:
        batch = waiting[:BATCH]
        outcome = run(["tests/gpu/operators.py", *batch], seconds)
        rows.update({row["operator"]: row for row in outcome.found})
        if outcome.status != "fine":
            begun = [line for line in outcome.lines if line in batch]
            culprit = (begun or batch)[-1 if begun else 0]
            rows[culprit] = {"operator": culprit, "error": outcome.status, "difference": None}
        waiting = [name for name in waiting if name not in rows]
    bad = [name for name, row in rows.items() if is_wrong(row)]
    return {"status": status_of(bad), "rows": [*rows.values()]}


def is_wrong(row: Json) -> bool:
    """Return whether an operator failed, or is too far from float32; NaN is."""
    return bool(row["error"]) or not row["difference"] <= LARGEST


def tests(path: str = "tests/gpu", seconds: float = 1800, of_each: float = 120) -> Json:
    """Run the tests for GPUs; return each one's outcome. A crash or a hang costs one test."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-n", "1"]
        given = {"MXAMP_TEST_LOG": str(log), "MXAMP_TEST_SECONDS": f"{of_each:g}"}
        outcome = run([*command, "-m", "gpu", path], seconds, **given)
        logged = log.read_text().splitlines() if log.exists() else []
    rows = [json.loads(line) for line in logged]
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    kept = [{**row, "text": without_paths(row["text"])} for row in rows if row["text"]]
    passed = sum(row["outcome"] == "passed" for row in rows)
    status = status_of(failed) if failed else outcome.status
    return {**part_of(outcome, passed=passed), "status": status, "rows": kept}


def models(names: Sequence[str], options: Sequence[str], seconds: float = 300) -> Json:
    """Train each model by one contender after another."""
    rows = []
    for name in names:
        for contender in CONTENDERS:
            kind = contender.replace(" unfused", "").replace(" again", "")
            fusion = {"MXNET_USE_FUSION": "0"} if "unfused" in contender else {}
            command = ["scripts/gpu_checks.py", "model", name, kind, *options]
            outcome = run(command, seconds, **fusion)
            measured = {key: value for row in outcome.found for key, value in row.items()}
            names_of = {"model": name, "contender": contender}
            rows.append({**part_of(outcome), **measured, **names_of})
    bad = [f"{r['model']} {r['contender']}" for r in rows if r["status"] != "fine"]
    return {"status": status_of(bad), "rows": rows}


def main_job(fast: bool) -> Json:
    """Run the example that trains and converts a network."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "main_job.json"
        command = ["scripts/main_job.py", "--device=gpu", *(["--fast"] if fast else [])]
        outcome = run([*command, "--json", str(path)], 600)
        found = json.loads(path.read_text()) if path.exists() else {}
    return part_of(outcome, **found)


def parts(fast: bool, simulated: bool) -> Dict[str, Callable[[], Json]]:
    """Return the parts of the check by name, in the order of what they tell."""
    options = ["--simulated"] if simulated else []
    names = operator_names()

    def check(name: str) -> Json:
        return part_of(run(["scripts/gpu_checks.py", name, *options], 300))

    wanted = SIMULATED_MODELS if simulated else FAST_MODELS if fast else MODELS
    found: Dict[str, Callable[[], Json]] = {
        "doctor": doctor,
        "clocks": clocks,
        "smoke": partial(smoke, options),
        "operators": partial(operators, names[::8] if fast and simulated else names),
        **{name: partial(check, name) for name in ("sums", "long", "several", "timings")},
        "models": partial(models, wanted, options),
        "clocks after": clocks,
    }
    if not simulated:  # scripts/test --gpu runs the tests there, quickstart the example
        found.update(tests=tests, main_job=partial(main_job, fast))
    return found


def write_report(todo: Dict[str, Callable[[], Json]], path: Path, simulated: bool) -> Json:
    """Run all parts, write the file after each, and return the report."""
    found: Json = {"schema": SCHEMA, "simulated": simulated, "finished": False, "parts": {}}
    save(path, found)  # now, not after hours, if it can't be written
    for name, part in todo.items():
        sys.stderr.write(f"== {name}\n")
        began = time.time()
        result = part()
        found["parts"][name] = {**result, "seconds": round(time.time() - began, 1)}
        found["finished"] = len(found["parts"]) == len(todo)
        save(path, found)
        if name == "smoke" and result["status"] == "failed: fusion":
            os.environ["MXNET_USE_FUSION"] = "0"  # all else can run without it
    return found


def read(path: Path) -> Json:
    """Read a report; raise for a file that is none."""
    try:
        found = json.loads(path.read_text())
        schema, _ = found.get("schema"), {**found.get("parts", {})}
    except (OSError, ValueError, AttributeError, TypeError):
        raise click.ClickException(f"{path} is no report of scripts/check_gpu") from None
    if schema != SCHEMA:
        raise click.ClickException(f"{path} has format {schema}, and this reads format {SCHEMA}")
    return dict(found)


# ---------------------------------------------------------------------- what a report says


def conclusions(found: Json) -> List[str]:
    """Return what a report says, and what to change for it, as lines."""
    done = found.get("parts", {})
    lines = ["on simulated GPUs: values, no speeds"] if found.get("simulated") else []
    if not found.get("finished"):
        lines.append(f"unfinished: it ended after {[*done, 'its start'][len(done) - 1]}")
    facts = done.get("doctor", {}).get("facts", {})
    lines += [f"GPU: {facts['GPU']}"] if "GPU" in facts else []
    for name, part in done.items():
        status = part["status"]
        if status != "fine":
            lines.append(f"{name}: {status}")
    if done.get("smoke", {}).get("status") == "failed: fusion":
        lines.append("set MXNET_USE_FUSION=0: fused kernels fail here")
    for row in done.get("operators", {}).get("rows", ()):
        if is_wrong(row):
            why = row["error"] or f"{row['difference']:.1e} from float32"
            lines.append(f"{row['operator']}: {why}; override(fp32=[{row['operator']!r}])")
    lines += _about_sums(done.get("sums", {}).get("rows", ()))
    for row in done.get("several", {}).get("rows", ()):
        if not row["difference"] <= LARGEST:
            which = f"{row['gpus']} GPUs, {row['kvstore']}"
            lines.append(f"{which}: weights {row['difference']:.1e} apart")
    for row in done.get("long", {}).get("rows", ()):
        losses = f"loss {row['float16']:.3g} for {row['float32']:.3g}"
        lines.append(f"from a scale of 2**24: {row['skips']} skips, {losses}")
    lines += _about_speed(done)
    return lines


def _about_sums(rows: Sequence[Json]) -> List[str]:
    """Return which operators sum in float16."""
    longest = max((row["length"] for row in rows), default=0)
    half = {
        (row["operator"], row["axis"])
        for row in rows
        if row["length"] == longest and row["error"] > ROUNDED
    }
    return [f"{name} sums in float16 over {axis}" for name, axis in sorted(half)]


def _about_speed(done: Json) -> List[str]:
    """Return what is faster otherwise, and each contender's speed against float32's."""
    times = {row["name"]: row["milliseconds"] for row in done.get("timings", {}).get("rows", ())}
    better = {
        ("RNN float32", "RNN float16"): "override(fp32=['RNN']) is faster",
        ("gemm2 float32", "batch_dot float32"): "float32 products are faster by linalg.gemm2",
        ("softmax float16", "softmax float32"): "softmax is faster in float16",
    }
    lines = [
        f"{said}: {times[new]:.2f} ms for {times[old]:.2f}"
        for (new, old), said in better.items()
        if times.get(new) and times.get(old) and times[new] < 0.9 * times[old]
    ]
    base: Dict[str, float] = {}
    for row in done.get("models", {}).get("rows", ()):
        if row.get("milliseconds"):
            first = base.setdefault(row["model"], row["milliseconds"])
            ratio, memory = first / row["milliseconds"], row["memory"] / 2**30
            lines.append(
                f"{row['model']}, {row['contender']}: {ratio:.2f} times float32's speed, "
                f"{row['step_on_host']:.1f} ms on the host a step, {memory:.1f} GiB"
            )
    return lines


@click.command()
@click.option("--fast", is_flag=True, help="Fewer models.")
@click.option("--simulated", is_flag=True, help="On simulated GPUs: values, but no speeds.")
@click.option("--show", type=click.Path(exists=True, path_type=Path), help="Read a report.")
@click.option("--out", type=OUT, default="gpu-report.json", show_default=True)
def main(fast: bool, simulated: bool, show: Path, out: Path) -> None:
    """Check mxamp on this machine's GPU, and write the results to one JSON file."""
    if show:
        found = read(show)
        click.echo("\n".join(conclusions(found)))
        sys.exit(0 if found.get("finished") else 1)
    try:
        from mxamp.framework.machine import default_device  # noqa: PLC0415
    except ImportError as error:  # no driver, or another library of CUDA's
        raise click.ClickException(str(error)) from None
    if default_device() != "gpu":
        raise click.ClickException(NO_GPU.format(python=os.path.relpath(sys.executable)))
    out = out.absolute()
    found = write_report(parts(fast, simulated), out, simulated)
    click.echo("\n".join(conclusions(found)))
    click.echo(f"All is in {out}.")
    if not simulated:
        click.echo("Please send it in: open an issue with it.")
    if any(part["status"] != "fine" for part in found["parts"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
