"""The shapes that choices look at: those of operators' first two inputs, as MXNet infers them."""

from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from mxnet.base import MXNetError

from ..policy.policy import Policy
from . import substitutions
from .graph import Graph, Node, Output
from .usage import Shape, Usage

__all__ = ["Pair", "input_shapes"]

Pair = Tuple[Optional[Shape], Optional[Shape]]


def input_shapes(graph: Graph, policy: Policy, usage: Usage) -> Dict[int, Pair]:
    """Return the shapes of the first two inputs of operators, as far as a choice looks at them."""
    shapes: Dict[Output, Optional[Shape]] = {
        (i, 0): usage.shapes.get(node.name)
        for i, node in enumerate(graph.nodes)
        if node.is_variable
    }
    wanted: Dict[int, Tuple[Optional[Output], Optional[Output]]] = {}
    for i, node in enumerate(graph.nodes):
        looked_at = () if node.is_variable else _looked_at(node, policy, usage)
        if looked_at:
            first, second = (node.inputs[k] if k in looked_at else None for k in (0, 1))
            wanted[i] = first, second
    asked = {o for pair in wanted.values() for o in pair if o is not None and shapes.get(o) is None}
    if asked and any(shapes.values()):
        # The operators too: the shapes of their parameters follow from the other inputs.
        shapes.update(_infer(graph, [*asked, *((i, 0) for i in wanted)], usage.shapes))
    return {
        i: (shapes.get(first) if first else None, shapes.get(second) if second else None)
        for i, (first, second) in wanted.items()
    }


def _looked_at(node: Node, policy: Policy, usage: Usage) -> FrozenSet[int]:
    """Return the positions of the inputs whose shapes a choice for `node` depends on."""
    rows = not usage.converting  # no choice looks at the shapes of data that are not known yet
    positions: Set[int] = set()
    for rule in policy.rule(node.operator).by_shape:
        if rule.name == "few_rows" and rows:
            positions |= {0, 1}
        elif rule.name == "long_sums" and rows:
            positions.add(0)
        elif rule.name == "odd_channels":
            positions.add(1)
    if rows and node.operator in substitutions.BY_SHAPE:
        positions.update(substitutions.BY_SHAPE[node.operator])
    return frozenset(positions)


def _infer(
    graph: Graph, outputs: Sequence[Output], shapes: Mapping[str, Shape]
) -> Dict[Output, Shape]:
    """Return the shapes of those outputs that MXNet can infer."""
    every = _visible_outputs(graph)
    if every is not None and graph.symbol is not None:
        outputs, symbol = every, graph.symbol.get_internals()
    else:
        symbol = Graph(graph.nodes, list(outputs), graph.attrs).to_symbol()
    inputs = set(symbol.list_inputs())
    try:
        known = {name: shape for name, shape in shapes.items() if name in inputs}
        _, inferred, _ = symbol.infer_shape_partial(**known)
    except MXNetError:
        return {}  # the graph can't run on these shapes; MXNet will say why
    return {output: shape for output, shape in zip(outputs, inferred or ()) if _known(shape)}


def _visible_outputs(graph: Graph) -> Optional[Sequence[Output]]:
    """Return the outputs that the internals of a graph's symbol list, in their order.

    None where that can't be told: the internals list their names, without the outputs that
    operators hide, such as the mean and the variance of `BatchNorm`.
    """
    if graph.symbol is None:
        return None
    names = graph.symbol.get_internals().list_outputs()
    listed: List[Output] = []
    for i, node in enumerate(graph.nodes):
        following = graph.nodes[i + 1].name if i + 1 < len(graph.nodes) else ""
        for k in range(node.num_outputs):
            name = names[len(listed)] if len(listed) < len(names) else ""
            its_own = name == node.name if node.is_variable else name.startswith(f"{node.name}_")
            if k and (not its_own or name in (following, f"{following}_output")):
                break
            if not its_own:
                return None
            listed.append((i, k))
    return listed if len(listed) == len(names) else None


def _known(shape: Optional[Shape]) -> bool:
    # Classic semantics write 0 for what is unknown, NumPy's -1.
    return bool(shape) and min(shape or ()) > 0
