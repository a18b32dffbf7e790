"""Gradients seen on their way: probes on what operators read and write, for one backward pass.

A probe is an `autograd.Function` that returns what it is given. MXNet calls its backward, in a
thread of its own, with the gradient.
"""

import ctypes
import threading
from typing import Callable, Optional

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray.ndarray import NDArray

from ....framework.arrays import dtype_code, invoke
from ....framework.machine import DTYPE_CODES
from ....framework.operators import handle_of
from ....framework.patching import original

__all__ = ["Probe", "has_gradient", "is_own_copy", "probed"]

#: Takes the gradient that has come to a probe.
See = Callable[[NDArray], None]

# As MXNet made it: under mxamp a function's backward is given gradients without the loss scale.
_call = original(autograd.Function, "__call__")
_COPY, _CAST = handle_of("identity"), handle_of("amp_cast")
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


def has_gradient(array: NDArray) -> bool:
    """Tell whether autograd computes a gradient of an array: whether it is in its graph.

    A probe on one that is not would have MXNet compute gradients that nobody wants.
    """
    if array.grad is not None and array.grad.stype != "default":
        return False  # MXNet's functions know no sparse gradients
    symbol = SymbolHandle()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)):
        return False
    check_call(_LIB.NNSymbolFree(symbol))
    return True


def probed(array: NDArray, see: See) -> NDArray:
    """Return an array of the same values whose gradient is shown to `see` on its way."""
    if array.grad is not None:
        # MXNet's functions don't add to the gradient of an array that has grad_req="add".
        array = _copy(array)
    output: Optional[NDArray] = _call(Probe(see), array)
    # MXNet gives a function, which runs later, the address of a gradient that it has brought from
    # oneDNN's layout to the plain one, and frees it at once. The gradient of a copy is plain.
    return array if output is None else _copy(output)


def _copy(array: NDArray) -> NDArray:
    if dtype_code(array) == DTYPE_CODES["bfloat16"]:
        # oneDNN copies no views in bfloat16; casts take them.
        is_np = isinstance(array, mx.np.ndarray)
        wide = invoke(_CAST, [array], ["dtype"], ["float32"], None, is_np, False)
        return invoke(_CAST, [wide], ["dtype"], ["bfloat16"], None, is_np, False)
    return invoke(_COPY, [array], [], [], None, isinstance(array, mx.np.ndarray), False)
