"""Judging backward passes by probes: the gradients that enter and leave each operator.

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
from ....framework.zero_gradients import zero_gradients
from ....graph.casts.builder import HALVES
from ....graph.ir import CASTS
from ..observing import probe_copy
from .findings import Finding, Statistics, values_of
from .inspection import Site, finding_at, is_float, is_nonfinite

__all__ = ["GradientWatch", "unobserved_copy"]

#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}

#: Operators that may rightly stop all of a gradient.
_MASKS = frozenset({
    "Activation", "Dropout", "Embedding", "LeakyReLU", "Pooling", "clip", "relu", "where",
    "_npx_relu", "_npi_where", "_maximum", "_minimum", "_maximum_scalar", "_minimum_scalar",
    "broadcast_maximum", "broadcast_minimum", "max", "min", "take", "pick", "gather_nd",
})  # fmt: skip

#: Backward passes after which an operator is taken to have none.
_KEPT = 4
_MOST = 100_000

# Below all patches: under mxamp a function's backward gets gradients without the loss scale.
_call = original(autograd.Function, "__call__")
_COPY, _CAST = handle_of("identity"), handle_of("amp_cast")


class _Passage:
    """One operator of a recorded forward pass, and the gradients seen at it."""

    def __init__(self, site: Site, inputs: Sequence[NDArray], skipped: bool, age: int) -> None:
        self.site, self.age = site, age
        # With an input of zeros, the gradients of the other inputs may be zero too.
        self.times_zero = any(is_float(array) and not values_of(array).any() for array in inputs)
        # Not judged: skipped by the user, or at fault in the forward pass.
        self.excused = skipped or any(map(is_nonfinite, inputs))
        self.outputs: Dict[int, Statistics] = {}
        self.inputs: Dict[int, Statistics] = {}

    def probe(self, seen: Dict[int, Statistics], position: int, array: NDArray) -> NDArray:
        """Return an array with a probe that notes its gradient, if autograd computes one."""
        if not is_float(array) or not _has_gradient(array):
            return array

        def note(gradient: NDArray) -> None:
            seen[position] = Statistics.of(gradient)

        return _probed(array, note)


class GradientWatch:
    """Sets probes around the operators of a recorded pass, and judges what they have seen."""

    def __init__(self) -> None:
        self._passages: Deque[_Passage] = deque(maxlen=_MOST)
        self._judged = 0
        self._lock = threading.Lock()

    def around(
        self,
        site: Site,
        inputs: Sequence[NDArray],
        run: Callable[[Sequence[NDArray]], Any],
        skipped: bool,
    ) -> Any:
        """Run an operator with probes on its inputs and outputs; return the outputs."""
        passage = _Passage(site, inputs, skipped, self._judged)
        with self._lock:
            self._passages.append(passage)
        unwatched = _unwatched(site.operator, len(inputs))
        given = [
            array if i in unwatched else passage.probe(passage.inputs, i, array)
            for i, array in enumerate(inputs)
        ]
        outputs = run(given)
        passage.excused = passage.excused or any(map(is_nonfinite, as_list(outputs)))
        if isinstance(outputs, (list, tuple)):
            return [passage.probe(passage.outputs, k, array) for k, array in enumerate(outputs)]
        return passage.probe(passage.outputs, 0, outputs)

    def judge(self, step: int) -> Optional[Finding]:
        """Return the first fault of the backward pass that just ran; None for a sound pass.

        An operator that is skipped, or at fault in the forward pass, excuses what follows from it.
        """
        nd.waitall()
        with self._lock:
            seen = [one for one in reversed(self._passages) if one.outputs or one.inputs]
            faults = [(one, judge(one, step)) for judge in (_nonfinite, _vanished) for one in seen]
            first = next(((one, fault) for one, fault in faults if fault is not None), None)
            for passage in seen:
                passage.outputs.clear()
                passage.inputs.clear()
            self._judged += 1
            # Graphs recorded lately may still wait for their backward pass.
            while self._passages and self._passages[0].age <= self._judged - _KEPT:
                self._passages.popleft()
        return None if first is None or first[0].excused else first[1]


def _unwatched(operator: Operator, count: int) -> Set[int]:
    """Return the positions of inputs whose gradients are always zero, or can't be read."""
    positions = zero_gradients().get(operator.handle, frozenset())
    without = set(range(count)) if positions is None else set(positions)
    return without.union(operator.mutable_inputs, _UNREADABLE.get(operator.name, ()))


def _nonfinite(passage: _Passage, step: int) -> Optional[Finding]:
    """Return the finding for an operator whose consumers have passed finite gradients back."""
    site = passage.site
    for k, seen in passage.outputs.items():
        if not seen.finite:
            # The consumers are sound: at fault is the sum of their gradients, or the loss's own.
            return finding_at(site, "nonfinite", "backward", step, f"gradient of output {k}", seen)
    for i, seen in passage.inputs.items():
        if not seen.finite:
            kind = "overflow" if seen.dtype in HALVES and not seen.nan else "nonfinite"
            return finding_at(site, kind, "backward", step, f"gradient of {site.names[i]}", seen)
    return None


def _vanished(passage: _Passage, step: int) -> Optional[Finding]:
    """Return the finding for an operator in low precision whose gradients are lost to zero."""
    came = sum(seen.nonzero for seen in passage.outputs.values())
    left = sum(seen.nonzero for seen in passage.inputs.values())
    site, name = passage.site, passage.site.operator.name
    dtypes = {seen.dtype for seen in (*passage.outputs.values(), *passage.inputs.values())}
    if not came or not passage.inputs or passage.times_zero or name in _MASKS:
        return None
    if not dtypes & HALVES or (left >= came / 2 if name in CASTS else left):
        return None
    i, seen = next(iter(passage.inputs.items()))
    detail = f"of {counted(came, 'value')} other than zero that came to it, {left} are left"
    tensor = f"gradient of {site.names[i]}"
    return finding_at(site, "vanish", "backward", step, tensor, seen, detail)


# ---------------------------------------------------------------------- probes


class _Probe(autograd.Function):  # type: ignore[misc]
    def __init__(self, see: Callable[[NDArray], None]) -> None:
        super().__init__()
        self._see = see

    def forward(self, array: NDArray) -> NDArray:
        """Return another array over the same memory: one can't be recorded twice."""
        return array.detach()

    def backward(self, gradient: NDArray) -> NDArray:
        """Show the gradient, and return it."""
        self._see(gradient)
        probe_copy.expected = True
        return gradient


def _has_gradient(array: NDArray) -> bool:
    """Return whether an array is in autograd's graph.

    A probe on any other array would have MXNet compute gradients that nobody reads.
    """
    if array.grad is not None and array.grad.stype != "default":
        return False  # MXNet's functions know no sparse gradients
    symbol = SymbolHandle()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)):
        return False
    check_call(_LIB.NNSymbolFree(symbol))
    return True


def _probed(array: NDArray, see: Callable[[NDArray], None]) -> NDArray:
    """Return an array of the same values, whose gradient is shown to `see`."""
    if array.grad is not None:
        # MXNet's functions don't add to the gradient of an array that has grad_req="add".
        array = unobserved_copy(array)
    output: Optional[NDArray] = _call(_Probe(see), array)
    # MXNet gives a function, which runs later, the address of a gradient that it has brought from
    # oneDNN's layout to the plain one, and frees it at once. The gradient of a copy is plain.
    return array if output is None else unobserved_copy(output)


def unobserved_copy(array: NDArray) -> NDArray:
    """Return a copy in the plain memory layout that no observer sees."""
    is_np = isinstance(array, mx.np.ndarray)
    if dtype_code(array) == DTYPE_CODES["bfloat16"]:
        # oneDNN copies no views in bfloat16; casts take them.
        array = invoke(_CAST, [array], ["dtype"], ["float32"], None, is_np, False)
        return invoke(_CAST, [array], ["dtype"], ["bfloat16"], None, is_np, False)
    return invoke(_COPY, [array], [], [], None, is_np, False)
