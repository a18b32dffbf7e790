"""`mxamp explain`: the precision of a saved model's operators, and why."""

from typing import Any, Optional

import click

from ..convert.saved import load_model, saved_semantics
from ..errors import unknown
from ..graph.casts.builder import is_converted
from ..graph.ir import Graph
from ..tools.debugging.explain import HINT, PRECISIONS
from ..tools.debugging.explain import explain as explain_symbol
from .options import chosen_policy, dtype_option, saved_model_options
from .output import examples

_EXAMPLES = examples(
    "mxamp explain model",
    "mxamp explain model-symbol.json --dtype bfloat16 --precision float32",
    "mxamp explain model --keep-fp32 'stage1_*' --name '*conv*'",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@dtype_option
@click.option("--name", metavar="PATTERN", default="*", help="Only operators of this name.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Only operators of this precision."
)
def explain(prefix: str, epoch: int, name: str, precision: Optional[str], **given: Any) -> None:
    """Show the precision of each operator of a saved model, and why.

    PREFIX is model for the files model-symbol.json and model-0000.params; either file name works
    too. PATTERN is a name in this command's output; * and ? match any characters. Gluon adds _fwd
    to the name of a layer. A model that was converted before is shown as it is, unless an option
    says how to convert it again.
    """
    symbol, args, auxs = load_model(prefix, epoch)
    as_it_is = is_converted(Graph.from_symbol(symbol)) and not any(given.values())
    wanted = given["target_dtype"], given["policy"], given["device"]
    with saved_semantics(prefix, epoch):
        plan = explain_symbol(
            symbol,
            policy=None if as_it_is else chosen_policy(*wanted),
            excluded_sym_names=given["excluded_sym_names"],
            params={**args, **auxs},
        )
    found = plan.filter(name=name)
    if not len(found):
        raise unknown("operator name", name, [node.name for node in plan], HINT)
    click.echo(found.filter(precision=precision))
