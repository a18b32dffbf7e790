"""Fusion of models for inference on CPUs, by MXNet's own graph pass for oneDNN.

`PASSES` prepare the graph for MXNet's pass. They rename activations to the operator that oneDNN
fuses, fold each BatchNorm into the product before it, and pad channels.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import invoke
from ...framework.machine import Values
from ...framework.operators import resolve, with_trait
from ...graph.edit import Edit, Params, View, without_fused_operators
from ...graph.ir import Graph, Node, Output
from ...policy.policy import Policy
from ...policy.regions import policy_for_node
from ...policy.values import flattens_data, is_true
from ..passes import Call, Detail, Pass
from . import fusible
from .attention import fuse_attention
from .dense_convolutions import make_dense_convolutions
from .pad_channels import pad_channels
from .substitutions import ACTIVATIONS
from .substitutions import PASSES as RUNNING_PASSES


def fused(
    graph: Graph, params: Mapping[str, NDArray], policy: Policy
) -> tuple[Graph, Params, Policy]:
    """Fuse a float32 model's operators for oneDNN; return the model and a policy for its casts.

    Products that `policy` keeps in float32, by class, shape or name, stay in float32 when fused.
    Raises `ArgumentError` where the device or dtype has no fused operators, a parameter is float64,
    or the graph already contains fused operators without a bfloat16 kernel.
    """
    fusible.check_fusible(params, policy)
    values = dict(params)
    for fusion_pass in PASSES:
        graph, values = apply_pass(fusion_pass, graph, values, policy)
    view = fusible.FusionView(graph, values, policy)
    apart, made = fusible.with_barriers(graph, before_norms=True)
    together = Graph.from_symbol(apart.to_symbol().get_backend_symbol("MKLDNN"))
    graph = _without_shared_weights(fusible.without_barriers(together, made))
    if not policy.lowers:
        return graph, values, policy.override(fp32=fusible.FUSED)
    layers = [
        node.name
        for node in graph.nodes
        if node.op in fusible.FUSED and any(map(view.stays_float32, node.subgraphs[0].nodes))
    ]
    fusible.check_fused(graph, policy, layers)
    return graph, values, policy.override(low=fusible.FUSED, fp32_layers=layers)


def apply_pass(
    fusion_pass: Pass, graph: Graph, params: Params, policy: Policy
) -> tuple[Graph, Params]:
    """Apply one pass of the fusion; return the new graph and the parameters that it still reads."""
    if fusion_pass.name is not None and fusion_pass.name not in policy.substitutions:
        return graph, params
    edit = Edit(graph, params)
    fusion_pass.apply(fusible.FusionView(graph, params, policy), edit)
    graph = edit.applied()
    inputs = set(graph.input_names)
    return graph, {name: value for name, value in edit.params.items() if name in inputs}


def _without_shared_weights(graph: Graph) -> Graph:
    """Return the graph with dense layers that share a weight unfused again.

    Each fused layer packs a copy of its weight. The copies of an unrolled recurrent layer, one per
    step, take up the cache, and more time than fusion saves.
    """
    view, dense = View(graph, {}), "_sg_mkldnn_fully_connected"
    return without_fused_operators(
        graph, lambda node: node.op == dense and view.reads(node.inputs[1][0]) > 1
    )


# ---------------------------------------------------------------------- no-ops and activations


def _drop_no_ops(view: fusible.FusionView, edit: Edit) -> None:
    """Remove copies and Dropouts, which do nothing in inference.

    Conditions: one output is read, and no graph output would become an input itself.

    MXNet's pass drops them too, but only after it has looked at the consumers of a product. It also
    renames the input of a net that begins with two of them.
    """
    for i, node in enumerate(view.graph.nodes):
        no_op = node.op == "_copy" or (
            node.op == "Dropout" and node.attrs.get("mode", "training") == "training"
        )
        if not no_op or i in view.multi_output_nodes:
            continue
        source = edit.node(i).inputs[0]
        # Without the no-op, a graph output that is an input would be the caller's array itself.
        if i not in view.head_nodes or not view.graph.nodes[source[0]].is_variable:
            edit.redirect((i, 0), source)


def _arrange_parameters(view: fusible.FusionView, edit: Edit) -> None:
    """Fold constants: compute reshaped, joined and sliced parameters ahead of time.

    Conditions: the array is no graph output.

    GluonNLP's BERT joins the weights of queries, keys and values at each call, and a fused dense
    layer would pack the joined weight each time. Recurrent layers read the matrices, not the
    vectors that Gluon makes of them.
    """
    nodes = view.graph.nodes
    values: dict[Output, NDArray] = {}
    for i, node in enumerate(nodes):
        if node.is_variable and node.name in view.params:
            values[i, 0] = view.params[node.name]
        elif node.operator in with_trait("arranges") and values.keys() >= set(node.inputs):
            inputs = [values[output] for output in node.inputs]
            attrs = {name: text for name, text in node.attrs.items() if not name.startswith("__")}
            call = resolve(node.op).handle, inputs, [*attrs], [*attrs.values()]
            values[i, 0] = invoke(*call, None, False, True)[0]  # of a list
            if i in view.head_nodes:
                continue  # as a parameter, the output would be the parameter's own array
            readers = {nodes[k].operator for k, _ in view.consumers.get((i, 0), ())}
            if readers != {"_rnn_param_concat"}:
                edit.redirect((i, 0), edit.add_parameter(f"{node.name}_arranged", values[i, 0]))


def _rename_activations(view: fusible.FusionView, edit: Edit) -> None:
    """Replace relu, sigmoid and tanh nodes with `Activation` nodes, which oneDNN fuses.

    Conditions: an operator of `mx.nd`, whose arrays are never empty.
    """
    for i, node in enumerate(view.graph.nodes):
        if node.operator in ACTIVATIONS:
            edit.change(i, op="Activation", attrs={**node.attrs, "act_type": node.operator})


# ---------------------------------------------------------------------- BatchNorm


def fold_into_producers(view: fusible.FusionView, edit: Edit) -> None:
    """Fold each BatchNorm into the weights of the convolution or dense layer before it.

    Conditions: the layer and the parameters have no other consumer, and the policy does not keep
    the BatchNorm in float32 by name.

    The values are folded in float32 and cast later: MXNet's own fusion folds in the dtype of the
    weight, and bfloat16 rounds toward zero.
    """
    for i, norm in enumerate(view.graph.nodes):
        is_folded = norm.op == "BatchNorm" and i not in view.multi_output_nodes
        if not is_folded or view.policy.keeps_layer(norm.name):
            continue
        source, output = norm.inputs[0]
        product = view.graph.nodes[source]
        if output or not view.is_read_once(source) or not _normalizes_channels(norm, product):
            continue
        statistics, names = view.own_parameters(norm), view.own_parameters(product)
        if statistics and names:
            scale, shift = _scale_and_shift(norm.attrs, [view.params[name] for name in statistics])
            _scale_product(edit, source, names, scale, shift)
            edit.redirect((i, 0), (source, 0))


def _normalizes_channels(norm: Node, product: Node) -> bool:
    """Return whether a BatchNorm normalizes the output channels of the layer before it."""
    rows = product.op == "FullyConnected" and not flattens_data(product.attrs)
    return product.op in fusible.PRODUCTS and norm.attrs.get("axis", "1") == "1" and not rows


def _scale_and_shift(attrs: Mapping[str, str], statistics: Sequence[NDArray]) -> tuple[Any, Any]:
    """Return the scale and shift per channel that together equal a BatchNorm in inference.

    `statistics` are gamma, beta, mean and variance.
    """
    gamma, beta, mean, variance = (array.asnumpy().astype(np.float64) for array in statistics)
    if is_true(attrs.get("fix_gamma", "True")):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(attrs.get("eps", "0.001")))
    return scale, beta - mean * scale


def _scale_product(edit: Edit, i: int, names: Sequence[str], scale: Values, shift: Values) -> None:
    """Fold a scale and a shift per output channel into the weight and bias of layer i.

    `names` are the names of its weight and, if it has one, its bias.
    """
    product = edit.node(i)
    weight, *biases = (edit.params[name].asnumpy() for name in names)
    factors = scale.reshape(-1, *[1] * (weight.ndim - 1))
    edit.params[names[0]] = fusible.float32_array(weight * factors)
    if biases:
        edit.params[names[1]] = fusible.float32_array(biases[0] * scale + shift)
        return
    bias = edit.add_parameter(f"{product.name}_folded_bias", fusible.float32_array(shift))
    attrs = {**product.attrs, "no_bias": "False"}
    edit.change(i, inputs=[*product.inputs, bias], attrs=attrs)


# ---------------------------------------------------------------------- images


def _add_fourth_channels(view: fusible.FusionView, edit: Edit) -> None:
    """Add a fourth channel of zeros to color images before convolutions, for faster kernels.

    Conditions: those of the substitution of the same name, and a weight without other consumers.

    A 1x1 convolution in float32 adds the channel: it is one kernel, three times as fast as
    oneDNN's concatenation.
    """
    images: dict[Output, Output] = {}
    padding = ((0, 0), (0, 1), (0, 0), (0, 0))
    for i, weight, _ in _matching_weights(view, "image_convolution"):
        node = view.graph.nodes[i]
        data = node.inputs[0]
        fusible.set_parameter(edit, node.inputs[1][0], np.pad(weight, padding))
        if data not in images:
            made = edit.unique_name(f"{node.name}_data_four")
            eye = fusible.float32_array(np.eye(4, 3).reshape(4, 3, 1, 1))
            inputs = [data, edit.add_parameter(f"{made}_weight", eye)]
            attrs = {"kernel": "(1, 1)", "num_filter": "4", "no_bias": "True"}
            images[data] = edit.add_node(Node("Convolution", made, attrs, inputs))
        edit.set_input(i, 0, images[data])


def _merge_groups(view: fusible.FusionView, edit: Edit) -> None:
    """Merge narrow groups of convolutions until they fill a block, with zeros in the weights.

    Conditions: those of the substitution of the same name, and a weight without other consumers.

    The substitution of the same name does this in graphs that run, but not in fused operators.
    """
    for i, weight, (block, channels, narrow, *kernel) in _matching_weights(view, "merged_groups"):
        merged, groups = block // narrow, channels // block
        apart = weight.reshape(groups, merged, narrow, 1, narrow, *kernel)
        own = np.eye(merged, dtype=bool).reshape(1, merged, 1, merged, 1, 1, 1)
        whole = np.where(own, apart, np.float32(0)).reshape(channels, block, *kernel)
        fusible.set_parameter(edit, edit.node(i).inputs[1][0], whole)
        edit.change(i, attrs={**edit.node(i).attrs, "num_group": str(groups)})


def _matching_weights(view: fusible.FusionView, kind: str) -> Iterator[tuple[int, Values, Detail]]:
    """Yield index, weight and detail of each convolution that substitution `kind` makes faster.

    The weights have no other consumers.
    """
    for i, node in enumerate(view.graph.nodes):
        name = view.own_parameter(node, 1)
        if name is not None:
            inside, weight = policy_for_node(view.policy, node.attrs), view.params[name]
            call = Call(node, inside, training=False, shapes=(None, weight.shape))
            match = RUNNING_PASSES.match(call)
            if match is not None and match[0] == kind:
                yield i, weight.asnumpy(), match[1]


#: In order: each pass sees the graph that the passes before it have made.
PASSES = (
    Pass(None, _drop_no_ops),
    Pass(None, _arrange_parameters),
    Pass("attention", fuse_attention),
    Pass(None, _rename_activations),
    Pass(None, fold_into_producers),
    Pass("padded_channels", pad_channels),
    Pass("image_convolution", _add_fourth_channels),
    Pass("merged_groups", _merge_groups),
    Pass("dense_convolution", make_dense_convolutions),
)
