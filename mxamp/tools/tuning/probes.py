"""Gradients with respect to what is computed inside a graph: inputs that are added there."""

from dataclasses import replace
from typing import Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...graph.ir import Graph, Node, Output

__all__ = ["differentiable", "random_signs", "with_probes", "zeros_like"]

_NORMS = frozenset({"BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm"})


def with_probes(graph: Graph, entries: Sequence[Output]) -> Tuple[Graph, Dict[Output, str]]:
    """Return a graph in which an input is added to each of these entries, and the inputs' names."""
    wanted = set(entries)
    nodes: List[Node] = []
    places: Dict[Output, Output] = {}
    names: Dict[Output, str] = {}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for i, node in enumerate(graph.nodes):
        added = add(replace(node, inputs=[places[entry] for entry in node.inputs]))
        for k in range(node.num_outputs):
            places[i, k] = added, k
            if (i, k) in wanted:
                names[i, k] = f"_mxamp_probe{len(names)}"
                probe = add(Node("null", names[i, k]))
                reads = [(added, k), (probe, 0)]
                places[i, k] = add(Node("elemwise_add", f"{names[i, k]}_add", {}, reads)), 0
    return Graph(nodes, [places[head] for head in graph.heads], graph.attrs), names


def differentiable(graph: Graph) -> Graph:
    """Return a graph that computes in training mode what this one computes in inference."""
    return replace(graph, nodes=[_as_in_inference(node) for node in graph.nodes])


def _as_in_inference(node: Node) -> Node:
    if node.is_variable:
        return node
    if node.operator in _NORMS:
        return replace(node, attrs={**node.attrs, "use_global_stats": "True"})
    if node.operator == "Dropout" and node.attrs.get("mode", "training") == "training":
        return replace(node, op="_copy", attrs={}, inputs=node.inputs[:1], num_outputs=1)
    if node.operator == "RNN":
        return replace(node, attrs={**node.attrs, "p": "0"})
    if node.operator == "LeakyReLU" and node.attrs.get("act_type") == "rrelu":
        bounds = (node.attrs.get("lower_bound", 0.125), node.attrs.get("upper_bound", 0.334))
        slope = sum(map(float, bounds)) / len(bounds)
        return replace(node, attrs={"act_type": "leaky", "slope": repr(slope)})
    return node


def zeros_like(array: NDArray) -> NDArray:
    """Return zeros of an array's shape, of its kind."""
    zeros = mx.nd.zeros(array.shape, ctx=array.context)
    return zeros.as_np_ndarray() if isinstance(array, mx.np.ndarray) else zeros


def random_signs(output: NDArray, random: np.random.RandomState) -> NDArray:
    """Return a combination of an output's elements, relative to their norm."""
    values = output.asnumpy()
    signs = random.choice([-1.0, 1.0], size=values.shape) / (np.linalg.norm(values) or 1.0)
    heads = mx.nd.array(signs, ctx=output.context, dtype="float32")
    return heads.as_np_ndarray() if isinstance(output, mx.np.ndarray) else heads
