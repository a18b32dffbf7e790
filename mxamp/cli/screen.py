"""Tables, progress and log lines of the commands that print results.

`mxamp run` prints none, and starts faster without rich.
"""

import logging
import os
import sys
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ..errors import AmpError, ArgumentError, CheckError
from .output import exit_with, in_options

__all__ = ["print_errors", "print_table", "show_messages"]

#: The width without a terminal and COLUMNS: wider than any table, so that a row is one line.
_UNLIMITED = 100_000


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    colors: Optional[Mapping[str, str]] = None,
) -> None:
    """Print a table: in a box on terminals, in plain columns in pipes and files.

    Lines are as wide as COLUMNS or the terminal; without both, each row is one line. `colors` are
    the colors of cells by their text.
    """
    in_box = sys.stdout.isatty() and bool(headings)
    table = Table(show_header=bool(headings), box=Table().box if in_box else None, pad_edge=in_box)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, (colors or {}).get(cell, "")) for cell in row))
    fits = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    console = Console() if fits else Console(width=_UNLIMITED)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_errors(errors: Iterable[Any]) -> None:
    """Print a table of `OutputError`s: the errors of finite elements, and the elements lost."""
    rows = []
    for one in errors:
        same = "" if one.same_argmax is None else f"{one.same_argmax:.1%}"
        numbers = f"{one.relative:.2e}", f"{one.maximum:.2e}", f"{one.lost:,}"
        rows.append((one.name, "x".join(map(str, one.shape)), *numbers, same))
    headings = ("output", "shape", "relative error", "largest", "lost to Inf or NaN", "same argmax")
    print_table(headings, rows)


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
        except BrokenPipeError:
            raise  # click ends the process quietly, with status 1: `head` has read enough
        except (AmpError, OSError, MemoryError) as error:
            status.stop()
            if isinstance(error, CheckError):
                print_errors(error.errors)
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
