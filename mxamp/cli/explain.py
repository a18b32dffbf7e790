"""`mxamp explain`: what mixed precision does to a saved model."""

from typing import Optional, Sequence

import click
from rich.console import Console
from rich.table import Table

from ..convert.saved import load_model, saved_semantics
from ..debugging.drawing import draw
from ..debugging.explain import explain as explain_symbol
from ..debugging.plan import Plan
from .group import DTYPES
from .options import chosen_policy, inputs_of, saved_model_options

__all__ = ["explain"]

_MODES = click.Choice(["converted", "inference", "training"])
_MODE_HELP = "Explain the converted model, or what runs while mxamp is on."


@click.command()
@saved_model_options
@click.option("--dtype", type=DTYPES, help="Default: float16 for GPUs, bfloat16 for CPUs.")
@click.option("--name", default="*", help="Only operators of this name; * and ? are known.")
@click.option("--precision", help="Only operators of this precision, such as float32.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--graph", metavar="FILE", help="Draw it too, as .svg, .png, .pdf or .dot.")
@click.option("--mode", type=_MODES, default="converted", show_default=True, help=_MODE_HELP)
@click.option("--input", "inputs", multiple=True, metavar="NAME:SHAPE", help="Shape of an input.")
def explain(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    dtype: Optional[str],
    name: str,
    precision: Optional[str],
    as_json: bool,
    graph: Optional[str],
    mode: str,
    inputs: Sequence[str],
) -> None:
    """Show what mixed precision does to the saved model PREFIX, operator by operator."""
    symbol, args, auxs = load_model(prefix, epoch)
    shapes, _ = inputs_of(inputs)
    with saved_semantics(prefix, epoch):
        plan = explain_symbol(
            symbol,
            policy=chosen_policy(dtype, device),
            excluded_sym_names=keep_fp32,
            params={**args, **auxs},
            mode=mode,
            input_shapes=shapes,
        )
    if graph:
        draw(plan, graph)
    shown = plan.filter(name=name, precision=precision)
    if as_json:
        click.echo(shown.to_json())
        return
    console = Console()
    console.print(_table(shown))
    console.print(plan.summary(), highlight=False)


def _table(plan: Plan) -> Table:
    table = Table()
    table.add_column("name", overflow="fold")
    for heading in ("operator", "precision", "reason"):
        table.add_column(heading)
    colours = {plan.target_dtype: "green", "float32": "yellow"}
    for node in plan.nodes:
        colour = colours.get(node.precision)
        precision = f"[{colour}]{node.precision}[/]" if colour else node.precision
        table.add_row(node.name, node.operator, precision, node.reason)
    return table
