"""Control flow: which bodies of loops and branches are rewritten, and what flows into them."""

from dataclasses import replace
from typing import Dict, List, Optional, Sequence

from ..policy.values import integers
from .graph import Node
from .usage import Shape, Usage

__all__ = ["LOOPS", "UNSAFE_LOOPS", "body_inputs", "body_usage", "rewrites_bodies", "step_shapes"]

#: Control flow whose gradients in graphs read memory that MXNet has never written: garbage or
#: right by luck, in plain float32 too. Any change to their bodies changes the luck.
UNSAFE_LOOPS = frozenset({"_while_loop", "_cond"})

LOOPS = UNSAFE_LOOPS | {"_foreach"}

#: The bodies of a node, in order, as its attributes call them.
_BODIES = {"_while_loop": ("cond", "func"), "_cond": ("cond", "then", "else")}


def rewrites_bodies(node: Node, training: bool) -> bool:
    """Tell whether the graphs that `node` holds are rewritten.

    oneDNN's fused operators hold graphs too, which stay as they are.
    """
    return node.operator in LOOPS and not (training and node.operator in UNSAFE_LOOPS)


def body_usage(usage: Usage, node: Node, position: int, dtypes: Sequence[str]) -> Usage:
    """Return how one body of `node` is used, where the node's own inputs have these `dtypes`.

    A body's inputs and outputs keep their dtypes. All gradients may be accumulated over the steps
    of a loop.
    """
    names = node.subgraphs[position].input_names
    inputs = body_inputs(node, position)
    return replace(
        usage,
        dtypes={names[inner]: dtypes[outer] for inner, outer in inputs.items()},
        shapes={},
        accumulated=frozenset(names),
        stored=frozenset(),
        restore=True,
    )


def step_shapes(node: Node, shapes: Sequence[Optional[Shape]]) -> Dict[str, Shape]:
    """Return the shapes of what one step of a `foreach` reads, by the names of its body's inputs.

    `shapes` are those of the node's inputs, data first: a step takes one slice of each. Those that
    are None are left out.
    """
    names, data = node.subgraphs[0].input_names, len(_places(node, "in_data_locs"))
    return {
        names[inner]: shape[1:] if outer < data else shape
        for inner, outer in body_inputs(node, 0).items()
        for shape in [shapes[outer]]
        if shape is not None
    }


def body_inputs(node: Node, position: int) -> Dict[int, int]:
    """Map the inputs of a body to the node's own inputs, by position."""
    if node.operator == "_foreach":
        # The body's positions of what the node takes, in the node's order.
        locations = ("in_data_locs", "in_state_locs", "remain_locs")
        places = [place for name in locations for place in _places(node, name)]
        return {place: outer for outer, place in enumerate(places)}
    if node.operator not in _BODIES:
        return {}
    # The node's positions of what the body takes, in the body's order.
    name = _BODIES[node.operator][position]
    return dict(enumerate(_places(node, f"{name}_input_locs")))


def _places(node: Node, attribute: str) -> List[int]:
    return integers(node.attrs.get(attribute, "[]"))
