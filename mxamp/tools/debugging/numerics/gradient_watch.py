"""Checking backward passes by probes: the gradients that enter and leave each operator.

A probe is an `autograd.Function` that returns its input. MXNet calls its backward, in a thread of
MXNet's, with the gradient.
"""

import ctypes
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Sequence, Set

import mxnet as mx
from mxnet import autograd, nd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray.ndarray import NDArray

from ....framework.arrays import as_list, dtype_code, invoke
from ....framework.machine import DTYPE_CODES
from ....framework.operators import Operator, handle_of
from ....framework.patching import original
from ....framework.wording import counted
from ....framework.zero_gradients import zero_gradient_inputs
from ....graph.casts.builder import HALVES
from ....graph.ir import CASTS
from ..observing import Run, probe_copy
from .findings import Finding, Statistics, values_of
from .inspection import Site, finding_at, is_checkable, is_nonfinite

__all__ = ["GradientWatch", "unobserved_copy"]

#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}

#: Operators that may rightly stop all of a gradient.
_MASKS = frozenset({
    "Activation", "Dropout", "Embedding", "LeakyReLU", "Pooling", "clip", "relu", "where",
    "_npx_relu", "_npi_where", "_maximum", "_minimum", "_maximum_scalar", "_minimum_scalar",
    "broadcast_maximum", "broadcast_minimum", "max", "min", "take", "pick", "gather_nd",
})  # fmt: skip

#: A call that this many backward passes have not reached is forgotten.
_KEPT_PASSES = 4
_MOST_CALLS = 100_000

# Below all patches: under mxamp a function's backward gets gradients without the loss scale.
_call = original(autograd.Function, "__call__")
_COPY, _CAST = handle_of("identity"), handle_of("amp_cast")


class _WatchedCall:
    """An operator call of a recorded forward pass, and the gradients of its outputs and inputs."""

    def __init__(self, site: Site, inputs: Sequence[NDArray], ignored: bool, passes: int) -> None:
        self.site = site
        self.passes = passes  #: the backward passes that ran before the call
        # With an input of zeros, the gradients of the other inputs may be zero too.
        self.has_zero_input = any(
            is_checkable(array) and not values_of(array).any() for array in inputs
        )
        #: Its gradients are not reported: skipped by the user, or at fault in the forward pass.
        self.ignored = ignored or any(map(is_nonfinite, inputs))
        self.output_gradients: Dict[int, Statistics] = {}  #: by position, as far as seen
        self.input_gradients: Dict[int, Statistics] = {}


def _probed(gradients: Dict[int, Statistics], position: int, array: NDArray) -> NDArray:
    """Return an array of equal values whose gradient's statistics go to `gradients[position]`.

    Returns the array itself if autograd computes no gradient for it.
    """
    if not is_checkable(array) or not _has_gradient(array):
        return array

    def record(gradient: NDArray) -> None:
        gradients[position] = Statistics.of(gradient)

    if array.grad is not None:
        # MXNet's functions don't add to the gradient of an array that has grad_req="add".
        array = unobserved_copy(array)
    output: Optional[NDArray] = _call(_Probe(record), array)
    # MXNet gives a function, which runs later, the address of a gradient that it has brought from
    # oneDNN's layout to the plain one, and frees it at once. The gradient of a copy is plain.
    return array if output is None else unobserved_copy(output)


class GradientWatch:
    """Sets probes around the operator calls of a recorded pass, and checks their gradients."""

    def __init__(self) -> None:
        self._calls: Deque[_WatchedCall] = deque(maxlen=_MOST_CALLS)
        self._passes = 0  # the backward passes so far
        self._lock = threading.Lock()

    def run_probed(self, site: Site, inputs: Sequence[NDArray], run: Run, ignored: bool) -> Any:
        """Run an operator on probed inputs; return its outputs, probed.

        Faults of the gradients of an `ignored` operator are not reported.
        """
        call = _WatchedCall(site, inputs, ignored, self._passes)
        with self._lock:
            self._calls.append(call)
        unwatched = _unwatched_inputs(site.operator, len(inputs))
        outputs = run(
            [
                array if i in unwatched else _probed(call.input_gradients, i, array)
                for i, array in enumerate(inputs)
            ]
        )
        call.ignored = call.ignored or any(map(is_nonfinite, as_list(outputs)))
        if isinstance(outputs, (list, tuple)):
            return [_probed(call.output_gradients, k, array) for k, array in enumerate(outputs)]
        return _probed(call.output_gradients, 0, outputs)

    def check(self, step: int) -> Optional[Finding]:
        """Return the first fault of the backward pass that just ran; None for a sound pass.

        The pass has no fault to report either if the first one is at an ignored operator.
        """
        nd.waitall()
        with self._lock:
            seen = [c for c in reversed(self._calls) if c.output_gradients or c.input_gradients]
            faults = [
                (c, find(c, step)) for find in (_nonfinite_fault, _vanish_fault) for c in seen
            ]
            first = next(((call, fault) for call, fault in faults if fault is not None), None)
            for call in seen:
                call.output_gradients.clear()
                call.input_gradients.clear()
            self._passes += 1
            # Graphs recorded lately may still wait for their backward pass.
            while self._calls and self._calls[0].passes <= self._passes - _KEPT_PASSES:
                self._calls.popleft()
        return None if first is None or first[0].ignored else first[1]


def _unwatched_inputs(operator: Operator, count: int) -> Set[int]:
    """Return the positions of inputs whose gradients are always zero, or can't be read."""
    positions = zero_gradient_inputs().get(operator.handle, frozenset())
    without = set(range(count)) if positions is None else set(positions)
    return without.union(operator.mutable_inputs, _UNREADABLE.get(operator.name, ()))


def _nonfinite_fault(call: _WatchedCall, step: int) -> Optional[Finding]:
    """Return the finding for a call's first gradient with Inf or NaN; None if all are finite."""
    site = call.site
    for k, found in call.output_gradients.items():
        if not found.finite:
            # The consumers are sound: at fault is the sum of their gradients, or the loss's own.
            tensor = f"gradient of output {k}"
            return finding_at(site, "nonfinite", "backward", step, tensor, found)
    for i, found in call.input_gradients.items():
        if not found.finite:
            kind = "overflow" if found.dtype in HALVES and not found.nan else "nonfinite"
            tensor = f"gradient of {site.names[i]}"
            return finding_at(site, kind, "backward", step, tensor, found)
    return None


def _vanish_fault(call: _WatchedCall, step: int) -> Optional[Finding]:
    """Return the finding for a call that loses its gradients to zero in half precision, or None."""
    outputs, inputs = call.output_gradients.values(), call.input_gradients.values()
    before = sum(gradient.nonzero for gradient in outputs)
    after = sum(gradient.nonzero for gradient in inputs)
    site, operator = call.site, call.site.operator.name
    if not before or not inputs or call.has_zero_input or operator in _MASKS:
        return None
    if HALVES.isdisjoint(gradient.dtype for gradient in (*outputs, *inputs)):
        return None
    if after >= before / 2 if operator in CASTS else after:
        return None
    i, found = next(iter(call.input_gradients.items()))
    detail = f"of {counted(before, 'value')} other than zero that came to it, {after} are left"
    tensor = f"gradient of {site.names[i]}"
    return finding_at(site, "vanish", "backward", step, tensor, found, detail)


# ---------------------------------------------------------------------- probes


class _Probe(autograd.Function):  # type: ignore[misc]
    """The identity function, which passes its gradient to `on_gradient` in the backward pass."""

    def __init__(self, on_gradient: Callable[[NDArray], None]) -> None:
        super().__init__()
        self._on_gradient = on_gradient

    def forward(self, array: NDArray) -> NDArray:
        """Return another array over the same memory: an array can't be recorded twice."""
        return array.detach()

    def backward(self, gradient: NDArray) -> NDArray:
        """Pass the gradient to `on_gradient`, and return it."""
        self._on_gradient(gradient)
        probe_copy.expected = True
        return gradient


def _has_gradient(array: NDArray) -> bool:
    """Return whether autograd computes a gradient for an array, in a form that a probe can read.

    A probe on any other array would have MXNet compute gradients that nobody reads.
    """
    if array.grad is not None and array.grad.stype != "default":
        return False  # MXNet's functions know no sparse gradients
    symbol = SymbolHandle()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)):
        return False
    check_call(_LIB.NNSymbolFree(symbol))
    return True


def unobserved_copy(array: NDArray) -> NDArray:
    """Return a copy in the plain memory layout that no observer sees."""
    is_np = isinstance(array, mx.np.ndarray)
    if dtype_code(array) == DTYPE_CODES["bfloat16"]:
        # oneDNN copies no views in bfloat16; casts take them.
        array = invoke(_CAST, [array], ["dtype"], ["float32"], None, is_np, False)
        return invoke(_CAST, [array], ["dtype"], ["bfloat16"], None, is_np, False)
    return invoke(_COPY, [array], [], [], None, is_np, False)
