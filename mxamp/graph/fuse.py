"""Fusion for inference on CPUs: BatchNorm into weights, and oneDNN's fused operators.

MXNet's own fusion folds BatchNorm into weights in the dtype that they have. In bfloat16 that biases
them, since it rounds toward zero: here they are folded in float32, then cast.
"""

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..policy.policy import Policy
from .cast_params import without
from .graph import Graph, Node
from .shape_rules import choose, stand_in
from .substitutions import ALL, Part, find, fourth_channel

__all__ = ["folded", "fused"]

Params = Dict[str, NDArray]

NOT_HERE = (
    "fuse=True is for inference in bfloat16 on CPUs, for which oneDNN has fused operators; this "
    "policy is for {dtype} on the {device}"
)

#: oneDNN's fused operators.
FUSED = ("_sg_mkldnn_conv", "_sg_mkldnn_fully_connected")
NO_KERNELS = (
    "oneDNN has no bfloat16 kernels for this CPU, which has no avx512 (or DNNL_MAX_CPU_ISA hides "
    "it): convert without fuse"
)

# The products that a BatchNorm folds into, with channels on axis 1 of their output.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})
_APART = "amp_apart"
# Inputs of a product: data and weight.
_WITHOUT_BIAS = 2


def fused(
    symbol: Symbol, params: Mapping[str, NDArray], policy: Policy, layers: Policy
) -> Tuple[Symbol, Params, Policy]:
    """Return a float32 model with fused operators, and a policy that lowers them.

    Products that `policy` keeps in float32, by shape or by the names `excluded`, are kept when
    they are fused. Raises `ArgumentError` where `policy` is for no fused operators.
    """
    if (policy.target_dtype, policy.device) != ("bfloat16", "cpu"):
        raise ArgumentError(NOT_HERE.format(dtype=policy.target_dtype, device=policy.device))
    if policy.rule("Convolution").missing:
        raise ArgumentError(NO_KERNELS)
    symbol, params = _with_four_channels(*folded(_renamed(symbol), params, layers), layers)
    shapes = {name: array.shape for name, array in params.items()}
    kept = dict(choose(symbol, policy, shapes, training=False, converting=True).kept)
    apart = _norms_apart(Graph.from_symbol(symbol)).to_symbol(type(symbol))
    graph = Graph.from_symbol(apart.get_backend_symbol("MKLDNN"))
    barriers = [i for i, node in enumerate(graph.nodes) if node.name.endswith(f"_{_APART}")]
    graph = without(graph, {i: graph.nodes[i].inputs[0][0] for i in barriers})
    names = [
        node.name
        for node in graph.nodes
        if node.op in FUSED
        and any(
            inner.name in kept or layers.keeps_layer(inner.name)
            for body in node.subgraphs
            for inner in body.nodes
        )
    ]
    return graph.to_symbol(type(symbol)), params, policy.override(low=FUSED, fp32_layers=names)


def _renamed(symbol: Symbol) -> Symbol:
    """Return a symbol with those activations that oneDNN fuses."""
    graph = Graph.from_symbol(symbol)
    nodes = []
    for node in graph.nodes:
        found = None if node.is_variable else find(node.operator, node.attrs, False)
        activation = found is not None and found[0] in ("relu", "sigmoid", "tanh")
        for part in ALL[found[0]].build(node.attrs, ()) if found and activation else ():
            node = Node(part.op, node.name, {**node.attrs, **part.attrs}, node.inputs)  # noqa: PLW2901
        nodes.append(node)
    return Graph(nodes, graph.heads, graph.attrs).to_symbol(type(symbol))


def _with_four_channels(symbol: Symbol, params: Params, policy: Policy) -> Tuple[Symbol, Params]:
    """Give convolutions of images a fourth channel of zeros, as the substitution does in graphs."""
    graph = Graph.from_symbol(symbol)
    readers, values = _readers(graph), dict(params)
    images: Dict[str, str] = {}
    for node in graph.nodes:
        name = graph.nodes[node.inputs[1][0]].name if len(node.inputs) > 1 else ""
        weight = values.get(name) if readers.get(name) == 1 else None
        if weight is None or weight.dtype is not np.float32:
            continue
        found = stand_in(node, policy, training=False, weight=weight.shape)
        if found is not None and found[0] == "image_convolution":
            images[node.name] = name
            values[name] = _array(np.pad(weight.asnumpy(), ((0, 0), (0, 1), (0, 0), (0, 0))))
    weights = set(images.values())
    nodes = [
        replace(node, attrs={k: v for k, v in node.attrs.items() if k != "__shape__"})
        if node.name in weights
        else node
        for node in graph.nodes
    ]
    graph = Graph(nodes, graph.heads, graph.attrs)
    fourth = fourth_channel()
    graph = _with_parts(graph, lambda node: fourth if node.name in images else ())
    return graph.to_symbol(type(symbol)), values


def _norms_apart(graph: Graph) -> Graph:
    """Put an operator before each BatchNorm that is left: MXNet would fold it in bfloat16."""
    apart = [Part("BlockGrad", _APART, (0,), {})]
    return _with_parts(graph, lambda node: apart if node.op == "BatchNorm" else ())


def _with_parts(graph: Graph, parts: Callable[[Node], Sequence[Part]]) -> Graph:
    """Put `parts` before the first input of nodes: they count it as 0, and themselves from 1."""
    nodes: List[Node] = []
    places: Dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        inputs = [(places[source], k) for source, k in node.inputs]
        found = inputs[:1]
        for part in parts(node):
            read = [found[k] for k in part.inputs]
            found.append((len(nodes), 0))
            nodes.append(Node(part.op, f"{node.name}_{part.suffix}", dict(part.attrs), read))
        places[i] = len(nodes)
        nodes.append(replace(node, inputs=[*found[-1:], *inputs[1:]]))
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)


def folded(symbol: Symbol, params: Mapping[str, NDArray], policy: Policy) -> Tuple[Symbol, Params]:
    """Fold BatchNorms into the products before them; return the symbol and its parameters.

    A BatchNorm stays where its input is no product's or is read by others too, where others read
    the parameters as well, and where `policy` keeps it in float32 by name.
    """
    graph = Graph.from_symbol(symbol)
    readers = _readers(graph)
    used = {output for node in graph.nodes for output in node.inputs} | set(graph.heads)
    statistics_read = {i for i, output in used if output}
    norms = [
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "BatchNorm" and not policy.keeps_layer(node.name)
    ]
    pairs = [_Pair(graph, i) for i in norms if i not in statistics_read]
    at_norm = {pair.norm: pair for pair in pairs if pair.folds(readers, params)}
    at_product = {pair.product: pair for pair in at_norm.values()}
    values = dict(params)
    nodes: List[Node] = []
    places: Dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if i in at_norm:
            places[i] = places[at_norm[i].product]
            continue
        inputs = [(places[source], k) for source, k in node.inputs]
        attrs = node.attrs
        if i in at_product:
            weight, bias = at_product[i].fold(values)
            values.update({at_product[i].weight: weight, at_product[i].bias: bias})
            if len(inputs) == _WITHOUT_BIAS:
                nodes.append(Node("null", at_product[i].bias))
                inputs.append((len(nodes) - 1, 0))
            attrs = {**attrs, "no_bias": "False"}
        places[i] = len(nodes)
        nodes.append(replace(node, attrs=attrs, inputs=inputs))
    heads = [(places[i], k) for i, k in graph.heads]
    new = Graph(nodes, heads, graph.attrs).to_symbol(type(symbol))
    names = set(new.list_inputs())
    return new, {name: value for name, value in values.items() if name in names}


class _Pair:
    """A BatchNorm and the operator before it."""

    def __init__(self, graph: Graph, norm: int) -> None:
        node = graph.nodes[norm]
        self.norm, self.product = norm, node.inputs[0][0]
        before = graph.nodes[self.product]
        names = [graph.nodes[source].name for source, _ in before.inputs]
        self.attrs, self.before = node.attrs, before
        self.statistics = [graph.nodes[source].name for source, _ in node.inputs[1:]]
        self.weight = names[1] if len(names) > 1 else ""
        self.bias = names[-1] if len(names) > _WITHOUT_BIAS else f"{before.name}_folded_bias"
        self.read = {*names[1:], *self.statistics}

    def folds(self, readers: Mapping[str, int], params: Mapping[str, NDArray]) -> bool:
        """Tell whether the two can become one. `readers` count a node's readers by its name."""
        channels_first = self.attrs.get("axis", "1") == "1" and not (
            self.before.op == "FullyConnected"
            and self.before.attrs.get("flatten", "True") not in ("True", "1")
        )
        return (
            self.before.op in _PRODUCTS
            and channels_first
            and readers[self.before.name] == 1
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
        return _array(new), _array(beta + (bias - mean) * scale)


def _array(values: Any) -> NDArray:
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def _readers(graph: Graph) -> Dict[str, int]:
    """Return how often each node is read, by name; as an output of the graph it counts too."""
    found = {node.name: 0 for node in graph.nodes}
    outputs = [output for node in graph.nodes for output in node.inputs] + graph.heads
    for i, _ in outputs:
        found[graph.nodes[i].name] += 1
    return found
