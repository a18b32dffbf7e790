"""What the shapes and the neighbours of a graph's operators decide, before it is rewritten.

Some bfloat16 kernels are fast or slow by shape, and by the memory layout that their input comes
in. The rules here keep such an operator in float32; the operator lists say which rules look at
which operators, and what was measured.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import AbstractSet, Callable, Dict, Mapping, Optional, Tuple

from ...policy.policy import Policy
from ...policy.regions import policies_of, policy_in
from ...policy.rules import Rule, terms
from ...policy.values import flattens
from ..ir import Graph, Node, Output, Usage
from . import equivalents, substitutions
from .choices import NONE, Choices, StandIn
from .edges import feeding_products
from .equivalents import Shapes
from .input_shapes import input_shapes
from .layouts import (
    Site,
    before_norms,
    behind_concats,
    channels,
    gives_blocks,
    in_blocks,
    shapes_layout,
)
from .volumes import readers_of_views, volume_readers

__all__ = ["RULES", "choose", "stand_in"]

# Dense layers in training: with more rows they gain whatever the weight's size; see `few_rows`.
_MANY_ROWS = 256
_WEIGHTS_A_ROW = 2**15
# In inference: what casting a weight costs, in rows that it is multiplied by.
_ROWS_A_CAST = 24


def choose(graph: Graph, policy: Policy, usage: Usage) -> Choices:
    """Return what `policy` chooses for a graph that is used like this.

    Rules about speed don't apply where a shape that they need is not known.
    """
    if not any(one.chooses for one in policies_of(policy, graph.marks)):
        return NONE
    return _choose(graph, policy, usage, input_shapes(graph, policy, usage))


def _choose(graph: Graph, policy: Policy, usage: Usage, known: Mapping[int, Shapes]) -> Choices:
    kept: Dict[int, str] = {}
    substituted: Dict[int, StandIn] = {}
    policies = [policy_in(policy, node.attrs, usage.off) for node in graph.nodes]
    substitutes = any(one.substitutions for one in policies)
    trains = substitutes and usage.training
    views = readers_of_views(graph.nodes, policy, usage) if substitutes else ()
    inner = feeding_products(graph) if trains else range(len(graph.nodes))
    for i, node in enumerate(graph.nodes):
        found = None
        if not (node.is_variable or i in views or usage.converting):
            found = stand_in(node, policies[i], usage.training, known.get(i, ()))
        if found is not None and (
            i in inner or not substitutions.ALL[found[0]].multiplies_gradients
        ):
            substituted[i] = found
    running = [_as_run(node, substituted.get(i)) for i, node in enumerate(graph.nodes)]
    concats = behind_concats(running) if usage.training else ()
    for i, (name, _) in list(substituted.items()):
        if substitutions.ALL[name].blocks_gradients and graph.nodes[i].inputs[0][0] in concats:
            del substituted[i]
    bodies: Dict[Tuple[int, int], Choices] = {}
    norms, readers = before_norms(running), _cast_readers(graph, usage.stored)
    of_volumes = volume_readers(running, policy, usage)
    blocked: Dict[Output, bool] = {}
    unknown = replace(usage, dtypes={}, shapes={}, stored=frozenset(), offline=frozenset())
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            continue
        for k, body_graph in enumerate(node.subgraphs):
            bodies[i, k] = _choose(body_graph, policy, unknown, {})
        rule = policies[i].rule(node.operator)
        if not rule.by_shape and i not in substituted and not shapes_layout(node):
            continue
        first = bool(node.inputs) and blocked.get(node.inputs[0], False)
        uses = readers.get(node.inputs[1], 0) if len(node.inputs) > 1 else 0
        through_cast = _casts_weight(graph, node, uses, policies[i], usage)
        shapes = known.get(i, ())
        site = Site(
            node, shapes, usage.training, i in norms, first, uses, through_cast, i in of_volumes
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
    chosen = frozenset((key, body) for key, body in bodies.items() if body != NONE)
    return Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)


def _as_run(node: Node, substitution: Optional[StandIn]) -> Node:
    """Return the node that runs: the one that stands in for it, where it is one."""
    single = substitution and substitutions.ALL[substitution[0]].single
    return replace(node, op=single) if single else node


def _reason_to_keep(site: Site, rule: Rule, answered: AbstractSet[str]) -> Optional[str]:
    """Return why an operator stays in float32: the last of the rules that say so."""
    reasons = rule.by_shape and [
        one.reason
        for one in rule.by_shape
        if one.name not in answered and RULES[one.name](replace(site, limit=one.limit))
    ]
    return reasons[-1] if reasons else None


def _cast_readers(graph: Graph, stored: AbstractSet[str]) -> "Counter[Output]":
    """Count the readers of each output that has to be cast."""
    return Counter(
        output
        for node in graph.nodes
        for output in node.inputs
        if graph.nodes[output[0]].name not in stored
    )


def _casts_weight(graph: Graph, node: Node, uses: int, policy: Policy, usage: Usage) -> bool:
    """Tell whether the second input is cast by the graph, and gradients may be computed."""
    if not node.inputs[1:] or not (usage.training or usage.converting):
        return False
    weight = graph.nodes[node.inputs[1][0]]
    stored = weight.name in usage.stored or usage.dtypes.get(weight.name) == policy.target_dtype
    alone = weight.name in usage.offline and uses == 1
    return not (weight.is_variable and (stored or alone))


def stand_in(node: Node, policy: Policy, training: bool, shapes: Shapes = ()) -> Optional[StandIn]:
    """Return what stands in for an operator, unless a user has classed that operator.

    `shapes` are those of its inputs, where they are known.
    """
    rule = policy.rule(node.operator)
    fitting = substitutions.find(node.operator, node.attrs, training, shapes)
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
    """Find dense layers whose weight is large for the rows it is multiplied by.

    In training the backward pass then spends its time on moving and casting the weight's gradient.
    Measured to lose up to 16 to 32 rows at 1024x1024, 64 at 768x3072 and 256 at 4096x4096.

    In inference it is the cast of the weight that costs, unless the weight is stored in bfloat16:
    as much as some 23 rows gain, by 1.46 times for 64 rows at 4096x4096 where the product alone
    is 1.95 times as fast.
    """
    if len(site.shapes) < len(("data", "weight")):
        return False
    data, weight = site.shapes[:2]
    if data is None or weight is None:
        return False
    flatten = flattens(site.node.attrs)
    rows = data[0] if flatten else math.prod(data[:-1])
    if not site.training:
        return 0 < rows * site.uses <= _ROWS_A_CAST
    return rows <= min(math.prod(weight) / _WEIGHTS_A_ROW, _MANY_ROWS)


def odd_channels(site: Site) -> bool:
    """Find convolutions without a blocked bfloat16 kernel, where that costs most.

    With channels that are no multiples of 16 its output has the plain layout, in which a BatchNorm
    behind it is 5 times slower; with 3 input channels, a first layer, it is slower itself.
    """
    both = channels(site)
    if both is None:
        return False
    return both[0] <= equivalents.COLOURS or (site.feeds_norm and not in_blocks(site, both))


def plain_layout(site: Site) -> bool:
    """Find normalisations whose input is not in oneDNN's blocked layout."""
    return not site.blocked


def long_sums(site: Site) -> bool:
    """Find products that sum more terms than a kernel with half-precision sums should.

    It is about right results: it holds in eager calls too, and where the shape is not known.
    """
    count = terms(site.node.operator, site.node.attrs, site.shapes[0] if site.shapes else None)
    return count is None or count > site.limit


def cast_weight(site: Site) -> bool:
    """Find transposed convolutions that would be trained through a cast of their weight.

    This one too is about right results. Eager calls know by the weight's dtype.
    """
    return site.casts_weight


def volume_views(site: Site) -> bool:
    """Find views of what a 3-D convolution has computed, which oneDNN can't read in bfloat16.

    It is about what runs at all, in graphs: eager calls read such a view.
    """
    return site.reads_volume


#: By the names that operator lists call them.
RULES: Mapping[str, Callable[[Site], bool]] = {
    rule.__name__: rule
    for rule in (few_rows, odd_channels, plain_layout, long_sums, cast_weight, volume_views)
}
