"""`mxamp run`: a script in mixed precision, with no change to it."""

import os
import sys
from contextlib import contextmanager, nullcontext
from typing import Iterator, List, Optional, Sequence

import click

from ..errors import AmpError
from ..frontends import automatic
from ..frontends.automatic import OWN_AMP, imports_mxamp, show_log
from ..policy.policy import Policy
from ..policy.targets import TARGETS_OR_AUTO
from ..tools.debugging.operator_counts import operator_stats
from .output import examples
from .script import execute, find_module, find_script

__all__ = ["run"]

BEFORE = (
    "mxamp run has no option {option!r}; those of the script stand behind it: mxamp run SCRIPT "
    "{option} ..."
)
_DTYPE_HELP = (
    "Default: float16 with a GPU, else bfloat16. With auto, CPUs without bfloat16 arithmetic run "
    "the script in float32."
)
_EXAMPLES = examples(
    "mxamp run train.py --epochs 3",
    "mxamp run --dtype float16 -m package.train --epochs 3",
    "mxamp run --stats train.py",
)


class _Run(click.Command):
    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        """Read the options; one of the script's in front of it is an error that says so."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(BEFORE.format(option=error.option_name), ctx) from None


@click.command(
    cls=_Run,
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-m]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--dtype", type=click.Choice(TARGETS_OR_AUTO), help=_DTYPE_HELP)
@click.option("--policy", "path", type=click.Path(), help="A policy file (TOML).")
@click.option("--stats", is_flag=True, help="Print at the end what ran in which dtype.")
def run(
    script: str,
    arguments: Sequence[str],
    as_module: bool,
    dtype: Optional[str],
    path: Optional[str],
    stats: bool,
) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, loss scaling included.

    SCRIPT may be - for standard input. What stands before it are mxamp's options, what follows it
    is the script's. The script needs no change. One that imports mxamp is left alone; one that
    calls mxnet.contrib.amp's init goes on by its own calls.
    """
    if dtype and path is not None:
        raise AmpError("--policy holds its target dtype: give --dtype or --policy, not both")
    program = find_module(script) if as_module else find_script(script)
    show_log()
    if imports_mxamp(program.source or program.code):
        automatic.logger.info(OWN_AMP, script, "mxamp")
    else:
        policy = Policy.load(path) if path is not None else None
        automatic.start(dtype, policy, name="mxamp run", instead="give --dtype bfloat16")
        if policy is None:
            # For the processes that it starts.
            os.environ[automatic.VARIABLE] = dtype or "1"
    with _shown_at_end() if stats else nullcontext():
        execute(program, arguments)


@contextmanager
def _shown_at_end() -> Iterator[None]:
    """Count what runs, and print it when the script has ended, in whatever way."""
    with operator_stats() as counted:
        try:
            yield
        finally:
            sys.stdout.flush()
            click.echo(f"\n{counted}", err=True)
