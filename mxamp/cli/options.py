"""Options that several commands have, and what their values mean."""

from typing import Any, Callable, Dict, List, Sequence, Tuple

import click
import numpy as np

from .group import DEVICES, usage_error

__all__ = ["inputs_of", "name_and_value", "saved_model_options"]

Command = Callable[..., Any]


def saved_model_options(command: Command) -> Command:
    """Add what `explain` and `convert` both take: a saved model, a device, layers to keep."""
    options: List[Callable[[Command], Command]] = [
        click.argument("prefix"),
        click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True),
        click.option(
            "--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU."
        ),
        click.option(
            "--keep-fp32", multiple=True, metavar="PATTERN", help="Layers to keep in float32."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def name_and_value(option: str, text: str) -> Tuple[str, str]:
    """Return the two parts of NAME:VALUE."""
    name, colon, value = text.partition(":")
    if not (name and colon and value):
        raise usage_error(f"{option} takes NAME:VALUE, not {text!r}")
    return name, value


def inputs_of(texts: Sequence[str]) -> Tuple[Dict[str, Tuple[int, ...]], Dict[str, Any]]:
    """Return shapes, and values read from .npy files, of inputs by name."""
    shapes, values = {}, {}
    for text in texts:
        name, value = name_and_value("--input", text)
        if value.endswith(".npy"):
            values[name] = np.load(value)
            continue
        try:
            shapes[name] = tuple(int(part) for part in value.split(","))
        except ValueError:
            raise usage_error(
                f"--input takes NAME:1,3,224,224 or NAME:FILE.npy, not {text!r}"
            ) from None
    return shapes, values
