"""Which operators give oneDNN's blocked layout, from operator to operator."""

from dataclasses import dataclass
from typing import FrozenSet, Mapping, Optional, Sequence, Set, Tuple

from ..casts.builder import is_inserted
from ..ir import Node, Output
from . import equivalents
from .equivalents import Shapes

__all__ = [
    "CONVOLUTIONS",
    "NORMS",
    "Site",
    "before_norms",
    "behind_concats",
    "channels",
    "gives_blocks",
    "in_blocks",
    "shapes_layout",
]

NORMS = frozenset({"BatchNorm", "_contrib_BatchNormWithReLU"})

# oneDNN's kernels for these give their output in the layout of their input.
_KEEP_LAYOUT = frozenset({"Activation", "LeakyReLU", "Pooling", "elemwise_add", "Concat"}) | NORMS

# Kernels for these give their output in blocks, where channels allow.
CONVOLUTIONS = frozenset({"Convolution", "Deconvolution", "_sg_mkldnn_conv"})


@dataclass
class Site:
    """An operator and what surrounds it. Shapes are None where they are not known."""

    node: Node
    shapes: Shapes  #: of its inputs
    training: bool
    feeds_norm: bool  #: a BatchNorm reads its output, with nothing between that changes its layout
    blocked: bool  #: its first input is in oneDNN's blocked layout
    uses: int  #: how often the graph reads its second input; 0 where that needs no cast
    casts_weight: bool  #: gradients may be computed, and its second input would be cast
    reads_volume: bool  #: an input may be a 3-D convolution's output, in the blocked layout
    limit: int = 0  #: of the rule that looks at it


def channels(site: Site) -> Optional[Tuple[int, int]]:
    """Return a convolution's channels, in and out."""
    weight = site.shapes[1] if site.shapes[1:] else None
    if weight is None:
        return None
    per_group = weight[1] * int(site.node.attrs.get("num_group", "1"))
    transposed = site.node.operator == "Deconvolution"
    return (weight[0], per_group) if transposed else (per_group, weight[0])


def in_blocks(site: Site, both: Tuple[int, int]) -> bool:
    """Tell whether a convolution with these channels, in and out, has a blocked kernel."""
    read, written = both
    block, four = equivalents.BLOCK, equivalents.COLOURS + 1
    groups = int(site.node.attrs.get("num_group", "1"))
    if groups not in (1, read, written):
        # Half blocks are as good as whole ones, but for a BatchNorm's gradient.
        block = block if site.training else block // 2
        return all(channel % groups == 0 and channel // groups % block == 0 for channel in both)
    return (read % block == 0 or read == four) and written % block == 0


def gives_blocks(site: Site, op_class: str, blocked: Mapping[Output, bool]) -> bool:
    """Tell whether an operator that is not kept in float32 gives a blocked bfloat16 output."""
    operator = site.node.operator
    if operator in CONVOLUTIONS:
        found = channels(site)
        return op_class == "low" and (found is None or in_blocks(site, found))
    if not _keeps_layout(site.node) or site.node.attrs.get("dim", "1") != "1":
        return False
    tensors = site.node.inputs[:1] if operator in NORMS else site.node.inputs
    return all(blocked.get(output, False) for output in tensors)


def shapes_layout(node: Node) -> bool:
    """Tell whether an operator's output may be in blocks."""
    return node.operator in CONVOLUTIONS or _keeps_layout(node)


def _keeps_layout(node: Node) -> bool:
    # The casts of an earlier conversion are taken out again.
    return node.operator in _KEEP_LAYOUT or is_inserted(node)


def behind_concats(nodes: Sequence[Node]) -> FrozenSet[int]:
    """Return the nodes whose output's gradient reaches a Concat of channels as they pass it on.

    oneDNN cuts a gradient in blocks into that of each part, and fails, or ends the process, where
    a part ends within a block of channels.
    """
    behind: Set[int] = set()
    for i, node in enumerate(nodes):
        joins = node.operator == "Concat" and node.attrs.get("dim", "1") == "1"
        if joins or (_keeps_layout(node) and any(source in behind for source, _ in node.inputs)):
            behind.add(i)
    return frozenset(behind)


def before_norms(nodes: Sequence[Node]) -> FrozenSet[int]:
    """Return the nodes whose output reaches a BatchNorm in the layout that they give it."""
    reaching: Set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if not node.is_variable and (
            node.operator in NORMS or (i in reaching and _keeps_layout(node))
        ):
            reaching.update(source for source, _ in node.inputs)
    return frozenset(reaching)
