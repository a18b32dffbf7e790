"""What the library says, in the words of the command line: options instead of arguments."""

import logging
import re
import sys
from contextlib import contextmanager
from typing import Iterator

import click
from rich.console import Console
from rich.status import Status

from ..errors import AmpError, ArgumentError

__all__ = ["in_options", "in_their_words"]

#: The arguments of Python functions, as messages name them, and what stands for them.
_OPTIONS = {
    "an rtol of": "an --rtol of",
    "another out": "another --out",
    "budget must": "--budget must",
    "out must": "--out must",
    "cast_optional_params": "--cast-params",
    "convert_hybrid_block(net, policy=policy)": "mxamp convert --policy",
    "ctx=mx.cpu()": "--device cpu",
    "excluded_sym_names": "--keep-fp32",
    "force=True": "--force",
    "fp32_ops": "--fp32-op",
    "fuse=True": "--fuse",
    "give them, as name:": "give them with --input, as name:",
    "input_dtypes": "--input-dtype",
    "input_shapes": "--input",
    "keep_io_types=False": "--cast-io",
    "larger tolerance": "larger --tolerance",
    "rtol must": "--rtol must",
    "target_dtype=": "--dtype ",
    "tolerance must": "--tolerance must",
    "without fuse": "without --fuse",
}
_ARGUMENTS = re.compile("|".join(map(re.escape, _OPTIONS)))


def in_options(text: str) -> str:
    """Return a message with options in place of arguments.

    >>> in_options("keep what reads it in float32 with excluded_sym_names")
    'keep what reads it in float32 with --keep-fp32'
    """
    return _ARGUMENTS.sub(lambda match: _OPTIONS[match[0]], text)


@contextmanager
def in_their_words() -> Iterator["Status | _NoStatus"]:
    """Show what the library logs and raises, in options' words.

    Warnings are lines on standard error. What is going on is shown on a terminal only. Errors in
    what was given go on to the group of commands; others end the process with status 1. Yields
    what shows it.
    """
    logger = logging.getLogger("mxamp")
    level, propagate = logger.level, logger.propagate
    console = Console(stderr=True)
    with console.status("reading") if console.is_terminal else _NoStatus() as status:
        handler = _Shown(status)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield status
        except ArgumentError as error:
            raise type(error)(in_options(str(error))) from error
        except (AmpError, OSError, MemoryError) as error:
            status.stop()
            _end(in_options(str(error)))
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


class _NoStatus:
    """Stands for a line of progress where there is no terminal."""

    def __enter__(self) -> "_NoStatus":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: str) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


class _Shown(logging.Handler):
    def __init__(self, status: "Status | _NoStatus") -> None:
        super().__init__()
        self.status = status

    def emit(self, record: logging.LogRecord) -> None:
        text = in_options(record.getMessage())
        if record.levelno >= logging.WARNING:
            click.echo(f"warning: {text}", err=True)
        else:
            self.status.update(text)


def _end(message: str) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)
