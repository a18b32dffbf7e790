"""Tables, progress and log lines of the commands that print results.

`mxamp run` and `mxamp launch` print none, and start faster without rich.
"""

import logging
import sys
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from ..errors import AmpError, ArgumentError, CheckError
from .output import exit_with, in_options

__all__ = ["console", "error_table", "make_table", "show_messages"]

#: The width without a terminal: wider than any table.
_UNLIMITED = 100_000


def console() -> Console:
    """Return a console for standard output; without a terminal, with no color or line limit."""
    return Console() if sys.stdout.isatty() else Console(width=_UNLIMITED, no_color=True)


def make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a rich table of `rows`, which wraps its cells on narrow terminals."""
    table = Table(show_header=bool(headings), box=Table().box if headings else None)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def error_table(errors: Iterable[Any]) -> Table:
    """Return a table of `OutputError`s: the errors of finite elements, and the elements lost."""
    rows = []
    for one in errors:
        same = "" if one.same_argmax is None else f"{one.same_argmax:.1%}"
        numbers = f"{one.relative:.2e}", f"{one.maximum:.2e}", f"{one.lost:,}"
        rows.append((escape(one.name), "x".join(map(str, one.shape)), *numbers, same))
    headings = ("output", "shape", "relative error", "largest", "lost to Inf or NaN", "same argmax")
    return make_table(headings, rows)


@contextmanager
def show_messages() -> Iterator[Status]:
    """Context in which the library's log and errors appear on standard error.

    Yields the progress line, which shows the log's last message on terminals. Warnings are lines of
    their own. An `ArgumentError` is raised again in terms of options; other errors end the process
    with status 1, a `CheckError` after the table of its errors.
    """
    logger = logging.getLogger("mxamp")
    level, propagate = logger.level, logger.propagate
    with Console(stderr=True).status("reading") as status:
        handler = _MessageHandler(status)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield status
        except ArgumentError as error:
            raise type(error)(in_options(str(error))) from error
        except (AmpError, OSError, MemoryError) as error:
            status.stop()
            if isinstance(error, CheckError):
                console().print(error_table(error.errors))
            exit_with(f"error: {in_options(str(error))}", 1)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _MessageHandler(logging.Handler):
    """Prints warnings as lines, and shows other messages in the progress line."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        text = in_options(record.getMessage())
        if record.levelno >= logging.WARNING:
            click.echo(f"warning: {text}", err=True)
        else:
            self.status.update(text)
