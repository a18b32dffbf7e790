"""Gluon's `clip_global_norm`, right under mixed precision.

It takes its norm by `dot`, which a policy would lower: half precision has no room for the square of
a norm. Of gradients that are in half precision themselves mxamp takes the norm, with float32 sums:
MXNet's would be Inf above 256 in float16, and clipping by it zeroes the gradients.
"""

import functools
import math
import warnings
from typing import Any, Callable

import mxnet as mx

from ..framework.machine import dtype_name
from ..policy.active import suspended
from .finite import multiply, square_sum

__all__ = ["build_clipping"]

_HALVES = frozenset({"float16", "bfloat16"})
# What keeps MXNet's `clip_global_norm` from a division by zero.
_EPSILON = 1e-8

NOT_FINITE = "nan or inf is detected. The arrays are left as they are."


def build_clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `clip_global_norm` that sums squares in float32."""

    @functools.wraps(original)
    def clip_global_norm(arrays: Any, max_norm: float, check_isfinite: bool = True) -> Any:
        if not any(dtype_name(array.dtype) in _HALVES for array in arrays):
            with suspended():
                return original(arrays, max_norm, check_isfinite)
        norm = math.sqrt(square_sum(arrays))
        if math.isfinite(norm):
            multiply(arrays, min(1.0, max_norm / (norm + _EPSILON)))
        elif check_isfinite:
            warnings.warn(UserWarning(NOT_FINITE), stacklevel=2)
        return norm if check_isfinite else mx.nd.array([norm], ctx=arrays[0].context)

    return clip_global_norm
