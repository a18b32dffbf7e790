"""Output of the commands: tables, help texts, and the library's messages in terms of options."""

import logging
import re
import sys
from contextlib import contextmanager
from typing import Iterable, Iterator, NoReturn, Sequence

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table

from ..errors import AmpError, ArgumentError

__all__ = [
    "IS_THERE",
    "POLICY_HOLDS",
    "console",
    "examples",
    "exit_with",
    "help_paragraph",
    "in_options",
    "make_table",
    "show_messages",
    "usage_error",
]

IS_THERE = "--out {path!r} is there already: give another --out, or overwrite it with --force"

POLICY_HOLDS = "--policy holds its target dtype: give --dtype or --policy, not both"

#: The width without a terminal: wider than any table.
_UNLIMITED = 100_000

#: The library's messages put arguments in backquotes. These are the options for them.
_OPTIONS = {
    "budget": "--budget",
    "cast_optional_params": "--cast-params",
    "convert_hybrid_block(net, policy=policy)": "mxamp convert --policy",
    "excluded_sym_names": "--keep-fp32",
    "force=True": "--force",
    "fuse": "--fuse",
    "fuse=True": "--fuse",
    "input_dtypes": "--input-dtype",
    "input_shapes": "--input",
    "keep_io_types=False": "--cast-io",
    "out": "--out",
    "rtol": "--rtol",
    "shapes": "--input",
    "tolerance": "--tolerance",
}


def in_options(message: str) -> str:
    """Return a message of the library with command options in place of argument names.

    >>> in_options("keep its readers in float32 with `excluded_sym_names`")
    'keep its readers in float32 with --keep-fp32'
    """
    return re.sub("`([^`]+)`", lambda match: _OPTIONS.get(match[1], match[0]), message)


@contextmanager
def show_messages() -> Iterator[Status]:
    """Context in which the library's log and errors appear on standard error.

    Yields the progress line, which shows the log's last message on terminals. Warnings are lines of
    their own. An `ArgumentError` is raised again in
    terms of options; other errors end the process with status 1.
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


def exit_with(message: str, status: int) -> NoReturn:
    """End the process with a message in one line on standard error."""
    click.echo(" ".join(message.split()), err=True)
    sys.exit(status)


def usage_error(message: str) -> click.UsageError:
    """Return the error for a bad option of the running command."""
    return click.UsageError(message, click.get_current_context())


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


def help_paragraph(heading: str, *lines: str) -> str:
    """Return a paragraph for a command's help: a heading and lines that click doesn't rewrap."""
    return "\n".join(["\b", f"{heading}:", *(f"  {line}" for line in lines), "", ""])


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help."""
    return help_paragraph("Examples", *commands)
