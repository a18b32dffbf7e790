"""`mxamp info` and `mxamp operators`: what this machine does, and what the lists say."""

from typing import List, Optional, Sequence, Tuple

import click
import mxnet as mx
from rich.console import Console
from rich.table import Table

from .._version import __version__
from ..framework import machine
from ..framework.operators import resolve
from ..policy.policy import Policy
from .group import DEVICES, DTYPES

__all__ = ["info", "operators"]


@click.command()
def info() -> None:
    """Say what this machine computes in which precision."""
    table = Table(show_header=False, box=None)
    for row in _facts():
        table.add_row(*row)
    Console().print(table)


def _facts() -> List[Tuple[str, str]]:
    features = machine.features()
    bfloat16 = "in float32 on rounded values"
    if machine.computes_bfloat16():
        bfloat16 = "in hardware"
    elif "avx512" in features:
        bfloat16 = "right, but not faster"
    return [
        ("mxamp", __version__),
        ("MXNet", mx.__version__),
        ("CPU", machine.cpu_name()),
        ("oneDNN may use", ", ".join(sorted(features)) or "no avx512"),
        ("bfloat16 on the CPU", bfloat16),
        ("float16 on the CPU", "true values, for trying and testing; not faster"),
        ("default device", machine.default_device()),
    ]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--dtype", type=DTYPES, help="Default: float16 with a GPU, else bfloat16.")
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--class", "op_class", help="Only operators of this class, such as low or fp32.")
def operators(
    names: Sequence[str], dtype: Optional[str], device: Optional[str], op_class: Optional[str]
) -> None:
    """Show the class of operators, by any of their NAMES, and why."""
    policy = Policy.default(dtype or machine.default_dtype(), device)
    table = Table("operator", "class", "reason")
    for name in [resolve(name).name for name in names] or sorted(policy.rules):
        rule = policy.rule(name)
        shown = "conditional" if rule.conditions else rule.op_class
        if op_class in (None, shown):
            why = rule.reason + (f" (no kernel here: {rule.missing})" if rule.missing else "")
            table.add_row(name, shown, why)
    Console().print(table)
