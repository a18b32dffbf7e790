"""Output operators that start the backward pass themselves, and the loss scale.

`SoftmaxOutput` and the regression outputs ignore the gradient that comes to them from the loss: a
scaled loss does not scale what they send back. Called eagerly, their input is passed through
`x + (x*s - BlockGrad(x*s))`, which leaves every value as it is and multiplies the gradient by
1 + s. `s` is an array: 0, but inside `scale_loss`, where MXNet's engine orders the backward pass
between the two writes to it. A backward pass outside `scale_loss` is unscaled.
"""

import atexit
import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.operators import LOSS_OUTPUTS, resolve

__all__ = ["HANDLES", "scaled_heads", "with_scalable_gradient"]

#: Of the operators whose eager calls are made scalable.
HANDLES = frozenset(resolve(name).handle for name in LOSS_OUTPUTS)

#: `s` by context. Recorded graphs hold these arrays, so they are made once a process.
_extra: Dict[Any, NDArray] = {}
atexit.register(_extra.clear)  # before MXNet's library goes
_lock = threading.Lock()


def with_scalable_gradient(data: NDArray) -> NDArray:
    """Return `data`, of the same values, with a gradient that `scaled_heads` multiplies."""
    extra = _extra_factor(data.context)
    scaled = mx.nd.broadcast_mul(data, extra.reshape((1,) * max(data.ndim, 1)))
    return data + (scaled - mx.nd.BlockGrad(scaled))


def _extra_factor(ctx: Any) -> NDArray:
    with _lock, autograd.pause():
        if ctx not in _extra:
            _extra[ctx] = mx.nd.zeros((1,), ctx=ctx)
        return _extra[ctx]


@contextmanager
def scaled_heads(scale: float) -> Iterator[None]:
    """Multiply what output operators send back by `scale`, in backward passes inside."""
    if scale == 1 or not _extra:
        yield
        return
    _set(scale - 1)
    try:
        yield
    finally:
        _set(0)


def _set(value: float) -> None:
    with _lock, autograd.pause():
        for extra in _extra.values():
            extra[:] = value
