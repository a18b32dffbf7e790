"""Output operators that start the backward pass themselves, and the loss scale.

`SoftmaxOutput` and its kin ignore the gradient that comes to them from the loss: a scaled loss does
not scale what they send back. Their input is passed through an identity whose gradient is
multiplied by a scale:

    BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x))

with a sign whose gradient is 1 (`_contrib_sign_ste`). The difference is exactly 0 for every x,
infinite, NaN and -0 included, so no value changes. The scale is an array: 1, but inside
`scale_loss`, where MXNet's engine orders the backward pass between the two writes to it.
"""

import atexit
import os
import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import cast, dtypes_of, plain_array
from ..framework.machine import dtype_name
from ..framework.operators import (
    BACKWARD_STARTERS,
    WRITTEN_BY_USERS,
    auxiliary_states,
    handle_of,
    starts_backward,
)
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from . import custom_gradients

__all__ = [
    "HANDLES",
    "scalable_inputs",
    "scale_array",
    "scaled_heads",
]

#: Of the operators whose eager calls may have to be made scalable.
HANDLES = {handle_of(name): name for name in (*BACKWARD_STARTERS, *WRITTEN_BY_USERS)}

#: The scale by context. Recorded graphs hold these arrays, so they are made once a process.
_scales: Dict[Any, NDArray] = {}
atexit.register(_scales.clear)  # before MXNet's library goes
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A child of a process whose other thread holds the lock would wait for ever.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def scalable_inputs(
    handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]
) -> List[NDArray]:
    """Return the inputs of a recorded call, those it sends gradients to made scalable.

    `handle` is one of `HANDLES`.
    """
    name = HANDLES[handle]
    if not starts_backward(name, attributes):
        return list(arrays)
    count = len(arrays) - auxiliary_states(attributes) if name in WRITTEN_BY_USERS else 1
    return [
        with_scalable_gradient(array) if i < count and kind in CASTABLE else array
        for i, (array, kind) in enumerate(zip(arrays, dtypes_of(arrays)))
    ]


def with_scalable_gradient(data: NDArray) -> NDArray:
    """Return `data`, of the same values, with a gradient that `scaled_heads` multiplies."""
    classic = plain_array(data)
    with suspended():
        scale = scale_array(data.context).reshape((1,) * max(data.ndim, 1))
        sign = mx.nd.contrib.sign_ste(classic)
        # The scale has no place in float16.
        zero = cast(mx.nd.BlockGrad(sign) - sign, "float32")
        scaled = cast(mx.nd.broadcast_mul(zero, scale), dtype_name(data.dtype))
        result = mx.nd.BlockGrad(classic) - scaled
    return result.as_np_ndarray() if isinstance(data, mx.np.ndarray) else result


def scale_array(ctx: Any) -> NDArray:
    """Return the array that holds the scale of a context's output operators."""
    with _lock, autograd.pause():
        if ctx not in _scales:
            _scales[ctx] = mx.nd.ones((1,), ctx=ctx)
        return _scales[ctx]


@contextmanager
def scaled_heads(scale: float, stays_inside: bool = False) -> Iterator[None]:
    """Multiply what output operators send back by `scale`, in backward passes inside.

    `stays_inside` says that gradients leave those passes without the scale. Waits for them where
    custom operators (`mx.operator.CustomOp`) are in use.
    """
    if scale == 1:
        yield
        return
    _set(scale)
    try:
        with custom_gradients.scaled(scale, stays_inside):
            yield
    finally:
        _set(1)


def _set(value: float) -> None:
    with _lock, autograd.pause():
        for array in _scales.values():
            array[:] = value
