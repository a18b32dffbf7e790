"""`mxamp doctor`: a report about an installation, which imports no MXNet."""

import json
import sys
import textwrap
from dataclasses import asdict
from typing import Any, Iterator, Tuple

import click

from ..tools.doctor.collect import Facts, collect
from ..tools.doctor.findings import findings, next_step, verdict
from .output import examples

SCHEMA = 4
_WIDTH, _COLUMN = 100, 18


@click.command(epilog=examples("mxamp doctor", "mxamp doctor --json > report.json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Report the fast dtype of this machine, its speed, and problems of the installation.

    The exit status is 1 if there is a problem. Notes are not problems.
    """
    facts = collect()
    found = findings(facts)
    problems = [one for one in found if one.level == "problem"]
    if as_json:
        data = {"schema": SCHEMA, "verdict": verdict(facts), **asdict(facts)}
        click.echo(json.dumps({**data, "findings": [one._asdict() for one in found]}, indent=2))
        sys.exit(bool(problems))
    click.echo(f"{verdict(facts)}\n")
    for name, text in _rows(facts):
        _print(f"{name:{_COLUMN}}", text)
    for number, one in enumerate(found, 1):
        _print(f"\n{number}. {one.level}: ", f"{one.what}. What to do: {one.advice}.")
    click.echo("" if problems else f"\nNo problem found.\n{next_step(facts)}")
    sys.exit(bool(problems))


def _print(head: str, text: str) -> None:
    """Print a text behind a head, in lines of at most 100 columns."""
    indent = " " * (_COLUMN if len(head) == _COLUMN else 3)
    click.echo(textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=indent))


def _rows(facts: Facts) -> Iterator[Tuple[str, Any]]:
    """Yield the rows of the table of facts: names and texts."""
    wheels = ", ".join(f"{name} {version}" for name, version in facts.wheels.items())
    yield "mxamp", facts.mxamp
    yield "MXNet", f"{facts.mxnet or 'not importable'} ({wheels or 'no wheel is installed'})"
    yield "NumPy, Python", f"{facts.numpy}, {facts.python} on {facts.system}"
    yield "CPU", f"{facts.cpu}; oneDNN may use {', '.join(facts.usable) or 'no avx512'}"
    yield "processors", f"{facts.processors:g} on {facts.physical} cores; {facts.threads} threads"
    for gpu in facts.gpus:
        yield "GPU", f"{gpu.name}, driver {gpu.driver}, compute capability {gpu.capability}"
    yield from facts.variables.items()
    yield "dtype 'auto'", facts.fast_dtype
