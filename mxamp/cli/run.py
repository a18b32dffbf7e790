"""The command `mxamp run`: run an unchanged script in mixed precision."""

import os
import subprocess
import sys
from typing import Any, Sequence

import click

from ..framework.environment import AUTOMATIC
from .output import POLICY_HOLDS, examples

_DTYPE = "Default: auto, the dtype that is fast on this machine."
NO_HOOK = "Python did not load mxamp_startup.pth: install mxamp by pip in it, start it without -S"
_EXAMPLES = examples("mxamp run --dtype float16 -m package.train --epochs 3")


@click.command(
    epilog=_EXAMPLES,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-m]",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "as_module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32", "auto"]), help=_DTYPE)
@click.option("--policy", type=click.Path(exists=True), help="A policy file (TOML).")
@click.option("--stats", is_flag=True, help="Count operators by dtype, and print them at the end.")
def run(script: str, arguments: Sequence[str], as_module: bool, **given: Any) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, with loss scaling in float16.

    SCRIPT needs no change; - means standard input. Options before SCRIPT are mxamp's, options after
    it are the script's. A script that imports mxamp runs as without this command. If a script calls
    init of mxnet.contrib.amp, mxamp's functions replace that module's from then on.
    """
    policy = given["policy"]
    if given["dtype"] and policy:
        raise click.UsageError(POLICY_HOLDS)
    if "mxamp_startup" not in sys.modules:
        raise click.ClickException(NO_HOOK)
    os.environ[AUTOMATIC] = given["dtype"] or "1"
    os.environ["MXAMP_POLICY"] = os.path.abspath(policy) if policy else ""
    os.environ["MXAMP_STATS"] = "1" if given["stats"] else ""
    flags: Any = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    program = ["-m", script] if as_module else [script]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, *program, *arguments])  # noqa: S606
