"""Output of commands: examples in their help, error tables, and progress on a terminal."""

import logging
import re
from contextlib import contextmanager
from typing import Any, Iterable, Iterator

import click

#: An argument of a function of mxamp in a message: `name`, or `name=value`.
_ARGUMENT = re.compile(r"`(\w+)(?:=([\w'\"]+))?`")
POLICY_HOLDS = "--policy holds its target dtype: give --dtype or --policy, not both"


def examples(*commands: str) -> str:
    """Return examples for the end of a command's help, in a form that click does not rewrap."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def in_options(text: str) -> str:
    """Rewrite a message to name command-line options in place of Python arguments.

    An option that stands for an argument has its name: `force=True` becomes --force.
    """
    command = click.get_current_context().find_root().obj
    options = {one.name: one for one in command.params} if command else {}

    def replaced(found: "re.Match[str]") -> str:
        option, value = options.get(found[1]), (found[2] or "True").strip("'\"")
        if option is None:
            return found[0]
        names = option.secondary_opts if value == "False" else option.opts
        more = "" if value in ("True", "False") else f" {value}"
        return f"{names[-1]}{more}" if names else found[0]

    return _ARGUMENT.sub(replaced, text)


def print_errors(errors: Iterable[Any]) -> None:
    """Print a table of the errors of a model's outputs."""
    from ..tools.tables import text_table  # `mxamp run` starts faster without NumPy

    headings = ("output", "shape", "relative error", "largest", "lost to Inf or NaN", "same argmax")
    rows = [
        (e.name, "x".join(map(str, e.shape)), e.relative, e.maximum, e.lost, e.same_argmax)
        for e in errors
    ]
    click.echo(text_table(headings, rows) if rows else "The outputs were not checked.")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a spinner and the current step on a terminal (a context manager)."""
    from rich.console import Console  # other commands start faster without it

    steps, handler = logging.getLogger("mxamp.progress"), logging.Handler()
    steps.setLevel(logging.INFO)
    console = Console(stderr=True, force_terminal=click.get_text_stream("stderr").isatty())
    # A spinner that turns more often would take time from what is timed.
    with console.status(text, refresh_per_second=2) as status:
        handler.emit = lambda record: status.update(record.getMessage())  # type: ignore
        steps.addHandler(handler)
        try:
            yield
        finally:
            steps.removeHandler(handler)
