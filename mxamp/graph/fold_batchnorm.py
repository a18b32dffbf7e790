"""BatchNorm folded into the weights before it or behind it, for inference.

MXNet's own fusion folds BatchNorm into weights in the dtype that they have. In bfloat16 that biases
them, since it rounds toward zero: here they are folded in float32, to be cast after that.
"""

from typing import Any, Mapping, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..policy.values import flattens, integers, is_true
from .edit import Edit, View
from .fusible import FusionView
from .graph import Node

__all__ = ["float32_array", "fold_into_consumers", "fold_into_producers"]

# The products that a BatchNorm folds into, with channels on axis 1 of their output.
_PRODUCTS = frozenset({"Convolution", "FullyConnected"})
_BIAS = 2  # among a product's inputs, where it has one
# How far the mean of what a BatchNorm reads may be from 0, for products to read it as it is.
_DEVIATIONS = 8


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


def fold_into_consumers(view: FusionView, edit: Edit) -> None:
    """Fold BatchNorms into the products that read them, and that stay in float32.

    Those are dense layers, and convolutions without borders of zeros: a border would have to be
    what the BatchNorm makes zero. In low precision, data far from its mean 0 would lose what the
    BatchNorm keeps; in float32 data up to 8 standard deviations from it loses three bits.
    """
    policy = view.policy
    if policy.rule("BatchNorm").given:
        return
    for i, norm in enumerate(view.graph.nodes):
        if norm.op != "BatchNorm" or i in view.outputs or i in view.several_read:
            continue
        statistics = view.own_parameters(norm)
        if policy.keeps_layer(norm.name) or not statistics or not _is_axis_1(norm):
            continue
        arrays = [view.params[name] for name in statistics]
        readers = view.consumers.get((i, 0), [])
        channels = arrays[0].shape[0]
        if not readers or not _is_near_zero(norm, *(a.asnumpy() for a in arrays[2:])):
            continue
        if not all(
            position == 0 and _takes_in(view, reader, channels) for reader, position in readers
        ):
            continue
        scale, shift = _scale_and_shift(norm.attrs, arrays)
        for reader, _ in readers:
            names = view.own_parameters(view.graph.nodes[reader]) or []
            weight, bias = _values(view, names)
            rows = weight.astype(np.float64).reshape((weight.shape[0], channels, -1))
            added = (rows * shift.reshape((1, -1, 1))).sum(axis=(1, 2))
            new = (rows * scale.reshape((1, -1, 1))).reshape(weight.shape)
            _set(edit, reader, names, new, bias + added)
        edit.alias((i, 0), norm.inputs[0])


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


def _takes_in(view: FusionView, i: int, channels: int) -> bool:
    """Return whether node i is a product that can take in a BatchNorm of so many channels."""
    node = view.graph.nodes[i]
    names = view.own_parameters(node) if node.op in _PRODUCTS else None
    if not names or (view.policy.lowers and not view.stays_float32(node)):
        return False
    read = view.params[names[0]].shape[1]
    if node.op == "Convolution":
        return read == channels and _is_whole_without_border(node)
    return flattens(node.attrs) and read % channels == 0


def _is_near_zero(norm: Node, mean: Any, variance: Any) -> bool:
    deviation = np.sqrt(variance.astype(np.float64) + float(norm.attrs.get("eps", "0.001")))
    return bool((np.abs(mean) <= _DEVIATIONS * deviation).all())


def _is_whole_without_border(convolution: Node) -> bool:
    attrs = convolution.attrs
    plain = attrs.get("layout", "None") in ("None", "NCHW", "NCW", "NCDHW")
    return (
        plain and attrs.get("num_group", "1") == "1" and not any(integers(attrs.get("pad", "()")))
    )
