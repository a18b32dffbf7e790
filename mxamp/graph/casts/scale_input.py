"""A graph with the loss scale as one more input, for operators that start the backward pass.

`SoftmaxOutput` and its kin ignore the gradient that comes to them, so the scale enters the graph
as data: the first input of each goes through the identity of `scaling.loss_outputs`, which changes
no value and multiplies the gradient by the scale.
"""

from typing import List, Optional

from ...framework.operators import WRITTEN_BY_USERS, auxiliary_states, starts_backward
from ..edit import Edit
from ..ir import Graph, Node, Output

__all__ = ["SCALE_INPUT", "with_scale_input"]

#: The input's name.
SCALE_INPUT = "amp_loss_scale"


def with_scale_input(graph: Graph) -> Optional[Graph]:
    """Return `graph` with the input `SCALE_INPUT`; None where no operator needs it."""
    starting = {
        i
        for i, node in enumerate(graph.nodes)
        if not node.is_variable and starts_backward(node.operator, node.attrs)
    }
    if not starting:
        return None
    edit = Edit(graph, {})
    scale = edit.add_node(Node("null", SCALE_INPUT, {"__shape__": "(1,)", "__dtype__": "0"}))
    for i in sorted(starting):
        node = graph.nodes[i]
        for k in _differentiable(graph, node):
            edit.read(i, k, _scaled(edit, f"{node.name}{k or ''}", node.inputs[k], scale))
    return edit.applied()


def _differentiable(graph: Graph, node: Node) -> List[int]:
    """Return the positions of the inputs that an operator sends gradients to."""
    if node.operator not in WRITTEN_BY_USERS:
        return [0]
    read = node.inputs[: len(node.inputs) - auxiliary_states(node.attrs)]
    sources = (graph.nodes[i] for i, _ in read)
    labels = [source.is_variable and "label" in source.name for source in sources]
    return [k for k, is_label in enumerate(labels) if not is_label]


def _scaled(edit: Edit, name: str, data: Output, scale: Output) -> Output:
    """Add BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x)) for an output x."""

    def add(op: str, suffix: str, *inputs: Output) -> Output:
        return edit.add_node(Node(op, f"{name}_amp_{suffix}", {}, list(inputs)))

    sign = add("_contrib_sign_ste", "sign", data)
    zero = add("elemwise_sub", "zero", add("BlockGrad", "block", sign), sign)
    scaled = add("broadcast_mul", "scaled", zero, scale)
    return add("elemwise_sub", "input", add("BlockGrad", "values", data), scaled)
