"""`mxamp doctor` and `mxamp info`: reports about an installation, which import no MXNet."""

import json
import sys
import textwrap
from dataclasses import asdict
from typing import Dict, Iterable, List, Sequence, Tuple

import click

from ..framework.cuda import NEWEST_WHEEL
from ..tools.doctor.collect import collect, runs_on
from ..tools.doctor.facts import Cpu, Facts, Gpu, numbers
from ..tools.doctor.findings import Finding, findings
from .output import examples

__all__ = ["as_json", "as_text", "doctor", "info"]

SCHEMA = 2
_WIDTH = 100
_TENSOR_CORES = (7, 0)

#: The features of MXNet that matter for mixed precision, and their use.
_FEATURES = {
    "MKLDNN": "oneDNN: fast float32 kernels on CPUs, and all bfloat16 ones",
    "OPENMP": "CPU kernels on several threads",
    "LAPACK": "linear algebra",
    "F16C": "float16 casts by the CPU's instructions; without it in software",
    "CUDA": "GPUs",
    "CUDNN": "fast convolutions on GPUs",
    "NCCL": "several GPUs",
    "INT64_TENSOR_SIZE": "arrays of more than 2,147,483,647 elements",
}
Row = Tuple[str, str]


@click.command(epilog=examples("mxamp doctor", "mxamp doctor --json > report.json"))
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON.")
@click.option("--no-measure", is_flag=True, help="Leave out the two seconds of timing.")
def doctor(json_wanted: bool, no_measure: bool) -> None:
    """Report what is installed, how fast each dtype is here, and what is wrong.

    The exit status is 1 if there is a problem. Notes do not count.
    """
    facts = collect(measure=not no_measure)
    found = findings(facts)
    click.echo(as_json(facts, found) if json_wanted else as_text(facts, found))
    if any(finding.level == "problem" for finding in found):
        sys.exit(1)


@click.command(epilog=examples("mxamp info"))
def info() -> None:
    """Report what this machine computes in which precision: the short form of `doctor`."""
    facts = collect(measure=False)
    click.echo(
        _lines([*_versions(facts), *_cpu_rows(facts.cpu), *_gpu_rows(facts), *_default_rows(facts)])
    )


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Return facts and findings as JSON; docs/troubleshooting.md describes it."""
    levels: Dict[str, List[Dict[str, str]]] = {"problem": [], "note": []}
    for finding in found:
        levels[finding.level].append(
            {"name": finding.name, "what": finding.what, "advice": finding.advice}
        )
    data = {"schema": SCHEMA, **asdict(facts)}
    return json.dumps({**data, "problems": levels["problem"], "notes": levels["note"]}, indent=2)


def as_text(facts: Facts, found: Sequence[Finding]) -> str:
    """Return facts and findings as text of at most 100 columns."""
    sections: List[Tuple[str, Iterable[Row]]] = [
        ("Versions", _versions(facts)),
        ("MXNet's features", _feature_rows(facts)),
        ("Machine", [*_cpu_rows(facts.cpu), *_gpu_rows(facts)]),
        ("A program that starts now", _start_rows(facts)),
        ("Environment variables that matter", _variable_rows(facts)),
        ("Speed of a dense layer", _speed_rows(facts)),
    ]
    texts = [
        f"{title}\n{_lines(rows, indent=2)}" for title, given in sections if (rows := list(given))
    ]
    return "\n\n".join([*texts, *_finding_texts(found)])


# ---------------------------------------------------------------------- rows


def _versions(facts: Facts) -> List[Row]:
    wheels = ", ".join(f"{wheel.name} {wheel.version}" for wheel in facts.wheels)
    version = facts.mxnet.version if facts.mxnet else "can't be imported"
    return [
        ("mxamp", facts.mxamp),
        ("MXNet", f"{version} ({wheels or 'no wheel is installed'})"),
        ("NumPy", facts.numpy),
        ("Python", facts.python),
        ("system", facts.system),
    ]


def _feature_rows(facts: Facts) -> List[Row]:
    if facts.mxnet is None:
        return []
    features = facts.mxnet.features
    rows = [
        (name, f"{'yes' if features.get(name) else 'no':4} {what}")
        for name, what in _FEATURES.items()
    ]
    blas = [name for name, on in features.items() if on and name.startswith("BLAS_")]
    return [*rows, ("BLAS", ", ".join(blas) or "none")]


def _cpu_rows(cpu: Cpu) -> List[Row]:
    bfloat16 = "no kernels: products in float32 on rounded values"
    if cpu.computes_bfloat16:
        bfloat16 = "in hardware"
    elif "avx512" in cpu.usable:
        bfloat16 = "right, but slower than float32"
    limit = f", of which the container may use {cpu.quota:g}" if cpu.quota else ""
    return [
        ("CPU", cpu.name + (", a virtual one" if cpu.virtual else "")),
        ("instructions", ", ".join(cpu.instructions) or "none that matter here"),
        ("oneDNN may use", ", ".join(cpu.usable) or "no avx512"),
        (
            "processors",
            f"{cpu.processors} on {cpu.physical} cores{limit}; threads of a kernel: {cpu.threads}",
        ),
        ("bfloat16 on the CPU", bfloat16),
        ("float16 on the CPU", "true values, for development and tests; not faster"),
    ]


def _gpu_rows(facts: Facts) -> List[Row]:
    if not facts.gpus:
        return [("GPUs", facts.gpu_error or "none found")]
    return [(f"GPU {number}", _gpu(gpu)) for number, gpu in enumerate(facts.gpus)]


def _gpu(gpu: Gpu) -> str:
    precision = "compute capability unknown"
    if runs_on(gpu, NEWEST_WHEEL) is False:
        precision = f"compute capability {gpu.capability}: MXNet's wheels have no code for it"
    elif gpu.capability is not None:
        fast = "on" if numbers(gpu.capability) >= _TENSOR_CORES else "without"
        precision = f"compute capability {gpu.capability}: float16 {fast} tensor cores, no bfloat16"
    return f"{gpu.name}, driver {gpu.driver}, {precision}"


def _default_rows(facts: Facts) -> List[Row]:
    device = "gpu" if facts.mxnet and facts.mxnet.gpus else "cpu"
    off = ", mixed precision off" if facts.fast_dtype == "float32" else ""
    return [("default device", device), ("dtype 'auto'", facts.fast_dtype + off)]


def _start_rows(facts: Facts) -> List[Row]:
    if facts.mxnet is None:
        return []
    on = f"on in {facts.mxnet.on}" if facts.mxnet.on else "off until the program switches it on"
    patched = len(facts.mxnet.patched)
    return [
        ("mixed precision", on),
        ("start-up hook", "active" if facts.start_up_hook else "not asked for, or not installed"),
        ("patched functions", str(patched) if patched else "none"),
        *_default_rows(facts),
    ]


def _variable_rows(facts: Facts) -> List[Row]:
    rows = [
        (f"{name}={setting.value}", setting.effect) for name, setting in facts.variables.items()
    ]
    return rows or [("none is set", "")]


def _speed_rows(facts: Facts) -> List[Row]:
    rows = []
    base = {speed.device: speed.gflops for speed in facts.speed if speed.dtype == "float32"}
    for speed in facts.speed:
        ratio = speed.gflops / base.get(speed.device, speed.gflops)
        times = "" if speed.dtype == "float32" else f", {ratio:.2f} times float32"
        rows.append(
            (f"{speed.dtype} on the {speed.device.upper()}", f"{speed.gflops:,.0f} GFLOP/s{times}")
        )
    return rows


# ---------------------------------------------------------------------- layout


def _lines(rows: Sequence[Row], indent: int = 0) -> str:
    """Return rows of a label and a text, wrapped to the width."""
    column = indent + min(max(len(label) for label, _ in rows), 24) + 2
    lines = []
    for label, text in rows:
        start = " " * indent + label
        if len(start) > column - 2 and text:
            lines += textwrap.wrap(start, _WIDTH, subsequent_indent=" " * indent)
            start = ""
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=start.ljust(column),
            subsequent_indent=" " * column,
            break_on_hyphens=False,
        ) or [start]
    return "\n".join(line.rstrip() for line in lines)


def _finding_texts(found: Sequence[Finding]) -> List[str]:
    texts = []
    for level in ("problem", "note"):
        items = [finding for finding in found if finding.level == level]
        if items:
            numbered = [_item(number, finding) for number, finding in enumerate(items, 1)]
            texts.append("\n".join([f"{level.capitalize()}s", *numbered]))
        elif level == "problem":
            texts.append("No problem found.")
    return texts


def _item(number: int, finding: Finding) -> str:
    what = f"{finding.what[0].upper()}{finding.what[1:]}."
    advice = f"What to do: {finding.advice}."
    return "\n".join(
        textwrap.fill(
            text, _WIDTH, initial_indent=start, subsequent_indent="     ", break_on_hyphens=False
        )
        for start, text in ((f"  {number}. ", what), ("     ", advice))
    )
