"""BatchNorm folded into the weights before it, for inference.

MXNet's own fusion folds BatchNorm into weights in the dtype that they have. In bfloat16 that biases
them, since it rounds toward zero: here they are folded in float32, to be cast after that.
"""

from typing import Any, Mapping, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...policy.values import flattens, is_true
from ..edit import Edit, View
from ..ir import Node
from .fusible import FusionView

__all__ = ["float32_array", "fold_into_producers"]

# The products that a BatchNorm folds into, with channels on axis 1 of their output.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})
_BIAS = 2  # among a product's inputs, where it has one


def float32_array(values: Any) -> NDArray:
    """Return NumPy values as a float32 array on the CPU."""
    return mx.nd.array(values.astype(np.float32), dtype=np.float32, ctx=mx.cpu())


def fold_into_producers(view: FusionView, edit: Edit) -> None:
    """Fold BatchNorms into the products before them.

    A BatchNorm stays where something else reads the product or one of the parameters, and where
    the policy keeps it in float32 by name.
    """
    for i, norm in enumerate(view.graph.nodes):
        if norm.op != "BatchNorm" or i in view.several_read or view.policy.keeps_layer(norm.name):
            continue
        source, output = norm.inputs[0]
        product = view.graph.nodes[source]
        statistics, names = view.own_parameters(norm), view.own_parameters(product)
        if output or not view.is_read_once(source) or not _on_channels(norm, product):
            continue
        if not statistics or not names:
            continue
        scale, shift = _scale_and_shift(norm.attrs, [view.params[name] for name in statistics])
        weight, bias = _values(view, names)
        new = weight * scale.reshape((-1,) + (1,) * (weight.ndim - 1))
        _set(edit, source, names, new, bias * scale + shift)
        edit.alias((i, 0), (source, 0))


def _values(view: View, names: Sequence[str]) -> Tuple[Any, Any]:
    """Return a product's weight and bias, which is 0 where it has none."""
    arrays = [view.params[name].asnumpy() for name in names]
    return arrays[0], arrays[1] if len(arrays) > 1 else 0.0


def _set(edit: Edit, i: int, names: Sequence[str], weight: Any, bias: Any) -> None:
    """Give product i these values; it gets a bias where it has none."""
    product = edit.node(i)
    edit.params[names[0]] = float32_array(weight)
    inputs = product.inputs[:_BIAS]
    if len(names) > 1:
        edit.params[names[1]] = float32_array(bias)
        inputs = product.inputs
    else:
        bias_variable = edit.add_parameter(f"{product.name}_folded_bias", float32_array(bias))
        inputs = [*inputs, bias_variable]
    edit.change(i, inputs=inputs, attrs={**product.attrs, "no_bias": "False"})


def _scale_and_shift(attrs: Mapping[str, str], statistics: Sequence[NDArray]) -> Tuple[Any, Any]:
    """Return what a BatchNorm multiplies with and adds, of its gamma, beta, mean and variance."""
    gamma, beta, mean, variance = (array.asnumpy().astype(np.float64) for array in statistics)
    if is_true(attrs.get("fix_gamma", "True")):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(attrs.get("eps", "0.001")))
    return scale, beta - mean * scale


def _is_axis_1(norm: Node) -> bool:
    return norm.attrs.get("axis", "1") == "1"


def _on_channels(norm: Node, product: Node) -> bool:
    """Return whether a norm's axis is that of the product's output channels."""
    rows = product.op == "FullyConnected" and not flattens(product.attrs)
    return product.op in _PRODUCTS and _is_axis_1(norm) and not rows
