"""`mxamp operators`: what the lists say."""

from typing import Optional, Sequence

import click
from rich.console import Console
from rich.table import Table

from ..framework import machine
from ..framework.operators import resolve
from ..policy.policy import Policy
from .group import DEVICES, DTYPES

__all__ = ["operators"]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@click.option("--class", "op_class", help="Only operators of this class, such as low or fp32.")
def operators(
    names: Sequence[str], dtype: Optional[str], device: Optional[str], op_class: Optional[str]
) -> None:
    """Show the class of operators, by any of their NAMES, and why."""
    policy = Policy.default(dtype or machine.default_dtype(device), device)
    table = Table("operator", "class", "reason")
    for name in [resolve(name).name for name in names] or sorted(policy.rules):
        rule = policy.rule(name)
        shown = "conditional" if rule.conditions else rule.op_class
        if op_class in (None, shown):
            why = rule.reason + (f" (no kernel here: {rule.missing})" if rule.missing else "")
            table.add_row(name, shown, why)
    Console().print(table)
