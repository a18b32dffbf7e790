"""The command `mxamp doctor`: a report on an installation, made without importing MXNet."""

import json
import sys
import textwrap

import click

from ..tools.doctor import PROBLEM, examine
from .output import examples

SCHEMA = 5
_WIDTH, _COLUMN = 100, 18


@click.command(epilog=examples("mxamp doctor", "mxamp doctor --json > report.json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Report the fast dtype of this machine, and problems of the installation.

    The exit status is 1 if there is a problem. Notes are not problems.
    """
    facts, found = examine()
    status = any(one.level == PROBLEM for one in found)
    if as_json:
        data = {"schema": SCHEMA, "facts": facts, "findings": [one._asdict() for one in found]}
        click.echo(json.dumps(data, indent=2))
        sys.exit(status)
    for name, text in facts.items():
        _print(f"{name:{_COLUMN - 1}} ", text)
    for number, one in enumerate(found, 1):
        _print(f"\n{number}. {one.level}: ", f"{one.what}. What to do: {one.advice}.")
    click.echo("" if status else "\nNo problem found.")
    sys.exit(status)


def _print(head: str, text: str) -> None:
    """Print a heading and a text, with lines wrapped at 100 columns."""
    indent = " " * (3 if head[0] == "\n" else _COLUMN)
    click.echo(textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=indent))
