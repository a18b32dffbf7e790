"""Backward passes that scale, for scripts that scale no loss themselves.

`autograd.backward`, `NDArray.backward` and `autograd.grad` multiply the gradients of their heads by
the shared scale, and unscale the gradients that come back: a script that knows of no loss scale
sees the gradients that float32 would give, and may clip or log them. Taking the scale out finds the
gradients that are not finite, in the same read. Trainers skip steps that overflowed; a gradient
that no trainer owns stays Inf.

An `autograd.Function` may clip the gradient it is given, or ignore it. So its `backward` gets
gradients without the scale, and its results are scaled again. A backward pass that it runs itself
scales and unscales on its own. `scaling.loss_outputs` does the same for custom operators.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from typing import Any, Callable, ContextManager, Iterable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOpProp

from ..errors import AmpError
from ..framework.arrays import cast
from ..framework.contrib_amp import check_contrib_is_off, refusals
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..scaling.finite import multiply, unscale
from ..scaling.loss_outputs import build_custom_op_init, in_unscaled_backward, scaled_outputs
from ..scaling.passes import entries_of, passes, without_flags
from ..scaling.scaler import SharedScale, scale_of
from ..scaling.trainer import Stage, State, active_hook, attach_hook
from .variables import Variable, Variables, by_gradient

logger = logging.getLogger("mxamp")

OVERFLOW = (
    "a gradient that no trainer owns overflowed with the loss scale %g, and is Inf or NaN: no step "
    "is skipped for it, and the scale stays. Skip an update of your own with it"
)

#: The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15
#: Float16 can't hold one factor of 2^-25 and less.
_LARGEST_FACTOR = 2.0**14

#: Runs the original backward pass with the given gradients of its heads.
Compute = Callable[[Any], Any]


class _BackwardPatches(FrontEnd):
    """Scales that never leave the backward pass, with their trainers and variables."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers and modules whose optimizer was not decorated; None leaves them as they are.
        self.default_scale: SharedScale | None = None
        self.trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self.variables = Variables()
        self._scale = 1.0  # of the running pass
        self._functions = threading.local()  # depth: of functions with unscaled gradients
        self._nested: list[NDArray] = []  # gradients of these arrays are unscaled already
        self._overflown: set[int] = set()  # by nested passes, by `id`
        self._has_warned = False

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            *self.variables.patches(),
            Patch(autograd.Function, "__call__", wrapping(self._patched_call)),
            Patch(CustomOpProp, "__init__", build_custom_op_init),
            # The scale may be in use without the casting patches, which refuse contrib too.
            *refusals(),
        ]

    def open(self) -> None:
        """Patch `backward` and `attach_grad`, and find the arrays that have gradients already."""
        check_contrib_is_off()
        with self._lock:
            if not self.is_open:
                passes.open()
                super().open()
                self.variables.add_existing()
                passes.automatic = self

    def close(self) -> None:
        """Undo the patches, and forget trainers and variables."""
        passes.automatic = None
        super().close()
        self.default_scale, self._has_warned = None, False
        self.trainers.clear()
        self.variables.clear()

    def _patched_init(
        self, original: Original, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> None:
        """Initialize a trainer, with a loss scale if there is one for it."""
        original(trainer, *args, **kwargs)
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        own_scale = scale_of(given) or scale_of(trainer._optimizer)
        shared = own_scale or self.default_scale
        if shared is None:
            return
        try:
            hook = attach_hook(trainer, shared.scaler, scaled_by=shared.scaled_by)
        except AmpError as error:
            if own_scale is not None:
                raise
            logger.warning("%s: this trainer is left as it is: %s", shared.scaled_by, error)
            return
        # For a first step whose gradients only other workers have computed.
        hook.last_stage = Stage.UNSCALED
        self.trainers.add(trainer)

    def retire_hooks(self) -> None:
        """Leave the trainers to other APIs; gradients that wait for their step are checked."""
        for hook in self._hooks():
            hook.scaled_by = ""

    def _hooks(self) -> list[State]:
        """Return the states of the trainers that still have a shared scale."""
        found = [active_hook(trainer) for trainer in list(self.trainers)]
        return [hook for hook in found if hook is not None and hook.is_shared]

    def run(
        self,
        compute: Compute,
        heads: Sequence[NDArray],
        head_grads: Any,
        recorded: ContextManager[None],
    ) -> None:
        """Run a backward pass with the lowest scale of all trainers, and unscale gradients.

        `recorded` is the context in which `passes` records the gradients that it writes.
        """
        hooks = self._hooks()
        scale, overflown = _lowest_scale(hooks, heads), set()
        with recorded:
            if scale == 1:
                # No scale to take out; trainers check the gradients they are about to use.
                compute(head_grads)
            else:
                overflown = self._run_scaled(compute, heads, head_grads, scale)
        for hook in hooks:
            hook.mark_unscaled(scale, overflown)
        owned = {id(entry.data) for hook in hooks for entry in entries_of(hook.trainer)}
        if not overflown <= owned and not self._has_warned:
            self._has_warned = True
            logger.warning(OVERFLOW, scale)

    def _run_scaled(
        self, compute: Compute, heads: Sequence[NDArray], head_grads: Any, scale: float
    ) -> set[int]:
        """Run a backward pass with a scale; return the arrays whose gradients have overflowed."""
        variables = list(self.variables.values())
        adding = [group[0].array.grad for group in by_gradient(v for v in variables if v.adds)]
        with without_flags([v.array for v in variables]):
            # The sum has to carry the same scale as what is added to it.
            multiply(adding, scale)
            self._scale, self._nested, self._overflown = scale, [], set()
            try:
                with scaled_outputs(scale, unscaled_outside=True):
                    compute(_scaled_gradients(heads, head_grads, scale))
                    mx.nd.waitall()
            except BaseException:
                multiply(adding, 1 / scale)
                raise
            finally:
                self._scale = 1.0
            written = {id(v.array) for v in variables if v.array._fresh_grad}
            found = _unscaled([v for v in variables if v.adds or id(v.array) in written], scale)
            for array in self._nested:
                array._fresh_grad = True
        self.variables.prune({*written, *map(id, self._nested)})
        return (found & written) | self._overflown

    def run_nested(self, compute: Compute, heads: Sequence[NDArray], head_grads: Any) -> None:
        """Run a backward pass inside another one, in a function or operator in Python.

        Written gradients are unscaled at once. Sums carry the scale of the pass around it.
        """
        if self._scale == 1 or not self._is_unscaled:
            # A custom operator in float16 is given scaled gradients, and passes them on.
            compute(head_grads)
            return
        variables = list(self.variables.values())
        with without_flags([v.array for v in variables]):
            compute(_scaled_gradients(heads, head_grads, self._scale))
            written = [v for v in variables if v.array._fresh_grad and not v.adds]
            self._overflown |= _unscaled(written, self._scale)
            for variable in written:
                variable.array._fresh_grad = False
            self._nested += [variable.array for variable in written]

    @property
    def _is_unscaled(self) -> bool:
        """Whether the caller runs in a `backward` in Python that was given unscaled gradients."""
        return bool(getattr(self._functions, "depth", 0)) or in_unscaled_backward()

    def run_grad(
        self, compute: Compute, heads: Sequence[NDArray], head_grads: Any, nested: bool
    ) -> Any:
        """Run `autograd.grad` with scaled head gradients; return the unscaled gradients."""
        if nested:
            scale = self._scale if self._is_unscaled else 1.0
        else:
            scale = _lowest_scale(self._hooks(), heads)
        if scale == 1:
            return compute(head_grads)
        gradients = _scaled_gradients(heads, head_grads, scale)
        if nested:
            found = compute(gradients)
        else:
            self._scale = scale
            try:
                with scaled_outputs(scale, unscaled_outside=True):
                    found = compute(gradients)
                    mx.nd.waitall()
            finally:
                self._scale = 1.0
        with suspended():
            if isinstance(found, NDArray):
                return _divided(found, scale)
            return [_divided(gradient, scale) for gradient in found]

    def _patched_call(self, original: Original, function: autograd.Function, *inputs: Any) -> Any:
        """Call an `autograd.Function` whose backward computes on unscaled gradients."""
        backward = function.backward

        @functools.wraps(backward)
        def unscaled_backward(*gradients: Any) -> Any:
            scale = self._scale
            if scale == 1:
                return backward(*gradients)
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


#: One a process, like the functions that it patches.
backward_patches = _BackwardPatches()


def _lowest_scale(hooks: Sequence[State], heads: Sequence[NDArray]) -> float:
    """Return the lowest scale of the trainers, or 1.

    A trainer does not count if all its parameters have another one since.
    """
    owning = [
        hook for hook in hooks if any(p._trainer is hook.trainer for p in hook.trainer._params)
    ]
    scale = min([hook.scaler.loss_scale for hook in owning or hooks], default=1.0)
    is_half = any(dtype_name(head.dtype) == "float16" for head in heads)
    return min(scale, _HALF_LIMIT) if is_half else scale


def _scaled_gradients(
    heads: Sequence[NDArray], head_grads: Any, scale: float
) -> list[NDArray | None]:
    """Return the gradients of the heads times the scale; ones where none are given."""
    given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
    with autograd.pause(), suspended():
        return [
            (mx.nd.ones_like(head.as_nd_ndarray()) if gradient is None else gradient) * scale
            for head, gradient in zip(heads, given or [None] * len(heads))
        ]


def _divided(gradient: NDArray, scale: float) -> NDArray:
    """Return a gradient divided by the scale; autograd may record the division."""
    first = min(scale, _LARGEST_FACTOR)
    gradient = gradient * (1 / first)
    return gradient if first == scale else gradient * (first / scale)


def _unscaled(variables: Iterable[Variable], scale: float) -> set[int]:
    """Divide gradients by the scale; return the arrays whose gradients are not finite, by `id`."""
    groups = by_gradient(variables)
    positions = unscale([group[0].array.grad for group in groups], scale)
    return {id(v.array) for i in positions for v in groups[i]}


def _times_in_float32(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor, in float32: half precision would lose small ones."""
    if gradient is None:
        return None
    with autograd.pause(), suspended():
        wide = cast(gradient, "float32") if dtype_name(gradient.dtype) in CASTABLE else gradient
        return wide * factor
