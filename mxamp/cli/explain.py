"""`mxamp explain` and `mxamp operators`: the precision of a model's operators, or of all."""

from __future__ import annotations

import fnmatch
import json
from typing import Sequence

import click

from ..convert.saved import load_model, saved_semantics
from ..errors import ArgumentError, unknown
from ..framework.operators import registry, resolve
from ..framework.tables import cell_text
from ..framework.wording import shortened
from ..graph.casts.builder import is_converted
from ..graph.ir import Graph
from ..policy.rules import SHOWN_CLASSES
from ..tools.debugging.explain import MODES, PRECISIONS, Plan
from ..tools.debugging.explain import explain as explain_symbol
from .inputs import parse_inputs
from .options import (
    chosen_policy,
    device_option,
    dtype_option,
    input_option,
    policy_option,
    saved_model_options,
)
from .output import examples, help_paragraph, in_options, usage_error
from .screen import print_table

CONVERTED = "This model was converted before. The table is the plan of converting it again."
_EXAMPLES = examples(
    "mxamp explain model",
    "mxamp explain model-symbol.json --dtype bfloat16 --precision float32",
    "mxamp explain model --keep-fp32 'stage1_*' --name '*conv*'",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@dtype_option
@click.option("--name", metavar="PATTERN", help="Only operators of this name.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Only operators of this precision."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="Explain the converted model, the default, or the graph that runs while mixed precision "
    "is on.",
)
@input_option
def explain(
    prefix: str,
    epoch: int,
    device: str | None,
    keep_fp32: Sequence[str],
    policy: str | None,
    dtype: str | None,
    as_json: bool,
    mode: str | None,
    inputs: Sequence[str],
    **wanted: str | None,
) -> None:
    """Show the precision of each operator of a saved model, and why.

    PREFIX is model for the files model-symbol.json and model-0000.params; either file name works
    too. PATTERN is a name in this command's output; * and ? match any characters. Gluon adds _fwd
    to the name of a layer. --input needs --mode inference or training. A model that was converted
    before is shown as it is, unless an option says how to convert it again.
    """
    symbol, args, auxs = load_model(prefix, epoch)
    shapes, _ = parse_inputs(inputs)
    if inputs and mode in (None, MODES[0]):
        raise usage_error(f"--input is for --mode {' and '.join(MODES[1:])}; give that too")
    converted = is_converted(Graph.from_symbol(symbol))
    as_it_is = converted and not (dtype or policy or device or keep_fp32 or mode)
    with saved_semantics(prefix, epoch):
        plan = explain_symbol(
            symbol,
            policy=None if as_it_is else chosen_policy(dtype, policy, device),
            excluded_sym_names=keep_fp32,
            params={**args, **auxs},
            mode=mode,
            input_shapes=shapes,
        )
    shown = _filtered(plan, **wanted)
    if as_json:
        click.echo(json.dumps(shown.to_dict(), indent=2))
        return
    headings, rows = shown.rows()
    colors = {shown.target_dtype: "green", "float32": "yellow"}
    print_table(headings, ([cell_text(cell) for cell in row] for row in rows), colors)
    if converted and not as_it_is:
        click.echo(CONVERTED)
    click.echo(in_options(plan.summary()))


def _filtered(plan: Plan, name: str | None, precision: str | None) -> Plan:
    """Return the part of a plan with operators of this name and precision; raise if empty."""
    shown = plan.filter(name=name or "*", precision=precision)
    if len(shown):
        return shown
    if name is not None and not len(plan.filter(name=name)):
        raise plan.unknown(name)
    counts = ", ".join(f"{count} in {other}" for other, count in plan.counts().items())
    raise ArgumentError(f"no operator computes in {precision} here: {counts}")


_CLASSES = (
    "low          computes in the target dtype",
    "fp32         computes in float32",
    "widest       computes in the widest dtype of its inputs",
    "neutral      computes in the dtype of its inputs",
    "untouched    is never cast",
    "conditional  computes in float32 for some values of an attribute",
)


@click.command(
    epilog=help_paragraph("Classes", *_CLASSES)
    + examples(
        "mxamp operators softmax 'conv*'",
        "mxamp operators --class low --dtype float16 --device gpu",
        "mxamp operators --class low --policy my.toml",
    )
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@dtype_option
@device_option
@policy_option
@click.option("--class", "op_class", type=click.Choice(SHOWN_CLASSES), help="Only this class.")
def operators(
    names: Sequence[str],
    dtype: str | None,
    device: str | None,
    policy: str | None,
    op_class: str | None,
) -> None:
    """Show the precision class of MXNet's operators, and why.

    NAME is any name of an operator; * and ? match any characters. Without a NAME, all operators are
    listed.
    """
    chosen = chosen_policy(dtype, policy, device)
    found = _operator_names(names) if names else sorted(chosen.rules)
    rows = []
    for name in found:
        rule = chosen.rule(name)
        if op_class in (None, rule.shown_class):
            missing = f" (no kernel here: {rule.missing})" if rule.missing else ""
            rows.append((name, rule.shown_class, rule.reason + missing))
    if not rows:
        classes = [f"{name} is {chosen.rule(name).shown_class}" for name in found]
        raise ArgumentError(f"none of these operators is {op_class}: {shortened(classes)}")
    print_table(["operator", "class", "reason"], rows)


def _operator_names(names: Sequence[str]) -> Sequence[str]:
    """Return the canonical names of MXNet's operators for names, aliases and patterns."""
    found: dict[str, None] = {}
    for pattern in names:
        if not set("*?[") & set(pattern):
            found[resolve(pattern).name] = None
            continue
        # In any case: MXNet mixes Concat and concat.
        matching = [
            one.name
            for one in registry().values()
            if fnmatch.filter([name.lower() for name in (one.name, *one.aliases)], pattern.lower())
        ]
        if not matching:
            hint = "* and ? stand for any characters"
            raise unknown("operator", pattern, registry(), hint, listed_by="`mxamp operators`")
        found.update(dict.fromkeys(sorted(matching)))
    return list(found)
