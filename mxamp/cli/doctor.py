"""`mxamp doctor`: a report about an installation, which imports no MXNet."""

import json
import shutil
import sys
from dataclasses import asdict
from typing import Iterator, Sequence, Tuple

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ..tools.doctor.collect import collect
from ..tools.doctor.facts import Facts, Gpu, lacks_code_for
from ..tools.doctor.findings import Finding, findings, next_step, verdict
from .output import examples

SCHEMA = 3
_WIDTH = 100


@click.command(epilog=examples("mxamp doctor", "mxamp doctor --json > report.json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-measure", is_flag=True, help="Skip the timing, about two seconds a device.")
def doctor(as_json: bool, no_measure: bool) -> None:
    """Report the fast dtype of this machine, its speed, and problems of the installation.

    The exit status is 1 if there is a problem. Notes are not problems.
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
        _print_facts(facts)
        _print_findings("Problems", problems)
        _print_findings("Notes", notes)
        _print_plain("" if problems else f"\nNo problem found.\n{next_step(facts)}")
    sys.exit(bool(problems))


def _print_facts(facts: Facts) -> None:
    """Print the verdict on a machine, and its facts as a table."""
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(overflow="fold")  # a long name is broken, not cut
    for row in _fact_rows(facts):
        table.add_row(*row)
    _print_plain(verdict(facts))
    _print_plain(Padding(table, (1, 0, 0, 0)))


def _print_findings(title: str, found: Sequence[Finding]) -> None:
    """Print findings as a numbered list under a title; print nothing without findings."""
    if found:
        _print_plain(f"\n{title}")
    for number, one in enumerate(found, 1):
        table = Table.grid(padding=(0, 1))
        table.add_row(f"  {number}.", f"{one.what[0].upper()}{one.what[1:]}.")
        table.add_row("", f"What to do: {one.advice}.")
        _print_plain(table)


def _print_plain(text: object) -> None:
    """Print a text or rich object as plain text of at most 100 columns, without trailing spaces."""
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
    console = Console(width=width, markup=False, highlight=False, emoji=False, no_color=True)
    with console.capture() as captured:
        console.print(text)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def _fact_rows(facts: Facts) -> Iterator[Tuple[str, str]]:
    """Yield the rows of the table of facts: names and texts."""
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
        yield f"GPU {number}", _gpu_text(gpu)
    if not facts.gpus:
        yield "GPUs", facts.gpu_error or "none found"
    yield "default device", facts.device
    yield "dtype 'auto'", facts.fast_dtype
    yield from facts.variables.items()
    for one in facts.speed:
        yield f"{one.dtype} on the {one.device.upper()}", f"{one.gflops:,.0f} GFLOP/s"


def _gpu_text(gpu: Gpu) -> str:
    """Return a GPU's name, driver and compute capability as a text."""
    lacks = ", for which MXNet's wheels have no code" if lacks_code_for(gpu) else ""
    capability = gpu.capability or "unknown"
    return f"{gpu.name}, driver {gpu.driver}, compute capability {capability}{lacks}"
