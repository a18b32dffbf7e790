"""Gradients of eager calls, by zeros that are added to the inputs of each call.

The gradient of such a zero is that of the input, as the call alone makes it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import dtype_of, invoke
from ...framework.operators import handle_of, resolve
from ...framework.patching import original
from ...framework.zero_gradients import zero_gradient_inputs
from .faults import Fault, Site, Tensor, gradient_fault, nonfinite

#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}
#: The calls that no backward pass has reached yet; older ones are forgotten.
_MOST_CALLS = 10_000
_ZEROS, _NEGATIVE, _SUM = handle_of("zeros_like"), handle_of("negative"), handle_of("add_n")
_TIMES = handle_of("_mul_scalar")
_mark_variables = original(autograd, "mark_variables")


class RecordedCall:
    """A call that autograd has recorded, and the zeros of its inputs by position."""

    def __init__(self, site: Site, inputs: Sequence[NDArray]) -> None:
        self.site, self.inputs = site, inputs
        self.zeros: dict[int, NDArray] = {}
        self.outputs: Sequence[NDArray] = ()
        self.is_ignored = False  #: faults of its gradients are not reported
        self.is_half = False
        self.graph: Any = None  #: for the call of a block, what watches its graph

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients of its inputs by position, if the last backward pass reached it."""
        found = {i: zero.grad for i, zero in self.zeros.items() if zero._fresh_grad}
        if found or not self.zeros:
            leaves = enumerate(self.inputs)
            found.update({i: x.grad for i, x in leaves if x.grad is not None and x._fresh_grad})
        names = self.site.names
        return {i: Tensor(f"gradient of {names[i]}", array) for i, array in sorted(found.items())}


class EagerGradients:
    """The recorded calls whose backward pass has not run."""

    def __init__(self) -> None:
        self._calls: deque[RecordedCall] = deque(maxlen=_MOST_CALLS)
        self._lock = threading.Lock()

    def record(self, site: Site, inputs: Sequence[NDArray]) -> tuple[RecordedCall, list[NDArray]]:
        """Record a call; return it, and its inputs plus zeros where that tells their gradients."""
        call = RecordedCall(site, inputs)
        with self._lock:
            self._calls.append(call)
        return call, [_plus_zero(call, i, array) for i, array in enumerate(inputs)]

    def fault(self) -> tuple[RecordedCall, Fault] | None:
        """Return the call and the first fault of the backward pass that has just run, or None."""
        with self._lock:
            reached = [(call, found) for call in self._calls if (found := call.gradients())]
            gone = {id(call) for call, _ in reached}
            self._calls = deque((c for c in self._calls if id(c) not in gone), _MOST_CALLS)
        # Whether values other than 0 have come to an array, by id, from the calls that read it.
        alive: dict[int, bool] = {}
        for call, gradients in reversed(reached):
            came = [alive[id(output)] for output in call.outputs if id(output) in alive]
            for i, gradient in gradients.items():
                array = id(call.inputs[i])
                alive[array] = alive.get(array, False) or gradient.nonzero > 0
                if gradient.is_bad:
                    return call, nonfinite(call.site, gradient)
            all_zero = not any(gradient.nonzero for gradient in gradients.values())
            if all_zero and call.is_half and call.graph is None and (not came or any(came)):
                fault = gradient_fault(call.site, next(iter(gradients.values())), is_half=True)
                if fault is not None:
                    return call, fault
        return None


def _plus_zero(call: RecordedCall, i: int, array: NDArray) -> NDArray:
    """Return an input of a call plus a new zero; the input itself where that can't be told apart.

    A parameter is left alone: its own gradient can be read, and layers treat an array that was
    computed in another way.
    """
    if array.stype != "default" or not Tensor("", array).is_checkable or not _is_recorded(array):
        return array
    is_sparse = array.grad is not None and array.grad.stype != "default"
    if is_sparse or (array.grad is not None and i > 0) or i in _unwatched(call.site.operator):
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
