"""Convert the graph of a float16 or bfloat16 model to float32."""

from __future__ import annotations

from dataclasses import replace
from typing import AbstractSet, Mapping, NamedTuple, Sequence

from ...framework.machine import DTYPE_CODES
from ...policy.active import OFF
from ...policy.decision import CASTABLE
from ...policy.regions import REGION
from ..edit import Edit, View
from ..ir import CASTS, HALVES, ROLE, Graph, Node, Output, Usage, body_inputs, infer_dtypes
from .offline import FLOAT32_CODE

#: The attributes that hold the dtype of an operator's output, and the half dtypes in them. Old
#: operators store MXNet's codes of dtypes.
_ATTRIBUTES = ("dtype", "out_dtype")
_IN_FLOAT32 = {one: "float32" for one in HALVES}
_IN_FLOAT32.update({str(DTYPE_CODES[one]): FLOAT32_CODE for one in HALVES})


class Widened(NamedTuple):
    """A graph converted to float32, and its variables whose dtype became float32."""

    graph: Graph
    variables: frozenset[str]


def has_halves(graph: Graph, dtypes: Mapping[str, str]) -> bool:
    """Return whether a graph uses float16 or bfloat16: in casts, constants or variables."""
    return not HALVES.isdisjoint(dtypes.values()) or any(
        node.operator == "amp_multicast" or _with_float32(node.attrs) != node.attrs
        for node in graph.all_nodes
    )


def widened(
    graph: Graph,
    dtypes: Mapping[str, str],
    kept: AbstractSet[str] = frozenset(),
    restore: bool = False,
) -> Widened:
    """Return the graph converted from half precision to float32.

    Casts between float16, bfloat16 and float32 are left out, unless they round on purpose. Casts
    from and to integers, booleans and float64 stay, with float32 in place of half precision.

    `dtypes` are the dtypes of the variables. Variables in `kept` keep their dtype: a cast behind
    each widens it. With `restore` the graph's outputs keep their dtypes too.
    """
    edit, found = Edit(graph, {}), infer_dtypes(graph, Usage(dtypes))
    variables = set()
    for i, node in enumerate(graph.nodes):
        if not node.is_variable or dtypes.get(node.name) not in HALVES:
            continue
        if node.name in kept:
            name, attrs = f"{node.name}_amp_cast_float32", {"dtype": "float32", ROLE: "cast"}
            edit.redirect((i, 0), edit.add_node(Node("amp_cast", name, attrs, [(i, 0)])))
        else:
            variables.add(node.name)
            edit.change(i, attrs=_with_float32(node.attrs, ("__dtype__", "dtype")))
    _widen_operators(edit, graph, found)
    for place, (i, k) in enumerate(graph.heads if restore else ()):
        if found[i, k] in HALVES:
            name, attrs = f"{graph.nodes[i].name}_amp_cast_{found[i, k]}", {"dtype": found[i, k]}
            edit.set_head(place, edit.add("amp_cast", name, [(i, k)], **attrs, **{ROLE: "cast"}))
    return Widened(edit.applied(), frozenset(variables))


def _widen_operators(edit: Edit, graph: Graph, found: Mapping[Output, str]) -> None:
    """Convert a graph's half-precision operators to float32; keep casts used only for rounding.

    `found` are the dtypes of all outputs.
    """
    view = View(graph, {})
    roundings: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.is_variable or any(source in roundings for source, _ in node.inputs):
            continue
        inputs = [found[output] for output in node.inputs]
        outputs = [found[i, k] for k in range(node.num_outputs)]
        if _rounds(i, view, inputs):
            roundings.add(i)
        elif node.operator in (*CASTS, "amp_multicast") and {*inputs, *outputs} <= CASTABLE:
            for k, source in enumerate(node.inputs):
                edit.redirect((i, k), source)
        else:
            bodies = [_widened_body(node, k, inputs) for k in range(len(node.subgraphs))]
            edit.change(i, attrs=_with_float32(node.attrs), subgraphs=bodies)


def without_lowering_regions(graph: Graph) -> Graph:
    """Return the graph without the attributes by which `autocast` makes operators use 16 bits."""

    def unmarked(node: Node) -> Node:
        bodies = [without_lowering_regions(body) for body in node.subgraphs]
        attrs = {n: text for n, text in node.attrs.items() if n != REGION or text == OFF}
        return replace(node, attrs=attrs, subgraphs=bodies)

    return graph if graph.marks <= {OFF} else replace(graph, nodes=list(map(unmarked, graph.nodes)))


def _rounds(i: int, view: View, inputs: Sequence[str]) -> bool:
    """Return whether node i is a cast to half precision whose only purpose is to round.

    That is a `Cast` of float32 or float64 in the model's own code that only casts back read: no
    operator computes in half precision between them, so their one effect is to round.
    """
    node = view.graph.nodes[i]
    if node.operator != "Cast" or node.is_inserted_cast or node.attrs["dtype"] not in HALVES:
        return False
    readers = [view.graph.nodes[j] for j, _ in view.consumers.get((i, 0), ()) if j >= 0]
    return (
        i not in view.head_nodes
        and inputs[0] not in HALVES
        and all(r.operator in CASTS and r.attrs["dtype"] not in HALVES for r in readers)
    )


def _widened_body(node: Node, position: int, dtypes: Sequence[str]) -> Graph:
    """Convert a loop's body to float32, given the dtypes of the loop's inputs.

    `position` is the number of the subgraph. Returns the body's graph.
    """
    body = node.subgraphs[position]
    names = body.input_names
    inputs = {names[inner]: dtypes[outer] for inner, outer in body_inputs(node, position).items()}
    wide = widened(body, inputs).graph
    edit = Edit(wide, {})
    for place, (i, k) in enumerate(wide.heads):
        # MXNet can't run a body that returns an input as it is.
        if wide.nodes[i].is_variable:
            edit.set_head(place, edit.add("_copy", f"{wide.nodes[i].name}_copy", [(i, k)]))
    return edit.applied()


def _with_float32(attrs: Mapping[str, str], names: Sequence[str] = _ATTRIBUTES) -> dict[str, str]:
    """Return an operator's attributes with float32 in place of float16 and bfloat16."""
    return {
        name: _IN_FLOAT32.get(text, text) if name in names else text for name, text in attrs.items()
    }
