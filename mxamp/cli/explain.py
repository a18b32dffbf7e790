"""`mxamp explain`: what mixed precision does to a saved model."""

from typing import Optional, Sequence

import click
from rich.markup import escape
from rich.table import Table

from ..convert.saved import load_model, saved_semantics
from ..errors import ArgumentError
from ..graph.casts.builder import is_converted
from ..graph.ir import Graph
from ..tools.debugging.drawing import draw
from ..tools.debugging.explain import MODES
from ..tools.debugging.explain import explain as explain_symbol
from ..tools.debugging.plan import PRECISIONS, Plan
from ..tools.tables import cell_text
from .group import DTYPES, examples, usage_error
from .inputs import inputs_of
from .options import chosen_policy, saved_model_options
from .output import console, table_of
from .words import in_options

__all__ = ["explain"]

_MODE_HELP = "Explain the converted model, or what runs while mxamp is on."
_NAME_HELP = "Only operators of this name; * and ? stand for any characters."
_INPUT_HELP = "Shape of an input, such as data:1,3,224,224, for the modes inference and training."
CONVERTED = "This model was converted before. Above is what another conversion would make of it."
_EXAMPLES = examples(
    "mxamp explain model",
    "mxamp explain model-symbol.json --dtype bfloat16 --precision float32",
    "mxamp explain model --keep-fp32 'stage1_*' --name '*conv*'",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--name", metavar="PATTERN", help=_NAME_HELP)
@click.option("--precision", type=click.Choice(PRECISIONS), help="Only what computes in it.")
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

    PREFIX is what the model's files begin with: model for model-symbol.json and model-0000.params.
    The name of either file will do. PATTERN is a name as this command shows it, or one in which *
    and ? stand for any characters; Gluon adds _fwd to the name of a layer.
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
    """Return the operators to show, which are some."""
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
