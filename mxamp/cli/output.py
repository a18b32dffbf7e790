"""Texts that commands print: examples in their help, and tables of errors."""

from typing import Any, Iterable

import click

POLICY_HOLDS = "--policy holds its target dtype: give --dtype or --policy, not both"


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help, which click doesn't rewrap."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def print_errors(errors: Iterable[Any]) -> None:
    """Print a table of `OutputError`s: the errors of finite elements, and the elements lost."""
    from ..framework.tables import text_table  # `mxamp run` starts faster without NumPy

    headings = ("output", "shape", "relative error", "largest", "lost to Inf or NaN", "same argmax")
    rows = [
        (e.name, "x".join(map(str, e.shape)), e.relative, e.maximum, e.lost, e.same_argmax)
        for e in errors
    ]
    click.echo(text_table(headings, rows))
