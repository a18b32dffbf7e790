"""A graph for training, where MXNet's own gradients are wrong: slopes of PReLU, biases.

MXNet's PReLU writes the gradient of its data over the one that comes in, and reads that again for
the gradient of the slope, which so is too small by a factor of the slope itself. Where its output
is an output of the graph it is right, as in eager calls. Written out, each gradient is an operator
of its own.
"""

from dataclasses import replace
from typing import AbstractSet

from .control_flow import rewrites_bodies
from .edit import Edit
from .graph import Graph, Node, Output
from .separate_biases import trained_nodes, with_separate_biases

__all__ = ["trained_graph"]


def trained_graph(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Return a graph with right gradients that is trained while variables `frozen` get none.

    It is the same one where MXNet's gradients are right.
    """
    return _with_slopes_apart(with_separate_biases(graph, frozen), frozen)


def _with_slopes_apart(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Return a graph with max(x, 0) + slope * min(x, 0) for each PReLU whose slope is trained."""
    if not any(map(_is_prelu, graph.all_nodes)):
        return graph
    trained, edit = trained_nodes(graph, frozen), Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if _is_prelu(node) and trained[node.inputs[1][0]]:
            _write_out(edit, i, node)
        elif rewrites_bodies(node, training=True):
            # What is frozen outside a loop is not known by name inside.
            bodies = [_with_slopes_apart(body, frozenset()) for body in node.subgraphs]
            if any(new is not old for new, old in zip(bodies, node.subgraphs)):
                edit.change(i, subgraphs=bodies)
    return edit.applied()


def _is_prelu(node: Node) -> bool:
    return node.operator == "LeakyReLU" and node.attrs.get("act_type") == "prelu"


def _write_out(edit: Edit, i: int, node: Node) -> None:
    data, slope = node.inputs
    hidden = {name: text for name, text in node.attrs.items() if name.startswith("__")}

    def add(op: str, suffix: str, *inputs: Output, **attrs: str) -> Output:
        return edit.add(op, f"{node.name}_{suffix}", inputs, **hidden, **attrs)

    above = add("Activation", "above", data, act_type="relu")
    below = add("_minimum_scalar", "below", data, scalar="0")
    # The slopes for each element: those of a PReLU of -1. It sends no gradient to its data, so
    # there is nothing to write over the one that comes in.
    minus_one = add("_mul_scalar", "minus_one", add("ones_like", "one", data), scalar="-1")
    slopes = edit.add_node(
        replace(node, name=edit.new_name(f"{node.name}_slopes"), inputs=[minus_one, slope])
    )
    lowered = add("elemwise_mul", "lowered", below, slopes)
    edit.change(i, op="elemwise_sub", attrs=hidden, inputs=[above, lowered])
