"""`mxamp doctor` and `mxamp info`: reports about an installation, which import no MXNet."""

import json
import sys
from dataclasses import asdict
from typing import Iterator, Sequence, Tuple

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ..framework.cuda import NEWEST_WHEEL
from ..tools.doctor.collect import collect
from ..tools.doctor.facts import Facts, Gpu, runs_on
from ..tools.doctor.findings import Finding, findings, verdict
from .output import examples

__all__ = ["doctor", "info"]

SCHEMA = 3
_WIDTH = 100


@click.command(epilog=examples("mxamp doctor", "mxamp doctor --json > report.json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-measure", is_flag=True, help="Leave out the two seconds of timing.")
def doctor(as_json: bool, no_measure: bool) -> None:
    """Report in which dtype this machine is fast, how fast, and what is wrong.

    The exit status is 1 if there is a problem. Notes do not count.
    """
    facts = collect(measure=not no_measure)
    found = findings(facts)
    problems, notes = ([one for one in found if one.level == kind] for kind in ("problem", "note"))
    if as_json:
        lists = {
            name: [{"name": one.name, "what": one.what, "advice": one.advice} for one in given]
            for name, given in (("problems", problems), ("notes", notes))
        }
        data = {"schema": SCHEMA, "verdict": verdict(facts), **asdict(facts), **lists}
        click.echo(json.dumps(data, indent=2))
    else:
        _show(facts)
        _show_findings("Problems", problems)
        _show_findings("Notes", notes)
        click.echo("" if problems else "\nNo problem found.")
    sys.exit(bool(problems))


@click.command(epilog=examples("mxamp info"))
def info() -> None:
    """Report what this machine computes in which precision: the short form of `doctor`."""
    _show(collect(measure=False))


def _show(facts: Facts) -> None:
    table = Table.grid(padding=(0, 2))
    for row in _rows(facts):
        table.add_row(*row)
    _print(verdict(facts))
    _print(Padding(table, (1, 0, 0, 0)))


def _show_findings(title: str, found: Sequence[Finding]) -> None:
    for number, one in enumerate(found, 1):
        if number == 1:
            _print(f"\n{title}")
        table = Table.grid(padding=(0, 1))
        table.add_row(f"  {number}.", f"{one.what[0].upper()}{one.what[1:]}.")
        table.add_row("", f"What to do: {one.advice}.")
        _print(table)


def _print(text: object) -> None:
    """Print plain text of at most 100 columns, without spaces at the ends of lines."""
    console = Console(width=_WIDTH, markup=False, highlight=False, emoji=False, no_color=True)
    with console.capture() as captured:
        console.print(text)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _rows(facts: Facts) -> Iterator[Tuple[str, str]]:
    wheels = ", ".join(f"{name} {version}" for name, version in facts.wheels.items())
    version = facts.mxnet.version if facts.mxnet else "can't be imported"
    yield "mxamp", facts.mxamp
    yield "MXNet", f"{version} ({wheels or 'no wheel is installed'})"
    yield "NumPy, Python", f"{facts.numpy}, {facts.python}"
    yield "system", facts.system
    cpu = facts.cpu
    limit = f", of which the container may use {cpu.quota:g}" if cpu.quota else ""
    yield "CPU", cpu.name + (", a virtual one" if cpu.virtual else "")
    yield "oneDNN may use", ", ".join(cpu.usable) or "no avx512"
    yield (
        "processors",
        f"{cpu.processors} on {cpu.physical} cores{limit}; threads of a kernel: {cpu.threads}",
    )
    for number, gpu in enumerate(facts.gpus):
        yield f"GPU {number}", _gpu(gpu)
    if not facts.gpus:
        yield "GPUs", facts.gpu_error or "none found"
    yield "default device", facts.device
    yield "dtype 'auto'", facts.fast_dtype
    yield from facts.variables.items()
    for one in facts.speed:
        yield f"{one.dtype} on the {one.device.upper()}", f"{one.gflops:,.0f} GFLOP/s"


def _gpu(gpu: Gpu) -> str:
    lacks = ", for which MXNet's wheels have no code" if runs_on(gpu, NEWEST_WHEEL) is False else ""
    capability = gpu.capability or "unknown"
    return f"{gpu.name}, driver {gpu.driver}, compute capability {capability}{lacks}"
