"""The command `mxamp explain`: the precision of a saved model's operators, and why."""

from typing import Any, Optional

import click

from ..convert.saved import load_model, saved_semantics
from ..graph.ir import Graph
from ..tools.debugging.explain import PRECISIONS
from ..tools.debugging.explain import explain as explain_symbol
from .options import chosen_policy, dtype_option, saved_model_options
from .output import examples

_EXAMPLES = examples(
    "mxamp explain model-symbol.json --dtype bfloat16 --precision float32",
    "mxamp explain model --keep-fp32 'stage1_*' --name '*conv*'",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@dtype_option
@click.option("--name", metavar="PATTERN", default="*", help="Operators to show, such as *conv*.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Only operators of this precision."
)
def explain(prefix: str, epoch: int, name: str, precision: Optional[str], **given: Any) -> None:
    """Show the precision of each operator of a saved model, and why.

    PREFIX is model for the files model-symbol.json and model-0000.params; either file name works
    too. In a PATTERN of names, * and ? match any characters; Gluon adds _fwd to the name of a
    layer. A converted or fused model is shown as it is; with a dtype, policy or device, or layers
    to keep, as it would be if it were converted again.
    """
    symbol, args, auxs = load_model(prefix, epoch)
    graph = Graph.from_symbol(symbol)
    as_it_is = not any(given.values()) and (graph.has_fused_operators or graph.is_converted)
    with saved_semantics(prefix, epoch):
        policy = None if as_it_is else chosen_policy(**given)
        kept, params = given["excluded_sym_names"], {**args, **auxs}
        plan = explain_symbol(symbol, policy=policy, excluded_sym_names=kept, params=params)
    found = plan.filter(name=name)
    # An unknown name raises.
    click.echo(found.filter(precision=precision) if len(found) else plan[name])
