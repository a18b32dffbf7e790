"""Choices by shape, before a graph is rewritten: operators kept in float32, and equivalents.

Some bfloat16 kernels are fast or slow depending on shapes and on the memory layout of their input.
The rules here keep a slow operator in float32. The operator lists say which rules apply to which
operators, and the measurements behind them.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import (
    AbstractSet,
    Callable,
    Container,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
)

from ...policy.policy import Policy
from ...policy.regions import node_policies, policy_for_node
from ...policy.rules import Rule, has_long_sums
from ...policy.values import flattens_data
from ..ir import Graph, Node, Output, Usage
from . import substitutions
from .equivalents import COLORS, Shapes
from .shapes import (
    Site,
    before_norms,
    behind_concats,
    channels,
    feeding_products,
    gives_blocks,
    in_blocks,
    input_shapes,
    may_give_blocks,
    readers_of_views,
    volume_readers,
)
from .substitutions import Match

__all__ = ["NONE", "RULES", "Choices", "allowed_match", "choose"]


class Choices(NamedTuple):
    """The choices for a graph, by node index: reasons to keep nodes in float32, and substitutions.

    `bodies` hold the choices for bodies of loops, by (index of the loop, position of the body).
    Graphs with equal choices share a compiled graph.
    """

    kept: FrozenSet[Tuple[int, str]] = frozenset()
    substituted: FrozenSet[Tuple[int, Match]] = frozenset()
    bodies: FrozenSet[Tuple[Tuple[int, int], "Choices"]] = frozenset()


NONE = Choices()

# Dense layers in training gain with more rows than this, whatever the size of the weight.
_MANY_ROWS = 256
_WEIGHTS_A_ROW = 2**15
# In inference, casting a weight costs as much as multiplying it by this many rows saves.
_ROWS_A_CAST = 24


def choose(graph: Graph, policy: Policy, usage: Usage) -> Choices:
    """Return which nodes of a graph shape rules keep in float32, and which are substituted.

    Rules about speed don't apply where a shape that they need is unknown.
    """
    if not any(one.depends_on_shapes for one in node_policies(policy, graph.marks)):
        return NONE
    return _choose(graph, policy, usage, input_shapes(graph, policy, usage))


def _choose(graph: Graph, policy: Policy, usage: Usage, known: Mapping[int, Shapes]) -> Choices:
    policies = [policy_for_node(policy, node.attrs, usage.off) for node in graph.nodes]
    substituted = _substitutions(graph, policies, policy, usage, known)
    kept = _kept(graph, policies, policy, usage, known, substituted)
    unknown = replace(usage, dtypes={}, shapes={}, stored=frozenset(), offline=frozenset())
    bodies = {
        (i, k): _choose(body, policy, unknown, {})
        for i, node in enumerate(graph.nodes)
        for k, body in enumerate(node.subgraphs)
    }
    chosen = frozenset((key, body) for key, body in bodies.items() if body != NONE)
    return Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)


def _substitutions(
    graph: Graph, policies: List[Policy], policy: Policy, usage: Usage, known: Mapping[int, Shapes]
) -> Dict[int, Match]:
    """Return the substitutions in a graph that is about to run, by node index."""
    found: Dict[int, Match] = {}
    if usage.converting or not any(one.substitutions for one in policies):
        return found
    views = readers_of_views(graph.nodes, policy, usage)
    inner: Container[int] = range(len(graph.nodes))
    if usage.training:
        inner = feeding_products(graph)
    for i, node in enumerate(graph.nodes):
        if node.is_variable or i in views:
            continue
        fitting = allowed_match(node, policies[i], usage.training, known.get(i, ()))
        if fitting is not None and (
            i in inner or not substitutions.ALL[fitting[0]].multiplies_gradients
        ):
            found[i] = fitting
    if usage.training and found:
        concats = behind_concats(_as_run(graph, found))
        for i, (name, _) in list(found.items()):
            if substitutions.ALL[name].blocks_gradients and graph.nodes[i].inputs[0][0] in concats:
                del found[i]
    return found


def _kept(
    graph: Graph,
    policies: List[Policy],
    policy: Policy,
    usage: Usage,
    known: Mapping[int, Shapes],
    substituted: Mapping[int, Match],
) -> Dict[int, str]:
    """Return the reasons of the operators that stay in float32, by node index."""
    kept: Dict[int, str] = {}
    blocked: Dict[Output, bool] = {}
    running = _as_run(graph, substituted)
    norms, readers = before_norms(running), _cast_readers(graph, usage.stored)
    of_volumes = volume_readers(running, policy, usage)
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            continue
        rule = policies[i].rule(node.operator)
        if not rule.by_shape and i not in substituted and not may_give_blocks(node):
            continue
        uses = readers.get(node.inputs[1], 0) if len(node.inputs) > 1 else 0
        site = Site(
            node,
            known.get(i, ()),
            usage.training,
            feeds_norm=i in norms,
            blocked=bool(node.inputs) and blocked.get(node.inputs[0], False),
            uses=uses,
            casts_weight=_casts_weight(graph, node, uses, policies[i], usage),
            reads_volume=i in of_volumes,
        )
        answered: AbstractSet[str] = frozenset()
        if i in substituted:
            answered = substitutions.ALL[substituted[i][0]].answers
        reason = _reason_to_keep(site, rule, answered)
        if reason is not None:
            kept[i] = reason
        blocked[i, 0] = reason is None and (
            bool(answered) or gives_blocks(replace(site, node=running[i]), rule.op_class, blocked)
        )
    return kept


def _as_run(graph: Graph, substituted: Mapping[int, Match]) -> List[Node]:
    """Return the graph's nodes, with the new operator where one operator replaces a node."""
    nodes = list(graph.nodes)
    for i, (name, _) in substituted.items():
        single = substitutions.ALL[name].single
        if single is not None:
            nodes[i] = replace(nodes[i], op=single)
    return nodes


def _reason_to_keep(site: Site, rule: Rule, answered: AbstractSet[str]) -> Optional[str]:
    """Return the reason of the last rule that keeps an operator in float32."""
    for one in reversed(rule.by_shape):
        if one.name not in answered and RULES[one.name](replace(site, limit=one.limit)):
            return one.reason
    return None


def _cast_readers(graph: Graph, stored: AbstractSet[str]) -> "Counter[Output]":
    """Count the readers of each output that has to be cast."""
    return Counter(
        output
        for node in graph.nodes
        for output in node.inputs
        if graph.nodes[output[0]].name not in stored
    )


def _casts_weight(graph: Graph, node: Node, uses: int, policy: Policy, usage: Usage) -> bool:
    """Return whether the graph casts the second input and may compute gradients."""
    if not node.inputs[1:] or not (usage.training or usage.converting):
        return False
    weight = graph.nodes[node.inputs[1][0]]
    stored = weight.name in usage.stored or usage.dtypes.get(weight.name) == policy.target_dtype
    cast_offline = weight.name in usage.offline and uses == 1
    return not (weight.is_variable and (stored or cast_offline))


def allowed_match(
    node: Node, policy: Policy, training: bool, shapes: Shapes = ()
) -> Optional[Match]:
    """Return the substitution for an operator, unless the user has set that operator's class.

    `shapes` are the shapes of its inputs, None where unknown.
    """
    rule = policy.rule(node.operator)
    fitting = substitutions.match_call(node.operator, node.attrs, training, shapes)
    if fitting is None or fitting[0] not in policy.substitutions or rule.given:
        return None
    substitution = substitutions.ALL[fitting[0]]
    if substitution.lowered is not None:
        product = policy.rule(substitution.lowered)
        if product.op_class != "low" or product.missing or policy.keeps_layer(node.name):
            return None
    return fitting


# ---------------------------------------------------------------------- the rules


def few_rows(site: Site) -> bool:
    """Find dense layers whose weight is large for the number of rows.

    In training, the backward pass moves and casts the gradient of the weight. Measured: slower
    with up to 32 rows at 1024x1024, 64 at 768x3072 and 256 at 4096x4096.

    In inference, casting the weight costs as much time as bfloat16 saves on about 23 rows, unless
    the weight is stored in bfloat16.
    """
    data, weight = (*site.shapes, None, None)[:2]
    if data is None or weight is None:
        return False
    flatten = flattens_data(site.node.attrs)
    rows = data[0] if flatten else math.prod(data[:-1])
    if not site.training:
        return 0 < rows * site.uses <= _ROWS_A_CAST
    return rows <= min(math.prod(weight) / _WEIGHTS_A_ROW, _MANY_ROWS)


def odd_channels(site: Site) -> bool:
    """Find convolutions without a blocked bfloat16 kernel, where that costs most.

    If a number of channels is not a multiple of 16, the output has the plain layout, in which a
    BatchNorm is several times slower. With 3 input channels, as in a first layer, the convolution
    itself is slower.
    """
    both = channels(site)
    if both is None:
        return False
    return both[0] <= COLORS or (site.feeds_norm and not in_blocks(site, both))


def plain_layout(site: Site) -> bool:
    """Find normalizations whose input is not in oneDNN's blocked layout."""
    return not site.blocked


def long_sums(site: Site) -> bool:
    """Find products that add too many terms for a kernel with half-precision sums.

    The rule affects results, so it also applies to eager calls, and where the shape is unknown.
    """
    first = site.shapes[0] if site.shapes else None
    return has_long_sums(site.limit, site.node.operator, site.node.attrs, first)


def cast_weight(site: Site) -> bool:
    """Find transposed convolutions that would be trained through a cast of their weight.

    This rule affects results too. Eager calls look at the dtype of the weight instead.
    """
    return site.casts_weight


def volume_views(site: Site) -> bool:
    """Find views of a 3-D convolution's output, which oneDNN can't read in bfloat16 graphs."""
    return site.reads_volume


#: The shape rules by their names in the operator lists.
RULES: Mapping[str, Callable[[Site], bool]] = {
    rule.__name__: rule
    for rule in (few_rows, odd_channels, plain_layout, long_sums, cast_weight, volume_views)
}
