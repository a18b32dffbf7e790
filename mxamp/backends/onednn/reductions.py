"""Faster equivalents of sums, means and broadcasts: matrix products with ones.

MXNet's own kernels add one element after the other, in sums and in the gradients of broadcasts.
BLAS is about 20 times as fast.
"""

from __future__ import annotations

import math
from typing import Mapping

from ...policy.values import is_true, parse_integers
from ..passes import Attributes, Call, Detail, Parts, Tensor
from .layouts import BLOCK, PLANAR_AXES, block_size

# The least elements of the summed array: with fewer, starting the additional operators takes
# longer than the sum.
_LEAST_ELEMENTS = 1024
# The most terms of a sum: in longer sums MXNet compensates rounding errors, and BLAS does not.
_MOST_TERMS = 2**16

#: Operators of `mx.np`, and the values of their attributes that a product needs.
_OF_NUMPY = frozenset({"_np_sum", "_npi_mean"})
_UNSET = {"dtype": "None", "initial": "None", "where": "None"}


def match_sum(call: Call) -> Detail | None:
    """Return (first axis, end axis, *shape) if a product should replace a sum or mean; else None.

    The axes are adjacent, the array has at least `_LEAST_ELEMENTS` elements, and each sum has at
    most `_MOST_TERMS` terms. The shape has a 0 for a batch of any size.
    """
    attrs, shape = call.attrs, call.shape
    if not shape or not all(shape) or is_true(attrs.get("exclude", "False")):
        return None
    if any(attrs.get(name, unset) != unset for name, unset in _UNSET.items()):
        return None
    if call.operator in _OF_NUMPY and attrs.get("axis") == "()":
        return None  # no axis; the operators of mx.nd take it for all axes
    span = _summed_span(attrs, len(shape))
    if span is None or math.prod(shape) < _LEAST_ELEMENTS:
        return None
    first, last = span
    # Reshape can't make an output without axes.
    some_left = last - first < len(shape) or is_true(attrs.get("keepdims", "False"))
    if not some_left or not 1 < math.prod(shape[first:last]) <= _MOST_TERMS:
        return None
    return (first, last, 0 if first else shape[0], *shape[1:])


def _summed_span(attrs: Attributes, axis_count: int) -> tuple[int, int] | None:
    """Return the first and the end axis of a sum; None if its axes are not adjacent."""
    summed = sorted(axis % axis_count for axis in parse_integers(attrs.get("axis", "()")))
    if not summed:
        return 0, axis_count
    first, last = summed[0], summed[-1] + 1
    return (first, last) if summed == list(range(first, last)) else None


def total(parts: Parts, detail: Detail) -> None:
    """Replace a sum over axes with a matrix product with ones.

    Conditions: those of `match_sum`.
    """
    _add_result(parts, _add_sums(parts, detail), parts.attrs, detail)


def mean(parts: Parts, detail: Detail) -> None:
    """Replace a mean over axes with a matrix product with ones, divided by the count.

    Conditions: those of `match_sum`.
    """
    _add_mean(parts, parts.attrs, detail)


def _add_mean(parts: Parts, attrs: Attributes, detail: Detail) -> None:
    """Add operators that compute a mean as a matrix product with ones."""
    first, last, *shape = detail
    count = str(math.prod(shape[first:last]))
    means = parts.add_float32("_div_scalar", "mean", _add_sums(parts, detail), scalar=count)
    _add_result(parts, means, attrs, detail)


def _add_sums(parts: Parts, detail: Detail) -> Tensor:
    """Add a matrix product with ones, which sums over the axes in `detail`; return the sums."""
    first, last, *shape = detail
    [data] = parts.inputs
    add = parts.add_float32
    summed, inner = math.prod(shape[first:last]), math.prod(shape[last:])
    outer = "-1" if first else "1"
    if inner == 1:
        # One pair of matrices: the gradient of `dot` would keep the rows for the backward pass.
        rows = add("Reshape", "rows", data, shape=f"(1, {outer}, {summed})")
        row = add("slice_axis", "row", rows, axis="1", begin="0", end="1")
        return add("batch_dot", "sums", rows, add("ones_like", "ones", row), transpose_b="True")
    planes = add("Reshape", "planes", data, shape=f"({outer}, {summed}, {inner})")
    column = add("slice_axis", "column", planes, axis="2", begin="0", end="1")
    return add("batch_dot", "sums", add("ones_like", "ones", column), planes, transpose_a="True")


def _add_result(parts: Parts, sums: Tensor, attrs: Attributes, detail: Detail) -> None:
    """Add a Reshape that gives `sums` the output shape of the sum or mean it replaces."""
    first, last, *shape = detail
    before = [-1, *shape[1:first]] if first else []
    kept = [1] * (last - first) if is_true(attrs.get("keepdims", "False")) else []
    after = [*before, *kept, *shape[last:]] or [1]
    parts.add_float32("Reshape", "", sums, shape=str(tuple(after)))


def match_pool(call: Call) -> Detail | None:
    """Return (tile height, tile width) if `pool_in_parts` should replace a pooling; else None.

    The call is a global average Pooling with a slow gradient. Where parts don't help, return the
    shape without the batch: `pool_in_parts` then uses a product. For AdaptiveAvgPooling2D return ()
    where Pooling is fast: MXNet's own kernel reads one element after the other.
    """
    attrs, shape, block = call.attrs, call.shape, block_size(call.policy)
    adapts, size = call.operator != "Pooling", parse_integers(attrs.get("output_size", "0"))
    whole = is_true(attrs.get("global_pool", "False")) and attrs.get("pool_type") == "avg"
    if adapts:  # measured with AVX2
        whole = block < BLOCK and size in ([1], [1, 1])
    plain = attrs.get("layout", "None") in ("None", "NCHW")
    if not (whole and plain and shape and all(shape)) or len(shape) != PLANAR_AXES:
        return None
    blocks, rest = divmod(shape[1], block)
    fewest = [_least_divisor(side) for side in shape[2:]]
    if rest or not call.training or max(shape[2:]) <= blocks:
        return () if adapts and not rest else None
    tiles = tuple([side // count for side, count in zip(shape[2:], fewest)])
    return shape[1:] if max(fewest) > blocks else tiles


def pool_in_parts(parts: Parts, detail: Detail) -> None:
    """Replace an average of maps with averages of tiles and a Pooling, or with a product with ones.

    Conditions: channels in blocks. `detail` comes from `match_pool`: without tiles there is only
    the Pooling.
    """
    if len(detail) == PLANAR_AXES - 1:
        _add_mean(parts, {"keepdims": "True"}, (2, 4, 0, *detail))
        return
    [averages], kind = parts.inputs, {"pool_type": "avg"}
    if detail:
        size = f"({detail[0]}, {detail[1]})"
        averages = parts.add("Pooling", "parts", averages, kernel=size, stride=size, **kind)
    parts.add("Pooling", "", averages, kernel="(1, 1)", global_pool="True", **kind)


def _least_divisor(side: int) -> int:
    """Return the smallest divisor of `side` that is above 1; 1 for 1."""
    return next((count for count in range(2, side) if side % count == 0), side)


_SUM = "sum"
#: The elementwise operator for equal shapes.
OPERATORS: Mapping[str, str] = {
    "broadcast_add": _SUM, "_npi_add": _SUM,
    "broadcast_sub": "elemwise_sub", "_npi_subtract": "elemwise_sub",
    "broadcast_mul": "elemwise_mul", "_npi_multiply": "elemwise_mul",
    "broadcast_div": "elemwise_div", "_npi_true_divide": "elemwise_div",
}  # fmt: skip
_KINDS = tuple(dict.fromkeys(OPERATORS.values()))

# The least elements of a broadcast's result: with fewer, starting the additional operators takes
# longer than the sum in its gradient.
_LEAST_RESULT = 2**15


def match_broadcast(call: Call) -> Detail | None:
    """Return the numbers for `broadcast` if it should replace a broadcasting operator; else None.

    They are the operator's index in `_KINDS`, the position of the repeated input, its repeats
    along the first and along the last axes, and the result's shape, with 0 for a batch of any size.
    """
    one, other = call.shape, call.weight
    if not one or not other or math.prod(one) == math.prod(other):
        return None
    which = int(math.prod(other) < math.prod(one))
    small, large = (other, one) if which else (one, other)
    aligned = (*[1] * (len(large) - len(small)), *small)
    if len(aligned) > len(large) or not all(large) or math.prod(large) < _LEAST_RESULT:
        return None
    kept = [k for k, length in enumerate(aligned) if length != 1]
    if not kept or aligned[kept[0] : kept[-1] + 1] != tuple(large[kept[0] : kept[-1] + 1]):
        return None
    before, behind = math.prod(large[: kept[0]]), math.prod(large[kept[-1] + 1 :])
    kind = _KINDS.index(OPERATORS[call.operator])
    return (kind, which, before, behind, large[0] if kept[0] else 0, *large[1:])


def broadcast(parts: Parts, detail: Detail) -> None:
    """Replace broadcasting: repeat an input by matrix products, then apply an elementwise operator.

    Conditions: training, float32 inputs, and a large result.

    The products are exact, since each of their sums has one term. A sum becomes a difference with
    the sign of its second input changed, because the gradients of MXNet's `elemwise_add` share
    memory. The inputs keep their order, in which MXNet lists the graph's variables.
    """
    kind, which, before, behind, *shape = detail
    inputs = list(parts.inputs)
    repeated, operator = inputs[which], _KINDS[kind]
    sign = -1 if operator == _SUM and which else 1
    if behind > 1:
        rows = parts.add("Reshape", "column", repeated, shape="(-1, 1)")
        row = parts.add("_full", "ones_row", shape=f"({behind}, 1)", value=str(sign))
        repeated, sign = _add_product(parts, "behind", rows, row, behind), 1
    if before > 1:
        length = math.prod(shape) // before  # of a known batch: the first axis is repeated
        columns = parts.add("Reshape", "columns", repeated, shape="(-1, 1)")
        rows = parts.add("_full", "ones_rows", shape=f"({before}, 1)", value=str(sign))
        repeated = _add_product(parts, "before", rows, columns, length)
    like = (shape[0] or -1, *shape[1:])
    inputs[which] = parts.add("Reshape", "repeated", repeated, shape=str(like))
    if operator == _SUM:
        operator = "elemwise_sub"
        inputs[1] = inputs[1] if which else parts.add("negative", "negative", inputs[1])
    parts.add(operator, "", *inputs)


def _add_product(parts: Parts, name: str, data: Tensor, weight: Tensor, width: int) -> Tensor:
    """Add a dense layer of `width` units without a bias; return its output."""
    attrs = {"no_bias": "True", "flatten": "False", "num_hidden": str(width)}
    return parts.add("FullyConnected", name, data, weight, **attrs)
