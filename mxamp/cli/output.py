"""Tables on standard output: fitted to a terminal, and whole in a pipe or a file."""

import sys
from typing import Any, Iterable, List, Optional, Sequence

import click
from rich.console import Console
from rich.table import Table

from ..errors import AmpError, unknown
from ..policy.targets import DEVICES as _DEVICES
from ..policy.targets import TARGETS, TARGETS_OR_AUTO, is_auto, one_dtype
from .starting import INTERRUPTED, STATUS

__all__ = [
    "DEVICES",
    "DTYPES",
    "DTYPES_OR_AUTO",
    "IS_THERE",
    "OneLineErrors",
    "console",
    "examples",
    "lines",
    "table_of",
    "usage_error",
]

#: Columns where there is no terminal: no table of ours is as wide.
_UNLIMITED = 100_000


def console() -> Console:
    """Return the console; without a terminal it cuts nothing and has no colour."""
    return Console() if sys.stdout.isatty() else Console(width=_UNLIMITED, no_color=True)


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose cells go over several lines where a terminal is narrow."""
    table = Table(show_header=bool(headings), box=Table().box if headings else None)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class _OneDtype(click.Choice):
    """A target dtype, where "auto" makes no sense and is an error that says why."""

    def convert(
        self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]
    ) -> Any:
        if is_auto(value):
            raise one_dtype()
        return super().convert(value, param, ctx)


DTYPES = _OneDtype(TARGETS)
DTYPES_OR_AUTO = click.Choice(TARGETS_OR_AUTO)
DEVICES = click.Choice(_DEVICES)

IS_THERE = "--out {path!r} is there already: give another --out, or overwrite it with --force"

#: Longer than any summary: the list of commands shows them whole.
_WHOLE = 1000


class OneLineErrors(click.Group):
    """A group whose errors, click's own of usage included, are one line each."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.Abort:
            _end(INTERRUPTED, STATUS)
        except click.UsageError as error:
            where = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            _fail(error.format_message() + where)
        except click.ClickException as error:
            _fail(error.format_message())
        except (AmpError, OSError) as error:
            _fail(str(error))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C ends it with one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _end(INTERRUPTED, STATUS)

    def resolve_command(self, ctx: click.Context, args: List[str]) -> Any:
        """Return the command that is named, or raise with the closest names."""
        if self.get_command(ctx, args[0]) is None:
            raise click.UsageError(str(unknown("command", args[0], self.list_commands(ctx))), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with whole summaries, which click would cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(_WHOLE)) for name, one in commands if one]
            )


def lines(heading: str, *given: str) -> str:
    """Return a paragraph of a command's help whose lines stay as they are."""
    # \b keeps click from filling them.
    return "\n".join(["\b", f"{heading}:", *(f"  {line}" for line in given), "", ""])


def examples(*given: str) -> str:
    """Return the end of a command's help: lines to type."""
    return lines("Examples", *given)


def usage_error(message: str) -> click.UsageError:
    """Return the error for a bad option of the command that runs."""
    return click.UsageError(message, click.get_current_context())


def _fail(message: str) -> None:
    _end(f"error: {' '.join(message.split())}", 2)


def _end(line: str, status: int) -> None:
    click.echo(line, err=True)
    sys.exit(status)
