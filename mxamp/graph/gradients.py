"""Graph passes that correct the gradients of PReLU and biases, and add a loss scale input.

MXNet's PReLU overwrites the incoming gradient with the gradient of its data, then reads it for the
gradient of the slope, which becomes too small by a factor of the slope. Only eager calls and graph
outputs are right. In the operators that replace PReLU here, each gradient has its own memory.

MXNet computes no gradient of a dense layer's bias where the weight needs none, in eager calls too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import AbstractSet, Any, Sequence

from mxnet import autograd, nd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray

from ..backends import Action, EagerOperator, Invoke
from ..framework.arrays import cast, has_gradient
from ..framework.machine import dtype_name
from ..framework.operators import auxiliary_states, resolve, starts_backward, with_trait
from .edit import Edit
from .ir import Graph, Node, Output, body_inputs, rewrites_bodies

#: The positions of inputs: of a dense layer, and of a PReLU.
_WEIGHT, _BIAS = 1, 2
_SLOPE = 1
#: The mark of the handles of weights that have a gradient array.
_IS_TRAINED = "is_trained"


def weights_beside_biases(graph: Graph) -> frozenset[str]:
    """Return the names of variables on which the weights of dense layers with a bias depend."""
    found: set[int] = set()
    for node in graph.nodes:
        if _is_dense_with_bias(node):
            found.add(node.inputs[_WEIGHT][0])
        for k, body in enumerate(node.subgraphs if rewrites_bodies(node, training=True) else ()):
            names, weights = body.input_names, weights_beside_biases(body)
            for inner, outer in body_inputs(node, k).items():
                if names[inner] in weights:
                    found.add(node.inputs[outer][0])
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in found:
            found.update(source for source, _ in graph.nodes[i].inputs)
    return frozenset(graph.nodes[i].name for i in found if graph.nodes[i].is_variable)


def without_bias(attrs: dict[str, str]) -> dict[str, str]:
    """Return a dense layer's attributes with `no_bias` set."""
    return {**attrs, "no_bias": "True"}


def separate_bias(then: Action, eager: EagerOperator) -> Action:
    """Wrap an eager dense layer so that its bias gets a gradient if its weight needs none."""

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        _, arrays, keys, vals, out, is_np_op, _ = arguments
        # A gradient array stays: with one, the weight is not looked at again.
        known = len(arrays) <= _BIAS or hasattr(arrays[_WEIGHT].handle, _IS_TRAINED)
        if known or not autograd.is_recording():
            return then(original, arguments)
        if has_gradient(arrays[_WEIGHT]):
            setattr(arrays[_WEIGHT].handle, _IS_TRAINED, True)
        elif has_gradient(arrays[_BIAS]) or _is_recorded(arrays[_BIAS]):
            # Only a weight with a gradient array gets a gradient for sure. For a computed weight,
            # an operator on the tape may stop gradients, and walking the tape takes too long.
            attrs, bias = without_bias(dict(zip(keys, map(str, vals)))), arrays[_BIAS]
            product = eager.call(original, "FullyConnected", arrays[:_BIAS], attrs, is_np_op)
            # Repeat the bias by a product with ones: its gradient is a product too, several times
            # as fast as the sum that is the gradient of broadcasting.
            ones = nd.ones((*product.shape[:-1], 1), ctx=bias.context)
            columns = [cast(ones, dtype_name(bias.dtype)), bias.reshape((-1, 1))]
            attrs = {**attrs, "flatten": "False"}
            repeated = eager.call(original, "FullyConnected", columns, attrs, is_np_op)
            added = eager.call(original, "elemwise_add", [product, repeated], {}, is_np_op)
            return eager.write(added, out)
        return then(original, arguments)

    return action


def _is_recorded(array: NDArray) -> bool:
    """Return whether autograd has recorded the operator that computed an array."""
    try:
        autograd.get_symbol(array)  # takes constant time
    except MXNetError:
        return False
    return True


def _is_dense_with_bias(node: Node) -> bool:
    return node.operator == "FullyConnected" and len(node.inputs) > _BIAS


def trained_nodes(graph: Graph, frozen: AbstractSet[str]) -> list[bool]:
    """Return, for each node, whether it passes gradients to a variable not in `frozen`."""
    trained: list[bool] = []
    for node in graph.nodes:
        if node.is_variable:
            trained.append(node.name not in frozen)
            continue
        stops = resolve(node.op).zero_gradients
        trained.append(any(trained[i] for k, (i, _) in enumerate(node.inputs) if k not in stops))
    return trained


def trained_graph(graph: Graph, frozen: AbstractSet[str]) -> Graph:
    """Replace dense and PReLU layers in a graph where MXNet computes wrong gradients.

    `frozen` names the variables that need no gradient. A trained bias beside a weight without a
    gradient becomes a separate addition. A PReLU with a trained slope becomes max(x, 0) + slope *
    min(x, 0). Returns `graph` itself if it has neither.
    """
    if not any(_is_dense_with_bias(node) or _is_prelu(node) for node in graph.all_nodes):
        return graph
    trained, edit = trained_nodes(graph, frozen), Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        gets_gradient = [trained[source] for source, _ in node.inputs]
        if _is_dense_with_bias(node) and gets_gradient[_BIAS] and not gets_gradient[_WEIGHT]:
            _separate_bias(edit, i, node)
        elif _is_prelu(node) and gets_gradient[_SLOPE]:
            _replace_prelu(edit, i, node)
        elif rewrites_bodies(node, training=True):
            bodies = [
                trained_graph(body, _frozen_inputs(node, k, gets_gradient))
                for k, body in enumerate(node.subgraphs)
            ]
            if any(new is not old for new, old in zip(bodies, node.subgraphs)):
                edit.change(i, subgraphs=bodies)
    return edit.applied()


def _frozen_inputs(loop: Node, position: int, gets_gradient: Sequence[bool]) -> AbstractSet[str]:
    """Return the names of a loop body's inputs that need no gradient."""
    names = loop.subgraphs[position].input_names
    outer_inputs = body_inputs(loop, position).items()
    return {names[inner] for inner, outer in outer_inputs if not gets_gradient[outer]}


def _separate_bias(edit: Edit, i: int, node: Node) -> None:
    """Replace dense layer i with one without a bias, and an addition of the bias."""
    edit.change(i, attrs=without_bias(node.attrs), inputs=node.inputs[:_BIAS])
    terms = [(i, 0), node.inputs[_BIAS]]
    edit.redirect(
        (i, 0), edit.add("_npi_add", f"{node.name}_with_bias", terms, **node.hidden_attrs)
    )


def _is_prelu(node: Node) -> bool:
    return node.operator == "LeakyReLU" and node.attrs.get("act_type") == "prelu"


def _replace_prelu(edit: Edit, i: int, node: Node) -> None:
    """Replace PReLU node i with max(x, 0) + slope * min(x, 0)."""
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


def with_scale_input(graph: Graph) -> Graph | None:
    """Return the graph with an input for the loss scale, which multiplies losses' gradients.

    `SoftmaxOutput` and similar operators ignore the gradient of their output, so their first input
    gets an identity that multiplies the gradient by the loss scale and changes no value. Returns
    None if the graph has no such operator.
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
        for k in _inputs_with_gradients(graph, node):
            edit.set_input(
                i, k, _add_gradient_scale(edit, f"{node.name}{k or ''}", node.inputs[k], scale)
            )
    return edit.applied()


def _inputs_with_gradients(graph: Graph, node: Node) -> list[int]:
    """Return the positions of a loss operator's inputs that get gradients, without labels."""
    if node.operator not in with_trait("calls_python"):
        return [0]
    read = node.inputs[: len(node.inputs) - auxiliary_states(node.attrs)]
    sources = (graph.nodes[i] for i, _ in read)
    labels = [source.is_variable and "label" in source.name for source in sources]
    return [k for k, is_label in enumerate(labels) if not is_label]


def _add_gradient_scale(edit: Edit, name: str, data: Output, scale: Output) -> Output:
    """Add an identity of `data` that multiplies its gradient by `scale`; return its output.

    It is BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x)).
    """

    def add(op: str, suffix: str, *inputs: Output) -> Output:
        return edit.add_node(Node(op, f"{name}_amp_{suffix}", {}, list(inputs)))

    sign = add("_contrib_sign_ste", "sign", data)
    zero = add("elemwise_sub", "zero", add("BlockGrad", "block", sign), sign)
    scaled = add("broadcast_mul", "scaled", zero, scale)
    return add("elemwise_sub", "input", add("BlockGrad", "values", data), scaled)
