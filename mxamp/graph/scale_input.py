"""A graph with the loss scale as one more input, for operators that start the backward pass.

`SoftmaxOutput` and its kin ignore the gradient that comes to them, so the scale enters the graph
as data: the first input of each goes through the identity of `scaling.loss_outputs`, which changes
no value and multiplies the gradient by the scale.
"""

from typing import Dict, List, Optional

from ..framework.operators import BACKWARD_STARTERS
from .graph import Graph, Node, Output

__all__ = ["SCALE_INPUT", "with_scale_input"]

#: The input's name.
SCALE_INPUT = "amp_loss_scale"


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
    """Append BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x)) for an output x of `nodes`."""

    def add(op: str, suffix: str, *inputs: Output) -> Output:
        nodes.append(Node(op, f"{name}_amp_{suffix}", {}, list(inputs)))
        return len(nodes) - 1, 0

    sign = add("_contrib_sign_ste", "sign", data)
    zero = add("elemwise_sub", "zero", add("BlockGrad", "block", sign), sign)
    scaled = add("broadcast_mul", "scaled", zero, (0, 0))
    return add("elemwise_sub", "input", add("BlockGrad", "values", data), scaled)
