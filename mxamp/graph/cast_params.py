"""Variables of a converted graph: recorded dtypes, and casts made once instead of each run."""

from dataclasses import replace
from typing import AbstractSet, Dict, List, Mapping, Optional, Set, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import float32_parts
from ..framework.machine import DTYPE_CODES, DTYPE_NAMES
from .graph import CASTS, TAKES_EMPTY, Graph, Node, Output
from .graph_copy import GraphCopy

__all__ = [
    "cast_offline",
    "count_losses",
    "of_any_shape",
    "widened",
    "with_copies",
    "with_dtypes",
    "with_single_variables",
    "without",
    "without_copies",
]

COPY = "_amp_copy"
FLOAT32 = str(DTYPE_CODES["float32"])


def with_dtypes(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """Record the dtype of each variable that MXNet can't infer any more: those before casts.

    MXNet infers dtypes backwards too, but not through a cast, be it in the body of a loop.
    """
    nodes = list(graph.nodes)
    before: Set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):
        node, code = nodes[i], DTYPE_CODES.get(dtypes.get(nodes[i].name, "float32"))
        if i in before or _casts(node):
            before.update(source for source, _ in node.inputs)
        if i in before and node.is_variable and "__dtype__" not in node.attrs and code is not None:
            nodes[i] = replace(node, attrs={**node.attrs, "__dtype__": str(code)})
    return replace(graph, nodes=nodes)


def _casts(node: Node) -> bool:
    inner = any(_casts(one) for body in node.subgraphs for one in body.nodes)
    return inner or node.op in CASTS


def cast_offline(graph: Graph, keep: AbstractSet[str], dtype: str) -> Tuple[Graph, Dict[str, str]]:
    """Drop the casts of variables that are only read through a cast to `dtype`.

    The variable takes the dtype itself, recorded in its `__dtype__`. Returns the graph, and the
    dtype by name of each such variable; those named in `keep` stay as they are.
    """
    readers: Dict[int, List[int]] = {}
    for i, node in enumerate(graph.nodes):
        for source, _ in node.inputs:
            readers.setdefault(source, []).append(i)
    heads = {node for node, _ in graph.heads}
    dropped: Dict[int, int] = {}
    cast_variables: Dict[str, str] = {}
    nodes = list(graph.nodes)

    def casts(i: int) -> Optional[List[int]]:
        """Return the casts between node i and what reads it in `dtype`; None if not all does."""
        found: List[int] = []
        if i in heads or i not in readers:
            return None
        for j in readers[i]:
            is_amp = nodes[j].op == "amp_cast" or TAKES_EMPTY in nodes[j].attrs
            to = nodes[j].attrs["dtype"] if is_amp else None
            # A variable that holds the other half precision is cast by way of float32; weights of
            # grouped convolutions are copied before they are cast.
            between = to == "float32" or _is_copy(nodes[j])
            behind = casts(j) if between else [] if to == dtype else None
            if behind is None:
                return None
            found += [j, *behind]
        return found

    for i, node in enumerate(graph.nodes):
        between = casts(i) if node.is_variable and node.name not in keep else None
        if between is not None:
            nodes[i] = replace(node, attrs={**node.attrs, "__dtype__": str(DTYPE_CODES[dtype])})
            cast_variables[node.name] = dtype
            dropped.update(dict.fromkeys(between, i))
    return without(replace(graph, nodes=nodes), dropped), cast_variables


def widened(graph: Graph, names: AbstractSet[str]) -> Graph:
    """Return a converted graph whose variables `names`, in half precision, are float32 ones.

    Behind each stands a cast to what it was, such as a conversion inserts: for the dtypes of
    outputs, until the graph is rewritten.
    """
    copy = GraphCopy(graph)
    for i, node in enumerate(graph.nodes):
        if not node.is_variable or node.name not in names:
            copy.add_copy(i)
            continue
        dtype = DTYPE_NAMES[int(node.attrs["__dtype__"])]
        variable = copy.add(replace(node, attrs={**node.attrs, "__dtype__": FLOAT32}))
        cast_node = replace(node, op="amp_cast", name=f"{node.name}_amp_cast_{dtype}")
        copy.stand_in(i, replace(cast_node, attrs={"dtype": dtype}, inputs=[variable]))
    return copy.finished()


def _is_copy(node: Node) -> bool:
    """Tell whether a conversion has put a copy before casts."""
    return node.op == "_copy" and COPY in node.name


def with_copies(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """Put a copy between each variable and its casts to or from bfloat16.

    On CPUs the gradient of such a cast is lost under grad_req="add" (`Builder.cast`), and a saved
    graph doesn't know how its gradients will be written.
    """

    def reads_through_copy(node: Node) -> bool:
        variable = graph.nodes[node.inputs[0][0]] if node.op in CASTS else node
        between = (dtypes.get(variable.name, "float32"), node.attrs.get("dtype"))
        return variable is not node and variable.is_variable and "bfloat16" in between

    casts = {i for i, node in enumerate(graph.nodes) if reads_through_copy(node)}
    if not casts:
        return graph
    copy = GraphCopy(graph)
    made: Dict[int, Output] = {}
    for i, node in enumerate(graph.nodes):
        inputs = copy.inputs(node)
        if i in casts:
            source = node.inputs[0][0]
            variable = graph.nodes[source]
            if source not in made:
                name = copy.new_name(f"{variable.name}{COPY}")
                made[source] = copy.add(Node("_copy", name, {}, inputs))
            inputs = [made[source]]
        copy.add_copy(i, inputs=inputs)
    return copy.finished()


def without_copies(graph: Graph) -> Graph:
    """Return the graph without what `with_copies` has put into it."""
    copies = {
        i: node.inputs[0][0]
        for i, node in enumerate(graph.nodes)
        if _is_copy(node) and graph.nodes[node.inputs[0][0]].is_variable
    }
    return without(graph, copies) if copies else graph


def without(graph: Graph, dropped: Mapping[int, int]) -> Graph:
    """Return the graph without the nodes `dropped`, each of which maps to what is read instead."""
    copy = GraphCopy(graph)
    for i in range(len(graph.nodes)):
        if i in dropped:
            copy.read_instead(i, dropped[i])
        else:
            copy.add_copy(i)
    return copy.finished()


def with_single_variables(graph: Graph) -> Graph:
    """Return the graph with one variable where several have a name: they are one parameter."""
    first: Dict[str, int] = {}
    twins: Dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable and first.setdefault(node.name, i) != i:
            twins[i] = first[node.name]
    if not twins:
        return graph
    nodes = list(graph.nodes)
    for i, k in twins.items():
        nodes[k] = replace(nodes[k], attrs={**nodes[i].attrs, **nodes[k].attrs})
    return without(replace(graph, nodes=nodes), twins)


def of_any_shape(variable: Node) -> Node:
    """Return a variable without the shape that Gluon records."""
    attrs = {name: text for name, text in variable.attrs.items() if name != "__shape__"}
    return replace(variable, attrs=attrs)


def count_losses(before: NDArray, after: NDArray) -> Tuple[int, int]:
    """Return how many finite values a cast has made infinite, and how many others zero."""
    overflown = vanished = 0
    for old, new in zip(float32_parts(before), float32_parts(after)):
        overflown += int((np.isfinite(old) & np.isinf(new)).sum())
        vanished += int(((old != 0) & (new == 0)).sum())
    return overflown, vanished
