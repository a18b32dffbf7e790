"""Pad the output channels of convolutions to oneDNN's blocks of 16, for inference.

For other numbers of output channels oneDNN falls back to slower kernels: in bfloat16 to a matrix
product per image in the plain layout, between two reorders. A padded convolution gets filters of
zeros, and its consumers get zero weights for the added channels. The original channels keep their
values, since only zeros are added to their sums.
"""

import math
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from ...policy.values import flattens_data, parse_integers
from ..edit import Edit, View, without_shape
from ..ir import Graph, Node, Output
from .equivalents import BLOCK, COLORS, PLANAR_AXES
from .fusible import FusionView, float32_array
from .shapes import NORMS

__all__ = [
    "Channels",
    "Runs",
    "SAME_CHANNELS",
    "elementwise",
    "joined",
    "pad_channels",
    "with_added",
]

#: Pairs of (original channels, padding channels behind them), in order.
Runs = Tuple[Tuple[int, int], ...]

#: The largest bound allowed: padding channels must stay finite, as zero times infinity is NaN.
_LARGEST = 1e4


class Channels(NamedTuple):
    """The channels of a tensor, on its axis 1."""

    runs: Runs
    added_by: FrozenSet[int] = frozenset()  #: the padded convolutions
    bound: float = 0.0  #: the largest magnitude that a padding channel may have

    @property
    def own(self) -> int:
        """The number of original channels."""
        return sum(own for own, _ in self.runs)

    @property
    def added(self) -> int:
        """The number of padding channels."""
        return sum(added for _, added in self.runs)

    @property
    def total(self) -> int:
        """The number of all channels."""
        return self.own + self.added

    def times(self, count: int) -> "Channels":
        """Return channels in which each channel is replaced by `count` channels."""
        return self._replace(runs=tuple((own * count, added * count) for own, added in self.runs))


def joined(parts: Sequence[Channels]) -> Channels:
    """Return the channels of concatenated tensors."""
    runs = [parts[0].runs[0]]
    for own, added in [run for part in parts for run in part.runs][1:]:
        before, between = runs[-1]
        if between:
            runs.append((own, added))
        else:
            runs[-1] = (before + own, added)
    added_by: FrozenSet[int] = frozenset().union(*(part.added_by for part in parts))
    return Channels(tuple(runs), added_by, max(part.bound for part in parts))


def with_added(values: Any, axis: int, runs: Runs, fill: float) -> Any:
    """Return a weight with padding channels inserted on an axis, filled with `fill`."""
    sizes = [own + added for own, added in runs]
    starts = np.cumsum([0, *sizes[:-1]])
    own = np.concatenate([start + np.arange(count) for (count, _), start in zip(runs, starts)])
    each = values.shape[axis] // len(own)
    places = (own[:, None] * each + np.arange(each)).ravel()
    shape = list(values.shape)
    shape[axis] = sum(sizes) * each
    result = np.full(shape, fill, values.dtype)
    result[(slice(None),) * axis + (places,)] = values
    return result


# ---------------------------------------------------------------------- operators

_Bound = Callable[[Mapping[str, str], float], float]


def _scalar(attrs: Mapping[str, str]) -> float:
    return abs(float(attrs.get("scalar", "1")))


def _activation(attrs: Mapping[str, str], bound: float) -> float:
    kind = attrs["act_type"]
    if kind in ("sigmoid", "softrelu", "log_sigmoid"):
        return bound + 1
    return bound if kind in ("relu", "tanh", "softsign", "mish") else math.inf


def _dropout(attrs: Mapping[str, str], bound: float) -> float:
    # The random mask of a seed depends on the number of channels.
    return math.inf if attrs.get("mode", "training") == "always" else bound


def _leaky(attrs: Mapping[str, str], bound: float) -> float:
    kind, slope = attrs.get("act_type", "leaky"), abs(float(attrs.get("slope", "0.25")))
    return bound * max(1, slope) if kind in ("leaky", "elu", "gelu") else math.inf


def _clip(attrs: Mapping[str, str], bound: float) -> float:
    low, high = float(attrs["a_min"]), float(attrs["a_max"])
    return bound if low <= 0 <= high else max(abs(low), abs(high))


def _pad(attrs: Mapping[str, str], bound: float) -> float:
    if attrs["mode"] != "constant" or any(parse_integers(attrs["pad_width"])[:4]):
        return math.inf
    return max(bound, abs(float(attrs.get("constant_value", "0"))))


def _pooling(attrs: Mapping[str, str], bound: float) -> float:
    if attrs.get("layout", "None") not in ("None", "NCHW"):
        return math.inf
    return bound if not bound or attrs.get("pool_type", "max") in ("max", "avg") else math.inf


def _same(_attrs: Mapping[str, str], bound: float) -> float:
    return bound


#: Operators that treat all channels alike, with the bound of their output for one of their input.
_ELEMENTWISE: Mapping[str, _Bound] = {
    "Activation": _activation, "LeakyReLU": _leaky, "clip": _clip, "Pooling": _pooling,
    "Dropout": _dropout, "Pad": _pad,
    **dict.fromkeys(("relu", "_npx_relu", "tanh", "_npi_tanh"), _same),
    **dict.fromkeys(("_copy", "BlockGrad", "amp_cast", "Cast"), _same),
    **dict.fromkeys(("sigmoid", "_npx_sigmoid", "hard_sigmoid"), lambda _attrs, _bound: 1.0),
    **dict.fromkeys(
        ("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_maximum_scalar", "_minimum_scalar"),
        lambda attrs, bound: bound + _scalar(attrs),
    ),
    "_mul_scalar": lambda attrs, bound: bound * _scalar(attrs),
    "_div_scalar": lambda attrs, bound: bound / _scalar(attrs) if _scalar(attrs) else math.inf,
}  # fmt: skip

_SUMS = frozenset(
    {"elemwise_add", "elemwise_sub", "broadcast_add", "broadcast_sub", "add_n", "_npi_add"}
)
_PRODUCTS = frozenset({"elemwise_mul", "broadcast_mul", "_npi_multiply"})

#: Operators of several tensors with the same channels.
SAME_CHANNELS = _SUMS | _PRODUCTS


def elementwise(node: Node, given: Sequence[Channels]) -> Optional[Channels]:
    """Return the output channels of an operator that treats all channels alike; else None."""
    operator, first = node.operator, given[0]
    bounds = [one.bound for one in given]
    if operator in SAME_CHANNELS:
        bound = math.prod(bounds) if operator in _PRODUCTS else sum(bounds)
    elif operator in _ELEMENTWISE and len(given) == 1:
        bound = _ELEMENTWISE[operator](node.attrs, bounds[0])
    else:
        return None
    if not bound <= _LARGEST or any(one.runs != first.runs for one in given):
        return None
    return joined(given)._replace(runs=first.runs, bound=bound)


# At most a third more arithmetic: as much as the slower kernels lose, without the reorders.
_MOST = 4 / 3
# Numbers of input channels that oneDNN's kernels read besides multiples of 16.
_FEW = frozenset({2, COLORS, 4, 8, 12})

#: Operators that leave the blocked layout anyway, so that a slice before them costs little.
_REORDERS = frozenset(
    {"Flatten", "Reshape", "transpose", "SwapAxis", "_np_reshape", "_npx_reshape", "_np_transpose"}
)
# The values of padding channels in a BatchNorm's gamma, beta, mean and variance.
_OF_NORMS = (0.0, 0.0, 0.0, 1.0)


def pad_channels(view: FusionView, edit: Edit) -> None:
    """Pad the channels of convolutions to multiples of 16, and the weights of their consumers.

    Graph outputs and operators that reorder axes get a slice without the padding. A convolution
    with any other consumer that can't read padding channels stays as it is.
    """
    rule = view.policy.rule("Convolution")
    if rule.given or rule.missing is not None:
        return
    plan = _Plan(view)
    while plan.refused:
        plan = _Plan(view, plan.left | plan.refused)
    plan.write(edit)


Given = Sequence[Optional[Channels]]  #: the channels of a node's inputs, None where unknown


class _Places(NamedTuple):
    """Padding for one axis of a parameter."""

    axis: int
    runs: Runs
    fill: float = 0.0


class _Plan:
    """The channels of each tensor, and the resulting changes of the graph."""

    def __init__(self, view: View, left: FrozenSet[int] = frozenset()) -> None:
        self.view, self.graph, self.left = view, view.graph, left
        self.refused: Set[int] = set()  #: more convolutions to leave unpadded
        self._channels: Dict[Output, Channels] = {}
        self._places: Dict[int, List[_Places]] = {}  # by index of the variable
        self._attrs: Dict[int, Dict[str, str]] = {}
        self._cut: Set[Tuple[int, int]] = set()  # inputs that read a slice: (node, position)
        self._dense = _read_by_dense(view.graph)
        for i, node in enumerate(self.graph.nodes):
            if not node.is_variable:
                self._visit(i, node)
        for output in self.graph.heads:
            self._check_cut(output)

    def write(self, edit: Edit) -> None:
        """Write the padding into the graph and its parameters."""
        for i, places in self._places.items():
            variable = self.graph.nodes[i]
            array = self.view.params[variable.name].asnumpy()
            for axis, runs, fill in places:
                array = with_added(array, axis, runs, fill)
            edit.params[variable.name] = float32_array(array)
            edit.change(i, attrs=without_shape(variable))
        for i, attrs in self._attrs.items():
            edit.change(i, attrs={**self.graph.nodes[i].attrs, **attrs})
        slices: Dict[Output, Output] = {}
        for i, k in sorted(self._cut):
            edit.set_input(i, k, self._sliced(edit, slices, self.graph.nodes[i].inputs[k]))
        for place, output in enumerate(self.graph.heads):
            if self._added(output):
                edit.set_head(place, self._sliced(edit, slices, output))

    def _sliced(self, edit: Edit, slices: Dict[Output, Output], output: Output) -> Output:
        """Return an output without padding, through one slice for all consumers."""
        if output not in slices:
            name = f"{self.graph.nodes[output[0]].name}_channels"
            end = str(self._channels[output].own)
            slices[output] = edit.add("slice_axis", name, [output], axis="1", begin="0", end=end)
        return slices[output]

    # ------------------------------------------------------------------ the walk over nodes

    def _visit(self, i: int, node: Node) -> None:
        given = [self._channels.get(output) for output in node.inputs]
        behind = self._BEHIND.get(node.operator, _Plan._behind_other)(self, i, node, given)
        if behind is not None:
            self._channels[i, 0] = behind
            return
        for k, output in enumerate(node.inputs):
            if self._added(output) and node.operator not in _REORDERS:
                self.refused |= self._channels[output].added_by
            elif self._added(output):
                self._cut.add((i, k))
                self._check_cut(output)

    def _check_cut(self, output: Output) -> None:
        """Refuse padding between original channels, which no single slice removes."""
        if self._added(output) and len(self._channels[output].runs) > 1:
            self.refused |= self._channels[output].added_by

    def _added(self, output: Output) -> int:
        return self._channels[output].added if output in self._channels else 0

    # ------------------------------------------------------------------ operators
    # Each `_behind` method returns the channels of the operator's output. None means that they are
    # unknown, or that the operator can't read its input's padding.

    def _behind_other(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        known = [one for one in given if one is not None]
        return elementwise(node, known) if known and len(known) == len(given) else None

    def _behind_concat(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        known = [one for one in given if one is not None]
        on_channels = node.attrs.get("dim", "1") == "1" and len(known) == len(given)
        return joined(known) if on_channels else None

    def _behind_flatten(self, i: int, _node: Node, given: Given) -> Optional[Channels]:
        return given[0] if i in self._dense else None

    def _behind_convolution(self, i: int, node: Node, given: Given) -> Optional[Channels]:
        data, weight = given[0], self._weight(node)
        own, groups = int(node.attrs["num_filter"]), int(node.attrs.get("num_group", "1"))
        if weight is not None and len(weight) == PLANAR_AXES and weight[0] == own:
            if groups == 1:
                return self._behind_whole(i, node, data or Channels(((weight[1], 0),)))
            if data is not None and weight[1] == 1 and data.own == groups:
                return self._behind_depthwise(i, node, data)
        return None if data is not None and data.added else Channels(((own, 0),))

    def _behind_whole(self, i: int, node: Node, data: Channels) -> Channels:
        """Return the output channels of a convolution without groups."""
        if data.added:
            self._place(node, 1, _Places(1, data.runs))
        own = int(node.attrs["num_filter"])
        total = -(-own // BLOCK) * BLOCK
        reads_blocks = data.total % BLOCK == 0 or data.total in _FEW
        if total == own or total > own * _MOST or not reads_blocks or i in self.left:
            return Channels(((own, 0),))
        behind = Channels(((own, total - own),), frozenset({i}))
        self._widen(i, node, behind, {"num_filter": str(total)})
        return behind

    def _behind_depthwise(self, i: int, node: Node, data: Channels) -> Channels:
        behind = data.times(int(node.attrs["num_filter"]) // data.own)._replace(bound=0.0)
        if behind.added:
            filters, groups = str(behind.total), str(data.total)
            self._widen(i, node, behind, {"num_filter": filters, "num_group": groups})
        return behind

    def _behind_dense(self, _i: int, node: Node, given: Given) -> Optional[Channels]:
        data, weight = given[0], self._weight(node)
        flatten = flattens_data(node.attrs)
        if data is not None and data.added:
            if weight is None or not flatten or weight[1] % data.own:
                return None
            self._place(node, 1, _Places(1, data.runs))
        return Channels(((int(node.attrs["num_hidden"]), 0),)) if flatten else None

    def _behind_norm(self, i: int, node: Node, given: Given) -> Optional[Channels]:
        data = given[0]
        changeable = self._weight(node) is not None and i not in self.view.multi_output_nodes
        if data is None or node.attrs.get("axis", "1") != "1" or (data.added and not changeable):
            return None
        if data.added:
            for k, fill in enumerate(_OF_NORMS, 1):
                self._place(node, k, _Places(0, data.runs, fill))
        return data

    _BEHIND: Mapping[str, Callable[..., Optional[Channels]]] = {
        "Convolution": _behind_convolution,
        "FullyConnected": _behind_dense,
        "Concat": _behind_concat,
        "Flatten": _behind_flatten,
        **dict.fromkeys(NORMS, _behind_norm),
    }

    # ------------------------------------------------------------------ parameters

    def _widen(self, i: int, node: Node, behind: Channels, attrs: Dict[str, str]) -> None:
        """Pad the filters of a convolution."""
        self._attrs[i] = attrs
        for k in range(1, len(node.inputs)):
            self._place(node, k, _Places(0, behind.runs))

    def _weight(self, node: Node) -> Optional[Tuple[int, ...]]:
        """Return the shape of a node's weight, if the node owns all its parameters."""
        names = self.view.own_parameters(node)
        return self.view.params[names[0]].shape if names else None

    def _place(self, node: Node, k: int, places: _Places) -> None:
        self._places.setdefault(node.inputs[k][0], []).append(places)


def _read_by_dense(graph: Graph) -> Set[int]:
    """Return the nodes that only dense layers read as data, directly or through a Flatten."""
    found: Set[int] = set(range(len(graph.nodes))) - {i for i, _ in graph.heads}
    read: Set[int] = set()
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        passes = not node.is_variable and node.operator in ("Flatten", "Dropout") and i in found
        for k, (source, _) in enumerate(node.inputs):
            read.add(source)
            if k or not (passes or node.operator == "FullyConnected"):
                found.discard(source)
    return found & read
