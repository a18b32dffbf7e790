"""Arithmetic of an array and one that is repeated along its first or last axes, in training.

The gradient of what is repeated is a sum, which MXNet's kernels add up one element after the other.
Repeated by a product with ones, its gradient is a product with ones too, of BLAS: each of the two
is exact in the forward pass, as each of their sums has one term. A sum is the difference to what is
repeated with its sign changed: the gradients of MXNet's `elemwise_add` share memory.
"""

import math
from typing import Mapping, Optional, Sequence, Tuple

from .equivalents import Attributes, Call, Detail, Part, Parts

__all__ = ["OPERATORS", "is_long_broadcast", "of_repeated", "repeats"]

_SUM = "sum"
#: What is done element by element once both shapes are equal.
OPERATORS: Mapping[str, str] = {
    "broadcast_add": _SUM, "_npi_add": _SUM,
    "broadcast_sub": "elemwise_sub", "_npi_subtract": "elemwise_sub",
    "broadcast_mul": "elemwise_mul", "_npi_multiply": "elemwise_mul",
    "broadcast_div": "elemwise_div", "_npi_true_divide": "elemwise_div",
}  # fmt: skip
_KINDS = tuple(dict.fromkeys(OPERATORS.values()))

# Of fewer elements, the operators that stand in take longer to start than one takes to sum.
_FEW = 2**15


def is_long_broadcast(call: Call) -> bool:
    """Tell whether gradients will be computed, and one input is repeated along outer axes alone."""
    return call.training and _repeated(call) is not None


def repeats(call: Call) -> Detail:
    """Return the operator, which input is repeated, how often before and behind, and the shape.

    The shape is that of the result, with 0 for a batch of any size.
    """
    found = _repeated(call)
    return (_KINDS.index(OPERATORS[call.operator]), *found) if found is not None else ()


def _repeated(call: Call) -> Optional[Tuple[int, ...]]:
    """Return what `repeats` does, without the operator; None where nothing is repeated so."""
    one, other = call.shapes
    if not one or not other or math.prod(one) == math.prod(other):
        return None
    which = int(math.prod(other) < math.prod(one))
    small, large = (other, one) if which else (one, other)
    aligned = (*[1] * (len(large) - len(small)), *small)
    if len(aligned) > len(large) or not all(large) or math.prod(large) < _FEW:
        return None
    kept = [k for k, length in enumerate(aligned) if length != 1]
    if not kept or aligned[kept[0] : kept[-1] + 1] != tuple(large[kept[0] : kept[-1] + 1]):
        return None
    before, behind = math.prod(large[: kept[0]]), math.prod(large[kept[-1] + 1 :])
    return (which, before, behind, large[0] if kept[0] else 0, *large[1:])


def of_repeated(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the product, or two of them, and the operator on equal shapes."""
    kind, which, before, behind, *shape = detail
    parts = Parts(inputs=2)
    repeated, operator = which, _KINDS[kind]
    sign = -1 if operator == _SUM else 1
    if behind > 1:
        rows = parts.add("Reshape", "column", repeated, shape="(-1, 1)")
        row = _constant(parts, "row", behind, sign)
        repeated, sign = _product(parts, "behind", rows, row, behind), 1
    if before > 1:
        length = math.prod(shape) // before  # of a known batch: the first axis is repeated
        columns = parts.add("Reshape", "columns", repeated, shape="(-1, 1)")
        rows = _constant(parts, "rows", before, sign)
        repeated = _product(parts, "before", rows, columns, length)
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


def _product(parts: Parts, name: str, data: int, weight: int, width: int) -> int:
    attrs = {"no_bias": "True", "flatten": "False", "num_hidden": str(width)}
    return parts.add("FullyConnected", name, data, weight, **attrs)
