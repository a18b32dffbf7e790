"""Options that several commands share, and their values."""

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import click

from ..convert.saved import epochs_of
from ..framework.files import check_writable
from ..framework.machine import default_dtype
from ..policy.policy import Policy
from ..policy.targets import DEVICES, TARGETS
from .inputs import NamedDtype, NamedInput
from .output import POLICY_HOLDS

Command = Callable[..., Any]

SEVERAL = "{prefix!r} has parameters of the epochs {epochs}: give --epoch, or the name of a file"
IS_READ = "--out {path!r} is a file that this command reads: give another --out"
IS_THERE = "--out {path!r} is there already: give another --out, or overwrite it with --force"

_FILE = re.compile(r"(?P<prefix>.+?)-(symbol\.json|(?P<epoch>\d{4,})\.params)")

dtype_option = click.option(
    "--dtype", type=click.Choice(TARGETS), help="Default: float16 for GPUs, bfloat16 for CPUs."
)
device_option = click.option(
    "--device", type=click.Choice(DEVICES), help="Default: the GPU if there is one, else the CPU."
)
policy_option = click.option("--policy", help="A policy file (TOML), in place of --dtype.")
force_option = click.option("--force", is_flag=True, help="Overwrite files.")
_INPUT_HELP = "Shape of an input, such as data:1,3,224,224, or a file of values."
_INPUT_DTYPE_HELP = "Dtype of an input that is not float32, such as index:int64."


def input_options(command: Command) -> Command:
    """Add --input and --input-dtype to a command, as `inputs` and `dtypes`."""
    several = functools.partial(click.option, multiple=True)
    dtypes = several("--input-dtype", "dtypes", type=NamedDtype(), help=_INPUT_DTYPE_HELP)
    values = several("--input", "inputs", type=NamedInput(), help=_INPUT_HELP)
    return values(dtypes(command))


def model_options(command: Command) -> Command:
    """Add PREFIX, --epoch and --import to a command, whose first arguments are prefix and epoch."""

    @click.argument("prefix")
    @click.option(
        "--epoch",
        type=click.IntRange(min=0),
        help="Number in the name of the parameter file; needed if there are several.",
    )
    @click.option(
        "--import",
        "modules",
        multiple=True,
        metavar="MODULE",
        help="Module to import first, such as one that registers custom operators.",
    )
    @functools.wraps(command)
    def run(prefix: str, epoch: Optional[int], modules: Sequence[str], **options: Any) -> Any:
        sys.path.insert(0, os.getcwd())
        for module in modules:
            importlib.import_module(module)
        return command(*split_prefix(prefix, epoch), **options)

    return run


def saved_model_options(command: Command) -> Command:
    """Add `model_options`, --device, --keep-fp32 and --policy to a command."""
    keep_fp32 = click.option(
        "--keep-fp32",
        multiple=True,
        metavar="PATTERN",
        help="Layers to keep in float32, by name; * and ? match any characters.",
    )
    return model_options(device_option(keep_fp32(policy_option(command))))


def check_out(out: str, force: bool, *read: Union[str, Path]) -> None:
    """Raise if the file `out` can't be written, is one of `read`, or exists without `force`."""
    if os.path.realpath(out) in [os.path.realpath(path) for path in read]:
        raise click.UsageError(IS_READ.format(path=out))
    if os.path.lexists(out) and not force:
        raise click.UsageError(IS_THERE.format(path=out))
    check_writable(out)


def chosen_policy(dtype: Optional[str], path: Optional[str], device: Optional[str]) -> Policy:
    """Return the policy in the file `path`, or the one for `dtype`; raise if both are given.

    Without either, return the device's default policy.
    """
    if path is None:
        return Policy.default(dtype or default_dtype(device), device)
    if dtype:
        raise click.UsageError(POLICY_HOLDS)
    return Policy.load(path, device)


def split_prefix(prefix: str, epoch: Optional[int]) -> Tuple[str, int]:
    """Return the prefix and epoch of a model named by its prefix or by one of its files.

    Without `epoch`, that is the only one there is; raises if there are several.
    """
    file = _FILE.fullmatch(prefix)
    if file is not None:
        prefix, number = file["prefix"], file["epoch"]
        epoch = int(number) if epoch is None and number else epoch
    epochs = epochs_of(prefix) if prefix and epoch is None else []
    if len(epochs) > 1:
        raise click.UsageError(SEVERAL.format(prefix=prefix, epochs=", ".join(map(str, epochs))))
    return prefix, epochs[0] if epochs else epoch or 0
