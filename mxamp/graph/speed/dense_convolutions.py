"""Dense layers as 1x1 convolutions of one image whose pixels are the rows, in fused models.

oneDNN packs a convolution's weight once, and a dense layer's at every call: for a few rows that
takes longer than the product.
"""

import math
from dataclasses import replace
from typing import Dict, List, Optional, Set

import mxnet as mx
from mxnet.ndarray.ndarray import NDArray

from ...policy.active import suspended
from ...policy.values import flattens
from ..edit import Edit, without_shape
from ..ir import Node, Output
from .fusible import FusionView

__all__ = ["make_dense_convolutions"]

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


def make_dense_convolutions(view: FusionView, edit: Edit) -> None:
    """Make convolutions of dense layers with large weights.

    A layer stays that is kept in float32, that keeps more than one axis of its data, or whose
    weight has another consumer. Activations between two of them take the image as it is. In
    float32, oneDNN's convolution with a sigmoid would make 0 of NaN.
    """
    given = any(view.policy.rule(op).given for op in ("Convolution", "FullyConnected"))
    if given or not view.policy.lowers:
        return
    made = _Images(view, edit)
    for i, node in enumerate(view.graph.nodes):
        name = _weight_of_large(view, node)
        if name is not None:
            variable = node.inputs[1][0]
            edit.params[name] = _with_kernel(view.params[name])
            edit.change(variable, attrs=without_shape(view.graph.nodes[variable]))
            made.add_convolution(i, node)
        elif _is_elementwise(node) and node.inputs[0] in made.images:
            made.add_on_image(i, node)
    made.make_matrices()


def _weight_of_large(view: FusionView, node: Node) -> Optional[str]:
    """Return the name of the weight of a dense layer to change; None for other nodes."""
    if node.op != "FullyConnected" or not flattens(node.attrs):
        return None
    name = view.own_parameter(node, 1)
    if name is None:
        return None
    shape = view.params[name].shape
    large = math.prod(shape) >= _LARGE and min(shape) >= _WIDE
    kept = view.stays_float32(node) or view.stays_float32(_convolution(node))
    return name if large and not kept else None


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


class _Images:
    """Matrices that are images, and matrices again where anything else reads them."""

    def __init__(self, view: FusionView, edit: Edit) -> None:
        self._view, self._edit = view, edit
        self.images: Dict[Output, Output] = {}  #: outputs of the source that are images
        self._read: Dict[Output, Output] = {}  # images of matrices of the source
        self._on_images: Set[int] = set()  # nodes of the source that read an image

    def add_convolution(self, i: int, node: Node) -> None:
        """Put the convolution in the place of a dense layer, node i of the source."""
        data, *parameters = node.inputs
        self._put(i, _convolution(node), [self._image(node, data), *parameters])

    def add_on_image(self, i: int, node: Node) -> None:
        """Let node i of the source read an image."""
        self._put(i, node, [self.images[node.inputs[0]]])

    def make_matrices(self) -> None:
        """Turn images into matrices for all that reads one as a matrix."""
        for output, image in self.images.items():
            readers = self._view.consumers.get(output, [])
            if all(i in self._on_images and k == 0 for i, k in readers):
                continue
            name = self._view.graph.nodes[output[0]].name
            matrix = self._edit.add("Reshape", f"{name}_matrix", [image], **_TO_MATRIX)
            self._edit.alias(output, self._edit.add("transpose", f"{name}_rows", [matrix]))

    def _put(self, i: int, node: Node, inputs: List[Output]) -> None:
        self._on_images.add(i)
        self.images[i, 0] = self._edit.add_node(node.reading(inputs))
        self._edit.alias((i, 0), self.images[i, 0])

    def _image(self, node: Node, data: Output) -> Output:
        if data in self.images:
            return self.images[data]
        if data not in self._read:
            rows = self._edit.add("Flatten", f"{node.name}_data_rows", [data])
            columns = self._edit.add("transpose", f"{node.name}_data_columns", [rows])
            image = self._edit.add("Reshape", f"{node.name}_data_image", [columns], **_TO_IMAGE)
            self._read[data] = image
        return self._read[data]
