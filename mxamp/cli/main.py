"""The command with all its commands."""

import click

from .._version import __version__
from .convert import convert
from .doctor import doctor, info
from .explain import explain, operators
from .launch import launch
from .output import OneLineErrors, examples
from .report import report
from .run import run
from .tune import tune

__all__ = ["main"]

_EXAMPLES = examples(
    "mxamp info",
    "mxamp run train.py",
    "mxamp explain model",
    "mxamp convert model --dtype bfloat16 --out model-bf16",
)


@click.group(
    cls=OneLineErrors,
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


for command in (doctor, info, run, launch, operators, explain, convert, tune, report):
    main.add_command(command)
