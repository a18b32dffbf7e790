"""Fusion for inference on CPUs: oneDNN's fused operators, made by MXNet's own pass.

Around that pass: activations are renamed to those that oneDNN fuses, BatchNorm is folded, channels
are padded, and what is left of BatchNorm takes in the relu behind it.
"""

from collections import Counter
from dataclasses import replace
from typing import AbstractSet, Dict, FrozenSet, Iterable, Mapping, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..framework.versions import has_feature
from ..policy.decision import decide
from ..policy.policy import Policy
from ..policy.regions import policy_in
from ..policy.values import kernel_axes
from .cast_params import of_any_shape, without
from .dense_convolutions import with_dense_convolutions
from .fold_batchnorm import (
    Params,
    float32_array,
    folded,
    folded_forward,
    is_float32,
    readers_by_name,
)
from .fusible import FUSED, check_fused, check_fusible
from .graph import Graph, Node, Output
from .graph_copy import GraphCopy
from .pad_channels import with_padded_channels
from .shape_rules import choose, stand_in
from .substitutions import ALL, find
from .usage import Usage

__all__ = ["FUSED", "fused"]

#: What they are made of: a product, and what follows it.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})

_ACTIVATIONS = frozenset({"relu", "sigmoid", "tanh"})
_APART = "amp_apart"

#: The convolution that gives an image its fourth channel.
_TO_FOUR = {"kernel": "(1, 1)", "num_filter": "4", "no_bias": "True"}


def fused(
    graph: Graph, params: Mapping[str, NDArray], policy: Policy
) -> Tuple[Graph, Params, Policy]:
    """Return a float32 model with fused operators, and a policy that lowers them.

    Products that `policy` keeps in float32, by class, shape or name, are kept when they are fused.
    Raises `ArgumentError` where `policy` is for no fused operators, a parameter is float64, or
    MXNet has fused operators before in a way that has no bfloat16 kernel.
    """
    check_fusible(params, policy)
    graph, values = folded(_renamed(_without_dropout(graph)), params, policy)
    graph, values = with_padded_channels(graph, values, policy)
    graph, values = _with_four_channels(graph, values, policy)
    kept = _kept_by_shape(graph, values, policy)
    graph, values = folded_forward(
        graph, values, policy, lambda node: not policy.lowers or _is_kept(node, kept, policy)
    )
    graph = _with_norms_and_relu(graph, policy)
    graph, values = with_dense_convolutions(
        graph, values, policy, lambda node: _is_kept(node, kept, policy)
    )
    kept = _kept_by_shape(graph, values, policy)
    graph = _fused_by_mxnet(graph)
    layers = [
        node.name
        for node in graph.nodes
        if node.op in FUSED and any(_is_kept(one, kept, policy) for one in _inside(node))
    ]
    if not policy.lowers:
        return graph, values, policy.override(fp32=FUSED)
    check_fused(graph, layers, policy)
    return graph, values, policy.override(low=FUSED, fp32_layers=layers)


def _without_dropout(graph: Graph) -> Graph:
    """Return the graph without what does nothing in inference.

    MXNet's pass takes it out too, but after it has looked at who reads a product.
    """
    masks = {i for node in graph.nodes for i, output in node.inputs if output}
    masks.update(i for i, output in graph.heads if output)
    idle = {
        i: node.inputs[0]
        for i, node in enumerate(graph.nodes)
        if node.op == "Dropout" and node.attrs.get("mode", "training") == "training"
    }
    return without(
        graph, {i: k for i, (k, output) in idle.items() if not output and i not in masks}
    )


def _renamed(graph: Graph) -> Graph:
    """Return the graph with those activations that oneDNN fuses."""
    nodes = []
    for node in graph.nodes:
        fitting = None if node.is_variable else find(node.operator, node.attrs, training=False)
        if fitting is not None and fitting[0] in _ACTIVATIONS:
            [part] = ALL[fitting[0]].build(node.attrs, ())
            nodes.append(replace(node, op=part.op, attrs={**node.attrs, **part.attrs}))
        else:
            nodes.append(node)
    return replace(graph, nodes=nodes)


def _fused_by_mxnet(graph: Graph) -> Graph:
    """Return the graph with oneDNN's fused operators: what MXNet's executors do to it."""
    apart, made = _apart(graph)
    graph = Graph.from_symbol(apart.to_symbol().get_backend_symbol("MKLDNN"))
    barriers = [i for i, node in enumerate(graph.nodes) if node.name in made]
    return without(graph, {i: graph.nodes[i].inputs[0][0] for i in barriers})


def _kept_by_shape(graph: Graph, params: Params, policy: Policy) -> FrozenSet[str]:
    """Return the operators that choices keep in float32, by name: MXNet's pass moves them."""
    shapes = {name: array.shape for name, array in params.items()}
    choices = choose(graph, policy, Usage(shapes=shapes, converting=True))
    return frozenset(graph.nodes[i].name for i, _ in choices.kept)


def _inside(node: Node) -> Iterable[Node]:
    return (inner for body in node.subgraphs for inner in body.nodes)


def _is_kept(node: Node, kept: AbstractSet[str], policy: Policy) -> bool:
    """Tell whether the fused operator that holds a node stays in float32 for it."""
    if node.name in kept or policy.keeps_layer(node.name):
        return True
    if node.op not in _PRODUCTS:
        return False
    inside = policy_in(policy, node.attrs)
    if inside.target_dtype != policy.target_dtype:
        return policy.lowers  # oneDNN fuses for one half precision alone
    return not decide(node.op, node.attrs, ["float32"] * len(node.inputs), inside).changes


# ---------------------------------------------------------------------- images


def _with_four_channels(graph: Graph, params: Params, policy: Policy) -> Tuple[Graph, Params]:
    """Give convolutions of images a fourth channel of zeros, as the substitution does in graphs.

    The image's comes from a 1x1 convolution, which stays in float32: one kernel, with three times
    the speed of oneDNN's concatenation.
    """
    weights = _weights_of_images(graph, params, policy)
    names = set(weights.values())
    values = dict(params)
    for name in names:
        padding = ((0, 0), (0, 1), (0, 0), (0, 0))
        values[name] = float32_array(np.pad(params[name].asnumpy(), padding))
    copy = GraphCopy(graph, params)
    images: Dict[Output, Output] = {}
    for i, node in enumerate(graph.nodes):
        inputs = copy.inputs(node)
        if i in weights:
            if node.inputs[0] not in images:
                name = copy.new_name(f"{node.name}_data_four")
                weight = copy.new_name(f"{name}_weight")
                values[weight] = float32_array(np.eye(4, 3).reshape(4, 3, 1, 1))
                reads = [inputs[0], copy.add(Node("null", weight))]
                colours = Node("Convolution", name, _TO_FOUR, reads)
                images[node.inputs[0]] = copy.add(colours)
            inputs[0] = images[node.inputs[0]]
        copied = of_any_shape(node) if node.name in names else node
        copy.add_copy(i, inputs=inputs, attrs=copied.attrs)
    return copy.finished(), values


def _weights_of_images(graph: Graph, params: Params, policy: Policy) -> Dict[int, str]:
    """Return the convolutions of images, by index, with the names of their weights."""
    readers = readers_by_name(graph)
    weights = {}
    for i, node in enumerate(graph.nodes):
        name = graph.nodes[node.inputs[1][0]].name if len(node.inputs) > 1 else ""
        weight = params.get(name) if readers.get(name) == 1 else None
        if weight is None or not is_float32(weight):
            continue
        inside = policy_in(policy, node.attrs)
        substitution = stand_in(node, inside, training=False, shapes=(None, weight.shape))
        if substitution is not None and substitution[0] == "image_convolution":
            weights[i] = name
    return weights


# ---------------------------------------------------------------------- BatchNorm and relu


def _with_norms_and_relu(graph: Graph, policy: Policy) -> Graph:
    """Make one operator of BatchNorms and the relu behind them, which has a float32 kernel only."""
    if not has_feature("norm_relu"):
        return graph
    if policy.lowers or "norm_relu" not in policy.substitutions or policy.rule("BatchNorm").given:
        return graph
    pairs = _norms_before_relu(graph)
    norms = set(pairs.values())
    copy = GraphCopy(graph)
    for i, node in enumerate(graph.nodes):
        if i in pairs:
            norm = graph.nodes[pairs[i]]
            both = replace(norm, op="_contrib_BatchNormWithReLU", name=node.name)
            copy.stand_in(i, replace(both, inputs=copy.inputs(norm)))
        elif i in norms:
            copy.read_instead(i, node.inputs[0][0])
        else:
            copy.add_copy(i)
    return copy.finished()


def _norms_before_relu(graph: Graph) -> Dict[int, int]:
    """Return relus by index, with the BatchNorms before them that nothing else reads.

    The kernel takes four axes alone: an operator on images must stand before or behind the two.
    """
    reads = [output for node in graph.nodes for output in node.inputs] + graph.heads
    readers = Counter(i for i, _ in reads)
    on_images = {i for i, node in enumerate(graph.nodes) if _is_on_images(node)}
    read_by_those = {source for i in on_images for source, _ in graph.nodes[i].inputs[:1]}
    pairs = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "Activation" or node.attrs.get("act_type") != "relu":
            continue
        k, output = node.inputs[0]
        norm = graph.nodes[k]
        plain = norm.op == "BatchNorm" and norm.attrs.get("axis", "1") == "1"
        images = i in read_by_those or (plain and norm.inputs[0][0] in on_images)
        if plain and images and not output and readers[k] == 1:
            pairs[i] = k
    return pairs


def _is_on_images(node: Node) -> bool:
    return node.op in ("Convolution", "Pooling") and kernel_axes(node.attrs) == len("HW")


# ---------------------------------------------------------------------- operators put in between


def _apart(graph: Graph) -> Tuple[Graph, AbstractSet[str]]:
    """Put operators before what MXNet's pass must not fuse with what it reads; return their names.

    It would fold the BatchNorms that are left in bfloat16. And it takes one that reads an output
    for the only one, wrongly where that is an output of the graph too, or where a sum reads both
    a convolution and what is computed from it.
    """
    read = Counter([i for node in graph.nodes for i, _ in node.inputs])
    read.update(i for i, _ in graph.heads)
    shared = {i for i, count in read.items() if count > 1 and _is_fusible(graph.nodes[i])}
    copy, made = GraphCopy(graph), set()
    for i, node in enumerate(graph.nodes):
        inputs = copy.inputs(node)
        for position, (source, _) in enumerate(node.inputs):
            if source in shared or (node.op == "BatchNorm" and position == 0):
                name = copy.new_name(f"{node.name}_{position}_{_APART}")
                made.add(name)
                inputs[position] = copy.add(Node("BlockGrad", name, {}, [inputs[position]]))
        copy.add_copy(i, inputs=inputs)
    return copy.finished(), made


def _is_fusible(node: Node) -> bool:
    return not node.is_variable and node.num_outputs == 1
