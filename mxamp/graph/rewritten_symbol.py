"""A symbol's graph rewritten, as a symbol that is about to run."""

from typing import FrozenSet, Optional, Type

from mxnet.symbol import Symbol

from ..errors import AmpError
from ..framework.collector import collector_paused
from ..policy.active import note_precision
from ..policy.policy import Policy
from ..policy.regions import REGION
from .builder import is_converted
from .choices import NONE, Choices
from .graph import Graph
from .input_order import with_reversed_inputs
from .insert_casts import PRECISION, rewrite
from .usage import Usage

__all__ = ["own_marks", "rewritten_symbol"]

OTHER_ORDER = (
    "the rewritten graph takes its inputs in another order; please report this graph: "
    "{before} became {after}"
)


def own_marks(symbol: Symbol) -> FrozenSet[str]:
    """Return the regions that hold in a graph where mixed precision is off around it.

    A converted graph has its casts, for whoever runs it.
    """
    if REGION not in Symbol.tojson(symbol, remove_amp_cast=False):
        return frozenset()
    graph = Graph.from_symbol(symbol)
    return frozenset() if is_converted(graph) else graph.marks


@collector_paused()
def rewritten_symbol(
    graph: Graph,
    symbol_class: Type[Symbol],
    policy: Policy,
    usage: Usage,
    choices: Choices = NONE,
    reverse: bool = False,
) -> Optional[Symbol]:
    """Return a symbol's graph rewritten, as a symbol of that class that is about to run.

    None where there is nothing to cast. Inputs and outputs keep names, order and dtypes; inputs
    that are to `reverse` come in the reverse order.
    """
    result = rewrite(graph, policy, usage, choices)
    for _, node, decision in result.decided():
        note_precision(node.operator, decision.precision)
    if result.graph == graph:
        return None
    for _, node, decision in result.decided():
        if decision.through is not None:
            node.attrs = {**node.attrs, PRECISION: decision.precision}
    rewritten = with_reversed_inputs(result.graph) if reverse else result.graph
    symbol = rewritten.to_symbol(symbol_class)
    before, after = graph.input_names, symbol.list_inputs()
    if reverse:
        before = before[::-1]
    if after != before:
        raise AmpError(OTHER_ORDER.format(before=before, after=after))
    return symbol
