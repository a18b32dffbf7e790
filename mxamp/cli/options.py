"""Click options that several subcommands share, and functions that check their values."""

import importlib
import os
import re
import sys
from functools import wraps
from typing import Any, Callable, Optional, Sequence, Tuple

import click
from mxnet.metric import EvalMetric

from ..backends import DEVICES
from ..convert.saved import epochs_of, model_files
from ..framework.files import check_writable
from ..policy.policy import Policy
from ..policy.targets import DTYPES, default_dtype
from ..tools.tuning.forms import checked_metric
from .inputs import READ, NamedDtype, NamedInput, record_files
from .output import POLICY_HOLDS

Command = Callable[..., Any]
Text = Optional[str]

SEVERAL = "{prefix!r} has parameters of the epochs {epochs}: give --epoch, or the name of a file"
IS_READ = "--out {path!r} is a file that this command reads: give another --out"
IS_THERE = "--out {path!r} is there already: give another --out, or overwrite it with --force"

_FILE = re.compile(r"(?P<prefix>.+?)-(symbol\.json|(?P<epoch>\d{4,})\.params)")


def repeatable(*names: str, text: str, **settings: Any) -> Callable[[Command], Command]:
    """Return a click option that can be repeated, with a help text that says so."""
    return click.option(*names, multiple=True, help=f"{text} May be repeated.", **settings)


# An option that stands for an argument of a function has its name: see `in_options`.
_DTYPE = "Default: float16 for GPUs, bfloat16 for CPUs."
dtype_option = click.option("--dtype", "target_dtype", type=click.Choice(DTYPES), help=_DTYPE)
_DEVICE = "Default: the GPU if there is one, else the CPU."
device_option = click.option("--device", type=click.Choice(DEVICES), help=_DEVICE)
_POLICY = "A policy file (TOML), in place of --dtype."
policy_option = click.option("--policy", metavar="FILE", callback=record_files, help=_POLICY)
force_option = click.option("--force", is_flag=True, help="Overwrite files.")
_INPUT = "Shape of an input, such as data:1,3,224,224, or a file of values."
_INPUT_DTYPE = "Dtype of an input that is not float32, such as index:int64."
_EPOCH = "Number in the name of the parameter file; needed if there are several."
_IMPORT = "Module to import first, such as one that registers custom operators."
_DATA = "A batch: arrays by input name, and for --metric the array label."
_METRIC = "A metric of MXNet of which more is better, or MODULE:FUNCTION of label and output."
_KEEP = "Layers to keep in float32, by name; * and ? match any characters."


def input_options(command: Command) -> Command:
    """Add the options --input and --input-dtype to a subcommand."""
    dtypes = repeatable("--input-dtype", "input_dtypes", type=NamedDtype(), text=_INPUT_DTYPE)
    values = repeatable("--input", "inputs", type=NamedInput(), text=_INPUT)
    return values(dtypes(command))


def batch_options(command: Command) -> Command:
    """Add the options --input, --input-dtype, --data and --metric to a subcommand."""
    data = repeatable("--data", metavar="FILE.npz", callback=record_files, text=_DATA)
    return data(input_options(click.option("--metric", metavar="NAME", help=_METRIC)(command)))


def named_metric(name: Text) -> Optional[EvalMetric]:
    """Return the metric for --metric: one of MXNet by name, or a function as MODULE:FUNCTION."""
    module, _, function = (name or "").rpartition(":")
    found = getattr(importlib.import_module(module), function, None) if module else name
    if module and not callable(found):
        raise click.UsageError(f"--metric {name}: module {module!r} has no function {function!r}")
    return checked_metric(found) if name else None


def model_options(command: Command) -> Command:
    """Add the argument PREFIX and the options --epoch and --import to a subcommand."""

    @click.argument("prefix")
    @click.option("--epoch", type=click.IntRange(min=0), help=_EPOCH)
    @repeatable("--import", "modules", metavar="MODULE", text=_IMPORT)
    @wraps(command)
    def run(prefix: str, epoch: Optional[int], modules: Sequence[str], **options: object) -> object:
        sys.path.insert(0, os.getcwd())
        for module in modules:
            importlib.import_module(module)
        prefix, number = split_prefix(prefix, epoch)
        record_files(click.get_current_context(), None, map(str, model_files(prefix, number)))
        return command(prefix, number, **options)

    return run


def saved_model_options(command: Command) -> Command:
    """Add PREFIX, --epoch, --import, --device, --keep-fp32 and --policy to a subcommand."""
    keep = repeatable("--keep-fp32", "excluded_sym_names", metavar="PATTERN", text=_KEEP)
    return model_options(device_option(keep(policy_option(command))))


def check_out(out: str, force: bool) -> None:
    """Raise if --out can't be written, is an input file, or exists without --force."""
    if os.path.realpath(out) in map(os.path.realpath, click.get_current_context().meta[READ]):
        raise click.UsageError(IS_READ.format(path=out))
    if os.path.lexists(out) and not force:
        raise click.UsageError(IS_THERE.format(path=out))
    check_writable(out)


def chosen_policy(target_dtype: Text, policy: Text, device: Text, **_: object) -> Policy:
    """Return the policy of --policy, else of --dtype and --device; raise if both are given.

    Without either, return the device's default policy.
    """
    if policy is None:
        return Policy.default(target_dtype or default_dtype(device), device)
    if target_dtype:
        raise click.UsageError(POLICY_HOLDS)
    return Policy.load(policy, device)


def split_prefix(prefix: str, epoch: Optional[int]) -> Tuple[str, int]:
    """Return prefix and epoch of a saved model, named by its prefix or by one of its files.

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
