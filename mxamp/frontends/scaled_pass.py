"""One backward pass whose heads are scaled, and whose gradients come out unscaled.

So a script that knows of no loss scale sees the gradients that float32 would give: it may clip,
log or use them as it likes. The pass over the gradients that takes the scale out also finds those
that are not finite (one read and one write at the speed of memory).
"""

import functools
import logging
import random
import threading
from typing import AbstractSet, Any, Callable, List, NamedTuple, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import cast
from ..framework.machine import dtype_name
from ..framework.patching import Patch
from ..framework.updated_arrays import updated_arrays
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..scaling.custom_gradients import calls_so_far, in_unscaled_backward
from ..scaling.finite import multiply, unscale
from ..scaling.hook import TrainerHook
from ..scaling.shared_scale import scale_in_force
from .variables import Variable, by_gradient, parameters_without_gradients

__all__ = [
    "Heads",
    "PassResult",
    "Repeated",
    "RunningPass",
    "inner_pass",
    "lower_scales",
    "note_overflow",
    "scale_for",
    "scaled_pass",
]


class RunningPass:
    """The scale of the backward pass that runs, and what passes inside it have unscaled."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.written_inside: Set[int] = set()
        self.overflown_inside: Set[int] = set()
        self._random: Optional[Tuple[Any, Any]] = None
        self._calls = self._custom_calls = 0  # of Python, in this try and up to it
        self._thread = threading.local()

    @property
    def in_function(self) -> bool:
        """Whether the calling thread computes the backward of a function that was unscaled."""
        return bool(getattr(self._thread, "depth", 0)) or in_unscaled_backward()

    def begin(self, scale: float) -> None:
        """Take note of a pass, or of another try of it, which draws the same random numbers."""
        self.scale = scale
        self.written_inside.clear()
        self.overflown_inside.clear()
        if self._random is None:
            self._random = random.getstate(), np.random.get_state()
        elif self._calls or calls_so_far() > self._custom_calls:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        self._calls, self._custom_calls = 0, calls_so_far()

    def end(self) -> None:
        """Take note of its end."""
        self.scale, self._random = 1.0, None
        self.written_inside.clear()
        self.overflown_inside.clear()

    def patch(self) -> Patch:
        """Return the patch of `autograd.Function`."""
        return Patch(autograd.Function, "__call__", self._build_call)

    def _build_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(function: autograd.Function, *inputs: Any) -> Any:  # noqa: N807
            backward = function.backward

            @functools.wraps(backward)
            def unscaled_backward(*gradients: Any) -> Any:
                scale = self.scale
                if scale == 1:
                    return backward(*gradients)
                self._calls += 1
                self._thread.depth = getattr(self._thread, "depth", 0) + 1
                try:
                    results = backward(*(_times(gradient, 1 / scale) for gradient in gradients))
                finally:
                    self._thread.depth -= 1
                if isinstance(results, NDArray):
                    return _times(results, scale)
                return [_times(result, scale) for result in results]

            function.backward = unscaled_backward
            return original(function, *inputs)

        return __call__


def _times(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor, in float32: without the scale half precision loses it."""
    if gradient is None:
        return None
    with autograd.pause(), suspended():
        wide = cast(gradient, "float32") if dtype_name(gradient.dtype) in CASTABLE else gradient
        return wide * factor


_LARGEST_FACTOR = 2.0**14

#: Runs the backward pass: called with the scale, and whether to keep the graph.
Compute = Callable[[float, bool], None]


class Heads:
    """The heads of a backward pass, and the gradients that they were given."""

    def __init__(self, heads: Any, head_grads: Any) -> None:
        self.heads: List[NDArray] = [heads] if isinstance(heads, NDArray) else list(heads)
        given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
        self.gradients = list(given) if given is not None else [None] * len(self.heads)

    def losses(self) -> List[NDArray]:
        """Return the heads that were given no gradient: the losses, without their graphs."""
        return [head.detach() for head, grad in zip(self.heads, self.gradients) if grad is None]

    def scaled_gradients(self, scale: float) -> List[Optional[NDArray]]:
        """Return the heads' gradients times the scale."""
        if scale == 1:
            return self.gradients
        return [_scaled(head, grad, scale) for head, grad in zip(self.heads, self.gradients)]


def _scaled(head: NDArray, gradient: Optional[NDArray], scale: float) -> NDArray:
    with autograd.pause(), suspended():
        if gradient is not None:
            return gradient * scale
        numpy = isinstance(head, mx.np.ndarray)
        return (mx.np if numpy else mx.nd).ones_like(head) * scale


class PassResult(NamedTuple):
    """The scale that was used; by `id` of arrays, which gradients it replaced, which overflowed."""

    scale: float
    replaced: AbstractSet[int]
    overflown: AbstractSet[int]


def scaled_pass(
    compute: Compute,
    scale: float,
    variables: Sequence[Variable],
    owned: AbstractSet[int],
    running: RunningPass,
) -> PassResult:
    """Run a backward pass, take the scale out of what it has written, and find what overflowed.

    A gradient of an array that is not `owned`, by trainers that skip a step, must not overflow
    where float32's would not: then the pass is run again with lower scales, down to 1. For that
    the graph is kept, and what gradients are added to is copied first.
    """
    fresh = [v for v in variables if v.array._fresh_grad]
    _set_fresh(fresh, False)
    adding = [group[0].gradient for group in by_gradient(v for v in variables if v.adds)]
    others = any(id(v.array) not in owned for v in variables)
    before = _copies(adding) if others else []
    scales = iter(lower_scales(scale))
    repeated = Repeated()
    try:
        while True:
            # What is added to has to carry the same scale as what is added.
            multiply(adding, scale)
            running.begin(scale)
            try:
                compute(scale, others)
            except BaseException:
                multiply(adding, 1 / scale)
                raise
            written = [v for v in variables if v.array._fresh_grad]
            overflown = _unscale(variables, scale, running)
            if scale <= 1 or overflown <= owned:
                # What a pass adds to still holds what has overflowed in an earlier one.
                replaced = {id(v.array) for v in written if not v.adds}
                return PassResult(scale, replaced, overflown)
            scale = next(scales)
            repeated.begin()
            _write(before, adding)
            _set_fresh(written, False)
    finally:
        repeated.end()
        running.end()
        _set_fresh(fresh, True)


class Repeated:
    """Running statistics and states that only the first try of a pass may update."""

    def __init__(self) -> None:
        self._arrays: List[NDArray] = []
        self._values: List[NDArray] = []

    def begin(self) -> None:
        """Keep the values that there are before the second try."""
        if not self._arrays:
            self._arrays = [*parameters_without_gradients(), *updated_arrays.all()]
            self._values = _copies(self._arrays)

    def end(self) -> None:
        """Put them back after the last one."""
        _write(self._values, self._arrays)


def unscaled(gradient: NDArray, scale: float) -> NDArray:
    """Return a gradient without the scale, recorded where autograd records."""
    # Float16 can't hold one factor of 2^-25 and less.
    factors = (
        (1 / scale,) if scale <= _LARGEST_FACTOR else (1 / _LARGEST_FACTOR, _LARGEST_FACTOR / scale)
    )
    for factor in factors:
        gradient = gradient * factor
    return gradient


def inner_pass(compute: Compute, variables: Sequence[Variable], running: RunningPass) -> None:
    """Run a backward pass inside another: a function in Python has been given unscaled gradients.

    What it writes is unscaled at once. What it adds to carries the scale of the pass around it.
    """
    fresh = [v for v in variables if v.array._fresh_grad]
    _set_fresh(fresh, False)
    try:
        compute(running.scale, False)
        written = [v for v in variables if v.array._fresh_grad and not v.adds]
        groups = by_gradient(written)
        positions = unscale([group[0].gradient for group in groups], running.scale)
        running.written_inside.update(id(v.array) for v in written)
        running.overflown_inside.update(id(v.array) for i in positions for v in groups[i])
    finally:
        _set_fresh(fresh, True)


def lower_scales(scale: float) -> List[float]:
    """Return the scales to try where one has overflowed: each far lower, the last one 1."""
    return [max(scale / 2**4, 1.0), max(scale / 2**8, 1.0), 1.0]


def _unscale(variables: Sequence[Variable], scale: float, running: RunningPass) -> AbstractSet[int]:
    """Take the scale out of gradients; return the variables whose gradients are not finite."""
    written = {id(v.array) for v in variables if v.array._fresh_grad}
    carry = written - running.written_inside
    groups = by_gradient(v for v in variables if v.adds or id(v.array) in carry)
    positions = unscale([group[0].gradient for group in groups], scale)
    overflown = {id(v.array) for i in positions for v in groups[i]}
    return (overflown & written) | running.overflown_inside


def _copies(arrays: Sequence[NDArray]) -> List[NDArray]:
    with autograd.pause(), suspended():
        return [array.copy() for array in arrays]


def _write(values: Sequence[NDArray], arrays: Sequence[NDArray]) -> None:
    with autograd.pause(), suspended():
        for value, array in zip(values, arrays):
            value.copyto(array)


def _set_fresh(variables: Sequence[Variable], fresh: bool) -> None:
    for variable in variables:
        variable.array._fresh_grad = fresh


logger = logging.getLogger("mxamp")

RUN_AGAIN = (
    "a gradient that no trainer owns overflowed with the loss scale %g: the backward pass was run "
    "again with %g, and the next one uses %g"
)
RUN_AGAIN_ALONE = (
    "a gradient that no trainer owns overflowed with the loss scale %g: the backward pass was run "
    "again with %g, in this worker alone"
)
NOT_FINITE = (
    "a gradient that no trainer owns is not finite with a loss scale of 1 either: it is not in "
    "float32, or half precision has no room for it. Nothing was skipped for it"
)

# The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15


def scale_for(hooks: Sequence[TrainerHook], heads: Heads) -> float:
    """Return the scale of a pass from these heads: the lowest of all trainers."""
    scale = scale_in_force(hooks).loss_scale
    if any(dtype_name(head.dtype) == "float16" for head in heads.heads):
        scale = min(scale, _HALF_LIMIT)
    return scale


def note_overflow(hooks: Sequence[TrainerHook], tried: float, used: float, finite: bool) -> None:
    """Lower the shared scale where a pass had to be run again, and a lower scale was the cure."""
    if used == tried:
        return
    if finite and any(hook.reduction.is_distributed for hook in hooks):
        # All workers hold the same scale, and the others have not seen this.
        logger.info(RUN_AGAIN_ALONE, tried, used)
    elif finite:
        lowered = scale_in_force(hooks).lower(tried)
        logger.info(RUN_AGAIN, tried, used, lowered)
    else:
        # Float32 would have overflowed too: the scale is not to blame.
        logger.warning(NOT_FINITE)
