"""Passes on the variables of a graph: record their dtypes, and cast parameters offline."""

from __future__ import annotations

from dataclasses import replace
from typing import AbstractSet, Mapping

from ...framework.machine import DTYPE_CODES
from ..edit import Edit, View
from ..ir import CASTS, ROLE, Graph, Node, Output

FLOAT32_CODE = str(DTYPE_CODES["float32"])


def with_recorded_dtypes(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """Return the graph with `__dtype__` set on the variables that feed a cast.

    MXNet infers dtypes from consumers too, but not through a cast, nor through a loop with a cast.
    """
    nodes = list(graph.nodes)
    before: set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):
        node, code = nodes[i], DTYPE_CODES.get(dtypes.get(nodes[i].name, "float32"))
        if i in before or _contains_cast(node):
            before.update(source for source, _ in node.inputs)
        if i in before and node.is_variable and "__dtype__" not in node.attrs and code is not None:
            nodes[i] = replace(node, attrs={**node.attrs, "__dtype__": str(code)})
    return replace(graph, nodes=nodes)


def _contains_cast(node: Node) -> bool:
    """Return whether a node is a cast, or a loop or branch with a cast in its subgraphs."""
    inner = any(_contains_cast(one) for body in node.subgraphs for one in body.nodes)
    return inner or node.op in CASTS


def cast_offline(graph: Graph, keep: AbstractSet[str], dtype: str) -> tuple[Graph, dict[str, str]]:
    """Store variables in `dtype` if all their consumers cast to it, and remove those casts.

    Each such variable gets the dtype itself, recorded in its `__dtype__`. Also returns the new
    dtypes by name. Variables named in `keep` and graph outputs keep their dtype.
    """
    view = View(graph, {})
    cast_variables: dict[str, str] = {}
    nodes, edit = graph.nodes, Edit(graph, {})

    def casts_behind(i: int) -> list[int] | None:
        """Return the casts to `dtype` behind node i; None if a consumer reads another dtype."""
        found: list[int] = []
        if i in view.head_nodes or (i, 0) not in view.consumers:
            return None
        for j, _ in view.consumers[i, 0]:
            is_amp = nodes[j].op == "amp_cast" or nodes[j].is_inserted_cast
            to = nodes[j].attrs["dtype"] if is_amp else None
            # A variable in the other half precision is cast through float32, and weights of grouped
            # convolutions are copied before the cast.
            between = to == "float32" or nodes[j].is_inserted_copy
            behind = casts_behind(j) if between else [] if to == dtype else None
            if behind is None:
                return None
            found += [j, *behind]
        return found

    for i, node in enumerate(graph.nodes):
        between = casts_behind(i) if node.is_variable and node.name not in keep else None
        if between is not None:
            edit.change(i, attrs={**node.attrs, "__dtype__": str(DTYPE_CODES[dtype])})
            cast_variables[node.name] = dtype
            for j in between:
                edit.redirect((j, 0), (i, 0))
    return edit.applied(), cast_variables


def names_cast_to(graph: Graph, dtype: str) -> set[str]:
    """Return the names of nodes whose output is cast to `dtype`, directly or through a `_copy`."""
    casts = [node for node in graph.nodes if node.op in CASTS and node.attrs.get("dtype") == dtype]
    sources = [graph.nodes[cast.inputs[0][0]] for cast in casts]
    return {(graph.nodes[one.inputs[0][0]] if one.op == "_copy" else one).name for one in sources}


def with_copies_before_casts(graph: Graph, dtypes: Mapping[str, str]) -> Graph:
    """Insert a copy before variables' casts to or from bfloat16, so that no gradient is lost.

    On CPUs the gradient of such a cast is lost under grad_req="add" (see
    `Builder._input_of_cast`), and a saved graph may be trained with any grad_req.
    """

    def reads_through_copy(node: Node) -> bool:
        """Return whether a node is a cast that needs a copy: of a variable, from or to bfloat16."""
        variable = graph.nodes[node.inputs[0][0]] if node.op in CASTS else node
        between = (dtypes.get(variable.name, "float32"), node.attrs.get("dtype"))
        return variable is not node and variable.is_variable and "bfloat16" in between

    edit = Edit(graph, {})
    made: dict[int, Output] = {}
    for i, node in enumerate(graph.nodes):
        if reads_through_copy(node):
            source = node.inputs[0][0]
            if source not in made:
                name = f"{graph.nodes[source].name}_amp_copy"
                made[source] = edit.add("_copy", name, node.inputs, **{ROLE: "copy"})
            edit.set_input(i, 0, made[source])
    return edit.applied()


def without_copies_before_casts(graph: Graph) -> Graph:
    """Return the graph without the copies that `with_copies_before_casts` has inserted."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.is_inserted_copy and graph.nodes[node.inputs[0][0]].is_variable:
            edit.redirect((i, 0), node.inputs[0])
    return edit.applied()


def with_merged_variables(graph: Graph) -> Graph:
    """Merge variables of the same name, which are one parameter; return the new graph."""
    edit = Edit(graph, {})
    first: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable and first.setdefault(node.name, i) != i:
            kept = first[node.name]
            edit.change(kept, attrs={**node.attrs, **edit.node(kept).attrs})
            edit.redirect((i, 0), (kept, 0))
    return edit.applied()
