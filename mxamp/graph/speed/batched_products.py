"""Batches of large matrix products as dense layers, which have bfloat16 kernels."""

import math
from typing import Optional, Sequence

from ...policy.values import is_true
from .equivalents import Attributes, Call, Detail, Part, Parts

__all__ = ["dense_products", "match_large_products"]

#: The least multiplications in a product of two matrices: with fewer, the operators around the
#: dense layers take longer than bfloat16 saves.
_LEAST = 2**23

_LOW = {"dtype": "bfloat16"}


def match_large_products(call: Call) -> Optional[Detail]:
    """Return (pairs, units) for a batch_dot of large matrices in training; else None.

    The units are the columns of a product.
    """
    data, weight = call.shape, call.weight
    if not call.training or data is None or weight is None or not all((*data, *weight)):
        return None
    units = weight[1 if is_true(call.attrs.get("transpose_b", "False")) else 2]
    return (data[0], units) if math.prod(data[1:]) * units >= _LEAST else None


def dense_products(attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the parts of a batch_dot: a dense layer without bias for each pair of matrices."""
    pairs, units = detail
    parts = Parts(inputs=2)
    data, weight = 0, 1
    if is_true(attrs.get("transpose_a", "False")):
        data = parts.add("transpose", "data", data, axes="(0, 2, 1)")
    if not is_true(attrs.get("transpose_b", "False")):
        weight = parts.add("transpose", "weight", weight, axes="(0, 2, 1)")
    rows, columns = (
        parts.add_split(f"{name}s", pairs, parts.add("amp_cast", f"{name}_low", one, **_LOW))
        for name, one in (("row", data), ("column", weight))
    )
    options = {"no_bias": "True", "flatten": "False", "num_hidden": str(units)}
    made = [
        parts.add("FullyConnected", f"product{k}", row, column, **options)
        for k, (row, column) in enumerate(zip(rows, columns))
    ]
    parts.add("stack", "", *made, axis="0", num_args=str(pairs))
    return parts.made
