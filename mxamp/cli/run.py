"""`mxamp run`: a script in mixed precision, with no change to it."""

import runpy
import sys
import traceback
from pathlib import Path
from typing import Optional, Sequence

import click

from ..errors import AmpError
from ..frontends import automatic
from ..policy.policy import Policy
from .group import DTYPES

__all__ = ["run"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--dtype", type=DTYPES, help="Default: float16 with a GPU, else bfloat16.")
@click.option("--policy", "path", type=click.Path(), help="An operator list of your own (TOML).")
def run(script: str, arguments: Sequence[str], dtype: Optional[str], path: Optional[str]) -> None:
    """Run a Python SCRIPT with ARGUMENTS in mixed precision, loss scaling included.

    The script needs no change. One that uses mxamp or mxnet.contrib.amp itself is left alone.
    """
    if not Path(script).is_file():
        raise AmpError(f"there is no file {script!r}")
    if dtype and path:
        raise AmpError("--policy holds its target dtype: give --dtype or --policy, not both")
    automatic.show_log()
    own = automatic.uses_amp(script)
    if own is not None:
        automatic.logger.info(automatic.OWN_AMP, script, own)
    else:
        automatic.start(dtype, Policy.load(path) if path else None, name="mxamp run")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        # The script's own errors are shown as Python shows them.
        traceback.print_exc()
        sys.exit(1)
