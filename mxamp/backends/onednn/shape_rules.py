"""Shape rules of CPUs: which operators of a graph stay in float32, which get replaced.

Some bfloat16 kernels are fast or slow depending on shapes and on the memory layout of their input.
The rules here keep a slow operator in float32, and the few that change results one that oneDNN gets
wrong. The operator lists say which rules apply to which operators, and the measurements behind
them. Rules about speed don't apply where a shape that they need is unknown.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Mapping

from ...graph.ir import Node, Output
from ...policy.rules import Reason
from ...policy.values import flattens_data, parse_integers
from .. import Site, rule
from ..choices import Match, Setting, Sites, last_reason
from ..passes import Call
from . import layouts
from .layouts import BLOCK, COLORS
from .substitutions import ACTIVATIONS, BLOCKED, PASSES, WRITES_BLOCKS

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
# The limit of small layers in eager calls relative to graphs.
_TIMES_IN_CALLS = 8


def choose_nodes(setting: Setting) -> tuple[Mapping[int, Reason], Mapping[int, Match]]:
    """Return two dicts by node index: reasons to stay in float32, and faster equivalents."""
    substituted = _matches(setting)
    sites = _Sites(setting, substituted)
    kept, small, excess = sites.walk({})
    if excess < 0:
        # All or none: a single layer in float32 may have large arrays cast that it is added to.
        kept, *_ = sites.walk(small)
    for i in kept.keys() & substituted.keys():
        if substituted[i][0] == "image_convolution":  # it is for bfloat16 kernels
            del substituted[i]
    return kept, substituted


def _matches(setting: Setting) -> dict[int, Match]:
    """Return the faster equivalents of a graph's nodes, by node index."""
    graph, policies, usage = setting.graph, setting.policies, setting.usage
    found: dict[int, Match] = {}
    if usage.converting or not any(one.substitutions for one in policies):
        return found
    views = layouts.volume_view_readers(graph.nodes, setting.policy, usage)
    plain = layouts.nodes_of_plain_layout(graph)
    feeding = layouts.nodes_before_products(graph) if usage.training else ()
    concats: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.operator in PASSES.by_operator and i not in views:
            behind = bool(node.inputs) and node.inputs[0][0] in concats
            shapes = setting.shapes.get(i, ())
            call = Call(node, policies[i], usage.training, shapes, i in feeding, behind)
            match = PASSES.match_in(setting, call)
            if match is not None and not (i in plain and match[0] in WRITES_BLOCKS):
                found[i] = match
        if layouts.follows_concat(_running(node, found.get(i)), concats):
            concats.add(i)
    return found


def _running(node: Node, match: Match | None) -> Node:
    """Return the node that will run: an `Activation` if that replaces this node, else this node."""
    return replace(node, op="Activation") if match and match[0] in ACTIVATIONS else node


class _Sites(Sites):
    """Builder of the `Site` of each node on a CPU, with oneDNN's memory layouts."""

    def __init__(self, setting: Setting, substituted: Mapping[int, Match]) -> None:
        super().__init__(setting)
        nodes, self._substituted = setting.graph.nodes, substituted
        self._running = [_running(node, substituted.get(i)) for i, node in enumerate(nodes)]
        self._norms = layouts.nodes_before_norms(self._running)
        self._of_volumes = layouts.volume_readers(self._running, setting.policy, setting.usage)

    def walk(
        self, small_layers: Mapping[int, Reason]
    ) -> tuple[dict[int, Reason], dict[int, Reason], float]:
        """Return nodes kept in float32, layers that may be too small, and their excess (a number).

        Both are reasons by node index: for float32, and of the layers that have the rule about
        small layers. The number is the sum of how far these layers are over the rule's limit,
        relative to it. The layers of the argument stay in float32.
        """
        kept, small, excess = {}, {}, 0.0  # type: dict[int, Reason], dict[int, Reason], float
        blocked: dict[Output, bool] = {}
        for i, (node, policy) in enumerate(zip(self.setting.graph.nodes, self.setting.policies)):
            if node.is_variable:
                continue
            rule = policy.rule(node.operator)
            site = self._in_layouts(i, node, blocked)
            others = [one for one in rule.by_shape if one.name != SMALL_LAYERS]
            reason = small_layers.get(i) or last_reason(site, others)
            if reason is not None:
                kept[i] = reason
            elif not policy.keeps_layer(node.name):
                doubles = site.training and site.operator == "FullyConnected"
                for one in rule.by_shape:
                    if one.name == SMALL_LAYERS:
                        small[i] = one.reason
                        limit = one.limit * (_TIMES_IN_TRAINING if doubles else 1)
                        excess += _relative_size(site, limit) - 1
            blocked[i, 0] = reason is None and (
                site.has_blocks
                or layouts.has_blocked_output(site, self._running[i], rule.op_class, blocked)
            )
        return kept, small, excess

    def _in_layouts(self, i: int, node: Node, blocked: Mapping[Output, bool]) -> Site:
        """Return the `Site` of node i, with its fields about oneDNN's memory layouts filled in.

        `blocked` says which outputs are in oneDNN's blocked layout.
        """
        return self.at(i)._replace(
            feeds_norm=i in self._norms,
            blocked=bool(node.inputs) and blocked.get(node.inputs[0], False),
            reads_volume=i in self._of_volumes,
            has_blocks=i in self._substituted and self._substituted[i][0] in BLOCKED,
        )


# ---------------------------------------------------------------------- the rules


def _row_count(site: Site, data: tuple[int, ...]) -> int:
    """Return the number of rows of a dense layer's input."""
    return data[0] if flattens_data(site.attrs) else math.prod(data[:-1])


@rule("few_rows", in_calls=True)
def has_few_rows(site: Site, _limit: int = 0) -> bool:
    """Return whether a dense layer's input has too few rows for bfloat16 to be faster.

    In training, the backward pass moves and casts the gradient of the weight. Measured: slower
    with up to 32 rows at 1024x1024, 64 at 768x3072 and 256 at 4096x4096. The layers of an unrolled
    cell share one cast of the weight and of its gradient, and gain with any number of rows.

    In inference, casting the weight costs as much time as bfloat16 saves on about 23 rows, unless
    the weight is stored in bfloat16.
    """
    if site.sizes is None:
        return False
    data, weight = site.sizes
    rows = _row_count(site, data)
    if not site.training:
        return 0 < rows * site.uses <= _ROWS_A_CAST
    if site.uses >= _UNROLLED:
        return False
    return rows <= min(math.prod(weight) / _WEIGHTS_A_ROW, _MANY_ROWS)


@rule("few_columns", in_calls=True)
def has_few_columns(site: Site, _limit: int = 0) -> bool:
    """Return whether a dense layer has too few outputs for bfloat16 to be faster.

    Casting the data costs more than bfloat16 saves. Measured on 64 to 2048 rows of 64 to 1024
    features: 1.1 to 3 times slower than float32 with 1 to 16 outputs, even at 24 to 32.
    """
    if site.sizes is None:
        return False
    data, weight = site.sizes
    return weight[0] < _FEW_COLUMNS and _row_count(site, data) >= _ROWS_OF_COLUMNS


@rule(SMALL_LAYERS, in_calls=True)
def is_small(site: Site, limit: int) -> bool:
    """Return whether a layer has too few multiplications for bfloat16 to be faster."""
    return _relative_size(site, limit * (_TIMES_IN_CALLS if site.in_call else 1)) < 1


def _relative_size(site: Site, limit: int) -> float:
    """Return a layer's multiplications as a fraction of a rule's `limit`; inf if unknown.

    Of a convolution it is an upper bound, exact for strides of 1. It is at least 1 if the weight
    needs no cast, or many layers share its cast and the sum of its gradients.
    """
    if site.sizes is None:
        return math.inf
    data, weight = site.sizes
    groups = int(site.attrs.get("num_group", "1"))
    places = math.prod(data) // max(1, weight[1] * groups)
    size = places * math.prod(weight) / max(1, limit)
    shared = site.training and site.uses >= _UNROLLED and math.prod(weight) >= _LARGE_SHARED
    return max(size, 1.0) if shared or not site.uses else size


@rule("odd_channels")
def has_odd_channels(site: Site, _limit: int = 0) -> bool:
    """Return whether a convolution's channels rule out oneDNN's fast bfloat16 kernels.

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


@rule("padded_kernel", changes_results=True, in_calls=True)
def has_padded_kernel(site: Site, _limit: int = 0) -> bool:
    """Return whether, in training, some weights of a convolution's kernel may read only padding.

    oneDNN 2.4 leaves the gradients of such weights unwritten in bfloat16. Measured: 3 x 3 with a
    stride of 2 on maps of 1 x 1, 5 x 5 on 1 x 2, 7 x 7 on 2 x 3; of volumes, strides in depth.
    Where shapes are unknown, as in bodies of loops, places may for any padding or stride.
    """

    def numbers(name: str, default: int) -> list[int]:
        return parse_integers(site.attrs.get(name, "")) or [default] * 3

    strides, pads = numbers("stride", 1), numbers("pad", 0)
    if not site.training:
        return False
    if site.sizes is None:
        return any(stride > 1 for stride in strides) or any(pads)
    data, weight = (sizes[2:] for sizes in site.sizes)
    axes = [*zip(data, weight, strides, pads, numbers("dilate", 1))]
    # The axis before the last two is the depth of volumes.
    return any(a[2] > 1 for a in axes[:-2]) or any(_misses(*a) for a in axes)


def _misses(size: int, kernel: int, stride: int, pad: int, dilate: int) -> bool:
    """Return whether, along one axis, some weights of a kernel read nothing but padding."""
    starts = range(-pad, size + pad - dilate * (kernel - 1), stride)
    missed = (all(not 0 <= n + k * dilate < size for n in starts) for k in range(kernel))
    return stride > size or any(missed)


@rule("plain_layout")
def has_plain_layout(site: Site, _limit: int = 0) -> bool:
    """Return whether a BatchNorm is slow because its input is not in oneDNN's blocked layout."""
    return not site.blocked


@rule("cast_weight", changes_results=True, in_calls=True, reads_weight=True)
def casts_weight(site: Site, _limit: int = 0) -> bool:
    """Return whether a transposed convolution's weight would be cast in training.

    oneDNN's gradient for such a weight of a transposed convolution writes out of bounds.
    """
    return site.casts_weight


@rule("volume_views", changes_results=True, is_missing_kernel=True)
def reads_volume(site: Site, _limit: int = 0) -> bool:
    """Return whether a node may reshape a 3-D convolution's output to a view oneDNN can't read."""
    return site.reads_volume
