"""batch_dot of large matrices in bfloat16, as one dense layer per pair of matrices."""

from __future__ import annotations

import math
from typing import Sequence

from ...policy.values import is_true
from ..passes import Call, Detail, Parts, Tensor

#: The least multiplications in a product of two matrices: with fewer, the operators around the
#: dense layers take longer than bfloat16 saves.
_LEAST = 2**23


def match_large_products(call: Call) -> Detail | None:
    """Return (pairs, output columns) for a batch_dot of large matrices; else None.

    The units are the columns of a product.
    """
    data, weight = call.shape, call.weight
    if data is None or weight is None or not all((*data, *weight)):
        return None
    if not call.lowers("FullyConnected"):
        return None
    units = weight[1 if is_true(call.attrs.get("transpose_b", "False")) else 2]
    return (data[0], units) if math.prod(data[1:]) * units >= _LEAST else None


def dense_products(parts: Parts, detail: Detail) -> None:
    """Before: a batch_dot. After: a dense layer without bias for each pair of matrices.

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
        """Add a bfloat16 cast of a batch and its split into matrices; return the matrices."""
        low = parts.add("amp_cast", f"{name}_low", tensor, dtype="bfloat16")
        return parts.add_all("SliceChannel", f"{name}s", pairs, low, **one_by_one)

    rows, columns = split("row", data), split("column", weight)
    options = {"no_bias": "True", "flatten": "False", "num_hidden": str(units)}
    made = [
        parts.add("FullyConnected", f"product{k}", row, column, **options)
        for k, (row, column) in enumerate(zip(rows, columns))
    ]
    parts.add("stack", "", *made, axis="0", num_args=str(pairs))
