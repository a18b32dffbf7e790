"""Memory layouts of tensors in a graph on CPUs: which ones oneDNN stores in blocks.

From them, `shape_rules` decides which operators stay in float32 and which get a faster equivalent.
"""

from __future__ import annotations

from typing import AbstractSet, Callable, Mapping, Sequence

from ...framework.operators import with_trait
from ...graph.ir import Graph, Node, Output, Usage
from ...policy.policy import Policy
from ...policy.regions import policy_for_node
from ...policy.rules import Rule
from ...policy.values import parse_integers
from .. import Site
from . import cpu

#: The channels of an image; with one more, oneDNN has a blocked kernel for the convolution.
COLORS = 3
#: The channels in a block of oneDNN's bfloat16 convolutions; `block_size` has those of others.
BLOCK = 16
#: The axes of a batch of images (NCHW), and of the weight of a 2-D convolution (OIHW).
PLANAR_AXES = 4

NORMS = with_trait("batch_norms")
CONVOLUTIONS = with_trait("convolutions")

_VOLUME_AXES = 5  # of a batch of volumes, NCDHW
_VOLUME_KERNEL_AXES = 3


# ---------------------------------------------------------------------- blocked layouts


def block_size(policy: Policy) -> int:
    """Return the channels in a block: 8 in float32 on a CPU without avx512, else 16."""
    return BLOCK if policy.lowers or "avx512" in cpu.onednn_features() else BLOCK // 2


def channel_counts(site: Site) -> tuple[int, int] | None:
    """Return a convolution's numbers of input and output channels; None if unknown."""
    weight = site.shapes[1] if site.shapes[1:] else None
    if weight is None:
        return None
    per_group = weight[1] * int(site.attrs.get("num_group", "1"))
    transposed = site.operator == "Deconvolution"
    return (weight[0], per_group) if transposed else (per_group, weight[0])


def has_blocked_kernel(site: Site, counts: tuple[int, int]) -> bool:
    """Return whether oneDNN has a fast (blocked) kernel for a convolution of these channels."""
    read, written = counts
    groups = int(site.attrs.get("num_group", "1"))
    if groups not in (1, read, written):
        # Half blocks are as fast as whole blocks, except for the gradient of a BatchNorm.
        block = BLOCK if site.training else BLOCK // 2
        return all(channel % groups == 0 and channel // groups % block == 0 for channel in counts)
    return (read % BLOCK == 0 or read == COLORS + 1) and written % BLOCK == 0


def has_blocked_output(
    site: Site, running: Node, op_class: str, blocked: Mapping[Output, bool]
) -> bool:
    """Return whether an operator's bfloat16 output is in oneDNN's blocked memory layout.

    `running` is the node of the site, or the single operator that replaces it. `blocked` holds
    which outputs before it are blocked.
    """
    if running.operator in CONVOLUTIONS:
        found = channel_counts(site)
        return op_class == "low" and (found is None or has_blocked_kernel(site, found))
    if not _keeps_layout(running) or running.attrs.get("dim", "1") != "1":
        return False
    tensors = running.inputs[:1] if running.operator in NORMS else running.inputs
    return all(blocked.get(output, False) for output in tensors)


def _keeps_layout(node: Node) -> bool:
    """Return whether a node's output has the same memory layout as its input."""
    # The rewrite removes the casts of an earlier conversion.
    return node.operator in with_trait("keeps_layout") or node.is_inserted_cast


def follows_concat(node: Node, concats: AbstractSet[int]) -> bool:
    """Return whether a node is a Concat of channels, or shares the memory layout of one.

    A blocked gradient of such a node reaches the Concat, where oneDNN splits it among the inputs.
    oneDNN fails, or crashes the process, if an input ends within a block of channels.
    """
    if node.operator == "Concat" and node.attrs.get("dim", "1") == "1":
        return True
    return _keeps_layout(node) and any(source in concats for source, _ in node.inputs)


def nodes_before_norms(nodes: Sequence[Node]) -> frozenset[int]:
    """Return the indexes of nodes whose output reaches a BatchNorm in unchanged memory layout."""
    return _nodes_before(nodes, NORMS, _keeps_layout)


def nodes_of_plain_layout(graph: Graph) -> frozenset[int]:
    """Return the indexes of nodes whose consumers can't read oneDNN's blocked layout.

    An RNN, a softmax or a slice reads it, or the program gets it from a graph with convolutions.
    Operators that work in place keep the layout of their input, whatever their kernel.
    """
    ends_layout = with_trait("leaves_blocks") | with_trait("spreads_infinity")

    def keeps(node: Node) -> bool:
        return not node.is_variable and node.operator not in ends_layout

    has_blocks = any(node.operator in CONVOLUTIONS for node in graph.nodes)
    heads = {i for i, _ in graph.heads if has_blocks}
    return _nodes_before(graph.nodes, with_trait("reads_plain_layout"), keeps, heads)


def _nodes_before(
    nodes: Sequence[Node],
    ends: AbstractSet[str],
    keeps: Callable[[Node], bool],
    heads: AbstractSet[int] = frozenset(),
) -> frozenset[int]:
    """Return indexes of nodes that lead to operators `ends` via nodes for which `keeps` is true."""
    reaching = {*heads}
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if node.operator in ends or (i in reaching and keeps(node)):
            reaching.update(source for source, _ in node.inputs)
    return frozenset(reaching)


# ---------------------------------------------------------------------- consumers


def nodes_with_consumers(graph: Graph, fits: Callable[[Node, int, bool], bool]) -> frozenset[int]:
    """Return the indexes of nodes, except graph outputs, whose consumers all satisfy `fits`.

    `fits(consumer, position, found)` gets a consumer, the position of the input that it reads, and
    whether the consumer is itself one of the nodes to return.
    """
    found = set(range(len(graph.nodes))) - {i for i, _ in graph.heads}
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        reads = enumerate(node.inputs)
        found.difference_update(j for k, (j, _) in reads if not fits(node, k, i in found))
    return frozenset(found)


def nodes_before_products(graph: Graph) -> frozenset[int]:
    """Return the indexes of nodes whose outputs reach only convolutions and dense layers."""
    ends = with_trait("spreads_infinity")
    passing = with_trait("passes_gradient") | with_trait("keeps_finite")
    return nodes_with_consumers(
        graph, lambda node, _, found: node.operator in ends or (found and node.operator in passing)
    )


# ---------------------------------------------------------------------- views of volumes
# In a graph, a view of a 3-D convolution's output keeps the blocked layout of five axes under a
# shape with other axes. In bfloat16, oneDNN's next operator can't read the view: "could not create
# a primitive descriptor for a reorder primitive". In float32 it reads the view, but not a view of
# the view.


def volume_readers(nodes: Sequence[Node], policy: Policy, usage: Usage) -> frozenset[int]:
    """Return indexes of nodes that may read a 3-D convolution's output in oneDNN's blocked layout.

    Operators that follow their inputs may keep the layout, whatever the shape. An input of five
    axes may be the result of an eager call.
    """

    def keeps(node: Node) -> bool:
        if node.is_variable:
            return usage.dtypes.get(node.name) == policy.target_dtype
        if node.operator in CONVOLUTIONS or node.is_inserted_cast:
            return node.is_inserted_cast  # the rewrite removes the casts of an earlier conversion
        rule = policy_for_node(policy, node.attrs, usage.regions_only).rule(node.operator)
        return rule.op_class in ("neutral", "widest") and not rule.has_shape_rule("volume_views")

    return frozenset(_volumes(nodes, usage, keeps)[1])


def volume_view_readers(nodes: Sequence[Node], policy: Policy, usage: Usage) -> frozenset[int]:
    """Return the indexes of nodes that may read a reshaped view of a 3-D convolution's output.

    An equivalent that begins with a view can't replace these nodes.
    """

    def rule_of(node: Node) -> Rule:
        return policy_for_node(policy, node.attrs, usage.regions_only).rule(node.operator)

    volumes, readers = _volumes(
        nodes, usage, lambda node: node.is_variable or rule_of(node).op_class != "low"
    )
    views = {i for i in volumes & readers if rule_of(nodes[i]).has_shape_rule("volume_views")}
    return frozenset(i for i in readers if any(j in views for j, _ in nodes[i].inputs))


def _volumes(
    nodes: Sequence[Node], usage: Usage, keeps: Callable[[Node], bool]
) -> tuple[set[int], set[int]]:
    """Return the nodes that may output a 3-D convolution's result, and the nodes that read them.

    `keeps` says whether an input of five axes, or a node that reads a volume, may hold one.
    """
    volumes: set[int] = set()
    readers: set[int] = set()
    for i, node in enumerate(nodes):
        if any(source in volumes for source, _ in node.inputs):
            readers.add(i)
        has_volume_shape = len(usage.shapes.get(node.name) or ()) == _VOLUME_AXES
        may_hold = has_volume_shape if node.is_variable else i in readers
        if _is_volume_product(node) or (may_hold and keeps(node)):
            volumes.add(i)
    return volumes, readers


def _is_volume_product(node: Node) -> bool:
    """Return whether a node is a 3-D convolution, fused or not."""
    if node.operator not in CONVOLUTIONS:
        return False
    # An operator fused by oneDNN holds its convolution in a subgraph.
    inner = [one for body in node.subgraphs for one in body.nodes]
    kernels = (parse_integers(one.attrs.get("kernel", "()")) for one in (node, *inner))
    return any(len(kernel) == _VOLUME_KERNEL_AXES for kernel in kernels)
