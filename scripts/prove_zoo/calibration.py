"""Calibrate random weights: fitting statistics, small residual branches, distinct detections.

A network of random weights multiplies one rounding by tens or hundreds on its way. A trained one
does not: its residual branches are small, and its BatchNorms hold the statistics of its data. The
graph is run node by node, and each BatchNorm gets the mean and variance of its input.
"""

import re
from typing import Any, Dict, List, Optional, Sequence

import mxnet as mx

from mxamp.graph.inspect import interpret, run_node
from mxamp.graph.ir import Graph, Node

_NORMS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm")
_SUMS = ("elemwise_add", "broadcast_add", "_npi_add", "_Plus", "_plus")
_PRODUCTS = ("elemwise_mul", "broadcast_mul", "_mul", "Dropout", "_mul_scalar")
_ACTIVATIONS = ("Activation", "relu", "LeakyReLU", "clip", "sigmoid")
#: gamma of a BatchNorm, or the factor of a convolution, at the end of a residual branch.
_BRANCH = 0.2
#: beta before an activation: most values stay positive, as in trained networks.
_SHIFT = 1.0
#: A channel's least variance, absolute and as a share of the mean square. A smaller one, such as
#: that of an image's one pooled value, would amplify its rounding.
_LEAST_VARIANCE, _LEAST_SHARE = 1e-4, 0.1
_PRODUCERS = ("Convolution", "FullyConnected")


def branch_ends(graph: Graph) -> List[Node]:
    """Return one BatchNorm or convolution of each residual sum: the end of its branch."""
    ends = []
    for node in graph.nodes:
        if node.op not in _SUMS or len(node.inputs) != 2:
            continue
        found = [_branch_end(graph, graph.nodes[i]) for i, _ in node.inputs]
        ends += [end for end in found if end is not None][:1]
    return ends


def _branch_end(graph: Graph, node: Node) -> Optional[Node]:
    """Return the BatchNorm or convolution that ends a branch with `node`, or None."""
    while node.op in _PRODUCTS and node.inputs:
        node = graph.nodes[node.inputs[0][0]]
    return node if node.op in (*_NORMS, "Convolution") else None


def predictors(graph: Graph) -> List[Node]:
    """Return the last convolutions and dense layers before selections (nms, topk)."""
    if not any(selects(node) for node in graph.nodes):
        return []
    leads = [False] * len(graph.nodes)
    for i in reversed(range(len(graph.nodes))):
        node = graph.nodes[i]
        if not selects(node) and (leads[i] or node.op in _PRODUCERS):
            for k, _ in node.inputs:
                leads[k] = True
    return [n for n, on in zip(graph.nodes, leads) if n.op in _PRODUCERS and not on]


def calibrate(symbol: Any, params: Dict[str, Any], data: Dict[str, Any]) -> None:
    """Fit a traced network's BatchNorm statistics and the scale of its weights to its data."""
    graph = Graph.from_symbol(symbol)
    activated = {i for n in graph.nodes if n.op in _ACTIVATIONS for i, _ in n.inputs}
    ends = {id(node) for node in branch_ends(graph)}
    last = {id(node) for node in predictors(graph)}
    positions = {id(node): i for i, node in enumerate(graph.nodes)}
    values = {name: param.data() for name, param in params.items()}

    def name_of(node: Node, i: int) -> str:
        return graph.nodes[node.inputs[i][0]].name

    def run_calibrated(node: Node, inputs: Sequence[Any]) -> List[Any]:
        given = list(inputs)
        if node.op in _NORMS and name_of(node, 3) in params:
            new = _statistics(node, inputs[0].as_nd_ndarray())
            shift = _SHIFT if positions[id(node)] in activated else 0.0
            new += [
                mx.nd.full(inputs[1].shape, _BRANCH if id(node) in ends else 1.0),
                mx.nd.full(inputs[2].shape, shift),
            ]
            for i, value in zip((3, 4, 1, 2), new):
                given[i] = _set(params, name_of(node, i), value, inputs[i])
        elif id(node) in last and len(node.inputs) == 3 and name_of(node, 2) in params:
            # Predictions that differ from place to place: else all boxes tie.
            weight, bias = _spread(run_node(node, given, mx.cpu())[0], *inputs[1:])
            given[1] = _set(params, name_of(node, 1), weight, inputs[1])
            given[2] = _set(params, name_of(node, 2), bias, inputs[2])
        elif id(node) in ends and name_of(node, 1) in params:
            given[1] = _set(params, name_of(node, 1), inputs[1] * _BRANCH, inputs[1])
        elif node.op == "Convolution" and "offset" in name_of(node, 1):
            given[1] = _set(params, name_of(node, 1), inputs[1] * 0.1, inputs[1])
        return list(run_node(node, given, mx.cpu()))

    with mx.autograd.predict_mode():
        interpret(graph, {**values, **data}, run_calibrated)
    mx.nd.waitall()


def _statistics(node: Node, value: Any) -> List[Any]:
    """Return the mean and the variance of each channel of a BatchNorm's input."""
    axis = int(node.attrs.get("axis", 1)) % value.ndim
    axes = tuple(i for i in range(value.ndim) if i != axis)
    mean = value.mean(axis=axes)
    square = (value**2).mean(axis=axes)
    variance = mx.nd.maximum(square - mean**2, square * _LEAST_SHARE)
    return [mean, variance.clip(_LEAST_VARIANCE, 1e30)]


def _spread(value: Any, weight: Any, bias: Any) -> List[Any]:
    """Return a layer's weight and bias, scaled so that its output has mean 0 and deviation 1."""
    axes = tuple(i for i in range(value.ndim) if i != 1)
    mean = value.mean(axis=axes)
    shape = [1, -1] + [1] * (value.ndim - 2)
    scale = 1 / ((value - mean.reshape(shape)) ** 2).mean().sqrt().asscalar()
    return [weight * scale, (bias - mean) * scale]


def _set(params: Dict[str, Any], name: str, value: Any, old: Any) -> Any:
    """Set a parameter to a value in the shape, dtype and array class of `old`; return it."""
    value = value.reshape(old.shape).astype(old.dtype)
    if isinstance(old, mx.np.ndarray):
        value = value.as_np_ndarray()
    params[name].set_data(value)
    return value


def selects(node: Node) -> bool:
    """Return whether a node selects from its inputs (nms, topk), where last bits may decide."""
    return bool(re.search(r"nms|topk|argsort|argmax|Proposal", node.op))


def before_selection(symbol: Any) -> Any:
    """Return a symbol of the inputs of the first selections, or None without selections."""
    graph = Graph.from_symbol(symbol)
    behind = [False] * len(graph.nodes)
    heads = []
    for i, node in enumerate(graph.nodes):
        after = any(behind[k] for k, _ in node.inputs)
        if selects(node) and not after:
            heads.append(node.inputs[0])
        behind[i] = after or selects(node)
    return (
        Graph(graph.nodes, list(dict.fromkeys(heads)), graph.attrs).to_symbol() if heads else None
    )
