"""Graphs for training: correct gradients of PReLU and biases, and the loss scale as an input.

MXNet's PReLU overwrites the incoming gradient with the gradient of its data, then reads it for the
gradient of the slope, which becomes too small by a factor of the slope. Only eager calls and graph
outputs are right. In the operators that replace PReLU here, each gradient has its own memory.
"""

from dataclasses import replace
from typing import AbstractSet, Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray

from ..framework.operators import WRITTEN_BY_USERS, auxiliary_states, resolve, starts_backward
from ..framework.zero_gradients import zero_gradients
from .edit import Edit
from .ir import Graph, Node, Output, body_inputs, rewrites_bodies

__all__ = [
    "SCALE_INPUT",
    "needs_separate_bias",
    "trained_graph",
    "trained_nodes",
    "weights_beside_biases",
    "with_scale_input",
    "with_separate_biases",
    "without_bias",
]

#: The positions of a dense layer's inputs.
_DATA, _WEIGHT, _BIAS = range(3)


def weights_beside_biases(graph: Graph) -> FrozenSet[str]:
    """Return the variables that weights of dense layers with biases depend on."""
    found: Set[int] = set()
    for node in graph.nodes:
        if _has_bias(node):
            found.add(node.inputs[_WEIGHT][0])
        for k, body in _bodies(node):
            names, weights = body.input_names, weights_beside_biases(body)
            for inner, outer in body_inputs(node, k).items():
                if names[inner] in weights:
                    found.add(node.inputs[outer][0])
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in found:
            found.update(source for source, _ in graph.nodes[i].inputs)
    return frozenset(graph.nodes[i].name for i in found if graph.nodes[i].is_variable)


def with_separate_biases(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Return a graph with separate additions of biases whose weight gets no gradient.

    `frozen` names the variables without gradients. Returns the same graph if no bias is trained
    beside such a weight.
    """
    if not any(_has_bias(node) for node in graph.all_nodes):
        return graph
    trained = trained_nodes(graph, frozen)
    apart = {
        i
        for i, node in enumerate(graph.nodes)
        if _has_bias(node)
        and trained[node.inputs[_BIAS][0]]
        and not trained[node.inputs[_WEIGHT][0]]
    }
    bodies = _changed_bodies(graph, trained)
    if not apart and not bodies:
        return graph
    edit = Edit(graph, {})
    for i, changed in bodies.items():
        edit.change(i, subgraphs=changed)
    for i in sorted(apart):
        node = graph.nodes[i]
        edit.change(i, attrs=without_bias(node.attrs), inputs=node.inputs[:_BIAS])
        reads = [(i, 0), node.inputs[_BIAS]]
        name = f"{node.name}_with_bias"
        edit.redirect((i, 0), edit.add("_npi_add", name, reads, **node.hidden_attrs))
    return edit.applied()


def _changed_bodies(graph: Graph, trained: Sequence[bool]) -> Dict[int, List[Graph]]:
    """Return the new bodies of changed loops, by index of the loop."""
    changed = {}
    for i, node in enumerate(graph.nodes):
        bodies = list(node.subgraphs)
        for k, body in _bodies(node):
            names = body.input_names
            places = body_inputs(node, k).items()
            frozen = {names[inner] for inner, outer in places if not trained[node.inputs[outer][0]]}
            bodies[k] = with_separate_biases(body, frozen)
        if any(new is not old for new, old in zip(bodies, node.subgraphs)):
            changed[i] = bodies
    return changed


def _bodies(node: Node) -> Iterable[Tuple[int, Graph]]:
    """Return the bodies of a loop that are rewritten in training, with their positions."""
    return enumerate(node.subgraphs) if rewrites_bodies(node, training=True) else ()


def without_bias(attrs: Dict[str, str]) -> Dict[str, str]:
    """Return a dense layer's attributes with the bias switched off."""
    return {**attrs, "no_bias": "True"}


def needs_separate_bias(arrays: Sequence[NDArray]) -> bool:
    """Return whether a recorded dense call may train its bias but not its weight.

    Only a weight with a gradient array gets a gradient for sure. For a computed weight, an operator
    on the tape may stop gradients, and walking the tape takes too long.
    """
    if len(arrays) <= _BIAS or arrays[_WEIGHT].grad is not None:
        return False
    return arrays[_BIAS].grad is not None or _is_recorded(arrays[_BIAS])


def _is_recorded(array: NDArray) -> bool:
    """Return whether autograd has recorded the computation of an array."""
    try:
        autograd.get_symbol(array)  # takes constant time
    except MXNetError:
        return False
    return True


def _has_bias(node: Node) -> bool:
    return node.operator == "FullyConnected" and len(node.inputs) > _BIAS


def trained_nodes(graph: Graph, frozen: AbstractSet[str]) -> List[bool]:
    """Return, for each node, whether gradients flow through it to a variable not in `frozen`."""
    trained: List[bool] = []
    for node in graph.nodes:
        if node.is_variable:
            trained.append(node.name not in frozen)
            continue
        handle = resolve(node.op).handle
        stops = zero_gradients().get(handle, frozenset())
        trained.append(
            stops is not None
            and any(trained[i] for k, (i, _) in enumerate(node.inputs) if k not in stops)
        )
    return trained


def trained_graph(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Return a graph with correct gradients, where the variables `frozen` get none.

    Returns the same graph if MXNet's gradients are right.
    """
    return _with_slopes_apart(with_separate_biases(graph, frozen), frozen)


def _with_slopes_apart(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Return a graph with max(x, 0) + slope * min(x, 0) for each PReLU whose slope is trained."""
    if not any(map(_is_prelu, graph.all_nodes)):
        return graph
    trained, edit = trained_nodes(graph, frozen), Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if _is_prelu(node) and trained[node.inputs[1][0]]:
            _replace_prelu(edit, i, node)
        elif rewrites_bodies(node, training=True):
            # Inside a loop, frozen variables have other names.
            bodies = [_with_slopes_apart(body, frozenset()) for body in node.subgraphs]
            if any(new is not old for new, old in zip(bodies, node.subgraphs)):
                edit.change(i, subgraphs=bodies)
    return edit.applied()


def _is_prelu(node: Node) -> bool:
    return node.operator == "LeakyReLU" and node.attrs.get("act_type") == "prelu"


def _replace_prelu(edit: Edit, i: int, node: Node) -> None:
    data, slope = node.inputs

    def add(op: str, suffix: str, *inputs: Output, **attrs: str) -> Output:
        return edit.add(op, f"{node.name}_{suffix}", inputs, **node.hidden_attrs, **attrs)

    above = add("Activation", "above", data, act_type="relu")
    below = add("_minimum_scalar", "below", data, scalar="0")
    # A PReLU of -1 is the negative slope of each element. Its data is constant, so MXNet computes
    # no gradient of the data that could overwrite the incoming gradient.
    minus_one = add("_mul_scalar", "minus_one", add("ones_like", "one", data), scalar="-1")
    slopes = edit.add_node(
        replace(node, name=edit.unique_name(f"{node.name}_slopes"), inputs=[minus_one, slope])
    )
    lowered = add("elemwise_mul", "lowered", below, slopes)
    edit.change(i, op="elemwise_sub", attrs=node.hidden_attrs, inputs=[above, lowered])


# ---------------------------------------------------------------------- loss scale

#: The name of the input for the loss scale.
SCALE_INPUT = "amp_loss_scale"


def with_scale_input(graph: Graph) -> Optional[Graph]:
    """Return `graph` with the loss scale as the input `SCALE_INPUT`; None if not needed.

    `SoftmaxOutput` and similar operators ignore the gradient of their output, so their first input
    gets an identity that multiplies the gradient by the scale and changes no value.
    """
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
            edit.set_input(i, k, _scaled(edit, f"{node.name}{k or ''}", node.inputs[k], scale))
    return edit.applied()


def _differentiable(graph: Graph, node: Node) -> List[int]:
    """Return the positions of an operator's inputs that get gradients."""
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
