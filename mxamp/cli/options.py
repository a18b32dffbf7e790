"""Options that several commands share, and their values."""

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import click

from ..convert.saved import epochs_of
from ..framework.machine import default_dtype
from ..policy.policy import Policy
from ..policy.targets import DEVICES as _DEVICES
from ..policy.targets import TARGETS, is_auto, one_dtype
from .output import show_messages, usage_error

__all__ = [
    "DEVICES",
    "DTYPES",
    "chosen_policy",
    "policy_option",
    "saved_model_options",
    "stop_status",
    "values_by_name",
]

Command = Callable[..., Any]


class _OneDtype(click.Choice):
    """A target dtype; "auto" is an error that says why."""

    def convert(
        self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]
    ) -> Any:
        if is_auto(value):
            raise one_dtype()
        return super().convert(value, param, ctx)


DTYPES = _OneDtype(TARGETS)
DEVICES = click.Choice(_DEVICES)

SEVERAL = "{prefix!r} has parameters of the epochs {epochs}: say which with --epoch"
NOT_IMPORTED = "--import: the module {name!r} can't be imported: {why}"
NO_MODULE_NAME = "--import takes the name of a module, such as package.module, not {text!r}"
TWICE = "{option} is given twice for {name!r}: {values}"
NO_DTYPE = "Missing option '--dtype' (or '--policy')."
POLICY_HOLDS = "--policy holds its target dtype: give --dtype or --policy, not both"

_IMPORT_HELP = "Module to import first, such as one that registers custom operators."
_EPOCH_HELP = "Number in the name of the parameter file. Default: the only one there is."
_KEEP_HELP = "Layers to keep in float32: names, in which * and ? stand for any characters."

_POLICY, _EPOCH, _STATUS = "mxamp.policy", "mxamp.epoch", "mxamp.status"
_FILE = re.compile(r"(?P<prefix>.+?)-(symbol\.json|(?P<epoch>\d{4,})\.params)")


def policy_option(command: Command) -> Command:
    """Add --policy, which `chosen_policy` reads."""
    option: Command = click.option(
        "--policy",
        type=click.Path(),
        expose_value=False,
        callback=_keep_policy,
        help="A policy file (TOML), saved or of your own, in place of --dtype.",
    )(command)
    return option


def saved_model_options(command: Command) -> Command:
    """Add the arguments of a saved model, a device and layers to keep in float32."""
    options: List[Callable[[Command], Command]] = [
        click.argument("prefix", callback=_prefix),
        click.option("--epoch", type=click.IntRange(min=0), callback=_epoch, help=_EPOCH_HELP),
        click.option(
            "--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU."
        ),
        click.option("--keep-fp32", multiple=True, metavar="PATTERN", help=_KEEP_HELP),
        policy_option,
        click.option(
            "--import",
            multiple=True,
            metavar="MODULE",
            expose_value=False,
            is_eager=True,
            callback=_import,
            help=_IMPORT_HELP,
        ),
    ]

    @functools.wraps(command)
    def spoken(*args: Any, **options: Any) -> Any:
        with show_messages() as status:
            click.get_current_context().meta[_STATUS] = status
            return command(*args, **options)

    decorated: Command = spoken
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def chosen_policy(dtype: Optional[str], device: Optional[str], default: bool = True) -> Policy:
    """Return the policy of --policy or of --dtype; without either the default, if allowed."""
    path = click.get_current_context().meta.get(_POLICY)
    if path is None:
        if not (dtype or default):
            raise usage_error(NO_DTYPE)
        return Policy.default(dtype or default_dtype(device), device)
    if dtype:
        raise usage_error(POLICY_HOLDS)
    return Policy.load(path, device)


def stop_status() -> None:
    """Stop the progress line, for a command that shows its own progress."""
    click.get_current_context().meta[_STATUS].stop()


def _prefix(context: click.Context, _: click.Parameter, value: str) -> str:
    """Return the prefix of a model, given as the prefix or as the name of one of its files."""
    file = _FILE.fullmatch(value)
    if file is None:
        return value
    context.meta[_EPOCH] = file["epoch"]
    return file["prefix"]


def _keep_policy(context: click.Context, _: click.Parameter, value: Optional[str]) -> None:
    context.meta[_POLICY] = value


def _epoch(context: click.Context, _: click.Parameter, value: Optional[int]) -> int:
    """Return the given epoch, or the only one there is."""
    prefix = context.params.get("prefix")
    if value is None and context.meta.get(_EPOCH) is not None:
        return int(context.meta[_EPOCH])
    if value is not None or not prefix:
        return value or 0
    epochs = epochs_of(prefix)
    if len(epochs) > 1:
        listed = ", ".join(map(str, epochs))
        raise click.UsageError(SEVERAL.format(prefix=prefix, epochs=listed), context)
    return epochs[0] if epochs else 0


def _import(_: click.Context, __: click.Parameter, names: Sequence[str]) -> None:
    """Import the user's modules, from the current folder too, as `python -m` does."""
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


def values_by_name(option: str, texts: Sequence[str]) -> Dict[str, str]:
    """Return the values of a repeatable option NAME:VALUE by name; raise for a name given twice."""
    values: Dict[str, str] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not (name and colon and value):
            raise usage_error(f"{option} takes NAME:VALUE, not {text!r}")
        if name in values:
            both = f"{values[name]!r} and {value!r}"
            raise usage_error(TWICE.format(option=option, name=name, values=both))
        values[name] = value
    return values
