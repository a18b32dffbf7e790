"""A graph for training, where MXNet's own gradients are wrong: slopes of PReLU, biases.

MXNet's PReLU writes the gradient of its data over the one that comes in, and reads that again for
the gradient of the slope, which so is too small by a factor of the slope itself. Where its output
is an output of the graph it is right, as in eager calls. Written out, each gradient is an operator
of its own.
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

#: A dense layer's inputs, with a bias.
_DATA, _WEIGHT, _BIAS = range(3)


def weights_beside_biases(graph: Graph) -> FrozenSet[str]:
    """Return the variables that the weights of dense layers with biases are computed from."""
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
    """Return a graph that is trained while the variables `frozen` get no gradients.

    It is the same one where no bias is trained beside a weight without a gradient.
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
        hidden = {key: value for key, value in node.attrs.items() if key.startswith("__")}
        edit.alias((i, 0), edit.add("_npi_add", f"{node.name}_with_bias", reads, **hidden))
    return edit.applied()


def _changed_bodies(graph: Graph, trained: Sequence[bool]) -> Dict[int, List[Graph]]:
    """Return the new bodies of the loops that have other ones, by the index of the loop."""
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
    """Return the bodies of a loop that are rewritten in training."""
    return enumerate(node.subgraphs) if rewrites_bodies(node, training=True) else ()


def without_bias(attrs: Dict[str, str]) -> Dict[str, str]:
    """Return a dense layer's attributes as those of one without a bias."""
    return {**attrs, "no_bias": "True"}


def needs_separate_bias(arrays: Sequence[NDArray]) -> bool:
    """Return whether a recorded dense call may train its bias and not its weight.

    Only a weight with a gradient array gets a gradient for sure. A weight that was computed does if
    nothing on the way to it stops gradients; finding out takes as long as the tape behind it is.
    """
    if len(arrays) <= _BIAS or arrays[_WEIGHT].grad is not None:
        return False
    return arrays[_BIAS].grad is not None or _is_recorded(arrays[_BIAS])


def _is_recorded(array: NDArray) -> bool:
    """Return whether autograd knows how an array was computed."""
    try:
        autograd.get_symbol(array)  # of its node alone, however long the tape is
    except MXNetError:
        return False
    return True


def _has_bias(node: Node) -> bool:
    return node.operator == "FullyConnected" and len(node.inputs) > _BIAS


def trained_nodes(graph: Graph, frozen: AbstractSet[str]) -> List[bool]:
    """Tell of each node whether gradients go through it to a variable."""
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
