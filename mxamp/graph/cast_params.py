"""Variables of a converted graph: recorded dtypes, and casts made once instead of each run."""

from typing import AbstractSet, Dict, List, Mapping, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import cast
from ..framework.machine import DTYPE_CODES
from .graph import CASTS, Graph, Node

__all__ = ["cast_offline", "count_losses", "with_dtypes", "without"]


def with_dtypes(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """Record the dtype of each variable behind a cast, where MXNet can't infer it any more."""
    behind = {node.inputs[0][0] for node in graph.nodes if node.op in CASTS}
    nodes = list(graph.nodes)
    for i in behind:
        node, code = nodes[i], DTYPE_CODES.get(dtypes.get(nodes[i].name, "float32"))
        if node.is_variable and "__dtype__" not in node.attrs and code is not None:
            nodes[i] = Node("null", node.name, {**node.attrs, "__dtype__": str(code)})
    return Graph(nodes, graph.heads, graph.attrs)


def cast_offline(graph: Graph, keep: AbstractSet[str], dtype: str) -> Tuple[Graph, Dict[str, str]]:
    """Drop the casts of variables that are only read through a cast to `dtype`.

    The variable takes the dtype itself, recorded in its `__dtype__`.
    """
    readers: Dict[int, List[Tuple[int, Node]]] = {}
    for i, node in enumerate(graph.nodes):
        for source, _ in node.inputs:
            readers.setdefault(source, []).append((i, node))
    heads = {node for node, _ in graph.heads}
    replaced: Dict[int, int] = {}
    found: Dict[str, str] = {}
    nodes = list(graph.nodes)
    for i, node in enumerate(graph.nodes):
        if not node.is_variable or node.name in keep or i in heads or i not in readers:
            continue
        if all(n.op == "amp_cast" and n.attrs["dtype"] == dtype for _, n in readers[i]):
            attrs = {**node.attrs, "__dtype__": str(DTYPE_CODES[dtype])}
            nodes[i] = Node("null", node.name, attrs)
            found[node.name] = dtype
            replaced.update((j, i) for j, _ in readers[i])
    return without(Graph(nodes, graph.heads, graph.attrs), replaced), found


def without(graph: Graph, replaced: Mapping[int, int]) -> Graph:
    """Return a graph in which each node of `replaced` is gone and its input read in its place."""
    places: Dict[int, int] = {}
    nodes: List[Node] = []
    for i, node in enumerate(graph.nodes):
        if i in replaced:
            places[i] = places[replaced[i]]
            continue
        places[i] = len(nodes)
        inputs = [(places[source], k) for source, k in node.inputs]
        nodes.append(Node(node.op, node.name, node.attrs, inputs, node.subgraphs, node.num_outputs))
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)


def count_losses(before: NDArray, after: NDArray) -> Tuple[int, int]:
    """Return how many finite values a cast has made infinite, and how many others zero."""
    old, new = before.asnumpy(), cast(after, "float32").asnumpy()
    overflown = np.isfinite(old) & np.isinf(new)
    vanished = (old != 0) & (new == 0)
    return int(overflown.sum()), int(vanished.sum())
