"""Gradients seen on their way: probes on what operators read and write, for one backward pass.

A probe is an `autograd.Function` that returns what it is given. MXNet calls its backward, in a
thread of its own, with the gradient.
"""

import threading
from typing import Callable, Optional

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import invoke
from ..framework.operators import resolve

__all__ = ["Probe", "is_own_copy", "probed"]

#: Takes the gradient that has come to a probe.
See = Callable[[NDArray], None]

# As MXNet made it: under mxamp a function's backward is given gradients without the loss scale.
_call = autograd.Function.__call__
_COPY = resolve("identity").handle
_state = threading.local()


def is_own_copy(operator: str) -> bool:
    """Tell whether a call is the copy by which MXNet takes what a probe's backward returns."""
    returned, _state.returned = getattr(_state, "returned", False), False
    return returned and operator == "_copyto"


class Probe(autograd.Function):  # type: ignore[misc]
    """Returns what it is given, and shows `see` the gradient."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def forward(self, array: NDArray) -> NDArray:
        """Return another array over the same memory: one can't be recorded twice."""
        return array.detach()

    def backward(self, gradient: NDArray) -> NDArray:
        """Show the gradient, and return it."""
        self._see(gradient)
        _state.returned = True
        return gradient


def probed(array: NDArray, see: See) -> NDArray:
    """Return an array over the same memory whose gradient is shown to `see` on its way."""
    if array.grad is not None:
        # MXNet's functions don't add to the gradient of an array that has grad_req="add".
        array = invoke(_COPY, [array], [], [], None, isinstance(array, mx.np.ndarray), False)
    output: Optional[NDArray] = _call(Probe(see), array)
    return array if output is None else output
