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
    channel_counts,
    concat_layout_nodes,
    has_blocked_kernel,
    has_blocked_output,
    input_shapes,
    may_be_blocked,
    nodes_before_norms,
    nodes_before_products,
    volume_readers,
    volume_view_readers,
)
from .substitutions import Match, Substitution

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
# In training, layers that share a weight gain if there are as many (measured: 16 to 20).
_UNROLLED = 16
# In inference, casting a weight costs as much as multiplying it by this many rows saves.
_ROWS_A_CAST = 24


def choose(graph: Graph, policy: Policy, usage: Usage) -> Choices:
    """Return which nodes of a graph stay in float32 by a shape rule, and which are substituted.

    Rules about speed don't apply where a shape that they need is unknown.
    """
    if not any(one.depends_on_shapes for one in node_policies(policy, graph.marks)):
        return NONE
    return _choose(graph, policy, usage, input_shapes(graph, policy, usage))


def _choose(graph: Graph, policy: Policy, usage: Usage, known: Mapping[int, Shapes]) -> Choices:
    """Return the choices for a graph whose operators have the input shapes `known`, by index."""
    policies = [policy_for_node(policy, node.attrs, usage.off) for node in graph.nodes]
    substituted = _matches(graph, policies, policy, usage, known)
    kept = _kept_reasons(graph, policies, policy, usage, known, substituted)
    unknown = replace(usage, dtypes={}, shapes={}, stored=frozenset(), offline=frozenset())
    bodies = {
        (i, k): _choose(body, policy, unknown, {})
        for i, node in enumerate(graph.nodes)
        for k, body in enumerate(node.subgraphs)
    }
    chosen = frozenset((key, body) for key, body in bodies.items() if body != NONE)
    return Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)


def _matches(
    graph: Graph, policies: List[Policy], policy: Policy, usage: Usage, known: Mapping[int, Shapes]
) -> Dict[int, Match]:
    """Return the match of each node to substitute, by index; none when converting."""
    found: Dict[int, Match] = {}
    if usage.converting or not any(one.substitutions for one in policies):
        return found
    views = volume_view_readers(graph.nodes, policy, usage)
    inner: Container[int] = range(len(graph.nodes))
    if usage.training:
        inner = nodes_before_products(graph)
    for i, node in enumerate(graph.nodes):
        if node.is_variable or i in views:
            continue
        match = allowed_match(node, policies[i], usage.training, known.get(i, ()))
        if match is not None and (
            i in inner or not substitutions.ALL[match[0]].multiplies_gradients
        ):
            found[i] = match
    if usage.training and found:
        concats = concat_layout_nodes(_with_single_operators(graph, found))
        for i, (name, _) in list(found.items()):
            if substitutions.ALL[name].blocks_gradients and graph.nodes[i].inputs[0][0] in concats:
                del found[i]
    return found


def _kept_reasons(
    graph: Graph,
    policies: List[Policy],
    policy: Policy,
    usage: Usage,
    known: Mapping[int, Shapes],
    substituted: Mapping[int, Match],
) -> Dict[int, str]:
    """Return why operators stay in float32, by index of the operators that do."""
    kept: Dict[int, str] = {}
    blocked: Dict[Output, bool] = {}
    running = _with_single_operators(graph, substituted)
    norms, readers = nodes_before_norms(running), _reader_counts(graph, usage.stored)
    of_volumes = volume_readers(running, policy, usage)
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            continue
        rule = policies[i].rule(node.operator)
        if not rule.by_shape and i not in substituted and not may_be_blocked(node):
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
        lifted_rules: AbstractSet[str] = frozenset()
        if i in substituted:
            lifted_rules = substitutions.ALL[substituted[i][0]].lifted_rules
        reason = _reason_to_keep(site, rule, lifted_rules)
        if reason is not None:
            kept[i] = reason
        blocked[i, 0] = reason is None and (
            bool(lifted_rules) or has_blocked_output(site, running[i], rule.op_class, blocked)
        )
    return kept


def _with_single_operators(graph: Graph, substituted: Mapping[int, Match]) -> List[Node]:
    """Return the graph's nodes, with the operator of each substitution by a single operator."""
    nodes = list(graph.nodes)
    for i, (name, _) in substituted.items():
        single = substitutions.ALL[name].single
        if single is not None:
            nodes[i] = replace(nodes[i], op=single)
    return nodes


def _reason_to_keep(site: Site, rule: Rule, lifted_rules: AbstractSet[str]) -> Optional[str]:
    """Return the reason of the last rule that keeps an operator in float32; None without one.

    The rules named in `lifted_rules` are left out.
    """
    for one in reversed(rule.by_shape):
        site.limit = one.limit
        if one.name not in lifted_rules and RULES[one.name](site):
            return one.reason
    return None


def _reader_counts(graph: Graph, stored: AbstractSet[str]) -> "Counter[Output]":
    """Return the number of readers of each output, except of variables named in `stored`."""
    return Counter(
        output
        for node in graph.nodes
        for output in node.inputs
        if graph.nodes[output[0]].name not in stored
    )


def _casts_weight(graph: Graph, node: Node, uses: int, policy: Policy, usage: Usage) -> bool:
    """Return whether the graph may be trained and casts the second input, read `uses` times."""
    if not node.inputs[1:] or not (usage.training or usage.converting):
        return False
    weight = graph.nodes[node.inputs[1][0]]
    stored = weight.name in usage.stored or usage.dtypes.get(weight.name) == policy.target_dtype
    cast_offline = weight.name in usage.offline and uses == 1
    return not (weight.is_variable and (stored or cast_offline))


def allowed_match(
    node: Node, policy: Policy, training: bool, shapes: Shapes = ()
) -> Optional[Match]:
    """Return the match of a node's substitution; None without one that `policy` allows.

    A user who sets the class of an operator turns its substitutions off. `shapes` are the shapes of
    the inputs, None where unknown.
    """
    if policy.rule(node.operator).given:
        return None

    def allows(substitution: Substitution) -> bool:
        if substitution.name not in policy.substitutions:
            return False
        if substitution.lowered is None:
            return True
        product = policy.rule(substitution.lowered)
        low = product.op_class == "low" and not product.missing
        return low and not policy.keeps_layer(node.name)

    return substitutions.match_call(node.operator, node.attrs, training, shapes, allows)


# ---------------------------------------------------------------------- the rules


def few_rows(site: Site) -> bool:
    """Return whether the weight of a dense layer is large for the number of rows.

    In training, the backward pass moves and casts the gradient of the weight. Measured: slower
    with up to 32 rows at 1024x1024, 64 at 768x3072 and 256 at 4096x4096. The layers of an unrolled
    cell share one cast of the weight and of its gradient, and gain with any number of rows.

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
    if site.uses >= _UNROLLED:
        return False
    return rows <= min(math.prod(weight) / _WEIGHTS_A_ROW, _MANY_ROWS)


def odd_channels(site: Site) -> bool:
    """Return whether a convolution lacks a blocked bfloat16 kernel, where that costs most.

    If a number of channels is not a multiple of 16, the output has the plain layout, in which a
    BatchNorm is several times slower. With 3 input channels, as in a first layer, the convolution
    itself is slower.
    """
    both = channel_counts(site)
    if both is None:
        return False
    return both[0] <= COLORS or (site.feeds_norm and not has_blocked_kernel(site, both))


def plain_layout(site: Site) -> bool:
    """Return whether the first input of a normalization is not in oneDNN's blocked layout."""
    return not site.blocked


def long_sums(site: Site) -> bool:
    """Return whether a product adds too many terms for a kernel with half-precision sums.

    The rule affects results, so it also applies to eager calls, and where the shape is unknown.
    """
    first = site.shapes[0] if site.shapes else None
    return has_long_sums(site.limit, site.node.operator, site.node.attrs, first)


def cast_weight(site: Site) -> bool:
    """Return whether a transposed convolution would be trained through a cast of its weight.

    This rule affects results too. Eager calls look at the dtype of the weight instead.
    """
    return site.casts_weight


def volume_views(site: Site) -> bool:
    """Return whether a view reads a 3-D convolution's output, as oneDNN can't in bfloat16."""
    return site.reads_volume


#: The shape rules by their names in the operator lists.
RULES: Mapping[str, Callable[[Site], bool]] = {
    rule.__name__: rule
    for rule in (few_rows, odd_channels, plain_layout, long_sums, cast_weight, volume_views)
}
