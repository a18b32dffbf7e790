"""One backward pass whose heads are scaled, and whose gradients come out unscaled.

A script that knows of no loss scale then sees the gradients that float32 would give: it may clip
or log them. Taking the scale out also finds the gradients that are not finite, in the same read.

An `autograd.Function` may clip the gradient it is given, or ignore it. So its `backward` gets
gradients without the scale, and its results are scaled again. A backward pass that it runs itself
scales and unscales on its own. `scaling.loss_outputs` does the same for custom operators.
"""

import functools
import random
import threading
from contextlib import closing, contextmanager
from typing import Any, Callable, Generator, Iterator, List, NamedTuple, Optional, Sequence, Set

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import cast
from ..framework.machine import dtype_name
from ..framework.patching import Original, Patch, wrapping
from ..patches.eager import updated_arrays
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..scaling.finite import all_finite, multiply, unscale
from ..scaling.loss_outputs import count_scaled_backwards, in_unscaled_backward, scaled_outputs
from .variables import Variable, by_gradient, parameters_without_gradients

__all__ = ["Heads", "PassResult", "ScaledPass", "unscaled"]

#: Float16 can't hold one factor of 2^-25 and less.
_LARGEST_FACTOR = 2.0**14
#: An overflow divides the scale by these; the last try has scale 1.
_DIVISORS = (1.0, 2.0**4, 2.0**8, float("inf"))

#: Runs the backward pass: called with the scale, and whether to keep the graph.
Compute = Callable[[float, bool], None]


class Heads:
    """The heads of a backward pass, and their given gradients."""

    def __init__(self, heads: Any, head_grads: Any) -> None:
        self.heads: List[NDArray] = [heads] if isinstance(heads, NDArray) else list(heads)
        given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
        self.gradients = list(given) if given is not None else [None] * len(self.heads)

    def losses(self) -> List[NDArray]:
        """Return the heads without a given gradient, detached from their graphs."""
        return [head.detach() for head, grad in zip(self.heads, self.gradients) if grad is None]

    def scaled_gradients(self, scale: float) -> List[Optional[NDArray]]:
        """Return the heads' gradients times the scale."""
        if scale == 1:
            return self.gradients
        with autograd.pause(), suspended():
            return [
                (_ones_like(head) if gradient is None else gradient) * scale
                for head, gradient in zip(self.heads, self.gradients)
            ]


def _ones_like(head: NDArray) -> NDArray:
    return (mx.np if isinstance(head, mx.np.ndarray) else mx.nd).ones_like(head)


class PassResult(NamedTuple):
    """The scale that was used; by `id` of arrays, which gradients it replaced, which overflowed."""

    scale: float
    replaced: Set[int]
    overflown: Set[int]


class ScaledPass:
    """The scaled backward passes of the process, one at a time: they mark gradients as fresh."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._lock = threading.RLock()
        self._running_in: Optional[int] = None  # the thread of the pass
        self._functions = threading.local()  # depth: of functions with unscaled gradients
        self._calls = 0  # of these functions
        # By nested passes: arrays whose gradients are unscaled already, and those not finite.
        self._written_inside: Set[int] = set()
        self._overflown_inside: Set[int] = set()

    @property
    def is_nested(self) -> bool:
        """Whether the caller runs inside a backward pass, in a function or operator in Python.

        MXNet calls it in the thread of the pass or in a thread of MXNet, unknown to Python.
        """
        if self._running_in is None:
            return False
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return foreign or self._running_in == threading.get_ident()

    @property
    def is_nested_unscaled(self) -> bool:
        """Whether the caller runs in a `backward` in Python that was given unscaled gradients."""
        return bool(getattr(self._functions, "depth", 0)) or in_unscaled_backward()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which no other scaled backward pass runs."""
        with self._lock:
            self._running_in = threading.get_ident()
            try:
                yield
            finally:
                self._running_in = None

    def run(
        self,
        compute: Compute,
        scale: float,
        variables: Sequence[Variable],
        owned: Set[int],
    ) -> PassResult:
        """Run a backward pass, unscale the gradients it has written, and return what overflowed.

        An array outside `owned` has no trainer to skip its step, so it must not overflow where
        float32 would not: the pass then runs again with lower scales, down to 1. For that the
        graph is kept, and gradients that are added to are copied first.
        """
        adding = [group[0].gradient for group in by_gradient(v for v in variables if v.adds)]
        others = any(id(v.array) not in owned for v in variables)
        before = _copy_arrays(adding) if others else []
        with _no_fresh_marks(variables), closing(self._trial_scales(scale)) as tries:
            for used in tries:
                # The sum has to carry the same scale as what is added to it.
                multiply(adding, used)
                try:
                    with scaled_outputs(used, unscaled_outside=True):
                        compute(used, others)
                        mx.nd.waitall()
                except BaseException:
                    multiply(adding, 1 / used)
                    raise
                written = [v for v in variables if v.array._fresh_grad]
                overflown = self._unscale_written(variables, used)
                if used <= 1 or overflown <= owned:
                    break
                _restore_values(adding, before)
                _mark_fresh(written, False)
        # A sum still holds the overflow of an earlier pass.
        replaced = {id(v.array) for v in written if not v.adds}
        return PassResult(used, replaced, overflown)

    def run_grad(
        self, compute: Callable[[float], List[NDArray]], scale: float
    ) -> "tuple[List[NDArray], float, bool]":
        """Compute gradients with lower and lower scales until they are finite.

        Returns the gradients, the scale that was used, and whether they are finite.
        """
        with closing(self._trial_scales(scale)) as tries:
            for used in tries:
                with scaled_outputs(used, unscaled_outside=True):
                    gradients = compute(used)
                    mx.nd.waitall()
                with suspended():
                    gradients = [unscaled(gradient, used) for gradient in gradients]
                finite = all_finite(gradients)
                if used <= 1 or finite:
                    break
        return gradients, used, finite

    def run_nested(self, compute: Compute, variables: Sequence[Variable]) -> None:
        """Run a backward pass inside another one, from a function that is given unscaled gradients.

        Written gradients are unscaled at once. Sums carry the scale of the pass around it.
        """
        with _no_fresh_marks(variables):
            compute(self.scale, False)
            written = [v for v in variables if v.array._fresh_grad and not v.adds]
            self._overflown_inside |= _unscale_gradients(written, self.scale)
            self._written_inside.update(id(v.array) for v in written)

    def _trial_scales(self, scale: float) -> Generator[float, None, None]:
        """Yield the scale, then far lower ones, until the caller stops; undo effects of reruns.

        The first try alone updates running statistics. All tries draw the same random numbers.
        """
        drawn = random.getstate(), np.random.get_state()
        arrays: List[NDArray] = []
        values: List[NDArray] = []
        try:
            for divisor in _DIVISORS:
                self.scale = min(scale, max(scale / divisor, 1.0))
                self._written_inside.clear()
                self._overflown_inside.clear()
                calls = self._calls + count_scaled_backwards()
                yield self.scale
                if self._calls + count_scaled_backwards() > calls:
                    random.setstate(drawn[0])
                    np.random.set_state(drawn[1])
                if not arrays:
                    arrays = [*parameters_without_gradients(), *updated_arrays.all()]
                    values = _copy_arrays(arrays)
        finally:
            _restore_values(arrays, values)
            self.scale = 1.0

    def _unscale_written(self, variables: Sequence[Variable], scale: float) -> Set[int]:
        """Unscale new gradients and sums; return the `id` of arrays whose new one is not finite."""
        written = {id(v.array) for v in variables if v.array._fresh_grad}
        scaled = written - self._written_inside
        overflown = _unscale_gradients(
            [v for v in variables if v.adds or id(v.array) in scaled], scale
        )
        return (overflown & written) | self._overflown_inside

    def patch(self) -> Patch:
        """Return the patch of `autograd.Function`."""
        return Patch(autograd.Function, "__call__", wrapping(self._patched_call))

    def _patched_call(self, original: Original, function: autograd.Function, *inputs: Any) -> Any:
        """Call an `autograd.Function` whose backward computes on unscaled gradients."""
        backward = function.backward

        @functools.wraps(backward)
        def unscaled_backward(*gradients: Any) -> Any:
            scale = self.scale
            if scale == 1:
                return backward(*gradients)
            self._calls += 1
            self._functions.depth = getattr(self._functions, "depth", 0) + 1
            try:
                results = backward(*(_times_in_float32(one, 1 / scale) for one in gradients))
            finally:
                self._functions.depth -= 1
            if isinstance(results, NDArray):
                return _times_in_float32(results, scale)
            return [_times_in_float32(result, scale) for result in results]

        function.backward = unscaled_backward
        return original(function, *inputs)


def unscaled(gradient: NDArray, scale: float) -> NDArray:
    """Return a gradient divided by the scale; autograd may record the division."""
    first = min(scale, _LARGEST_FACTOR)
    gradient = gradient * (1 / first)
    return gradient if first == scale else gradient * (first / scale)


@contextmanager
def _no_fresh_marks(variables: Sequence[Variable]) -> Iterator[None]:
    """Context without marks of fresh gradients, so that a pass sets its own; restored after it."""
    fresh = [v for v in variables if v.array._fresh_grad]
    _mark_fresh(fresh, False)
    try:
        yield
    finally:
        _mark_fresh(fresh, True)


def _mark_fresh(variables: Sequence[Variable], fresh: bool) -> None:
    """Set MXNet's `_fresh_grad`, whether no update has used the gradient, of each array."""
    for variable in variables:
        variable.array._fresh_grad = fresh


def _unscale_gradients(variables: Sequence[Variable], scale: float) -> Set[int]:
    """Divide gradients by the scale; return the arrays whose gradients are not finite, by `id`."""
    groups = by_gradient(variables)
    positions = unscale([group[0].gradient for group in groups], scale)
    return {id(v.array) for i in positions for v in groups[i]}


def _times_in_float32(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor, in float32: half precision would lose small ones."""
    if gradient is None:
        return None
    with autograd.pause(), suspended():
        wide = cast(gradient, "float32") if dtype_name(gradient.dtype) in CASTABLE else gradient
        return wide * factor


def _copy_arrays(arrays: Sequence[NDArray]) -> List[NDArray]:
    with autograd.pause(), suspended():
        return [array.copy() for array in arrays]


def _restore_values(arrays: Sequence[NDArray], values: Sequence[NDArray]) -> None:
    """Copy each value into the array at the same position."""
    with autograd.pause(), suspended():
        for array, value in zip(arrays, values):
            value.copyto(array)
