"""Options that several commands share, and their values."""

import functools
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import click

from ..convert.saved import epochs_of
from ..framework.files import check_writable
from ..framework.machine import default_dtype, dtype_name
from ..policy.policy import Policy
from ..policy.targets import DEVICES, TARGETS, auto_error, is_auto
from .output import IS_THERE, POLICY_HOLDS, usage_error
from .screen import show_messages

__all__ = [
    "TargetDtype",
    "check_out",
    "chosen_policy",
    "device_option",
    "dtype_option",
    "force_option",
    "input_dtype_option",
    "input_option",
    "model_options",
    "parse_named_values",
    "policy_option",
    "saved_model_options",
    "stop_progress_line",
]

Command = Callable[..., Any]

SEVERAL = "{prefix!r} has parameters of the epochs {epochs}: say which with --epoch"
NOT_IMPORTED = "--import: the module {name!r} can't be imported: {why}"
NO_MODULE_NAME = "--import takes the name of a module, such as package.module, not {text!r}"
TWICE = "{option} is given twice for {name!r}: {values}"
READ_TOO = "--out {path!r} is a file that is read here: give another --out"
NO_DTYPE = "Missing option '--dtype' (or '--policy')."

_STATUS = "mxamp.status"
_FILE = re.compile(r"(?P<prefix>.+?)-(symbol\.json|(?P<epoch>\d{4,})\.params)")


class TargetDtype(click.Choice):
    """A `click.Choice` of target dtypes that explains why it doesn't take "auto"."""

    def convert(
        self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]
    ) -> Any:
        """Return the dtype that an option's value names; raise for another value."""
        if is_auto(value):
            raise auto_error()
        name = dtype_name(value)  # "bf16" is "bfloat16"
        return super().convert(name if name in self.choices else value, param, ctx)


dtype_option = click.option(
    "--dtype", type=TargetDtype(TARGETS), help="Default: float16 for GPUs, bfloat16 for CPUs."
)
device_option = click.option(
    "--device", type=click.Choice(DEVICES), help="Default: the GPU if there is one, else the CPU."
)
policy_option = click.option(
    "--policy", type=click.Path(), help="A policy file (TOML), in place of --dtype."
)
input_option = click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:SHAPE|NAME:FILE.npy",
    help="Shape of an input, such as data:1,3,224,224, or a file of values.",
)
input_dtype_option = click.option(
    "--input-dtype",
    "dtypes",
    multiple=True,
    metavar="NAME:DTYPE",
    help="Dtype of an input that is not float32, such as index:int64.",
)
force_option = click.option("--force", is_flag=True, help="Overwrite files.")


def model_options(command: Command) -> Command:
    """Add a saved model's options to a command; show the library's messages while it runs.

    The options are PREFIX, --epoch and --import. The command gets the prefix and the epoch as its
    first two arguments.
    """

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
    def run_with_messages(
        prefix: str, epoch: Optional[int], modules: Sequence[str], **options: Any
    ) -> Any:
        _import_modules(modules)
        with show_messages() as status:
            click.get_current_context().meta[_STATUS] = status
            return command(*_split_prefix(prefix, epoch), **options)

    return run_with_messages


def saved_model_options(command: Command) -> Command:
    """Add `model_options`, and the options of a model's precision, to a command.

    These are --device, --keep-fp32 and --policy.
    """
    keep_fp32 = click.option(
        "--keep-fp32",
        multiple=True,
        metavar="PATTERN",
        help="Layers to keep in float32, by name; * and ? match any characters.",
    )
    return model_options(device_option(keep_fp32(policy_option(command))))


def check_out(out: str, force: bool, inputs: Iterable[Path]) -> None:
    """Raise if the file `out` can't be written, exists without `force`, or is in `inputs`."""
    target = Path(out)
    if out and os.path.lexists(target) and not target.is_dir():
        if target.exists() and any(map(target.samefile, filter(os.path.exists, inputs))):
            raise usage_error(READ_TOO.format(path=out))
        if not force:
            raise usage_error(IS_THERE.format(path=out))
    check_writable(out)


def chosen_policy(
    dtype: Optional[str], path: Optional[str], device: Optional[str], default: bool = True
) -> Policy:
    """Return the policy in the file `path`, or the one for `dtype`; raise if both are given.

    Without either, return the device's default policy, or raise if `default` is false.
    """
    if path is None:
        if not (dtype or default):
            raise usage_error(NO_DTYPE)
        return Policy.default(dtype or default_dtype(device), device)
    if dtype:
        raise usage_error(POLICY_HOLDS)
    return Policy.load(path, device)


def stop_progress_line() -> None:
    """Remove the running command's progress line, if the command shows progress of its own."""
    click.get_current_context().meta[_STATUS].stop()


def _split_prefix(prefix: str, epoch: Optional[int]) -> Tuple[str, int]:
    """Return the prefix and epoch of a model named by its prefix or by one of its files.

    Without `epoch`, that is the only one there is; raises if there are several.
    """
    file = _FILE.fullmatch(prefix)
    if file is not None:
        prefix, number = file["prefix"], file["epoch"]
        epoch = int(number) if epoch is None and number else epoch
    epochs = epochs_of(prefix) if prefix and epoch is None else []
    if len(epochs) > 1:
        raise usage_error(SEVERAL.format(prefix=prefix, epochs=", ".join(map(str, epochs))))
    return prefix, epochs[0] if epochs else epoch or 0


def _import_modules(names: Sequence[str]) -> None:
    """Import modules by name, from the current folder too; raise a usage error if one fails."""
    here = str(Path.cwd())
    if names and here not in sys.path:
        sys.path.insert(0, here)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise usage_error(NO_MODULE_NAME.format(text=name))
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
            raise usage_error(NOT_IMPORTED.format(name=name, why=why)) from error


def parse_named_values(option: str, texts: Sequence[str]) -> Dict[str, str]:
    """Return the values in texts NAME:VALUE by name; raise if a name is given twice."""
    values: Dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if not (name and value):
            raise usage_error(f"{option} takes NAME:VALUE, not {text!r}")
        if name in values:
            both = f"{values[name]!r} and {value!r}"
            raise usage_error(TWICE.format(option=option, name=name, values=both))
        values[name] = value
    return values
