"""The shapes that choices look at: those of operators' inputs, as MXNet infers them."""

from typing import Any, Dict, FrozenSet, Mapping, Optional, Sequence, Set

from mxnet.base import MXNetError

from ...policy.policy import Policy
from ...policy.regions import policy_in
from ..ir import Graph, Node, Output, Shape, Usage, alone
from . import substitutions
from .equivalents import Shapes

__all__ = ["input_shapes"]

#: How many of their outputs operators of several show, by call; it never changes.
_shown: Dict[Any, int] = {}


def input_shapes(graph: Graph, policy: Policy, usage: Usage) -> Dict[int, Shapes]:
    """Return the shapes of operators' inputs, as far as a choice looks at them."""
    shapes: Dict[Output, Optional[Shape]] = {
        (i, 0): usage.shapes.get(node.name)
        for i, node in enumerate(graph.nodes)
        if node.is_variable
    }
    wanted: Dict[int, Sequence[Optional[Output]]] = {}
    for i, node in enumerate(graph.nodes):
        looked_at = () if node.is_variable else _looked_at(node, policy, usage)
        if looked_at:
            wanted[i] = [
                output if k in looked_at else None
                for k, output in enumerate(node.inputs[: max(looked_at) + 1])
            ]
    asked = {o for few in wanted.values() for o in few if o is not None and shapes.get(o) is None}
    if asked and any(shapes.values()):
        # The operators too: the shapes of their parameters follow from the other inputs.
        shapes.update(_infer(graph, [*asked, *((i, 0) for i in wanted)], usage.shapes))
    return {
        i: tuple([None if output is None else shapes.get(output) for output in outputs])
        for i, outputs in wanted.items()
    }


def _looked_at(node: Node, policy: Policy, usage: Usage) -> FrozenSet[int]:
    """Return the positions of the inputs whose shapes a choice for `node` depends on."""
    rows = not usage.converting  # no choice looks at the shapes of data that are not known yet
    positions: Set[int] = set()
    for rule in policy_in(policy, node.attrs, usage.off).rule(node.operator).by_shape:
        if rule.name == "few_rows" and rows:
            positions |= {0, 1}
        elif rule.name == "long_sums" and rows:
            positions.add(0)
        elif rule.name == "odd_channels":
            positions.add(1)
    if rows and node.operator in substitutions.BY_SHAPE:
        wanted = substitutions.BY_SHAPE[node.operator]
        positions.update(range(len(node.inputs)) if wanted is None else wanted)
    return frozenset(positions)


def _infer(
    graph: Graph, outputs: Sequence[Output], shapes: Mapping[str, Shape]
) -> Dict[Output, Shape]:
    """Return the shapes of those outputs that MXNet can infer."""
    if graph.symbol is not None:
        outputs, symbol = _visible_outputs(graph), graph.symbol.get_internals()
    else:
        symbol = Graph(graph.nodes, list(outputs), graph.attrs).to_symbol()
    inputs = set(symbol.list_inputs())
    try:
        known = {name: shape for name, shape in shapes.items() if name in inputs}
        _, inferred, _ = symbol.infer_shape_partial(**known)
    except MXNetError:
        return {}  # the graph can't run on these shapes; MXNet will say why
    return {output: shape for output, shape in zip(outputs, inferred or ()) if _known(shape)}


def _visible_outputs(graph: Graph) -> Sequence[Output]:
    """Return the outputs that the internals of a graph's symbol list, in their order.

    These lack what operators hide, such as the mean and the variance of `BatchNorm`.
    """
    return [(i, k) for i, node in enumerate(graph.nodes) for k in range(_visible(node))]


def _visible(node: Node) -> int:
    """Return how many of its outputs an operator shows: MXNet is asked on a graph of its own."""
    if node.num_outputs == 1:
        return 1
    key = (*node.call, len(node.inputs))
    if key not in _shown:
        symbol = alone(node, [{}] * len(node.inputs))
        _shown[key] = len(symbol.get_internals().list_outputs()) - len(node.inputs)
    return _shown[key]


def _known(shape: Optional[Shape]) -> bool:
    # Classic semantics write 0 for what is unknown, NumPy's -1.
    return bool(shape) and min(shape or ()) > 0
