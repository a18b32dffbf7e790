"""Judging backward passes: the gradients that came to each operator, and that left it."""

import ctypes
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Optional, Sequence, Set

import mxnet as mx
from mxnet import autograd, nd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray.ndarray import NDArray

from ....framework.arrays import dtype_code, invoke
from ....framework.machine import DTYPE_CODES
from ....framework.nested import as_list
from ....framework.operators import Operator, handle_of
from ....framework.patching import original
from ....framework.wording import counted
from ....framework.zero_gradients import zero_gradients
from ....graph.casts.builder import HALVES
from ....graph.ir import CASTS
from .findings import Finding, Statistics, values_of
from .inspection import Site, finding_at, is_float, is_nonfinite

__all__ = [
    "GradientWatch",
    "Probe",
    "has_gradient",
    "is_own_copy",
    "probed",
]

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


#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}

#: Operators that may well stop all of a gradient.
_MASKS = frozenset({
    "Activation", "Dropout", "Embedding", "LeakyReLU", "Pooling", "clip", "relu", "where",
    "_npx_relu", "_npi_where", "_maximum", "_minimum", "_maximum_scalar", "_minimum_scalar",
    "broadcast_maximum", "broadcast_minimum", "max", "min", "take", "pick", "gather_nd",
})  # fmt: skip


# So many backward passes an operator waits for its own, before it is taken to have none.
_KEPT = 4
_MOST = 100_000


class _Passage:
    """One operator of a recorded forward pass, and the gradients seen at it."""

    def __init__(self, site: Site, inputs: Sequence[NDArray], skipped: bool, age: int) -> None:
        self.site, self.age = site, age
        # An input is all zero, and so may the others' gradients be.
        self.times_zero = any(is_float(array) and not values_of(array).any() for array in inputs)
        # Nothing is to be said of it: it is skipped, or was at fault in the forward pass.
        self.excused = skipped or any(map(is_nonfinite, inputs))
        self.heads: Dict[int, Statistics] = {}
        self.inputs: Dict[int, Statistics] = {}

    @property
    def is_seen(self) -> bool:
        """Whether a backward pass has come by."""
        return bool(self.heads or self.inputs)

    def forget(self) -> None:
        """Be ready for another pass."""
        self.heads.clear()
        self.inputs.clear()


class GradientWatch:
    """Probes around the operators of a recorded pass; after backward, what they have seen."""

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
        """Run an operator with probes on what it reads and writes; return its outputs."""
        passage = _Passage(site, inputs, skipped, self._judged)
        with self._lock:
            self._passages.append(passage)
        unwatched = _unwatched(site.operator, len(inputs))
        outputs = run(
            [
                array
                if i in unwatched or not is_float(array) or not has_gradient(array)
                else probed(array, _note(passage.inputs, i))
                for i, array in enumerate(inputs)
            ]
        )
        passage.excused = passage.excused or any(map(is_nonfinite, as_list(outputs)))
        if isinstance(outputs, (list, tuple)):
            return [self._head(passage, k, array) for k, array in enumerate(outputs)]
        return self._head(passage, 0, outputs)

    @staticmethod
    def _head(passage: _Passage, k: int, array: NDArray) -> NDArray:
        if not is_float(array) or not has_gradient(array):
            return array
        return probed(array, _note(passage.heads, k))

    def judge(self, step: int) -> Optional[Finding]:
        """Return what went wrong first in the backward pass that was just run; None for nothing.

        Where that was to be skipped, or has gone wrong in the forward pass already, what follows
        from it is no finding either.
        """
        nd.waitall()
        with self._lock:
            seen = [passage for passage in reversed(self._passages) if passage.is_seen]
            found = next(((p, f) for p in seen if (f := _nonfinite(p, step)) is not None), None)
            if found is None:
                found = next(((p, f) for p in seen if (f := _vanished(p, step)) is not None), None)
            for passage in seen:
                passage.forget()
            self._judged += 1
            # Other graphs may be waiting for their backward pass.
            while self._passages and self._passages[0].age <= self._judged - _KEPT:
                self._passages.popleft()
        return None if found is None or found[0].excused else found[1]


def _note(seen: Dict[int, Statistics], position: int) -> Callable[[NDArray], None]:
    def see(gradient: NDArray) -> None:
        seen[position] = Statistics.of(gradient)

    return see


def _unwatched(operator: Operator, count: int) -> Set[int]:
    """Return the positions of inputs without a probe: no gradient comes, or none can be seen."""
    positions = zero_gradients().get(operator.handle, frozenset())
    without = set(range(count)) if positions is None else set(positions)
    return without.union(operator.mutable_inputs, _UNREADABLE.get(operator.name, ()))


def _nonfinite(passage: _Passage, step: int) -> Optional[Finding]:
    """Return the finding for an operator that the passes behind it have given finite gradients."""
    for k, seen in passage.heads.items():
        if not seen.finite:
            # All behind it are fine: the sum of what came from them, or the loss's own gradient.
            return finding_at(
                passage.site, "nonfinite", "backward", step, f"gradient of output {k}", seen
            )
    for i, seen in passage.inputs.items():
        if not seen.finite:
            kind = "overflow" if seen.dtype in HALVES and not seen.nan else "nonfinite"
            return finding_at(passage.site, kind, "backward", step, _of_input(passage, i), seen)
    return None


def _vanished(passage: _Passage, step: int) -> Optional[Finding]:
    """Return the finding for an operator in low precision whose gradients are lost to zero."""
    came = sum(seen.nonzero for seen in passage.heads.values())
    left = sum(seen.nonzero for seen in passage.inputs.values())
    name = passage.site.operator.name
    if not came or not passage.inputs or passage.times_zero or name in _MASKS:
        return None
    if left >= came / 2 if name in CASTS else left:
        return None
    if not any(
        seen.dtype in HALVES for seen in (*passage.heads.values(), *passage.inputs.values())
    ):
        return None
    i, seen = next(iter(passage.inputs.items()))
    detail = f"of {counted(came, 'value')} other than zero that came to it, {left} are left"
    return finding_at(passage.site, "vanish", "backward", step, _of_input(passage, i), seen, detail)


def _of_input(passage: _Passage, i: int) -> str:
    return f"gradient of {passage.site.names[i]}"
