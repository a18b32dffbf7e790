"""Pad output channels of convolutions to multiples of 16 in inference, for faster kernels.

For other numbers of output channels oneDNN falls back to slower kernels: in bfloat16 to a matrix
product per image in the plain layout, between two reorders. A padded convolution gets filters of
zeros, and its consumers get zero weights for the added channels. The original channels keep their
values, since only zeros are added to their sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import AbstractSet, Any, Callable, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from ...framework.operators import with_trait
from ...graph.edit import Edit, View
from ...graph.ir import Node, Output
from ...policy.values import flattens_data, parse_integers
from ..passes import Attributes
from .fusible import FusionView, set_parameter
from .layouts import BLOCK, COLORS, NORMS, PLANAR_AXES, nodes_with_consumers

#: For each channel in order, whether it is an original one: the others are padding.
Mask = Tuple[bool, ...]

#: The largest bound allowed: padding channels must stay finite, as zero times infinity is NaN.
_LARGEST = 1e4


class Channels(NamedTuple):
    """The channel layout of a tensor: which channels are original, and which are padding.

    Padding channels hold zeros or other constants.
    """

    mask: Mask
    added_by: frozenset[int] = frozenset()  #: the padded convolutions
    bound: float = 0.0  #: the largest magnitude that a padding channel may have

    @property
    def own(self) -> int:
        """The number of original channels, without padding."""
        return sum(self.mask)

    @property
    def added(self) -> int:
        """The number of padding channels."""
        return len(self.mask) - self.own


_UNKNOWN = Channels(())
Inputs = Sequence[Channels]  #: the channels of a node's inputs


def concatenated_channels(parts: Inputs) -> Channels:
    """Return the channel layout of tensors concatenated along the channel axis."""
    mask = tuple(own for part in parts for own in part.mask)
    added_by: frozenset[int] = frozenset().union(*(part.added_by for part in parts))
    return Channels(mask, added_by, max(part.bound for part in parts))


def padded_weight(values: Any, axis: int, mask: Mask, fill: float) -> Any:
    """Return a parameter with padding channels, filled with `fill`, inserted along an axis."""
    places = np.repeat(mask, values.shape[axis] // sum(mask))
    shape = list(values.shape)
    shape[axis] = len(places)
    result = np.full(shape, fill, values.dtype)
    result[(slice(None),) * axis + (places,)] = values
    return result


# ---------------------------------------------------------------------- operators

#: By how much each kind of Activation may enlarge a value.
_ENLARGED_BY = {
    **dict.fromkeys(("relu", "tanh", "softsign", "mish"), 0),
    **dict.fromkeys(("sigmoid", "softrelu", "log_sigmoid"), 1),
}


def _scalar(attrs: Attributes) -> float:
    """Return the magnitude of an operator's attribute `scalar`."""
    return abs(float(attrs.get("scalar", "1")))


def _bound_after_leaky(attrs: Attributes, bound: float) -> float:
    """Return the largest magnitude after a LeakyReLU of values up to `bound`; inf if unknown."""
    kind, slope = attrs.get("act_type", "leaky"), abs(float(attrs.get("slope", "0.25")))
    return bound * max(1, slope) if kind in ("leaky", "elu", "gelu") else math.inf


def _bound_after_clip(attrs: Attributes, bound: float) -> float:
    """Return the largest magnitude after a clip of values up to `bound`; inf if unknown."""
    low, high = float(attrs["a_min"]), float(attrs["a_max"])
    return bound if low <= 0 <= high else max(abs(low), abs(high))


def _bound_after_pad(attrs: Attributes, bound: float) -> float:
    """Return the largest magnitude after a Pad of values up to `bound`; inf if unknown."""
    if attrs["mode"] != "constant" or any(parse_integers(attrs["pad_width"])[:4]):
        return math.inf
    return max(bound, abs(float(attrs.get("constant_value", "0"))))


def _bound_after_pooling(attrs: Attributes, bound: float) -> float:
    """Return the largest magnitude after a Pooling of values up to `bound`; inf if unknown."""
    if attrs.get("layout", "None") not in ("None", "NCHW"):
        return math.inf
    return bound if not bound or attrs.get("pool_type", "max") in ("max", "avg") else math.inf


#: Operators that treat all channels alike, with the bound of their output for one of their input.
_ELEMENTWISE: Mapping[str, Callable[[Attributes, float], float]] = {
    "LeakyReLU": _bound_after_leaky, "clip": _bound_after_clip,
    "Pooling": _bound_after_pooling, "Pad": _bound_after_pad,
    "Activation": lambda attrs, bound: bound + _ENLARGED_BY.get(attrs["act_type"], math.inf),
    # The random mask of a seed depends on the number of channels.
    "Dropout": lambda attrs, bound: math.inf if attrs.get("mode") == "always" else bound,
    **dict.fromkeys(("relu", "_npx_relu", "tanh", "_npi_tanh"), lambda _attrs, bound: bound),
    **dict.fromkeys(("_copy", "BlockGrad", "amp_cast", "Cast"), lambda _attrs, bound: bound),
    **dict.fromkeys(("sigmoid", "_npx_sigmoid", "hard_sigmoid"), lambda _attrs, _bound: 1.0),
    **dict.fromkeys(
        ("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_maximum_scalar", "_minimum_scalar"),
        lambda attrs, bound: bound + _scalar(attrs),
    ),
    "_mul_scalar": lambda attrs, bound: bound * _scalar(attrs),
    "_div_scalar": lambda attrs, bound: bound / _scalar(attrs) if _scalar(attrs) else math.inf,
}  # fmt: skip


def _channels_after_elementwise(node: Node, inputs: Inputs) -> Channels:
    """Return the channel layout after an elementwise operator; `_UNKNOWN` after other operators."""
    operator, first = node.operator, inputs[0]
    bounds = [one.bound for one in inputs]
    if operator in with_trait("sums"):
        bound = sum(bounds)
    elif operator in with_trait("products"):
        bound = math.prod(bounds)
    elif operator in _ELEMENTWISE and len(inputs) == 1:
        bound = _ELEMENTWISE[operator](node.attrs, bounds[0])
    else:
        return _UNKNOWN
    if not bound <= _LARGEST or any(one.mask != first.mask for one in inputs):
        return _UNKNOWN
    return concatenated_channels(inputs)._replace(mask=first.mask, bound=bound)


# At most a third more arithmetic: as much as the slower kernels lose, without the reorders.
_MOST = 4 / 3
# Numbers of input channels that oneDNN's kernels read besides multiples of 16.
_FEW = frozenset({2, COLORS, 4, 8, 12})

# The values of padding channels in a BatchNorm's gamma, beta, mean and variance.
_OF_NORMS = (0.0, 0.0, 0.0, 1.0)
# Operators through which a dense layer may read a map.
_FLAT = frozenset({"Flatten", "Dropout"})


def pad_channels(view: FusionView, edit: Edit) -> None:
    """Pad convolutions' output channels to multiples of 16, and adapt their consumers.

    Conditions: inference, and convolutions compute in the target dtype. Graph outputs and operators
    that reorder axes get a slice without the padding. A convolution with any other consumer that
    can't read padding channels stays as it is.
    """
    rule = view.policy.rule("Convolution")
    if rule.given or rule.no_kernel is not None:
        return
    plan = _Padding(view, frozenset())
    while plan.refused:
        plan = _Padding(view, plan.unpadded | plan.refused)
    plan.write(edit)


class _Padding:
    """The plan for padding channels in a graph: new parameters, attributes and slices."""

    def __init__(self, view: View, unpadded: AbstractSet[int]) -> None:
        self.view, self.graph, self.unpadded = view, view.graph, unpadded
        self.refused: set[int] = set()  #: more convolutions to leave unpadded
        self._channels: dict[Output, Channels] = defaultdict(lambda: _UNKNOWN)
        # Axis, mask of channels and fill value, by index of the variable.
        self._paddings: dict[int, list[tuple[int, Mask, float]]] = {}
        self._attrs: dict[int, dict[str, str]] = {}
        self._sliced_inputs: set[tuple[int, int]] = set()  # (node, position)
        # The nodes that only dense layers read as data, directly or through a Flatten.
        self._read_by_dense_layers = nodes_with_consumers(
            view.graph,
            lambda node, k, found: k == 0
            and (node.operator == "FullyConnected" or (found and node.operator in _FLAT)),
        )
        for i, node in enumerate(self.graph.nodes):
            if not node.is_variable:
                self._propagate(i, node)
        for output in self.graph.heads:
            self._refuse_inner_padding(output)

    def write(self, edit: Edit) -> None:
        """Apply the plan: pad parameters, set attributes, and add slices to the graph."""
        for i, paddings in self._paddings.items():
            array = self.view.params[self.graph.nodes[i].name].asnumpy()
            for padding in paddings:
                array = padded_weight(array, *padding)
            set_parameter(edit, i, array)
        for i, attrs in self._attrs.items():
            edit.change(i, attrs={**self.graph.nodes[i].attrs, **attrs})
        slices: dict[Output, Output] = {}
        for i, k in sorted(self._sliced_inputs):
            edit.set_input(i, k, self._sliced(edit, slices, self.graph.nodes[i].inputs[k]))
        for place, output in enumerate(self.graph.heads):
            if self._channels[output].added:
                edit.set_head(place, self._sliced(edit, slices, output))

    def _sliced(self, edit: Edit, slices: dict[Output, Output], output: Output) -> Output:
        """Return a slice of an output without its padding channels; add it on first use."""
        if output not in slices:
            name = f"{self.graph.nodes[output[0]].name}_channels"
            end = str(self._channels[output].own)
            slices[output] = edit.add("slice_axis", name, [output], axis="1", begin="0", end=end)
        return slices[output]

    # ------------------------------------------------------------------ the walk over nodes

    def _propagate(self, i: int, node: Node) -> None:
        """Record node i's output channels; give up padding that the node can't read."""
        inputs = [self._channels[output] for output in node.inputs]
        channels_after = self._CHANNELS_AFTER.get(node.operator, _Padding._channels_after_other)
        outputs = channels_after(self, i, node, inputs)
        if outputs.mask:
            self._channels[i, 0] = outputs
            return
        for k, output in enumerate(node.inputs):
            if inputs[k].added and node.operator not in with_trait("leaves_blocks"):
                self.refused |= inputs[k].added_by
            elif inputs[k].added:
                self._sliced_inputs.add((i, k))
                self._refuse_inner_padding(output)

    def _refuse_inner_padding(self, output: Output) -> None:
        """Give up padding that lies between original channels: a single slice can't remove it."""
        channels = self._channels[output]
        if not all(channels.mask[: channels.own]):
            self.refused |= channels.added_by

    # ------------------------------------------------------------------ operators
    # Each method returns the output channels for the channels of the inputs. They are unknown, too,
    # where the operator can't read its input's padding.

    def _channels_after_other(self, i: int, node: Node, inputs: Inputs) -> Channels:
        """Return the channel layout of the output of an operator without a weight."""
        if not inputs or not all(one.mask for one in inputs):
            return _UNKNOWN
        if node.operator == "Flatten":
            return inputs[0] if i in self._read_by_dense_layers else _UNKNOWN
        if node.operator == "Concat":
            joins = node.attrs.get("dim", "1") == "1"
            return concatenated_channels(inputs) if joins else _UNKNOWN
        return _channels_after_elementwise(node, inputs)

    def _channels_after_convolution(self, i: int, node: Node, inputs: Inputs) -> Channels:
        """Pad a convolution where possible; return the channel layout of its output."""
        data, weight = inputs[0], self._weight_shape(node)
        own, groups = int(node.attrs["num_filter"]), int(node.attrs.get("num_group", "1"))
        if weight is not None and len(weight) == PLANAR_AXES and weight[0] == own:
            if groups == 1:
                read = data if data.mask else Channels((True,) * weight[1])
                return self._channels_after_ungrouped(i, node, read)
            if weight[1] == 1 and data.own == groups:
                return self._channels_after_depthwise(i, node, data)
        return _UNKNOWN if data.added else Channels((True,) * own)

    def _channels_after_ungrouped(self, i: int, node: Node, data: Channels) -> Channels:
        """Pad an ungrouped convolution to a multiple of 16 channels; return its output's layout."""
        if data.added:
            self._pad_input(node, 1, 1, data.mask)
        own, read = int(node.attrs["num_filter"]), len(data.mask)
        total = -(-own // BLOCK) * BLOCK
        reads_blocks = read % BLOCK == 0 or read in _FEW
        if total == own or total > own * _MOST or not reads_blocks or i in self.unpadded:
            return Channels((True,) * own)
        outputs = Channels((True,) * own + (False,) * (total - own), frozenset({i}))
        self._add_filters(i, node, outputs, {"num_filter": str(total)})
        return outputs

    def _channels_after_depthwise(self, i: int, node: Node, data: Channels) -> Channels:
        """Pad a depthwise convolution like its input; return the channel layout of its output."""
        each = int(node.attrs["num_filter"]) // data.own
        mask = tuple(own for own in data.mask for _ in range(each))
        outputs = Channels(mask, data.added_by)
        if outputs.added:
            attrs = {"num_filter": str(len(mask)), "num_group": str(len(data.mask))}
            self._add_filters(i, node, outputs, attrs)
        return outputs

    def _channels_after_dense(self, _i: int, node: Node, inputs: Inputs) -> Channels:
        """Pad a dense layer's weight for its padded input; return its output's channel layout."""
        data, weight = inputs[0], self._weight_shape(node)
        flatten = flattens_data(node.attrs)
        if data.added:
            if weight is None or not flatten or weight[1] % data.own:
                return _UNKNOWN
            self._pad_input(node, 1, 1, data.mask)
        return Channels((True,) * int(node.attrs["num_hidden"])) if flatten else _UNKNOWN

    def _channels_after_norm(self, i: int, node: Node, inputs: Inputs) -> Channels:
        """Pad a BatchNorm like its input; return the channel layout of its output."""
        data = inputs[0]
        changeable = self._weight_shape(node) is not None and i not in self.view.multi_output_nodes
        if node.attrs.get("axis", "1") != "1" or (data.added and not changeable):
            return _UNKNOWN
        if data.added:
            for k, fill in enumerate(_OF_NORMS, 1):
                self._pad_input(node, k, 0, data.mask, fill)
        return data

    _CHANNELS_AFTER: Mapping[str, Callable[..., Channels]] = {
        "Convolution": _channels_after_convolution,
        "FullyConnected": _channels_after_dense,
        **dict.fromkeys(NORMS, _channels_after_norm),
    }

    # ------------------------------------------------------------------ parameters

    def _add_filters(self, i: int, node: Node, outputs: Channels, attrs: dict[str, str]) -> None:
        """Plan zero filters and biases in convolution i for the padding channels of `outputs`."""
        self._attrs[i] = attrs
        for k in range(1, len(node.inputs)):
            self._pad_input(node, k, 0, outputs.mask)

    def _weight_shape(self, node: Node) -> tuple[int, ...] | None:
        """Return the shape of a node's weight; None if another node shares its parameters."""
        names = self.view.own_parameters(node)
        return self.view.params[names[0]].shape if names else None

    def _pad_input(
        self, node: Node, position: int, axis: int, mask: Mask, fill: float = 0.0
    ) -> None:
        """Plan padding, filled with `fill`, of the parameter that a node reads at `position`."""
        self._paddings.setdefault(node.inputs[position][0], []).append((axis, mask, fill))
