"""Large dense layers turned into 1x1 convolutions, in models fused for inference.

The rows of the data become the pixels of one image. oneDNN packs the weight of a convolution once,
but the weight of a dense layer in each call, which takes longer than the product with a few rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mxnet.ndarray.ndarray import NDArray

from ...framework.operators import with_trait
from ...graph.edit import Edit
from ...graph.ir import Node, Output
from ...policy.values import flattens_data
from .fusible import FusionView, set_parameter

#: The least elements of a weight, and its least rows and columns. With fewer, turning rows into
#: pixels and back costs more than the convolution saves.
_LARGE, _WIDE = 2**20, 1000

_LEAKY = frozenset({"leaky", "elu", "gelu", "selu"})

#: The shapes that turn (channels, rows) into (1, channels, rows, 1), and back.
_IMAGE, _MATRIX = "(-4, 1, -1, -4, -1, 1)", "(-3, -3)"


def make_dense_convolutions(view: FusionView, edit: Edit) -> None:
    """Replace dense layers with large weights by 1x1 convolutions in bfloat16.

    Conditions: the policy does not keep the layer in float32, it flattens its data, and its weight
    has no other consumer. Activations between two convolutions read the image. Float32 models stay
    unchanged, because oneDNN's float32 convolution with a sigmoid turns NaN into 0.
    """
    is_set_by_user = any(view.policy.rule(op).given for op in ("Convolution", "FullyConnected"))
    if is_set_by_user or not view.policy.lowers:
        return
    images = _Images(view, edit)
    for i, node in enumerate(view.graph.nodes):
        weight = _large_weight(view, node)
        if weight is not None:
            kernel = weight.asnumpy().reshape(*weight.shape, 1, 1)
            set_parameter(edit, node.inputs[1][0], kernel)
            data, *parameters = node.inputs
            images.replace(i, _as_convolution(node), [images.of_matrix(data, node), *parameters])
        elif _is_elementwise(node) and node.inputs[0] in images.by_output:
            images.replace(i, node, [images.by_output[node.inputs[0]]])
    images.restore_matrices()


def _large_weight(view: FusionView, node: Node) -> NDArray | None:
    """Return a dense layer's weight if it is large enough for a convolution; else None."""
    if node.op != "FullyConnected" or not flattens_data(node.attrs):
        return None
    name = view.own_parameter(node, 1)
    if name is None:
        return None
    weight = view.params[name]
    large = math.prod(weight.shape) >= _LARGE and min(weight.shape) >= _WIDE
    kept = view.stays_float32(node) or view.stays_float32(_as_convolution(node))
    return weight if large and not kept else None


def _as_convolution(dense: Node) -> Node:
    """Return the 1x1 convolution that is equivalent to a dense layer, as a node."""
    attrs = {**dense.attrs, "kernel": "(1, 1)", "num_filter": dense.attrs["num_hidden"]}
    for name in ("num_hidden", "flatten"):  # a convolution has neither
        attrs.pop(name, None)
    return replace(dense, op="Convolution", attrs=attrs)


def _is_elementwise(node: Node) -> bool:
    """Return whether a node applies one function to each element, such as an activation."""
    kind = node.attrs.get("act_type", "leaky")
    return node.op in with_trait("elementwise") or (node.op == "LeakyReLU" and kind in _LEAKY)


class _Images:
    """Builder of reshapes from matrices to the images that 1x1 convolutions read, and back."""

    def __init__(self, view: FusionView, edit: Edit) -> None:
        self._view, self._edit = view, edit
        self.by_output: dict[Output, Output] = {}  #: by output of the source graph
        self._read: dict[Output, Output] = {}  # by matrix of the source graph
        self._on_images: set[int] = set()  # nodes of the source graph that read an image

    def restore_matrices(self) -> None:
        """Add reshapes of images back to matrices, for consumers that can't read images."""
        for output, image in self.by_output.items():
            readers = self._view.consumers.get(output, [])
            if all(i in self._on_images and k == 0 for i, k in readers):
                continue
            name = self._view.graph.nodes[output[0]].name
            matrix = self._edit.add("Reshape", f"{name}_matrix", [image], shape=_MATRIX)
            self._edit.redirect(output, self._edit.add("transpose", f"{name}_rows", [matrix]))

    def replace(self, i: int, node: Node, inputs: list[Output]) -> None:
        """Replace node i with a node whose output is an image instead of a matrix."""
        self._on_images.add(i)
        self.by_output[i, 0] = self._edit.add_node(node.with_inputs(inputs))
        self._edit.redirect((i, 0), self.by_output[i, 0])

    def of_matrix(self, data: Output, node: Node) -> Output:
        """Return a matrix reshaped to an image; add the reshape on first use."""
        if data in self.by_output:
            return self.by_output[data]
        if data not in self._read:
            rows = self._edit.add("Flatten", f"{node.name}_data_rows", [data])
            columns = self._edit.add("transpose", f"{node.name}_data_columns", [rows])
            image = self._edit.add("Reshape", f"{node.name}_data_image", [columns], shape=_IMAGE)
            self._read[data] = image
        return self._read[data]
