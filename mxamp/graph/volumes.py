"""Which operators read the output of a 3-D convolution, as oneDNN lays it out.

In a graph a view of such an output, in bfloat16, keeps the blocked layout of five axes under a
shape of other axes, and oneDNN's next operator can't read it: "could not create a primitive
descriptor for a reorder primitive". The same in fewer axes runs, and so do eager calls.
"""

from typing import FrozenSet, Sequence, Set

from ..policy.policy import Policy
from .builder import is_inserted
from .graph import Node
from .usage import Usage

__all__ = ["kernel_axes", "volume_readers"]

_PRODUCTS = frozenset({"Convolution", "Deconvolution", "_sg_mkldnn_conv"})


def volume_readers(nodes: Sequence[Node], policy: Policy, usage: Usage) -> FrozenSet[int]:
    """Return the nodes that may read a 3-D convolution's output in bfloat16's blocked layout.

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
        if _gives(node, policy) or (i in readers and _passes_on(node, policy)):
            giving.add(i)
    return frozenset(readers)


def kernel_axes(node: Node) -> int:
    """Return how many axes a convolution's or a pooling's kernel has, 0 where it is not given."""
    sizes = node.attrs.get("kernel", "()").strip("()[] ,")
    return len(sizes.split(",")) if sizes else 0


def _gives(node: Node, policy: Policy) -> bool:
    """Tell whether it is a 3-D convolution that may run in bfloat16."""
    if node.operator not in _PRODUCTS:
        return False
    rule = policy.rule(node.operator)
    # A fused one holds the convolution that it runs.
    inner = [one for body in node.subgraphs for one in body.nodes]
    volumes = any(kernel_axes(one) == len("DHW") for one in (node, *inner))
    return volumes and rule.op_class != "fp32" and not rule.missing


def _passes_on(node: Node, policy: Policy) -> bool:
    # The casts of an earlier conversion are taken out again.
    if node.operator in _PRODUCTS or is_inserted(node):
        return is_inserted(node)
    rule = policy.rule(node.operator)
    return rule.op_class in ("neutral", "widest") and not rule.looks_at("volume_views")
