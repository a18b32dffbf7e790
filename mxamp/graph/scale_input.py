"""A graph with the loss scale as one more input, for operators that start the backward pass.

`SoftmaxOutput` and its kin ignore the gradient that comes to them, so the scale enters the graph
as data: the first input x of each becomes x + (x*s - BlockGrad(x*s)), with s = scale - 1. That
leaves every value as it is and multiplies the gradient by 1 + s.
"""

from typing import Dict, List, Optional

from ..framework.operators import BACKWARD_STARTERS
from .graph import Graph, Node, Output

__all__ = ["SCALE_INPUT", "with_scale_input"]

#: The input's name.
SCALE_INPUT = "amp_loss_scale_minus_one"


def with_scale_input(graph: Graph) -> Optional[Graph]:
    """Return `graph` with the input `SCALE_INPUT`; None where no operator needs it."""
    nodes: List[Node] = [Node("null", SCALE_INPUT, {"__shape__": "(1,)", "__dtype__": "0"})]
    places: Dict[int, int] = {}
    needed = False
    for i, node in enumerate(graph.nodes):
        inputs = [(places[source], k) for source, k in node.inputs]
        if not node.is_variable and node.operator in BACKWARD_STARTERS:
            needed = True
            inputs[0] = _scaled(nodes, node.name, inputs[0])
        places[i] = len(nodes)
        nodes.append(Node(node.op, node.name, node.attrs, inputs, node.subgraphs, node.num_outputs))
    if not needed:
        return None
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)


def _scaled(nodes: List[Node], name: str, data: Output) -> Output:
    """Append x + (x*s - BlockGrad(x*s)) for an output x of `nodes`; return where it is."""

    def add(op: str, suffix: str, *inputs: Output) -> Output:
        nodes.append(Node(op, f"{name}_amp_{suffix}", {}, list(inputs)))
        return len(nodes) - 1, 0

    product = add("broadcast_mul", "scaled", data, (0, 0))
    zero = add("elemwise_sub", "zero", product, add("BlockGrad", "block", product))
    return add("elemwise_add", "input", data, zero)
