"""The gradients that eager calls make of their inputs, by zeros.

A zero is added to an input of a call: its gradient is that which the call makes of that input.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any, Container, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import dtype_of, invoke
from ...framework.operators import handle_of, resolve
from ...framework.patching import original
from ...framework.zero_gradients import zero_gradient_inputs
from .observing import MonitoredGraph, Tensor

#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}
#: The calls that no backward pass has reached yet; older ones are forgotten.
_MOST_CALLS = 10_000
_ZEROS, _NEGATIVE, _SUM = handle_of("zeros_like"), handle_of("negative"), handle_of("add_n")
_TIMES = handle_of("_mul_scalar")
_mark_variables = original(autograd, "mark_variables")


class RecordedCall:
    """A call of an operator that autograd has recorded, or of a graph."""

    def __init__(self, place: Any, inputs: Sequence[NDArray] = ()) -> None:
        self.place, self.inputs = place, inputs  # the place is a `Site` or a `MonitoredGraph`
        #: The zeros that were added to inputs, by position.
        self.zeros: dict[int, NDArray] = {}
        self.is_half = self.is_ignored = False

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients of its inputs by position, if the last backward pass reached it."""
        found = {i: zero.grad for i, zero in self.zeros.items() if zero._fresh_grad}
        if found or not self.zeros:
            leaves = enumerate(self.inputs)
            found.update({i: x.grad for i, x in leaves if x.grad is not None and x._fresh_grad})
        return {i: Tensor(found[i]) for i in sorted(found)}


class EagerGradients:
    """The recorded calls whose backward pass has not run."""

    def __init__(self) -> None:
        self._calls: deque[RecordedCall] = deque(maxlen=_MOST_CALLS)
        self._lock = threading.Lock()

    def record(self, call: RecordedCall) -> list[NDArray]:
        """Record a call; return its inputs, plus zeros where that tells their gradients."""
        with self._lock:
            self._calls.append(call)
        return [_plus_zero(call, i, array) for i, array in enumerate(call.inputs)]

    def reached(self, graphs: Container[Any]) -> list[tuple[RecordedCall, dict[int, Tensor]]]:
        """Return the calls that the last backward pass has reached, last first, with gradients.

        `graphs` are those that it has reached.
        """
        reached: list[tuple[RecordedCall, dict[int, Tensor]]] = []
        waiting: deque[RecordedCall] = deque(maxlen=_MOST_CALLS)
        with self._lock:
            for call in self._calls:
                found = call.gradients()
                if found or (isinstance(call.place, MonitoredGraph) and call.place in graphs):
                    reached.insert(0, (call, found))
                else:
                    waiting.append(call)
            self._calls = waiting
        return reached


def _plus_zero(call: RecordedCall, i: int, array: NDArray) -> NDArray:
    """Return an input of a call plus a new zero; the input itself where that can't be told apart.

    A parameter is left alone: its own gradient can be read, and layers treat an array that was
    computed in another way.
    """
    if not Tensor(array).is_checkable or not _is_recorded(array):
        return array
    is_sparse = array.grad is not None and array.grad.stype != "default"
    if is_sparse or (array.grad is not None and i > 0) or i in _unwatched(call.place.operator):
        return array
    with autograd.pause():
        gradient = invoke(_ZEROS, [array], [], [], None, False, False)
        # Zeros with a sign, which change no value, not even that of a zero.
        zero = invoke(_NEGATIVE, [gradient], [], [], None, False, False)
    _mark_variables([zero], [gradient])
    call.zeros[i] = zero
    is_np = isinstance(array, mx.np.ndarray)
    if dtype_of(array) == "bfloat16":  # oneDNN adds no views
        array = invoke(_TIMES, [array], ["scalar"], ["1.0"], None, is_np, False)
    result: NDArray = invoke(_SUM, [array, zero], ["num_args"], ["2"], None, is_np, False)
    return result


def _unwatched(operator: str) -> set[int]:
    """Return the positions of inputs whose gradients are always zero, or can't be read."""
    found = resolve(operator)
    positions = zero_gradient_inputs().get(found.handle, frozenset())
    without = set(range(1000)) if positions is None else set(positions)
    return without.union(found.mutable_inputs, _UNREADABLE.get(operator, ()))


def _is_recorded(array: NDArray) -> bool:
    """Return whether autograd computes a gradient for an array."""
    symbol = SymbolHandle()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)):
        return False
    check_call(_LIB.NNSymbolFree(symbol))
    return True
