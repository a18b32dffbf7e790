"""Faster equivalents of the fused `RNN` operator: an `RNN` per layer, or unrolled LSTM steps.

MXNet's RNN has no bfloat16 kernel. The unrolled LSTM, for large states in inference, computes one
product for the inputs of all steps, and one product per step for the state. Gates and cells are
computed in float32.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Callable, Sequence

from ...framework.operators import with_trait
from ...graph.ir import Graph, Node, Output, Shape
from ...policy.values import is_true
from ..passes import Attributes, Call, Detail, Parts, Tensor

_Tensors = Sequence[Tensor]  #: outputs of nodes

#: Gates of each mode. Those of an LSTM are input, forget, cell and output, in this order.
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
# The least elements of an LSTM's recurrent weight, reached by 363 units. With fewer, or with fewer
# multiplications in a step, an `RNN` per layer in float32 is faster (measured with avx512_bf16, 1
# to 64 rows).
_LARGE_WEIGHT, _LARGE_STEP = 2**19, 2**23
# The least parameters of each layer from which an `RNN` per layer is faster, and the least per
# element that a backward layer reverses.
_LEAST_LAYER, _LEAST_STACKED, _LEAST_REVERSED = 2**18, 2**16, 2
# The most steps in all layers: with 15 operators per step, a larger graph takes seconds to build.
_MOST_STEPS = 256
# The least elements of rows that MXNet copies at once.
_WIDE_ROW = 16


def opened_inputs(graph: Graph, node: Node) -> list[Output]:
    """Return a node's inputs, with an RNN's parameter vector replaced by the tensors it joins.

    A parameter that is only reshaped to be joined is read before the reshape.
    """
    if node.operator != "RNN" or graph.nodes[node.inputs[1][0]].operator != "_rnn_param_concat":
        return node.inputs
    data, (joined, _), *states = node.inputs
    parameters = []
    for output in graph.nodes[joined].inputs:
        source = graph.nodes[output[0]]
        is_reshaped = source.operator in with_trait("reshapes")
        parameters.append(source.inputs[0] if is_reshaped else output)
    return [data, *parameters, *states]


def match_rnn(call: Call) -> Detail | None:
    """Return (steps, rows, width) of an LSTM's data if unrolling makes it faster; else None.

    Unrolled are calls with large states and few steps. The parameters are one vector, or matrices
    and biases.
    """
    attrs, shape = call.attrs, call.shape
    if shape is None or not all(shape) or _is_special(attrs) or not call.lowers("FullyConnected"):
        return None
    layers = int(attrs["num_layers"]) * _directions(attrs)
    weight = _GATES["lstm"] * int(attrs["state_size"]) ** 2
    steps, rows, _ = shape
    large = weight >= _LARGE_WEIGHT and weight * rows >= _LARGE_STEP
    if attrs["mode"] != "lstm" or not large or steps * layers > _MOST_STEPS:
        return None
    joined = len(call.shapes) == 2 + _state_count(attrs)
    return shape if joined or _are_apart(call) else None


def match_layers(call: Call) -> Detail | None:
    """Return (rows, width) of an RNN's data if one `RNN` per layer is faster; else None.

    Each layer's parameters are tensors of their own, which rows can hold.
    """
    attrs, shape = call.attrs, call.shape
    if shape is None or not all(shape) or _is_special(attrs):
        return None
    # MXNet's RNN drops elements between layers.
    between = int(attrs["num_layers"]) > 1 and float(attrs.get("p", "0")) > 0
    if between or not _are_apart(call):
        return None
    shapes = _shapes(attrs, shape[-1])
    weights = [shapes[k : k + 2] for k in range(0, len(shapes) // 2, 2)]
    if any(_row_width(pair) < _WIDE_ROW for pair in weights):
        return None
    size = sum(math.prod(one) for pair in weights for one in pair) / len(weights)
    least = _LEAST_STACKED if len(weights) > 1 and not call.training else _LEAST_LAYER
    backward = (_directions(attrs) - 1) * math.prod(shape[:2]) * sum(n for _, n in weights[0])
    return None if size < max(least, _LEAST_REVERSED * backward) else shape[1:]


def _is_special(attrs: Attributes) -> bool:
    """Return whether an RNN has a projection, cell state clipping or sequence lengths."""
    names = ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max")
    lengths = is_true(attrs.get("use_sequence_length", "False"))
    return lengths or any(attrs.get(name, "None") != "None" for name in names)


def _are_apart(call: Call) -> bool:
    """Return whether an RNN's parameters are separate matrices and biases, not one vector."""
    found = list(call.shapes[1 : -_state_count(call.attrs)])
    return found == _shapes(call.attrs, (call.shape or ())[-1])


def _row_width(weights: Sequence[tuple[int, ...]]) -> int:
    """Return a width to which a layer's weights and biases all reshape, to be stacked as rows.

    It is the width of the weights if that fits, so that they need no other shape.
    """
    units = weights[0][0]
    width = reduce(math.gcd, (columns for _, columns in weights), units)
    return width if width >= _WIDE_ROW else units


def _directions(attrs: Attributes) -> int:
    """Return the number of directions of an RNN: 2 if it is bidirectional, else 1."""
    return 2 if is_true(attrs.get("bidirectional", "False")) else 1


def _state_count(attrs: Attributes) -> int:
    """Return the number of state tensors of an RNN: 2 for an LSTM (state and cell), else 1."""
    return 2 if attrs["mode"] == "lstm" else 1


def _shapes(attrs: Attributes, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of an RNN's parameters in MXNet's order, for `width` input features.

    Each direction of a layer has a weight for the input and one for the state. The biases of all
    layers follow.
    """
    size, directions = int(attrs["state_size"]), _directions(attrs)
    rows = size * _GATES[attrs["mode"]]
    widths = [width] + [size * directions] * (int(attrs["num_layers"]) - 1)
    weights = [(rows, one) for below in widths for _ in range(directions) for one in (below, size)]
    return [*weights, *[(rows,)] * len(weights)]


def rnn(parts: Parts, detail: Detail) -> _Tensors | None:
    """Replace an LSTM with unrolled steps, whose dense layers compute in bfloat16.

    Conditions: inference, large states, few steps, and dense layers compute in bfloat16. `detail`
    is that of `match_rnn`.
    """
    steps, *sizes = detail

    def add_layer(k: int, below: Tensor, own: _Tensors, begin: _Tensors) -> tuple[Tensor, _Tensors]:
        order = range(steps)[:: -1 if k % _directions(parts.attrs) else 1]
        states, end = _LayerSteps(parts, f"l{k}", own).steps(below, order, begin)
        return _add_concat(parts, f"l{k}", states, axis=0), end

    return _add_layers(parts, sizes, add_layer)


def layers(parts: Parts, detail: Detail) -> _Tensors | None:
    """Replace an RNN of several layers or directions with one RNN for each.

    Conditions: each parameter is a tensor of its own, and no elements drop between layers.
    `detail` is that of `match_layers`.

    MXNet's RNN joins the weights of several layers or directions element by element, in each call
    in training. The RNN of a single one copies its weights at once.
    """
    attrs = parts.attrs
    shapes = _shapes(attrs, detail[1])
    single = {**attrs, "num_layers": "1", "bidirectional": "False"}
    count = 1 + _state_count(attrs) if _has_ends(attrs) else 1

    def add_layer(k: int, below: Tensor, own: _Tensors, begin: _Tensors) -> tuple[Tensor, _Tensors]:
        vector = _add_vector(parts, f"l{k}_vector", own, shapes[2 * k : 2 * k + 2])
        backward = bool(k % _directions(attrs))
        read = parts.add("reverse", f"l{k}_reversed", below, axis="0") if backward else below
        out, *end = parts.add_all("RNN", f"l{k}", count, read, vector, *begin, **single)
        return parts.add("reverse", f"l{k}_out", out, axis="0") if backward else out, end

    return _add_layers(parts, detail, add_layer)


def _add_layers(
    parts: Parts,
    sizes: Sequence[int],
    add_layer: Callable[[int, Tensor, _Tensors, _Tensors], tuple[Tensor, _Tensors]],
) -> _Tensors | None:
    """Add an RNN's layers one by one with `add_layer`; return the outputs.

    None stands for a single output, which takes the place of the RNN's.

    `sizes` are rows and width of the data. `add_layer(k, below, own, begin)` adds layer
    k, directions counted as layers, which reads `below`. Its parameters are `own`, and `begin` is
    its first state (and cell). It returns the layer's output and its last state (and cell).
    """
    rows, width = sizes
    attrs, directions = parts.attrs, _directions(parts.attrs)
    layer_count, first_state = int(attrs["num_layers"]), len(parts.inputs) - _state_count(attrs)
    below, *tensors = parts.inputs[:first_state]
    parameters = _add_parameters(parts, tensors, _shapes(attrs, width))
    biases = len(parameters) // 2
    # MXNet often infers the shape of begin states from their consumers, but not from slices.
    shape = f"({layer_count * directions}, {rows}, {attrs['state_size']})"
    begins = [
        parts.add("Reshape", f"begins{n}", states, shape=shape)
        for n, states in enumerate(parts.inputs[first_state:], first_state)
    ]
    ends: list[_Tensors] = []
    for layer in range(layer_count):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            own = [*parameters[2 * k :][:2], *parameters[biases + 2 * k :][:2]]
            begin = [
                parts.add("slice_axis", f"l{k}_begin{n}", states, **_bounds(k, k + 1))
                for n, states in enumerate(begins)
            ]
            output, end = add_layer(k, below, own, begin)
            outputs.append(output)
            ends.append(end)
        below = _add_concat(parts, f"l{layer}_sides", outputs, axis=2)
    if not _has_ends(attrs):
        parts.add("_copy", "", below)
        return None
    joined = [_add_concat(parts, f"ends{k}", one, axis=0) for k, one in enumerate(zip(*ends))]
    outputs = [parts.add("_copy", "out", below)]
    return outputs + [parts.add("_copy", f"end{k}", tensor) for k, tensor in enumerate(joined)]


def _has_ends(attrs: Attributes) -> bool:
    """Return whether an RNN also outputs its last states."""
    return is_true(attrs.get("state_outputs", "False"))


def _add_vector(parts: Parts, name: str, own: _Tensors, weights: Sequence[Shape]) -> Tensor:
    """Add operators that join a layer's parameters to one vector; return the vector.

    MXNet joins vectors one element after the other. `weights` are the shapes of the weights.
    """
    width = _row_width(weights)
    joined = [
        tensor
        if shape[1:] == (width,)
        else parts.add("Reshape", f"{name}_rows{k}", tensor, shape=f"(-1, {width})")
        for k, (tensor, shape) in enumerate(zip(own, [*weights, (), ()]))
    ]
    rows = _add_concat(parts, f"{name}_rows", joined, axis=0)
    return parts.add("Reshape", name, rows, shape="(-1,)")


def _add_concat(parts: Parts, name: str, tensors: _Tensors, axis: int) -> Tensor:
    """Add a Concat of tensors and return its output; return a single tensor as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return parts.add("Concat", name, *tensors, num_args=str(len(tensors)), dim=str(axis))


def _add_parameters(parts: Parts, tensors: _Tensors, shapes: Sequence[Shape]) -> _Tensors:
    """Return an RNN's weights and biases; if MXNet stores them in one vector, slice it.

    MXNet lists a graph's inputs in the order of a walk from its outputs. A vector with all biases
    and an element of each weight, which the first product reads, keeps their order.
    """
    added: list[Tensor] = []
    source, begin = tensors[0], 0
    if len(tensors) > 1:
        begin = len(tensors) // 2
        added += tensors[:begin]
        ones = [_add_element(parts, f"one{k}", one) for k, one in enumerate(added, 1)]
        source = _add_concat(parts, "biases", [*ones, *tensors[begin:]], axis=0)
    for k in range(len(added), len(shapes)):
        end = begin + math.prod(shapes[k])
        piece = parts.add("slice_axis", f"piece{k}", source, **_bounds(begin, end))
        added.append(parts.add("Reshape", f"parameter{k}", piece, shape=str(shapes[k])))
        begin = end
    return added


def _add_element(parts: Parts, name: str, tensor: Tensor) -> Tensor:
    """Add operators that extract one element of a weight as a constant; return the element."""
    element = parts.add("slice", f"{name}_element", tensor, begin="(0, 0)", end="(1, 1)")
    element = parts.add("BlockGrad", f"{name}_constant", element)
    return parts.add("Reshape", name, element, shape="(1,)")


def _bounds(begin: int, end: int) -> Attributes:
    """Return the attributes of a slice_axis along axis 0 from `begin` to `end`."""
    return {"axis": "0", "begin": str(begin), "end": str(end)}


class _LayerSteps:
    """Unroller of one direction of an LSTM layer into operators for each time step."""

    def __init__(self, parts: Parts, name: str, weights: _Tensors) -> None:
        self._parts, self._name, self._size = parts, name, int(parts.attrs["state_size"])
        self._read, self._recur, self._read_bias, self._bias = weights

    def steps(self, data: Tensor, order: Sequence[int], begin: _Tensors) -> tuple[Any, _Tensors]:
        """Unroll the layer over time; return its outputs by time step, and its last state and cell.

        `data` is the layer's input, and `begin` the state and cell before the first step.
        """
        bias = self._add("elemwise_add", "bias", self._read_bias, self._bias)
        reads = self._product("reads", data, self._read, bias)
        state, states = begin, {}
        for t in order:
            before = self._product(f"recurs{t}", state[0], self._recur)
            name = f"{self._name}_step{t}"
            read = self._parts.add("slice_axis", name, reads, **_bounds(t, t + 1))
            # Not in float32: the sum has the dtype of the products.
            gates = self._parts.add("elemwise_add", f"{self._name}_gates", read, before)
            state = self._step(gates, state)
            states[t] = state[0]
        return [states[t] for t in sorted(states)], state

    def _step(self, gates: Tensor, state: _Tensors) -> _Tensors:
        """Add an LSTM cell's operators after the gates' dense layers; return the state and cell."""
        open_gates = self._add_activation(gates, "sigmoid")
        into, forget, out = (self._gate(open_gates, k) for k in (0, 1, 3))
        new = self._add_activation(self._gate(gates, 2), "tanh")
        kept = self._add("elemwise_mul", "kept", forget, state[1])
        cell = self._add("elemwise_add", "cell", kept, self._add("elemwise_mul", "new", into, new))
        return self._add("elemwise_mul", "state", out, self._add_activation(cell, "tanh")), cell

    def _add(self, op: str, name: str, *inputs: Tensor, **attrs: str) -> Tensor:
        """Add a float32 operator, named after the layer; return its output."""
        return self._parts.add_float32(op, f"{self._name}_{name}", *inputs, **attrs)

    def _add_activation(self, tensor: Tensor, act_type: str) -> Tensor:
        return self._add("Activation", act_type, tensor, act_type=act_type)

    def _gate(self, tensor: Tensor, k: int) -> Tensor:
        """Add a slice of gate number k from the tensor of all gates; return its output."""
        begin, end = str(k * self._size), str((k + 1) * self._size)
        return self._add("slice_axis", f"gate{k}", tensor, axis="2", begin=begin, end=end)

    def _product(self, name: str, tensor: Tensor, *parameters: Tensor) -> Tensor:
        """Add a dense layer that computes all gates; return its output."""
        attrs = {"num_hidden": str(self._size * _GATES["lstm"]), "flatten": "False"}
        attrs["no_bias"] = str(len(parameters) == 1)
        name = f"{self._name}_{name}"
        return self._parts.add("FullyConnected", name, tensor, *parameters, **attrs)


def is_divided(node: Node) -> bool:
    """Return whether a node is an RNN of several layers or directions."""
    return node.op == "RNN" and int(node.attrs["num_layers"]) * _directions(node.attrs) > 1
