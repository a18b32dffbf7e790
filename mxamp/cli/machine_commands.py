"""`mxamp operators`: what the lists say."""

import fnmatch
from typing import Dict, Optional, Sequence

import click

from ..errors import ArgumentError, unknown
from ..framework.operators import registry, resolve
from ..framework.wording import shortened
from ..policy.rules import SHOWN_CLASSES
from .group import DEVICES, DTYPES, examples, lines
from .options import chosen_policy, policy_option
from .output import console, table_of

__all__ = ["operators"]

_CLASSES = (
    "low          computes in the target dtype",
    "fp32         computes in float32",
    "widest       computes in the widest dtype of its inputs",
    "neutral      follows its inputs",
    "untouched    no input is cast",
    "conditional  float32 for some values of an attribute",
)


@click.command(
    epilog=lines("Classes", *_CLASSES)
    + examples(
        "mxamp operators softmax 'conv*'",
        "mxamp operators --class low --dtype float16 --device gpu",
        "mxamp operators --class low --policy my.toml",
    )
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--device", type=DEVICES, help="Default: the GPU if there is one, else the CPU.")
@policy_option
@click.option("--class", "op_class", type=click.Choice(SHOWN_CLASSES), help="Only this class.")
def operators(
    names: Sequence[str], dtype: Optional[str], device: Optional[str], op_class: Optional[str]
) -> None:
    """Show the class of MXNet's operators, and why.

    NAME is any name of an operator, or a pattern in which * and ? stand for any characters. Without
    one all operators are shown.
    """
    policy = chosen_policy(dtype, device)
    found = _found(names) if names else sorted(policy.rules)
    rows = []
    for name in found:
        rule = policy.rule(name)
        if op_class in (None, rule.shown_class):
            missing = f" (no kernel here: {rule.missing})" if rule.missing else ""
            rows.append((name, rule.shown_class, rule.reason + missing))
    if not rows:
        classes = [f"{name} is {policy.rule(name).shown_class}" for name in found]
        raise ArgumentError(f"no operator of these is {op_class}: {shortened(classes)}")
    console().print(table_of(["operator", "class", "reason"], rows))


def _found(names: Sequence[str]) -> Sequence[str]:
    """Return the canonical names that names and patterns stand for, each once."""
    found: Dict[str, None] = {}
    for pattern in names:
        if not set("*?[") & set(pattern):
            found[resolve(pattern).name] = None
            continue
        matching = [
            operator.name
            for operator in registry().values()
            if any(_matches(one, pattern) for one in (operator.name, *operator.aliases))
        ]
        if not matching:
            hint = "* and ? stand for any characters"
            raise unknown("operator", pattern, registry(), hint, listed_by="`mxamp operators`")
        found.update(dict.fromkeys(sorted(matching)))
    return list(found)


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a name is like a pattern, whatever their case: MXNet mixes Concat and concat."""
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())
