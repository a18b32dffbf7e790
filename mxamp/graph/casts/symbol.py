"""A graph with its inputs in the reverse order, so that gradients of weights are freed early.

MXNet plans the backward pass by a walk from the gradients, in the order of the graph's inputs.
The gradient of the first layer's weight needs all of the pass; where it is asked for first, the
half-precision gradients of all other weights wait for their casts to float32 until the end: one
more copy of the model, in half precision. Asked for last, each is cast and freed as it is made.
"""

from typing import FrozenSet, Optional, Type

from mxnet.symbol import Symbol

from ...errors import AmpError
from ...policy.active import note_precision
from ...policy.policy import Policy
from ...policy.regions import REGION
from ..ir import Graph, Usage, collector_paused
from ..speed.choices import NONE, Choices
from .builder import is_converted
from .insert import PRECISION, rewrite

__all__ = [
    "own_marks",
    "rewritten_symbol",
    "with_reversed_inputs",
]


def with_reversed_inputs(graph: Graph) -> Graph:
    """Return a graph that computes the same, whose symbol lists its inputs in reverse.

    `graph` has its inputs in the order of its symbol's `list_inputs`, which follows from a
    depth-first walk. The first comes last once all others are among its dependencies, which the
    walk visits and nothing reads.
    """
    inputs = [i for i, node in enumerate(graph.nodes) if node.is_variable]
    operators = [i for i, node in enumerate(graph.nodes) if not node.is_variable]
    places = {old: new for new, old in enumerate([*reversed(inputs), *operators])}
    nodes = [
        graph.nodes[old].reading([(places[i], k) for i, k in graph.nodes[old].inputs])
        for old in places
    ]
    if len(inputs) > 1:
        last = len(inputs) - 1
        nodes[last].control_deps = list(range(last))
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)


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
