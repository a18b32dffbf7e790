"""Sums, means and broadcasts as products with vectors of ones.

MXNet's own kernels add one element after the other, in sums and in the gradients of broadcasts.
BLAS is about 20 times as fast.
"""

import math
from typing import Mapping, Optional, Sequence, Tuple

from ...policy.values import is_true, parse_integers
from .equivalents import BLOCK, PLANAR_AXES, Attributes, Call, Detail, Part, Parts, has_elements

__all__ = [
    "OPERATORS",
    "global_pool",
    "is_global_pool",
    "is_long_broadcast",
    "is_long_sum",
    "is_slow_pool",
    "broadcast",
    "mean",
    "parts_of_map",
    "repeats",
    "span_and_shape",
    "total",
]

# With fewer elements, starting the additional operators takes longer than the sum.
_FEW = 1024
# The longest sum: in longer ones MXNet compensates rounding errors, and BLAS does not.
_LONGEST = 2**16

#: Operators of `mx.np`, and the values of their attributes that a product needs.
_OF_NUMPY = frozenset({"_np_sum", "_npi_mean"})
_UNSET = {"dtype": "None", "initial": "None", "where": "None"}


def is_long_sum(call: Call) -> bool:
    """Return whether a sum or mean is over adjacent axes of a large enough array."""
    attrs, shape = call.attrs, call.shape
    if not shape or not all(shape) or is_true(attrs.get("exclude", "False")):
        return False
    if any(attrs.get(name, unset) != unset for name, unset in _UNSET.items()):
        return False
    if call.operator in _OF_NUMPY and attrs.get("axis") == "()":
        return False  # no axis; the operators of mx.nd take it for all axes
    span = _span(attrs, len(shape))
    if span is None or math.prod(shape) < _FEW:
        return False
    first, last = span
    # Reshape can't make an output without axes.
    some_left = last - first < len(shape) or is_true(attrs.get("keepdims", "False"))
    return some_left and 1 < math.prod(shape[first:last]) <= _LONGEST


def span_and_shape(call: Call) -> Detail:
    """Return the range of summed axes and the shape, with 0 for a batch of any size."""
    shape = call.shape or ()
    first, last = _span(call.attrs, len(shape)) or (0, len(shape))
    return (first, last, 0 if first else shape[0], *shape[1:])


def _span(attrs: Attributes, axes: int) -> Optional[Tuple[int, int]]:
    """Return the range of summed axes; None where they are not adjacent."""
    summed = sorted(axis % axes for axis in parse_integers(attrs.get("axis", "()")))
    if not summed:
        return 0, axes
    first, last = summed[0], summed[-1] + 1
    return (first, last) if summed == list(range(first, last)) else None


def total(attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the sum over the axes."""
    parts = Parts(inputs=1)
    _restored(parts, _product(parts, detail), attrs, detail)
    return parts.made


def mean(attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the mean over the axes."""
    first, last, *shape = detail
    parts = Parts(inputs=1)
    summed = _product(parts, detail)
    count = str(math.prod(shape[first:last]))
    _restored(parts, parts.add("_div_scalar", "mean", summed, scalar=count), attrs, detail)
    return parts.made


def _product(parts: Parts, detail: Detail) -> int:
    first, last, *shape = detail
    summed, inner = math.prod(shape[first:last]), math.prod(shape[last:])
    outer = "-1" if first else "1"
    if inner == 1:
        rows = parts.add("Reshape", "rows", 0, shape=f"({outer}, {summed})")
        row = parts.add("slice_axis", "row", rows, axis="0", begin="0", end="1")
        ones = parts.add("ones_like", "ones", row)
        return parts.add("dot", "sums", rows, ones, transpose_b="True")
    planes = parts.add("Reshape", "planes", 0, shape=f"({outer}, {summed}, {inner})")
    column = parts.add("slice_axis", "column", planes, axis="2", begin="0", end="1")
    ones = parts.add("ones_like", "ones", column)
    return parts.add("batch_dot", "sums", ones, planes, transpose_a="True")


def _restored(parts: Parts, summed: int, attrs: Attributes, detail: Detail) -> None:
    first, last, *shape = detail
    before = [-1, *shape[1:first]] if first else []
    kept = [1] * (last - first) if is_true(attrs.get("keepdims", "False")) else []
    after = [*before, *kept, *shape[last:]] or [1]
    parts.add("Reshape", "", summed, shape=str(tuple(after)))


_GLOBAL = {"kernel": "(1, 1)", "global_pool": "True", "pool_type": "avg"}


def is_global_pool(call: Call) -> bool:
    """Return whether AdaptiveAvgPooling2D averages whole maps."""
    size = parse_integers(call.attrs.get("output_size", "()"))
    return size in ([], [1], [1, 1]) and has_elements(call)


def is_slow_pool(call: Call) -> bool:
    """Return whether a Pooling is a global average with a slow gradient."""
    attrs = call.attrs
    if not is_true(attrs.get("global_pool", "False")) or attrs.get("pool_type", "max") != "avg":
        return False
    planar = call.shape is not None and len(call.shape) == PLANAR_AXES and has_elements(call)
    return planar and attrs.get("layout", "None") in ("None", "NCHW") and bool(parts_of_map(call))


def global_pool(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the average by oneDNN's Pooling, which has a bfloat16 kernel for blocked layouts."""
    if not detail:
        return [Part("Pooling", "", (0,), _GLOBAL)]
    if len(detail) == PLANAR_AXES - 1:
        parts = mean({"axis": "(2, 3)", "keepdims": "True"}, (2, 4, 0, *detail))
        return [part._replace(float32=True) for part in parts]
    size = f"({detail[0]}, {detail[1]})"
    first = {"kernel": size, "stride": size, "pool_type": "avg"}
    return [Part("Pooling", "parts", (0,), first), Part("Pooling", "", (1,), _GLOBAL)]


def parts_of_map(call: Call) -> Detail:
    """Return the height and width of the parts to average first, () for a single step.

    Where parts don't help, return the shape without the batch: `global_pool` then uses a product.
    """
    if not call.training or call.shape is None:
        return ()
    _, channels, *sides = call.shape
    blocks = channels // BLOCK
    if channels % BLOCK or max(sides) <= blocks:
        return ()
    fewest = [_divisor(side) for side in sides]
    if max(fewest) > blocks:
        return call.shape[1:]
    return tuple([side // count for side, count in zip(sides, fewest)])


def _divisor(side: int) -> int:
    """Return the least divisor above 1."""
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

# With fewer elements, starting the additional operators takes longer than the sum.
_FEW_TO_REPEAT = 2**15


def is_long_broadcast(call: Call) -> bool:
    """Return whether a call in training broadcasts one input along its first or last axes."""
    return call.training and _repeated(call) is not None


def repeats(call: Call) -> Detail:
    """Return the operator, the repeated input, its repeats before and behind, and the shape.

    The shape is the result's, with 0 for a batch of any size.
    """
    found = _repeated(call)
    return (_KINDS.index(OPERATORS[call.operator]), *found) if found is not None else ()


def _repeated(call: Call) -> Optional[Tuple[int, ...]]:
    """Return the result of `repeats` without the operator; None where it doesn't apply."""
    one, other = call.shapes
    if not one or not other or math.prod(one) == math.prod(other):
        return None
    which = int(math.prod(other) < math.prod(one))
    small, large = (other, one) if which else (one, other)
    aligned = (*[1] * (len(large) - len(small)), *small)
    if len(aligned) > len(large) or not all(large) or math.prod(large) < _FEW_TO_REPEAT:
        return None
    kept = [k for k, length in enumerate(aligned) if length != 1]
    if not kept or aligned[kept[0] : kept[-1] + 1] != tuple(large[kept[0] : kept[-1] + 1]):
        return None
    before, behind = math.prod(large[: kept[0]]), math.prod(large[kept[-1] + 1 :])
    return (which, before, behind, large[0] if kept[0] else 0, *large[1:])


def broadcast(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return one or two products that repeat an input, then the operator on equal shapes.

    The products are exact, since each of their sums has one term. A sum becomes a difference with
    the sign changed, because the gradients of MXNet's `elemwise_add` share memory.
    """
    kind, which, before, behind, *shape = detail
    parts = Parts(inputs=2)
    repeated, operator = which, _KINDS[kind]
    sign = -1 if operator == _SUM else 1
    if behind > 1:
        rows = parts.add("Reshape", "column", repeated, shape="(-1, 1)")
        row = _constant(parts, "row", behind, sign)
        repeated, sign = _repeated_by_product(parts, "behind", rows, row, behind), 1
    if before > 1:
        length = math.prod(shape) // before  # of a known batch: the first axis is repeated
        columns = parts.add("Reshape", "columns", repeated, shape="(-1, 1)")
        rows = _constant(parts, "rows", before, sign)
        repeated = _repeated_by_product(parts, "before", rows, columns, length)
    like = (shape[0] or -1, *shape[1:])
    repeated = parts.add("Reshape", "repeated", repeated, shape=str(like))
    inputs = [0, 1]
    inputs[which] = repeated
    if operator == _SUM:
        operator, inputs = "elemwise_sub", [1 - which, repeated]
    parts.add(operator, "", *inputs)
    return parts.made


def _constant(parts: Parts, name: str, count: int, value: int) -> int:
    return parts.add("_full", f"ones_{name}", shape=f"({count}, 1)", value=str(value))


def _repeated_by_product(parts: Parts, name: str, data: int, weight: int, width: int) -> int:
    attrs = {"no_bias": "True", "flatten": "False", "num_hidden": str(width)}
    return parts.add("FullyConnected", name, data, weight, **attrs)
