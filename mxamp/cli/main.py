"""The command with all its commands."""

import click

from .._version import __version__
from .convert import convert
from .explain import explain
from .group import OneLineErrors
from .machine_commands import info, operators
from .report import report
from .run import run

__all__ = ["main"]


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mxamp")
def main() -> None:
    """Automatic mixed precision for Apache MXNet."""


for command in (info, run, operators, explain, convert, report):
    main.add_command(command)
