"""Which operators read the output of a 3-D convolution, as oneDNN lays it out.

In a graph a view of such an output keeps the blocked layout of five axes under a shape of other
axes. In bfloat16 oneDNN's next operator can't read it: "could not create a primitive descriptor for
a reorder primitive"; in float32 it reads the view, but no view of that. Fewer axes do no harm.
"""

from typing import FrozenSet, Sequence, Set

from ...policy.policy import Policy
from ...policy.regions import policy_in
from ...policy.values import kernel_axes
from ..casts.builder import is_inserted
from ..ir import Node, Usage
from .layouts import CONVOLUTIONS

__all__ = ["readers_of_views", "volume_readers"]


def volume_readers(nodes: Sequence[Node], policy: Policy, usage: Usage) -> FrozenSet[int]:
    """Return the nodes that may read a 3-D convolution's output in oneDNN's blocked layout.

    Operators that follow their inputs pass the layout on, or may; no shape needs to be known. An
    array of five axes that is passed in may be what an eager call gave.
    """
    readers: Set[int] = set()
    giving: Set[int] = set()
    for i, node in enumerate(nodes):
        if node.is_variable:
            shape, dtype = usage.shapes.get(node.name, ()), usage.dtypes.get(node.name)
            if len(shape) == len("NCDHW") and dtype == policy.target_dtype:
                giving.add(i)
            continue
        if any(source in giving for source, _ in node.inputs):
            readers.add(i)
        inside = policy_in(policy, node.attrs, usage.off)
        if _gives(node, inside) or (i in readers and _passes_on(node, inside)):
            giving.add(i)
    return frozenset(readers)


def readers_of_views(nodes: Sequence[Node], policy: Policy, usage: Usage) -> FrozenSet[int]:
    """Return the nodes that read a view of what may come from a 3-D convolution, in any dtype.

    In float32 MXNet reads such a view, but no view of it: nothing that begins with one may stand in
    for these nodes.
    """
    readers: Set[int] = set()
    volumes: Set[int] = set()
    views: Set[int] = set()
    for i, node in enumerate(nodes):
        if node.is_variable:
            if len(usage.shapes.get(node.name, ())) == len("NCDHW"):
                volumes.add(i)
            continue
        sources = [source for source, _ in node.inputs if source in volumes]
        if views.intersection(sources):
            readers.add(i)
        rule = policy_in(policy, node.attrs, usage.off).rule(node.operator)
        if sources and rule.looks_at("volume_views"):
            views.add(i)
        if _is_volume_product(node) or (sources and rule.op_class != "low"):
            volumes.add(i)
    return frozenset(readers)


def _gives(node: Node, policy: Policy) -> bool:
    """Tell whether it is a 3-D convolution whose output may be in blocks."""
    return _is_volume_product(node) and not policy.rule(node.operator).missing


def _is_volume_product(node: Node) -> bool:
    if node.operator not in CONVOLUTIONS:
        return False
    # A fused one holds the convolution that it runs.
    inner = [one for body in node.subgraphs for one in body.nodes]
    axes = (kernel_axes(one.attrs) for one in (node, *inner))
    return any(count == len("DHW") for count in axes)


def _passes_on(node: Node, policy: Policy) -> bool:
    # The casts of an earlier conversion are taken out again.
    if node.operator in CONVOLUTIONS or is_inserted(node):
        return is_inserted(node)
    rule = policy.rule(node.operator)
    return rule.op_class in ("neutral", "widest") and not rule.looks_at("volume_views")
