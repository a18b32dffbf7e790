"""BatchNorm folded into the weights before it or behind it, for inference.

MXNet's own fusion folds BatchNorm into weights in the dtype that they have. In bfloat16 that biases
them, since it rounds toward zero: here they are folded in float32, to be cast after that.
"""

from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..framework.machine import dtype_name
from ..policy.policy import Policy
from ..policy.values import flattens, integers, is_true
from .graph import Graph, Node, Output
from .graph_copy import GraphCopy

__all__ = ["Params", "float32_array", "is_float32", "folded", "folded_forward", "readers_by_name"]

Params = Dict[str, NDArray]

# The products that a BatchNorm folds into, with channels on axis 1 of their output.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})
# Inputs of a product: data and weight.
_WITHOUT_BIAS = 2
# How far the mean of what a BatchNorm reads may be from 0, for products to read it as it is.
_DEVIATIONS = 8


def folded(graph: Graph, params: Mapping[str, NDArray], policy: Policy) -> Tuple[Graph, Params]:
    """Fold BatchNorms into the products before them; return the graph and its parameters.

    A BatchNorm stays where its input is no product's or is read by others too, where others read
    the parameters as well, and where `policy` keeps it in float32 by name.
    """
    at_norm = _pairs(graph, params, policy)
    at_product = {pair.product: pair for pair in at_norm.values()}
    unread = {name for pair in at_norm.values() for name in pair.statistics}
    values = {name: value for name, value in params.items() if name in set(graph.input_names)}
    copy = GraphCopy(graph, params)
    for i, node in enumerate(graph.nodes):
        if i in at_norm:
            copy.read_instead(i, at_norm[i].product)
        elif i in at_product:
            pair = at_product[i]
            inputs, bias = _with_bias(copy, node, pair.bias)
            values[pair.weight], values[bias] = pair.fold(values)
            copy.add_copy(i, inputs=inputs, attrs={**node.attrs, "no_bias": "False"})
        elif not (node.is_variable and node.name in unread):
            copy.add_copy(i)
    return copy.finished(), {k: value for k, value in values.items() if k not in unread}


def readers_by_name(graph: Graph) -> "Counter[str]":
    """Count the readers of each node, by its name; as an output of the graph it counts too.

    Parameters are known by name: two variables of one name are one parameter.
    """
    outputs = [output for node in graph.nodes for output in node.inputs] + graph.heads
    return Counter(graph.nodes[i].name for i, _ in outputs)


def is_float32(array: NDArray) -> bool:
    """Tell whether an array is float32, which NumPy arrays of MXNet's name otherwise."""
    return dtype_name(array.dtype) == "float32"


def float32_array(values: Any) -> NDArray:
    """Return NumPy values as a float32 array on the CPU."""
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def _with_bias(copy: GraphCopy, product: Node, bias: Optional[str]) -> Tuple[List[Output], str]:
    """Return what a product reads, and the name of its bias: a new one where it has none."""
    inputs = copy.inputs(product)
    if bias is None:
        bias = copy.new_name(f"{product.name}_folded_bias")
        inputs.append(copy.add(Node("null", bias)))
    return inputs, bias


def _pairs(graph: Graph, params: Mapping[str, NDArray], policy: Policy) -> "Dict[int, _Pair]":
    """Return the BatchNorms that are folded, by index, with the products before them."""
    outputs = [output for node in graph.nodes for output in node.inputs] + graph.heads
    readers, parameter_readers = Counter(i for i, _ in outputs), readers_by_name(graph)
    statistics_read = {i for i, output in outputs if output}
    pairs = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "BatchNorm" or i in statistics_read or policy.keeps_layer(node.name):
            continue
        pair = _Pair(graph, i)
        if readers[pair.product] == 1 and pair.folds(parameter_readers, params):
            pairs[i] = pair
    return pairs


class _Pair:
    """A BatchNorm and the operator before it."""

    def __init__(self, graph: Graph, norm: int) -> None:
        node = graph.nodes[norm]
        self.product, _ = node.inputs[0]
        before = graph.nodes[self.product]
        names = [graph.nodes[source].name for source, _ in before.inputs]
        self.attrs, self.before = node.attrs, before
        self.statistics = [graph.nodes[source].name for source, _ in node.inputs[1:]]
        self.weight = names[1] if len(names) > 1 else ""
        self.bias = names[-1] if len(names) > _WITHOUT_BIAS else None
        self.read = {*names[1:], *self.statistics}

    def folds(self, readers: Mapping[str, int], params: Mapping[str, NDArray]) -> bool:
        """Tell whether the two can become one; `readers` count those of parameters by name."""
        channels_first = self.attrs.get("axis", "1") == "1" and not (
            self.before.op == "FullyConnected" and not flattens(self.before.attrs)
        )
        return (
            self.before.op in _PRODUCTS
            and channels_first
            and all(readers[name] == 1 for name in self.read)
            and all(name in params and is_float32(params[name]) for name in self.read)
        )

    def fold(self, values: Mapping[str, NDArray]) -> Tuple[NDArray, NDArray]:
        """Return the product's weight and bias with the BatchNorm in them, in float32."""
        scale, shift = _scale_and_shift(self.attrs, [values[name] for name in self.statistics])
        weight = values[self.weight].asnumpy()
        bias = 0.0 if self.bias is None else values[self.bias].asnumpy()
        new = weight * scale.reshape((-1,) + (1,) * (weight.ndim - 1))
        return float32_array(new), float32_array(bias * scale + shift)


def _scale_and_shift(attrs: Mapping[str, str], statistics: Sequence[NDArray]) -> Tuple[Any, Any]:
    """Return what a BatchNorm multiplies with and adds, of its gamma, beta, mean and variance."""
    gamma, beta, mean, variance = (array.asnumpy().astype(np.float64) for array in statistics)
    if is_true(attrs.get("fix_gamma", "True")):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(attrs.get("eps", "0.001")))
    return scale, beta - mean * scale


# ---------------------------------------------------------------------- into what reads it


def folded_forward(
    graph: Graph, params: Params, policy: Policy, in_float32: Callable[[Node], bool]
) -> Tuple[Graph, Params]:
    """Fold BatchNorms into the products that read them, and that are `in_float32`.

    Those are dense layers, and convolutions without borders of zeros: a border would have to be
    what the BatchNorm makes zero. In low precision, data far from its mean 0 would lose what the
    BatchNorm keeps; in float32 data up to 8 standard deviations from it loses three bits.
    """
    if "folded_norm" not in policy.substitutions or policy.rule("BatchNorm").given:
        return graph, params
    norms = _norms_before_products(graph, params, policy, in_float32)
    unread = {graph.nodes[k].name for i in norms for k, _ in graph.nodes[i].inputs[1:]}
    values = dict(params)
    copy = GraphCopy(graph, params)
    for i, node in enumerate(graph.nodes):
        norm = node.inputs[0][0] if node.inputs else -1
        if i in norms:
            copy.read_instead(i, norm)
        elif norm in norms:
            names = [graph.nodes[source].name for source, _ in node.inputs[1:]]
            inputs, bias = _with_bias(copy, node, names[1] if len(names) > 1 else None)
            before = graph.nodes[norm]
            statistics = [values[graph.nodes[source].name] for source, _ in before.inputs[1:]]
            scaled = _folded_behind(before.attrs, statistics, values[names[0]], values.get(bias))
            values[names[0]], values[bias] = scaled
            copy.add_copy(i, inputs=inputs, attrs={**node.attrs, "no_bias": "False"})
        elif not (node.is_variable and node.name in unread):
            copy.add_copy(i)
    return copy.finished(), {k: v for k, v in values.items() if k not in unread}


def _folded_behind(
    attrs: Mapping[str, str],
    statistics: Sequence[NDArray],
    weight: NDArray,
    bias: Optional[NDArray],
) -> Tuple[NDArray, NDArray]:
    """Return a product's weight and bias with the BatchNorm before it in them, in float32."""
    scale, shift = _scale_and_shift(attrs, statistics)
    old = weight.asnumpy().astype(np.float64)
    rows = old.reshape((old.shape[0], len(scale), -1))
    added = (rows * shift.reshape((1, -1, 1))).sum(axis=(1, 2))
    new = (rows * scale.reshape((1, -1, 1))).reshape(old.shape)
    return float32_array(new), float32_array(added + (0 if bias is None else bias.asnumpy()))


def _norms_before_products(
    graph: Graph, params: Params, policy: Policy, in_float32: Callable[[Node], bool]
) -> Set[int]:
    """Return the BatchNorms that all that reads them can take in."""
    readers: Dict[int, List[Tuple[int, int]]] = {}
    for i, node in enumerate(graph.nodes):
        for k, (source, output) in enumerate(node.inputs):
            readers.setdefault(source, []).append((i, -1 if output else k))
    names = readers_by_name(graph)
    outputs = {i for i, _ in graph.heads}

    def is_own(i: int) -> bool:
        name = graph.nodes[i].name
        known = name in params and is_float32(params[name])
        return known and names[name] == 1 and graph.nodes[i].is_variable

    def takes_in(i: int, position: int, channels: int) -> bool:
        node = graph.nodes[i]
        parameters = [source for source, _ in node.inputs[1:]]
        if node.op not in _PRODUCTS or position or not all(map(is_own, parameters)):
            return False
        if not in_float32(node):
            return False
        read = params[graph.nodes[parameters[0]].name].shape[1]
        if node.op == "Convolution":
            return read == channels and _is_whole_without_border(node)
        flatten = flattens(node.attrs)
        return flatten and read % channels == 0

    found = set()
    for i, node in enumerate(graph.nodes):
        if node.op != "BatchNorm" or i in outputs or policy.keeps_layer(node.name):
            continue
        own = all(is_own(source) for source, _ in node.inputs[1:])
        plain = node.attrs.get("axis", "1") == "1" and not node.inputs[0][1]
        if own and plain and i in readers:
            *_, mean, variance = (params[graph.nodes[k].name] for k, _ in node.inputs[1:])
            taken = all(takes_in(reader, k, mean.shape[0]) for reader, k in readers[i])
            if taken and _is_near_zero(node, mean.asnumpy(), variance.asnumpy()):
                found.add(i)
    return found


def _is_near_zero(norm: Node, mean: Any, variance: Any) -> bool:
    deviation = np.sqrt(variance.astype(np.float64) + float(norm.attrs.get("eps", "0.001")))
    return bool((np.abs(mean) <= _DEVIATIONS * deviation).all())


def _is_whole_without_border(convolution: Node) -> bool:
    attrs = convolution.attrs
    plain = attrs.get("layout", "None") in ("None", "NCHW", "NCW", "NCDHW")
    return (
        plain and attrs.get("num_group", "1") == "1" and not any(integers(attrs.get("pad", "()")))
    )
