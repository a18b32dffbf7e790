"""`mxamp launch`: several workers and MXNet's parameter server on this machine."""

import shutil
import sys
from typing import Sequence

import click

from ..errors import AmpError
from ..tools.launch import ParameterServerRun
from .output import examples, help_paragraph

__all__ = ["launch"]

NO_COMMAND = (
    "there is no command {name!r}: mxamp launch starts a program with its arguments, such as "
    "mxamp launch -n 2 python train.py"
)

_EXAMPLES = examples(
    "mxamp launch -n 2 python train.py --epochs 3",
    "mxamp launch -n 4 -s 2 mxamp run train.py",
)
_DETAILS = help_paragraph(
    "Exit status",
    "0 if all workers succeed, else the status of the first process that failed,",
    "or 128 plus the signal's number if it was killed",
)


@click.command(
    epilog=_EXAMPLES + _DETAILS,
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of workers.",
)
@click.option(
    "-s",
    "--servers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of parameter servers.",
)
def launch(command: Sequence[str], workers: int, servers: int) -> None:
    """Run COMMAND in several workers, with MXNet's parameter server, on this machine.

    COMMAND must train with a kvstore such as dist_sync. Each line of output begins with the rank of
    its worker. If one process fails, all processes end. Ctrl-C, or killing the launcher, ends all
    processes too.
    """
    if shutil.which(command[0]) is None:
        raise AmpError(NO_COMMAND.format(name=command[0]))
    run = ParameterServerRun(command, workers, servers, lambda line: click.echo(line, err=True))
    sys.exit(run.run())
