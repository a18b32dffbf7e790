"""BatchNorm folded into the weights before it, for inference.

MXNet's own fusion folds BatchNorm into weights in the dtype that they have. In bfloat16 that biases
them, since it rounds toward zero: here they are folded in float32, to be cast after that.
"""

from collections import Counter
from typing import Any, Dict, Mapping, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..policy.policy import Policy
from .graph import Graph, GraphCopy, Node, Output

__all__ = ["Params", "float32_array", "folded", "readers_by_name"]

Params = Dict[str, NDArray]

# The products that a BatchNorm folds into, with channels on axis 1 of their output.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})
# Inputs of a product: data and weight.
_WITHOUT_BIAS = 2


def folded(graph: Graph, params: Mapping[str, NDArray], policy: Policy) -> Tuple[Graph, Params]:
    """Fold BatchNorms into the products before them; return the graph and its parameters.

    A BatchNorm stays where its input is no product's or is read by others too, where others read
    the parameters as well, and where `policy` keeps it in float32 by name.
    """
    at_norm = _pairs(graph, params, policy)
    at_product = {pair.product: pair for pair in at_norm.values()}
    unread = {name for pair in at_norm.values() for name in pair.statistics}
    values = {name: value for name, value in params.items() if name in set(graph.input_names)}
    copy = GraphCopy(graph)
    for i, node in enumerate(graph.nodes):
        if i in at_norm:
            copy.read_instead(i, at_norm[i].product)
        elif i in at_product:
            values[at_product[i].weight], values[at_product[i].bias] = at_product[i].fold(values)
            inputs = _with_bias(copy, node, at_product[i])
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


def float32_array(values: Any) -> NDArray:
    """Return NumPy values as a float32 array on the CPU."""
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def _with_bias(copy: GraphCopy, product: Node, pair: "_Pair") -> "list[Output]":
    inputs = copy.inputs(product)
    if len(inputs) == _WITHOUT_BIAS:
        inputs.append(copy.add(Node("null", pair.bias)))
    return inputs


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
        self.bias = names[-1] if len(names) > _WITHOUT_BIAS else f"{before.name}_folded_bias"
        self.read = {*names[1:], *self.statistics}

    def folds(self, readers: Mapping[str, int], params: Mapping[str, NDArray]) -> bool:
        """Tell whether the two can become one; `readers` count those of parameters by name."""
        channels_first = self.attrs.get("axis", "1") == "1" and not (
            self.before.op == "FullyConnected"
            and self.before.attrs.get("flatten", "True") not in ("True", "1")
        )
        return (
            self.before.op in _PRODUCTS
            and channels_first
            and all(readers[name] == 1 for name in self.read)
            and all(name in params and params[name].dtype is np.float32 for name in self.read)
        )

    def fold(self, values: Mapping[str, NDArray]) -> Tuple[NDArray, NDArray]:
        """Return the product's weight and bias with the BatchNorm in them, in float32."""
        gamma, beta, mean, variance = (
            values[name].asnumpy().astype(np.float64) for name in self.statistics
        )
        if self.attrs.get("fix_gamma", "True") in ("True", "1"):
            gamma = np.ones_like(gamma)
        scale = gamma / np.sqrt(variance + float(self.attrs.get("eps", "0.001")))
        weight = values[self.weight].asnumpy()
        bias = values[self.bias].asnumpy() if self.bias in values else 0.0
        new = weight * scale.reshape((-1,) + (1,) * (weight.ndim - 1))
        return float32_array(new), float32_array(beta + (bias - mean) * scale)
