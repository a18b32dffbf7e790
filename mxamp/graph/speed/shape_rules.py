"""Choices by shape, before a graph is rewritten: operators kept in float32, and equivalents.

Some bfloat16 kernels are fast or slow depending on shapes and on the memory layout of their input.
The rules here keep a slow operator in float32. The operator lists say which rules apply to which
operators, and the measurements behind them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import Callable, Mapping, Sequence

from ...policy.policy import Policy
from ...policy.regions import REGION, policy_for_node
from ...policy.rules import Reason, Rule, ShapeRule, has_long_sums
from ...policy.values import flattens_data
from ..ir import Graph, Node, Output, Usage, body_usage, infer_dtypes, rewrites_bodies
from . import recurrent
from . import shapes as layouts
from .passes import BLOCK, COLORS, Call, Shapes
from .shapes import Site
from .substitutions import ACTIVATIONS, ALL, BLOCKED, NONE, OPERATORS, Choices, Match, match_call

SMALL_LAYERS = "small_layers"
# Dense layers in training gain with more rows than this, whatever the size of the weight.
_MANY_ROWS = 256
_WEIGHTS_A_ROW = 2**15
# In training, layers that share a weight gain if there are as many (measured: 16 to 20).
_UNROLLED = 16
# In inference, casting a weight costs as much as multiplying it by this many rows saves.
_ROWS_A_CAST = 24
# Elements of such a weight from which any number of rows gains.
_LARGE_SHARED = 2**16
# Convolutions with as many channels gain without a blocked kernel: in inference, in training, and
# in training with 1 x 1 kernels.
_MANY_CHANNELS, _MANY_TRAINED, _MANY_POINTWISE = 32, 40, 48
# Dense layers with fewer outputs lose. With fewer rows the layer takes no time worth a rule.
_FEW_COLUMNS, _ROWS_OF_COLUMNS = 32, 128
# The limit of small dense layers in training relative to inference: gradients are cast too.
# Measured on nets of 1 to 6 layers: at 2 to 4 million multiplications a layer 0.95 to 1.07 of
# float32's time, the more in large first layers, which compute no gradient of their data.
_TIMES_IN_TRAINING = 2


def choose(graph: Graph, policy: Policy, usage: Usage) -> Choices:
    """Return which nodes of a graph stay in float32 by a shape rule, and which are substituted.

    Rules about speed don't apply where a shape that they need is unknown.
    """
    inside = (policy_for_node(policy, {REGION: mark}) for mark in graph.marks)
    if not any(one.depends_on_shapes for one in (policy, *inside)):
        return NONE
    return _choose(graph, policy, usage, layouts.input_shapes(graph, policy, usage))


def _choose(graph: Graph, policy: Policy, usage: Usage, known: Mapping[int, Shapes]) -> Choices:
    """Return the choices for a graph whose operators have the input shapes `known`, by index."""
    policies = [policy_for_node(policy, node.attrs, usage.off) for node in graph.nodes]
    substituted = _matches(graph, policies, policy, usage, known)
    kept = _kept_reasons(graph, policies, policy, usage, known, substituted)
    for i in kept.keys() & substituted.keys():
        if substituted[i][0] == "image_convolution":  # it is for bfloat16 kernels
            del substituted[i]
    bodies = {}
    for i, node in enumerate(graph.nodes):
        if rewrites_bodies(node, usage.training):
            dtypes = infer_dtypes(graph, usage)
            for k, body in enumerate(node.subgraphs):
                inner = body_usage(usage, node, k, [dtypes[output] for output in node.inputs])
                bodies[i, k] = _choose(body, policy, replace(inner, offline=frozenset()), {})
    chosen = frozenset((key, body) for key, body in bodies.items() if body != NONE)
    return Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)


def _matches(
    graph: Graph, policies: list[Policy], policy: Policy, usage: Usage, known: Mapping[int, Shapes]
) -> dict[int, Match]:
    """Return the match of each node to substitute, by index; none when converting."""
    found: dict[int, Match] = {}
    if usage.converting or not any(one.substitutions for one in policies):
        return found
    views = layouts.volume_view_readers(graph.nodes, policy, usage)
    feeding = layouts.nodes_before_products(graph) if usage.training else ()
    concats: set[int] = set()
    dtypes: Mapping[Output, str] = {}
    for i, node in enumerate(graph.nodes):
        if node.operator in OPERATORS and i not in views:
            behind = bool(node.inputs) and node.inputs[0][0] in concats
            call = Call(node, policies[i], usage.training, known.get(i, ()), i in feeding, behind)
            if (match := match_call(call)) is not None:
                dtypes = dtypes or infer_dtypes(graph, usage)
                inputs = recurrent.opened_inputs(graph, node)
                if ALL[match[0]].fits([dtypes[output] for output in inputs]):
                    found[i] = match
        if layouts.follows_concat(_running(node, found.get(i)), concats):
            concats.add(i)
    return found


def _running(node: Node, match: Match | None) -> Node:
    """Return a node, as an `Activation` if that replaces it."""
    return replace(node, op="Activation") if match and match[0] in ACTIVATIONS else node


def _kept_reasons(
    graph: Graph,
    policies: list[Policy],
    policy: Policy,
    usage: Usage,
    known: Mapping[int, Shapes],
    substituted: Mapping[int, Match],
    small_layers: Mapping[int, Reason] = MappingProxyType({}),
) -> dict[int, Reason]:
    """Return why operators stay in float32, by index of the operators that do.

    `small_layers` are known to.
    """
    kept: dict[int, Reason] = {}
    small: dict[int, Reason] = {}
    excess = 0.0  # of the layers' multiplications over their limits, relative to these
    blocked: dict[Output, bool] = {}
    running = [_running(node, substituted.get(i)) for i, node in enumerate(graph.nodes)]
    norms = layouts.nodes_before_norms(running)
    readers = Counter(output for node in graph.nodes for output in node.inputs)
    of_volumes = layouts.volume_readers(running, policy, usage)
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            continue
        rule = policies[i].rule(node.operator)
        if not rule.by_shape and i not in substituted and not layouts.may_be_blocked(node):
            continue
        uses = _uses_of_weight(graph, node, policies[i], usage, readers)
        first_is_blocked = bool(node.inputs) and blocked.get(node.inputs[0], False)
        around = i in norms, first_is_blocked, uses, _casts_weight(graph, node, uses, usage)
        has_blocks = i in substituted and substituted[i][0] in BLOCKED
        site = Site(node, known.get(i, ()), usage.training, *around, i in of_volumes, has_blocks)
        alone = [one for one in rule.by_shape if one.name != SMALL_LAYERS]
        reason = small_layers.get(i) or _reason_to_keep(site, alone)
        if reason is not None:
            kept[i] = reason
        elif not policies[i].keeps_layer(node.name):
            for one in rule.by_shape:
                if one.name == SMALL_LAYERS:
                    small[i] = one.reason
                    doubles = usage.training and node.operator == "FullyConnected"
                    limit = one.limit * (_TIMES_IN_TRAINING if doubles else 1)
                    excess += _relative_size(site, limit) - 1
        blocked[i, 0] = reason is None and (
            site.has_blocks or layouts.has_blocked_output(site, running[i], rule.op_class, blocked)
        )
    # All or none: a single layer in float32 may have large arrays cast that it is added to.
    if excess < 0:
        return _kept_reasons(graph, policies, policy, usage, known, substituted, small)
    return kept


def _reason_to_keep(site: Site, rules: Sequence[ShapeRule]) -> Reason | None:
    """Return the reason of the last rule that keeps an operator in float32; None without one."""
    return next((one.reason for one in reversed(rules) if RULES[one.name](site, one.limit)), None)


def _uses_of_weight(
    graph: Graph, node: Node, policy: Policy, usage: Usage, readers: Mapping[Output, int]
) -> int:
    """Return the number of readers of a node's second input; 0 if it needs no cast."""
    if not node.inputs[1:]:
        return 0
    weight = graph.nodes[node.inputs[1][0]]
    stored = weight.name in usage.stored or usage.dtypes.get(weight.name) == policy.target_dtype
    return 0 if weight.is_variable and stored else readers[node.inputs[1]]


def _casts_weight(graph: Graph, node: Node, uses: int, usage: Usage) -> bool:
    """Return whether the graph may be trained and casts the second input, read `uses` times."""
    if not uses or not (usage.training or usage.converting):
        return False
    weight = graph.nodes[node.inputs[1][0]]
    return not (weight.is_variable and weight.name in usage.offline and uses == 1)


# ---------------------------------------------------------------------- the rules


def _row_count(site: Site, data: tuple[int, ...]) -> int:
    """Return the number of rows of a dense layer's data."""
    return data[0] if flattens_data(site.node.attrs) else math.prod(data[:-1])


def _has_few_rows(site: Site) -> bool:
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
    rows = _row_count(site, data)
    if not site.training:
        return 0 < rows * site.uses <= _ROWS_A_CAST
    if site.uses >= _UNROLLED:
        return False
    return rows <= min(math.prod(weight) / _WEIGHTS_A_ROW, _MANY_ROWS)


def _has_few_columns(site: Site) -> bool:
    """Return whether a dense layer has few outputs for many rows.

    Casting the data costs more than bfloat16 saves. Measured on 64 to 2048 rows of 64 to 1024
    features: 1.1 to 3 times slower than float32 with 1 to 16 outputs, even at 24 to 32.
    """
    data, weight = (*site.shapes, None, None)[:2]
    if data is None or weight is None:
        return False
    return weight[0] < _FEW_COLUMNS and _row_count(site, data) >= _ROWS_OF_COLUMNS


def _relative_size(site: Site, limit: int) -> float:
    """Return the multiplications of a layer relative to a limit; infinity for unknown shapes.

    Of a convolution it is an upper bound, exact for strides of 1. It is at least 1 if the weight
    needs no cast, or many layers share its cast and the sum of its gradients.
    """
    data, weight = (*site.shapes, None, None)[:2]
    if data is None or weight is None:
        return math.inf
    groups = int(site.node.attrs.get("num_group", "1"))
    places = math.prod(data) // max(1, weight[1] * groups)
    size = places * math.prod(weight) / max(1, limit)
    shared = site.training and site.uses >= _UNROLLED and math.prod(weight) >= _LARGE_SHARED
    return max(size, 1.0) if shared or not site.uses else size


def _has_odd_channels(site: Site) -> bool:
    """Return whether a convolution lacks a blocked bfloat16 kernel, where that costs most.

    If a number of channels is not a multiple of 16, the output has the plain layout, in which a
    BatchNorm is several times slower. With 3 input channels, as in a first layer, the convolution
    itself is slower. With few channels, float32 has a faster kernel for multiples of 8, and for
    kernels of 1 x 1.
    """
    both = layouts.channel_counts(site)
    if both is None or site.has_blocks:
        return False
    if both[0] <= COLORS:
        return True
    pointwise = math.prod((site.shapes[1] or ())[2:]) == 1
    trained = _MANY_POINTWISE if pointwise else _MANY_TRAINED
    few = min(both) < (trained if site.training else _MANY_CHANNELS)
    fast = few and (pointwise or not any(n % (BLOCK // 2) for n in both))
    return (site.feeds_norm or fast) and not layouts.has_blocked_kernel(site, both)


def _has_padded_kernel(site: Site) -> bool:
    """Return whether places of a convolution's kernel may read only padding, in training.

    oneDNN 2.4 leaves the gradients of such weights unwritten in bfloat16. Measured: 3 x 3 with a
    stride of 2 on maps of 1 x 1, 5 x 5 on 1 x 2, 7 x 7 on 2 x 3; of volumes, strides in depth.
    """

    def numbers(name: str, default: int) -> list[int]:
        return [*map(int, re.findall(r"\d+", site.node.attrs.get(name, "")))] or [default] * 3

    # Unknown shapes have no axes.
    data, weight = ((one or ())[2:] for one in (*site.shapes, None, None)[:2])
    axes = [*zip(data, weight, numbers("stride", 1), numbers("pad", 0), numbers("dilate", 1))]
    # The axis before the last two is the depth of volumes.
    return site.training and (any(a[2] > 1 for a in axes[:-2]) or any(_misses(*a) for a in axes))


def _misses(size: int, kernel: int, stride: int, pad: int, dilate: int) -> bool:
    """Return whether places of a kernel, or of a stride, read no data along one axis."""
    starts = range(-pad, size + pad - dilate * (kernel - 1), stride)
    missed = (all(not 0 <= n + k * dilate < size for n in starts) for k in range(kernel))
    return stride > size or any(missed)


def _has_long_sums(site: Site, limit: int) -> bool:
    """Return whether a product adds too many terms for a kernel with half-precision sums."""
    node = site.node
    return has_long_sums(limit, node.operator, node.attrs, site.shapes, site.training)


#: The shape rules by their names in the operator lists: whether a rule with this limit keeps an
#: operator in float32. Rules about speed don't apply where a shape that they need is unknown.
RULES: Mapping[str, Callable[[Site, int], bool]] = {
    "few_rows": lambda site, _: _has_few_rows(site),
    "odd_channels": lambda site, _: _has_odd_channels(site),
    # The first input of a normalization is not in oneDNN's blocked layout.
    "plain_layout": lambda site, _: not site.blocked,
    # The next three and the last affect results too. Eager calls also apply `long_sums`, and for
    # `cast_weight` look at the dtype of the weight.
    "long_sums": _has_long_sums,
    "cast_weight": lambda site, _: site.casts_weight,
    # oneDNN can't read a view of a 3-D convolution's output in bfloat16.
    "volume_views": lambda site, _: site.reads_volume,
    "few_columns": lambda site, _: _has_few_columns(site),
    # In graphs, all layers together.
    SMALL_LAYERS: lambda site, limit: _relative_size(site, limit) < 1,
    "padded_kernel": lambda site, _: _has_padded_kernel(site),
}


# ---------------------------------------------------------------------- eager calls

# The rules that eager calls follow. Calls that cast take several times as long as nodes of a graph.
IN_CALLS = frozenset({"few_rows", "few_columns", SMALL_LAYERS, "padded_kernel"})
_TIMES_IN_CALLS = 8


def reason_to_keep_call(
    rule: Rule, attrs: dict[str, str], shapes: Shapes, training: bool
) -> Reason | None:
    """Return why the size of an eager call with a float32 weight keeps it in float32, or None."""
    site = Site(Node(rule.operator, "", attrs), shapes, training, False, False, 1, False, False)
    rules = [one for one in rule.by_shape if one.name in IN_CALLS]
    return _reason_to_keep(site, [one._replace(limit=one.limit * _TIMES_IN_CALLS) for one in rules])
