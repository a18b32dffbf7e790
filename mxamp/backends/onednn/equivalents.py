"""Faster equivalents of single operators, built from operators with faster kernels."""

from __future__ import annotations

import math
from typing import Any, Sequence

from ...policy.decision import CASTABLE
from ...policy.values import is_true, parse_integers
from ..passes import Call, Detail, Parts, Tensor, has_elements
from .layouts import BLOCK, block_size

# The least elements of a LayerNorm whose equivalent is faster.
_LEAST_NORM = 2**11
# The least multiplications in a product of two matrices: with fewer, the operators around the
# dense layers take longer than bfloat16 saves.
_LEAST_PRODUCT = 2**23


def match_relu6(call: Call) -> Detail | None:
    """Return (keeps NaN, leaves blocks) if `relu6` should replace a clip from 0 to 6; else None."""
    bounds = float(call.attrs["a_min"]), float(call.attrs["a_max"])
    is_safe = not call.training or call.feeds_products
    fits = bounds == (0, 6) and is_safe and has_elements(call)
    leaves_blocks = block_size(call.policy) < BLOCK and bool(call.shape) and not call.training
    return (not call.policy.lowers, leaves_blocks) if fits else None


def relu6(parts: Parts, detail: Detail) -> None:
    """Replace clip(x, 0, 6) with min(relu(x), 6), or min(max(x, 0), 6) to keep NaN.

    Conditions: x has elements. In training the result leads only to layers with weights, because
    the gradient of the minimum multiplies an infinite gradient by 0, where `clip` returns 0. An
    infinite gradient reaches the weights anyway there.

    The minimum has a faster kernel in float32. Its gradient reads the output of the relu: with both
    in float32, training keeps one tensor instead of two. In inference MXNet would write the maximum
    over x, and copy it back to oneDNN's layout of x, which the minimum can't read: a Reshape before
    them leaves this layout.
    """
    (keeps_nan, leaves_blocks), [data] = detail, parts.inputs
    if leaves_blocks:
        data = parts.add("Reshape", "plain", data, shape="(-2,)")
    if keeps_nan:
        relu = parts.add_float32("_maximum_scalar", "relu", data, scalar="0")
    else:
        relu = parts.add_float32("Activation", "relu", data, act_type="relu")
    parts.add("_minimum_scalar", "", relu, scalar="6")


def match_layer_norm(call: Call) -> Detail | None:
    """Return (times to subtract the mean,) if `layer_norm` should replace a call; else None."""
    if math.prod(call.shape or (_LEAST_NORM,)) < _LEAST_NORM:
        return None
    attrs = call.attrs
    plain = attrs.get("axis", "-1") == "-1" and not is_true(attrs.get("output_mean_var", "False"))
    return (1 if call.policy.lowers else 2,) if plain else None


def layer_norm(parts: Parts, detail: Detail) -> None:
    """Replace a LayerNorm with matrix products that compute its sums and broadcasts.

    Conditions: training, the last axis, and nobody reads mean and variance.

    The products' gradients are products too. The gradients of MXNet's LayerNorm and broadcasts are
    reductions that add one element at a time. The sums are a `batch_dot` of a single pair, whose
    gradient reads the vector alone: that of `dot` would keep the other input for the backward pass.

    Centering x centers its gradient too. BLAS rounds sums more than MXNet's LayerNorm does: float32
    policies center twice, which removes the rest of a large constant that gradients share.
    """
    [centerings] = detail
    x, gamma, beta = parts.inputs
    add = parts.add
    rows = add("Reshape", "rows", x, shape="(1, -1, 0)", reverse="True")
    ones = add("ones_like", "ones", gamma)
    row = add("Reshape", "row", ones, shape="(1, -1)")
    share = add("broadcast_div", "share", ones, add("sum", "count", ones))
    weights = add("Reshape", "weights", share, shape="(1, -1, 1)")
    centered = rows
    for k in range(centerings):
        mean = add("batch_dot", f"mean{k}", centered, weights)
        means = add("dot", f"means{k}", mean, row)
        centered = add("elemwise_sub", f"centered{k}", centered, means)
    variance = add("batch_dot", "variance", add("square", "square", centered), weights)
    padded = add("_plus_scalar", "padded", variance, scalar=parts.attrs.get("eps", "1e-05"))
    inverse = add("rsqrt", "inverse", padded)
    scale = add("dot", "scale", inverse, add("Reshape", "gammas", gamma, shape="(1, -1)"))
    one = add("ones_like", "one", inverse)
    shift = add("dot", "shift", one, add("Reshape", "betas", beta, shape="(1, -1)"))
    made = add("elemwise_add", "sum", add("elemwise_mul", "scaled", centered, scale), shift)
    add("reshape_like", "", made, x)


def match_masked_softmax(call: Call) -> Detail | None:
    """Return () if `masked_softmax` should replace a softmax with a length per row; else None.

    `masked_softmax` needs no numbers: the tuple is empty.
    """
    attrs = call.attrs
    plain = attrs.get("axis", "-1") == "-1" and not {"temperature", "dtype"} & set(attrs)
    masked = is_true(attrs.get("use_length", "False"))
    return () if masked and plain and has_elements(call) else None


def has_integer_lengths(dtypes: Sequence[str]) -> bool:
    """Return whether a softmax has float data and int32 or int64 lengths, given the dtypes."""
    return dtypes[0] in CASTABLE and dtypes[1] in ("int32", "int64")


def masked_softmax(parts: Parts, _detail: Detail) -> None:
    """Replace softmax(x, lengths) with oneDNN's softmax between two masks.

    Conditions: inference, the last axis, no temperature and no other dtype.

    Elements past the length are replaced, not added to: they may be NaN. The second mask makes
    zeros of rows of length 0, for which the softmax gives NaN.
    """
    x, length = parts.inputs
    add = parts.add
    places = add("_contrib_arange_like", "places", x, axis="-1")
    zero = add("slice_axis", "zero", places, axis="0", begin="0", end="1")
    ends = add("_plus_scalar", "ends", places, scalar="1")
    lengths = add("Concat", "lengths", zero, ends, dim="0", num_args="2")
    row = add("Reshape", "row", places, shape="(1, -1)")
    column = add("Reshape", "column", lengths, shape="(-1, 1)")
    # One mask for each length; copying rows of it is faster than comparing every element.
    masks = add("broadcast_lesser", "masks", row, column)
    mask = add("take", "mask", masks, length, mode="clip")
    zeros = add("zeros_like", "zeros", x)
    least = add("_plus_scalar", "least", zeros, scalar="-inf")
    shares = add("softmax", "shares", add("where", "apart", mask, x, least))
    add("where", "", mask, shares, zeros)


def match_split(call: Call) -> Detail | None:
    """Return where the outputs of a split begin and end if `split` should replace it; else None.

    The result is (number of axes, *bounds), with 0 axes for slices.

    Along the last axis, MXNet copies element by element. In training, equal parts are split along a
    new axis before the last one, so that the gradient is copied row by row: the gradient of slices
    is a sum of arrays that are mostly zeros.
    """
    shape, attrs = call.shape, call.attrs
    if shape is None or not all(shape) or is_true(attrs.get("squeeze_axis", "False")):
        return None
    if int(attrs.get("axis", "1")) not in (-1, len(shape) - 1):
        return None
    sections, axes = int(attrs.get("num_outputs", attrs.get("sections", "0"))), 0
    if sections:
        # As in NumPy's array_split, the first parts are longer by one.
        size, longer = divmod(shape[-1], sections)
        bounds = [size * i + min(i, longer) for i in range(sections + 1)]
        axes = len(shape) if call.training and not longer else 0
    else:
        bounds = [*parse_integers(attrs["indices"]), shape[-1]]
    # Parts of NumPy's splits may be empty, and MXNet has no empty slices.
    return (axes, *bounds) if all(a < b for a, b in zip(bounds, bounds[1:])) else None


def split(parts: Parts, detail: Detail) -> Sequence[Any] | None:
    """Replace a split along the last axis by slices, or by a Reshape and a split on a new axis.

    Conditions: no part is empty.
    """
    axes, *bounds = detail
    [data] = parts.inputs
    if not axes:
        return [
            parts.add("slice_axis", f"slice{i}", data, axis="-1", begin=str(a), end=str(b))
            for i, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]
    count = str(len(bounds) - 1)
    shape = ", ".join(["0"] * (axes - 1) + ["-4", count, "-1"])
    rows = parts.add("Reshape", "parts", data, shape=f"({shape})")
    parts.add("SliceChannel", "", rows, axis=str(axes - 1), num_outputs=count, squeeze_axis="True")
    return None


def match_large_products(call: Call) -> Detail | None:
    """Return (batch size, output columns) if dense layers should replace a batch_dot; else None.

    The units are the columns of a product.
    """
    data, weight = call.shape, call.weight
    if data is None or weight is None or not all((*data, *weight)):
        return None
    if not call.lowers("FullyConnected"):
        return None
    units = weight[1 if is_true(call.attrs.get("transpose_b", "False")) else 2]
    return (data[0], units) if math.prod(data[1:]) * units >= _LEAST_PRODUCT else None


def dense_products(parts: Parts, detail: Detail) -> None:
    """Replace a batch_dot with a dense layer for each pair of matrices.

    Conditions: training, large matrices, and dense layers compute in bfloat16.
    """
    pairs, units = detail
    attrs, (data, weight) = parts.attrs, parts.inputs
    if is_true(attrs.get("transpose_a", "False")):
        data = parts.add("transpose", "data", data, axes="(0, 2, 1)")
    if not is_true(attrs.get("transpose_b", "False")):
        weight = parts.add("transpose", "weight", weight, axes="(0, 2, 1)")
    one_by_one = {"num_outputs": str(pairs), "axis": "0", "squeeze_axis": "True"}

    def split(name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Add operators that split a batch into bfloat16 matrices; return the matrices."""
        low = parts.add("amp_cast", f"{name}_low", tensor, dtype="bfloat16")
        return parts.add_all("SliceChannel", f"{name}s", pairs, low, **one_by_one)

    rows, columns = split("row", data), split("column", weight)
    options = {"no_bias": "True", "flatten": "False", "num_hidden": str(units)}
    made = [
        parts.add("FullyConnected", f"product{k}", row, column, **options)
        for k, (row, column) in enumerate(zip(rows, columns))
    ]
    parts.add("stack", "", *made, axis="0", num_args=str(pairs))
