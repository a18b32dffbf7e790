"""Dense layers as 1x1 convolutions of one image whose pixels are the rows, in fused models.

oneDNN packs a convolution's weight once, and a dense layer's at every call: for a few rows that
takes longer than the product.
"""

import math
from dataclasses import replace
from typing import Callable, Dict, List, Set, Tuple

import mxnet as mx
from mxnet.ndarray.ndarray import NDArray

from ..policy.active import suspended
from ..policy.policy import Policy
from ..policy.values import flattens
from .cast_params import of_any_shape
from .fold_batchnorm import Params, is_float32, readers_by_name
from .graph import Graph, Node, Output
from .graph_copy import GraphCopy

__all__ = ["with_dense_convolutions"]

#: Elements of a weight, and its rows and columns. With fewer, turning rows into pixels and back
#: costs more than is gained.
_LARGE, _WIDE = 2**20, 1000

#: Operators that take each element alone, in whatever shape.
_ELEMENTWISE = frozenset(
    {"Activation", "relu", "sigmoid", "tanh", "_copy", "BlockGrad", "_npx_relu", "_npi_tanh"}
)
_LEAKY = frozenset({"leaky", "elu", "gelu", "selu"})

_TO_IMAGE = {"shape": "(-4, 1, -1, -4, -1, 1)"}  # (channels, rows) to (1, channels, rows, 1)
_TO_MATRIX = {"shape": "(-3, -3)"}  # and back

# What a convolution does not have.
_OF_DENSE = frozenset({"num_hidden", "flatten"})


def with_dense_convolutions(
    graph: Graph, params: Params, policy: Policy, is_kept: Callable[[Node], bool]
) -> Tuple[Graph, Params]:
    """Return the graph with convolutions for dense layers with large weights, and its parameters.

    Those stay that `is_kept` in float32, that keep more than one axis of their data, and whose
    weight others read too. Activations between two of them take the image as it is. In float32,
    oneDNN's convolution with a sigmoid would make 0 of NaN.
    """
    given = any(policy.rule(op).given for op in ("Convolution", "FullyConnected"))
    if "dense_convolution" not in policy.substitutions or given or not policy.lowers:
        return graph, params
    layers = {
        i: name
        for i, name in _layers(graph, params).items()
        if not is_kept(graph.nodes[i]) and not is_kept(_convolution(graph.nodes[i]))
    }
    values = dict(params)
    copy = _Copy(graph)
    for i, node in enumerate(graph.nodes):
        if i in layers:
            values[layers[i]] = _with_kernel(params[layers[i]])
            copy.add_convolution(i, node)
        elif _is_elementwise(node) and node.inputs[0][0] in copy.images:
            copy.add_on_image(i, node)
        elif node.is_variable and node.name in layers.values():
            copy.add_copy(i, attrs=of_any_shape(node).attrs)
        else:
            copy.add_copy(i)
    return copy.finished(), values


def _layers(graph: Graph, params: Params) -> Dict[int, str]:
    """Return the dense layers to change, by index, with the names of their weights."""
    readers = readers_by_name(graph)
    layers = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "FullyConnected" or not flattens(node.attrs):
            continue
        variable = graph.nodes[node.inputs[1][0]]
        weight = params.get(variable.name) if variable.is_variable else None
        if weight is None or readers[variable.name] > 1:
            continue
        large = math.prod(weight.shape) >= _LARGE and min(weight.shape) >= _WIDE
        if large and is_float32(weight):
            layers[i] = variable.name
    return layers


def _convolution(dense: Node) -> Node:
    """Return the convolution for a dense layer; its inputs are still the layer's."""
    attrs = {name: text for name, text in dense.attrs.items() if name not in _OF_DENSE}
    attrs.update(kernel="(1, 1)", num_filter=dense.attrs["num_hidden"])
    return replace(dense, op="Convolution", attrs=attrs)


def _with_kernel(weight: NDArray) -> NDArray:
    """Return a copy of a dense layer's weight as a convolution's, from any of oneDNN's layouts."""
    with suspended():
        return mx.nd.reshape(weight.as_nd_ndarray(), shape=(*weight.shape, 1, 1))


def _is_elementwise(node: Node) -> bool:
    kind = node.attrs.get("act_type", "leaky")
    return node.op in _ELEMENTWISE or (node.op == "LeakyReLU" and kind in _LEAKY)


class _Copy(GraphCopy):
    """A copy in which matrices are images, and matrices again where anything else reads them."""

    def __init__(self, source: Graph) -> None:
        super().__init__(source)
        self.images: Dict[int, Output] = {}  #: of nodes of the source
        self._apart: Set[int] = set()  #: those that nothing has read as a matrix yet
        self._read: Dict[Output, Output] = {}  #: images of matrices of the source

    def inputs(self, node: Node) -> List[Output]:
        """Return what a node of the source reads: matrices."""
        for i, _ in node.inputs:
            self._make_matrix(i)
        return super().inputs(node)

    def add_convolution(self, i: int, node: Node) -> None:
        """Append the convolution for a dense layer, node i of the source."""
        data, *parameters = node.inputs
        read = [self._image(node, data), *super().inputs(node.reading(parameters))]
        self._add_image(i, _convolution(node).reading(read))

    def add_on_image(self, i: int, node: Node) -> None:
        """Append node i of the source, which reads an image."""
        self._add_image(i, node.reading([self.images[node.inputs[0][0]]]))

    def finished(self) -> Graph:
        """Return the copy, its outputs as matrices."""
        for i, _ in self._source.heads:
            self._make_matrix(i)
        return super().finished()

    def _add_image(self, i: int, node: Node) -> None:
        self.images[i] = self.add(node)
        self._apart.add(i)

    def _make_matrix(self, i: int) -> None:
        if i in self._apart:
            self._apart.remove(i)
            name = self._source.nodes[i].name
            matrix = self._added("Reshape", f"{name}_matrix", self.images[i], **_TO_MATRIX)
            self.read_through(i, self._added("transpose", f"{name}_rows", matrix))

    def _image(self, node: Node, data: Output) -> Output:
        if data[0] in self.images:
            return self.images[data[0]]
        if data not in self._read:
            [read] = super().inputs(node.reading([data]))
            rows = self._added("Flatten", f"{node.name}_data_rows", read)
            columns = self._added("transpose", f"{node.name}_data_columns", rows)
            image = self._added("Reshape", f"{node.name}_data_image", columns, **_TO_IMAGE)
            self._read[data] = image
        return self._read[data]

    def _added(self, op: str, name: str, read: Output, **attrs: str) -> Output:
        return self.add(Node(op, self.new_name(name), attrs, [read]))
