"""The command with all its commands."""

from importlib import import_module
from typing import List, Optional

import click

from .._version import __version__
from .group import OneLineErrors, examples

__all__ = ["main"]

_EXAMPLES = examples(
    "mxamp info",
    "mxamp run train.py",
    "mxamp explain model",
    "mxamp convert model --dtype bfloat16 --out model-bf16",
)
#: The module of each command.
_MODULES = {
    "doctor": "doctor",
    "info": "doctor",
    "run": "run",
    "launch": "launch",
    "operators": "machine_commands",
    "explain": "explain",
    "convert": "convert",
    "tune": "tune",
    "report": "report",
}


class _Commands(OneLineErrors):
    """A group that loads a command when it is called: a run needs few modules of mxamp."""

    def list_commands(self, ctx: click.Context) -> List[str]:
        """Return the names of the commands, sorted."""
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """Load a command; return None if there is none of this name."""
        if cmd_name not in _MODULES:
            return None
        command: click.Command = getattr(
            import_module(f".{_MODULES[cmd_name]}", __package__), cmd_name
        )
        return command


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog=_EXAMPLES,
)
@click.version_option(__version__, prog_name="mxamp")
@click.pass_context
def main(context: click.Context) -> None:
    """Automatic mixed precision for Apache MXNet."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
