"""`mxamp explain` and `mxamp operators`: the precision of a model's operators, or of all."""

import fnmatch
from typing import Dict, Optional, Sequence

import click
from rich.markup import escape
from rich.table import Table

from ..convert.saved import load_model, saved_semantics
from ..errors import ArgumentError, unknown
from ..framework.operators import registry, resolve
from ..framework.wording import shortened
from ..graph.casts.builder import is_converted
from ..graph.ir import Graph
from ..policy.rules import SHOWN_CLASSES
from ..tools.debugging.drawing import draw
from ..tools.debugging.explain import MODES, PRECISIONS, Plan
from ..tools.debugging.explain import explain as explain_symbol
from ..tools.tables import cell_text
from .inputs import inputs_of
from .options import DEVICES, DTYPES, chosen_policy, policy_option, saved_model_options
from .output import console, examples, in_options, lines, table_of, usage_error

__all__ = [
    "explain",
    "operators",
]

_MODE_HELP = "Explain the converted model, or the graphs that run while mxamp is on."
_NAME_HELP = "Only operators of this name; * and ? stand for any characters."
_INPUT_HELP = "Shape of an input, such as data:1,3,224,224, for the modes inference and training."
CONVERTED = "This model was converted before. The table is the plan of converting it again."
_EXAMPLES = examples(
    "mxamp explain model",
    "mxamp explain model-symbol.json --dtype bfloat16 --precision float32",
    "mxamp explain model --keep-fp32 'stage1_*' --name '*conv*'",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--name", metavar="PATTERN", help=_NAME_HELP)
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Only operators that compute in it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--graph", metavar="FILE", help="Draw it too, as .svg, .png, .pdf or .dot.")
@click.option(
    "--mode", type=click.Choice(MODES), default=MODES[0], show_default=True, help=_MODE_HELP
)
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE", help=_INPUT_HELP)
def explain(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    dtype: Optional[str],
    name: Optional[str],
    precision: Optional[str],
    as_json: bool,
    graph: Optional[str],
    mode: str,
    inputs: Sequence[str],
) -> None:
    """Show which precision each operator of a saved model computes in, and why.

    PREFIX is the beginning of the model's file names: model for model-symbol.json and
    model-0000.params. Either file name works too. PATTERN is a name in this command's output, in
    which * and ? stand for any characters; Gluon adds _fwd to the name of a layer.
    """
    symbol, args, auxs = load_model(prefix, epoch)
    shapes, _ = inputs_of(inputs)
    if inputs and mode == MODES[0]:
        raise usage_error(f"--input is for --mode {' and '.join(MODES[1:])}; give that too")
    with saved_semantics(prefix, epoch):
        plan = explain_symbol(
            symbol,
            policy=chosen_policy(dtype, device),
            excluded_sym_names=keep_fp32,
            params={**args, **auxs},
            mode=mode,
            input_shapes=shapes,
        )
    shown = _filtered(plan, name, precision)
    if graph is not None:
        draw(plan, graph)
    if as_json:
        click.echo(shown.to_json())
        return
    screen = console()
    screen.print(_table(shown))
    if is_converted(Graph.from_symbol(symbol)):
        screen.print(CONVERTED, highlight=False, markup=False)
    screen.print(in_options(plan.summary()), highlight=False, markup=False)


def _filtered(plan: Plan, name: Optional[str], precision: Optional[str]) -> Plan:
    """Return the plan's operators that match; raise if there are none."""
    shown = plan if name is None else plan.filter(name=name)
    if name is not None and not len(shown):
        raise plan.unknown(name)
    if precision is None or any(node.precision == precision for node in shown):
        return shown.filter(precision=precision)
    counts = ", ".join(f"{count} in {other}" for other, count in shown.counts().items())
    raise ArgumentError(f"no operator computes in {precision} here: {counts}")


def _table(plan: Plan) -> Table:
    colours = {plan.target_dtype: "green", "float32": "yellow"}
    headings, rows = plan.rows()
    place = headings.index("precision")
    shown = []
    for row in rows:
        cells = [escape(cell_text(cell)) for cell in row]
        colour = colours.get(cells[place])
        cells[place] = f"[{colour}]{cells[place]}[/]" if colour else cells[place]
        shown.append(cells)
    return table_of(headings, shown)


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
    a name, all operators are listed.
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
        raise ArgumentError(f"none of these operators is {op_class}: {shortened(classes)}")
    console().print(table_of(["operator", "class", "reason"], rows))


def _found(names: Sequence[str]) -> Sequence[str]:
    """Return the canonical names of the operators that match names or patterns."""
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
    """Return whether a name matches a pattern in any case: MXNet mixes Concat and concat."""
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())
