"""Loss scaling inside backward passes, for scripts that scale no loss themselves.

`autograd.backward`, `NDArray.backward` and `autograd.grad` multiply the gradients of their heads by
the shared scale, and unscale the gradients that come back: a script that knows of no loss scale
sees the gradients that float32 would give, and may clip or log them. Taking the scale out finds the
gradients that are not finite, in the same read. Trainers skip steps that overflowed; a gradient
that no trainer owns stays Inf.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import AmpError
from ..framework.arrays import as_list, map_arrays
from ..framework.contrib_amp import check_contrib_is_off, refusals
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Original, Patch, locked, patches_of_function, wrapping
from ..policy.active import suspended
from ..scaling.backward_passes import scaling_patches
from ..scaling.finite import divide_and_check, multiply
from ..scaling.ledger import entries_of, ledger, named
from ..scaling.running import BackwardPass, current, run
from ..scaling.scaler import SharedScale, scale_of
from ..scaling.trainer import State, active_state, attach_state
from .variables import Variables, by_gradient

logger = logging.getLogger("mxamp")

OVERFLOW = "a gradient that no trainer owns overflowed at scale %g: skip your own update with it"

#: The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15
#: Float16 can't hold one factor of 2^-25 and less.
_LARGEST_FACTOR = 2.0**14

#: Runs the original backward pass with the given gradients of its heads.
Compute = Callable[[Any], Any]


class _BackwardPatches(FrontEnd):
    """Monkey patches that scale the loss in a backward pass, and unscale its gradients after."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers and modules whose optimizer was not decorated; None leaves them as they are.
        self.default_scale: SharedScale | None = None
        self.variables = Variables()
        self._has_warned = False

    def patches(self) -> Sequence[Patch]:
        """Return monkey patches of trainers and `autograd` that add loss scaling to them."""
        return [
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            *patches_of_function(autograd, "grad", wrapping(self._patched_grad)),
            *self.variables.patches(),
            # The scale may be in use without the casting patches, which refuse contrib too.
            *refusals(),
        ]

    @locked
    def open(self) -> None:
        """Patch backward passes, and record the arrays that already have gradients."""
        check_contrib_is_off()
        if not self.is_open:
            scaling_patches.open()
            super().open()
            self.variables.add_existing()
            scaling_patches.automatic = self

    def close(self) -> None:
        """Undo the patches of backward passes, and forget the arrays with gradients."""
        scaling_patches.automatic = None
        super().close()
        self.default_scale, self._has_warned = None, False
        self.variables.clear()

    def _patched_init(
        self, original: Original, trainer: Trainer, *args: object, **kwargs: object
    ) -> None:
        """Call `Trainer.__init__`; attach the loss scale of `decorate` or of an automatic run."""
        original(trainer, *args, **kwargs)
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        own_scale = scale_of(given) or scale_of(trainer._optimizer)
        shared = own_scale or self.default_scale
        if shared is None:
            return
        try:
            attach_state(trainer, shared.scaler, scaled_by=shared.scaled_by)
        except AmpError as error:
            if own_scale is not None:
                raise
            logger.warning("%s: this trainer is left as it is: %s", shared.scaled_by, error)

    def run(self, compute: Compute, one: BackwardPass) -> None:
        """Run a backward pass with the trainers' lowest loss scale, then unscale gradients."""
        states = shared_states()
        dropped = {state for state in states if state.overflown}
        scale = _lowest_scale(one)
        with ledger.recording(one, one.scale):
            if scale == 1:
                # No scale to take out; trainers check the gradients they are about to use.
                run(one, partial(compute, one.head_grads))
            else:
                self.run_scaled(compute, one, scale)
        for state in states:
            state.note_unscaled(scale, one.overflown, state in dropped)
        owned = {id(entry.data) for state in states for entry in entries_of(state.trainer)}
        if not one.overflown <= owned and not self._has_warned:
            self._has_warned = True
            logger.warning(OVERFLOW, scale)

    def run_scaled(self, compute: Compute, one: BackwardPass, scale: float) -> None:
        """Run a backward pass with the loss scale `scale`, then unscale the gradients it wrote.

        If it runs inside another pass, that unscales the gradients behind the heads of both.
        """
        written = self.variables.behind(one.names - (one.outer.names if one.outer else set()))
        adding = [group[0].array.grad for group in by_gradient(v for v in written if v.adds)]
        one.scale *= scale
        scaled = partial(compute, _scaled_gradients(one, scale))
        # The sum has to carry the same scale as what is added to it.
        multiply(adding, scale)
        try:
            scaled() if one.outer else run(one, scaled, to_end=True)
        except BaseException:
            multiply(adding, 1 / scale)
            raise
        groups = by_gradient(written)
        bad = divide_and_check([group[0].array.grad for group in groups], scale)
        (one.outer or one).overflown |= {id(v.array) for i in bad for v in groups[i]}
        self.variables.prune(one.names if one.frees else set())

    def _patched_grad(
        self, original: Original, heads: Any, variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `autograd.grad` on the scaled loss, and return unscaled gradients."""
        head_grads, *rest = args or [kwargs.pop("head_grads", None)]
        one, outer = BackwardPass(as_list(heads), head_grads), current()
        one.scale = outer.backward_pass.scale / outer.scale if outer else _lowest_scale(one)
        if one.scale == 1:
            return original(heads, variables, head_grads, *rest, **kwargs)
        scaled = _scaled_gradients(one, one.scale)
        compute = partial(original, heads, variables, scaled, *rest, **kwargs)
        found = compute() if outer else run(one, compute, to_end=True)
        with suspended():
            return map_arrays(found, lambda array: _divided(array, one.scale), lambda other: other)


#: One a process, like the functions that it patches.
backward_patches = _BackwardPatches()


def shared_states() -> list[State]:
    """Return the loss scaling state of each trainer that uses `decorate` or an automatic run."""
    found = [active_state(trainer) for trainer in ledger.known()]
    return [state for state in found if state is not None and state.is_shared]


def _lowest_scale(one: BackwardPass) -> float:
    """Return the loss scale for a backward pass: the lowest of the trainers', or 1.

    If their scales differ, the trainers of parameters behind the pass's heads count: the script may
    use the other ones no more.
    """
    states = shared_states()
    if len({state.scaler.loss_scale for state in states}) > 1:
        states = [h for h in states if named(entries_of(h.trainer), one.names)] or states
    scale = min([state.scaler.loss_scale for state in states], default=1.0)
    is_half = any(dtype_name(head.dtype) == "float16" for head in one.heads)
    return min(scale, _HALF_LIMIT) if is_half else scale


def _scaled_gradients(one: BackwardPass, scale: float) -> list[NDArray | None]:
    """Return a backward pass's head gradients, ones by default, times the loss scale."""
    given = one.head_grads or [None] * len(one.heads)
    with autograd.pause(), suspended():
        return [
            (mx.nd.ones_like(head.as_nd_ndarray()) if gradient is None else gradient) * scale
            for head, gradient in zip(one.heads, given)
        ]


def _divided(gradient: NDArray, scale: float) -> NDArray:
    """Return a gradient divided by the loss scale; autograd can record the division."""
    first = min(scale, _LARGEST_FACTOR)
    gradient = gradient * (1 / first)
    return gradient if first == scale else gradient * (first / scale)
