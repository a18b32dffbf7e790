"""A graph with its inputs in the reverse order, so that gradients of weights are freed early.

MXNet plans the backward pass by a walk from the gradients, in the order of the graph's inputs.
The gradient of the first layer's weight needs all of the pass; where it is asked for first, the
half-precision gradients of all other weights wait for their casts to float32 until the end: one
more copy of the model, in half precision. Asked for last, each is cast and freed as it is made.
"""

from .graph import Graph

__all__ = ["with_reversed_inputs"]


def with_reversed_inputs(graph: Graph) -> Graph:
    """Return a graph that computes the same, whose symbol lists its inputs in reverse.

    `graph` has its inputs in the order of its symbol's `list_inputs`, which follows from a
    depth-first walk. The first comes last once all others are among its dependencies, which the
    walk visits and nothing reads.
    """
    inputs = [i for i, node in enumerate(graph.nodes) if node.is_variable]
    operators = [i for i, node in enumerate(graph.nodes) if not node.is_variable]
    places = {old: new for new, old in enumerate([*reversed(inputs), *operators])}
    nodes = [
        graph.nodes[old].reading([(places[i], k) for i, k in graph.nodes[old].inputs])
        for old in places
    ]
    if len(inputs) > 1:
        last = len(inputs) - 1
        nodes[last].control_deps = list(range(last))
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)
