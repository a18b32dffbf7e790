"""The losses of a step as one number."""

from typing import Sequence

import numpy as np
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import KIND_NAMES, cast, flat_view, kind_code, plain_array
from ...framework.machine import device_kind
from ...policy.active import suspended

__all__ = ["mean_of"]

#: Larger losses than this are summed where they are.
_SMALL = 2**12


def mean_of(losses: Sequence[NDArray]) -> float:
    """Return the mean of all elements of losses, in any dtype; waits for them."""
    count = sum(loss.size for loss in losses)
    with np.errstate(all="ignore"):
        return float(sum(map(_sum, losses))) / count if count else float("nan")


def _sum(loss: NDArray) -> float:
    array = plain_array(loss)
    kind = KIND_NAMES.get(kind_code(array))
    if kind == "float32" and device_kind(array.context) == "cpu":
        # As it lies in memory: asnumpy() copies.
        return float(flat_view(array, np.float32).sum(dtype=np.float64)) if array.size else 0.0
    with autograd.pause(), suspended():
        wide = cast(array, "float32") if kind in ("float16", "bfloat16") else array
        if wide.size > _SMALL:
            return float(wide.mean().asscalar()) * int(wide.size)
        values = wide.asnumpy()
        return float(values.sum(dtype=np.float64))
