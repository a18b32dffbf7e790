"""Backward passes that scale, for scripts that scale no loss themselves.

`autograd.backward`, `NDArray.backward` and `autograd.grad` multiply the gradients of their heads by
the shared scale, and unscale the gradients that come back. Trainers skip steps that overflowed.
"""

import gc
import logging
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOpProp

from ..errors import AmpError
from ..framework.contrib_amp import (
    CONTRIB_AMP_MODULES,
    REFUSED,
    check_contrib_is_off,
    refuse_contrib,
)
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..patches.eager import updated_arrays
from ..scaling.hook import TrainerHook
from ..scaling.loss_outputs import build_custom_op_init
from ..scaling.shared_scale import (
    SharedScale,
    attach_shared_scale,
    lowest_scale,
    scale_of,
    shared_scale_hook,
)
from .scaled_pass import Heads, PassResult, ScaledPass, unscaled
from .variables import Variables, patches_of_function

__all__ = ["backward_patches"]

logger = logging.getLogger("mxamp")

RUN_AGAIN = (
    "a gradient that no trainer owns overflowed with the loss scale %g: the backward pass was run "
    "again with %g, %s"
)
NOT_FINITE = (
    "a gradient that no trainer owns is not finite with a loss scale of 1 either: float32 would "
    "overflow too, or half precision has no room for it. No step was skipped for it"
)

# The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15


class _BackwardPatches(FrontEnd):
    """Patches of backward passes and trainers, with the trainers and variables found so far."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers whose optimizer was not decorated; None leaves them as they are.
        self.default_scale: Optional[SharedScale] = None
        self.trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._has_new_trainer = False  # since the last backward pass
        self.variables = Variables()
        self.pass_ = ScaledPass()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Trainer, "__init__", wrapping(_patched_init)),
            *patches_of_function(autograd, "backward", wrapping(_patched_backward)),
            Patch(NDArray, "backward", wrapping(_patched_array_backward)),
            *patches_of_function(autograd, "grad", wrapping(_patched_grad)),
            *self.variables.patches(),
            self.pass_.patch(),
            Patch(CustomOpProp, "__init__", build_custom_op_init),
            # The scale may be in use without the casting patches, which refuse contrib too.
            *(Patch(CONTRIB_AMP_MODULES[1], name, refuse_contrib) for name in REFUSED),
        ]

    def open(self) -> None:
        """Patch `backward` and `attach_grad`, and find the arrays that have gradients already."""
        check_contrib_is_off()
        with self._lock:
            if not self.is_open:
                super().open()
                self.variables.add_existing()
                updated_arrays.watch()

    def close(self) -> None:
        """Undo the patches, and forget trainers and variables."""
        super().close()
        self.default_scale = None
        self.trainers.clear()
        self.variables.clear()
        updated_arrays.stop()

    def add_trainer(self, trainer: Trainer, shared_scale: SharedScale) -> None:
        """Scale a trainer's losses by a shared scale from now on, inside backward passes."""
        attach_shared_scale(trainer, shared_scale)
        self.trainers.add(trainer)
        self._has_new_trainer = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which no other backward pass runs; then forget variables nobody else holds."""
        with self.pass_.running():
            try:
                yield
            finally:
                # Not before: a script may drop an array and keep its gradient.
                self.variables.prune()

    def hooks(self) -> List[TrainerHook]:
        """Return the hooks of the trainers of `add_trainer` that still have a shared scale."""
        if self._has_new_trainer:
            self._has_new_trainer = False
            # A trainer and its hook hold each other: collect the trainers that this one replaces.
            gc.collect()
        found = [shared_scale_hook(trainer) for trainer in list(self.trainers)]
        return [hook for hook in found if hook is not None]


#: One a process, like the functions that it patches.
backward_patches = _BackwardPatches()


def _patched_init(original: Original, self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Initialize a trainer; add it to `backward_patches` if there is a loss scale for it."""
    original(self, *args, **kwargs)
    given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
    own_scale = scale_of(given) or scale_of(self._optimizer)
    shared_scale = own_scale or backward_patches.default_scale
    if shared_scale is None:
        return
    try:
        backward_patches.add_trainer(self, shared_scale)
    except AmpError as error:
        if own_scale is not None:
            raise
        logger.warning("%s: this trainer is left as it is: %s", shared_scale.scaled_by, error)


def _patched_backward(
    original: Original,
    heads: Any,
    head_grads: Any = None,
    retain_graph: bool = False,
    train_mode: bool = True,
) -> None:
    """Run a backward pass with scaled head gradients, and unscale the gradients it computes."""
    hooks, pass_ = backward_patches.hooks(), backward_patches.pass_
    # A custom operator in float16 is given scaled gradients, and passes them on.
    if not hooks or (pass_.is_nested and not pass_.is_nested_unscaled):
        original(heads, head_grads, retain_graph, train_mode)
        return
    listed = Heads(heads, head_grads)

    def run_original(scale: float, keep_graph: bool) -> None:
        gradients = listed.scaled_gradients(scale)
        original(listed.heads, gradients, retain_graph or keep_graph, train_mode)

    if pass_.is_nested:
        pass_.run_nested(run_original, backward_patches.variables.all())
        return
    result = _run_scaled(run_original, hooks, listed)
    losses = listed.losses()
    for hook in hooks:
        hook.mark_unscaled(*result, losses)


def _run_scaled(
    compute: Callable[[float, bool], None], hooks: Sequence[TrainerHook], heads: Heads
) -> PassResult:
    """Run a backward pass with the lowest scale of the hooks' trainers, and unscale gradients."""
    scale = _scale_for(hooks, heads)
    if scale == 1:
        # No scale to take out; trainers check the gradients they are about to use.
        compute(scale, False)
        return PassResult(scale, set(), set())
    with backward_patches.running():
        # Arrays whose updates trainers skip.
        params = (param for hook in hooks for param in hook.trainer._params)
        owned = {id(data) for param in params if param._grad is not None for data in param._data}
        variables = backward_patches.variables.all()
        result = backward_patches.pass_.run(compute, scale, variables, owned)
    _report_second_run(hooks, scale, result.scale, finite=result.overflown <= owned)
    return result


def _patched_array_backward(
    original: Original,
    self: NDArray,
    out_grad: Any = None,
    retain_graph: bool = False,
    train_mode: bool = True,
) -> None:
    """Run `NDArray.backward` through the patched `autograd.backward` if there are trainers."""
    if backward_patches.trainers:
        # The patched function, looked up at each call.
        autograd.backward([self], [out_grad], retain_graph, train_mode)
    else:
        original(self, out_grad, retain_graph, train_mode)


def _patched_grad(
    original: Original,
    heads: Any,
    variables: Any,
    head_grads: Any = None,
    retain_graph: Optional[bool] = None,
    create_graph: bool = False,
    train_mode: bool = True,
) -> Any:
    """Run `autograd.grad` with scaled head gradients; return the unscaled gradients."""
    hooks, pass_ = backward_patches.hooks(), backward_patches.pass_
    listed = Heads(heads, head_grads)
    inner, scale = pass_.is_nested, 1.0
    if inner and pass_.is_nested_unscaled:
        scale = pass_.scale
    elif hooks and not inner:
        scale = _scale_for(hooks, listed)
    if scale == 1:
        return original(heads, variables, head_grads, retain_graph, create_graph, train_mode)

    def scaled_gradients(scale: float) -> List[NDArray]:
        gradients = listed.scaled_gradients(scale)
        # The graph is kept, to run again after an overflow.
        return list(original(listed.heads, variables, gradients, True, create_graph, train_mode))

    if inner:
        return [unscaled(gradient, scale) for gradient in scaled_gradients(scale)]
    with backward_patches.running():
        found, used, finite = pass_.run_grad(scaled_gradients, scale)
    _report_second_run(hooks, scale, used, finite)
    return found


def _scale_for(hooks: Sequence[TrainerHook], heads: Heads) -> float:
    """Return the loss scale of a backward pass from `heads`: the lowest of all trainers."""
    scale = lowest_scale(hooks).loss_scale
    if any(dtype_name(head.dtype) == "float16" for head in heads.heads):
        scale = min(scale, _HALF_LIMIT)
    return scale


def _report_second_run(
    hooks: Sequence[TrainerHook], tried: float, used: float, finite: bool
) -> None:
    """Log a pass that overflowed and ran again; lower the shared scale if that cured it."""
    if used == tried:
        return
    if not finite:
        logger.warning(NOT_FINITE)
    elif any(hook.reduction.is_distributed for hook in hooks):
        # All workers hold the same scale, and this overflow is seen by one of them.
        logger.info(RUN_AGAIN, tried, used, "in this worker alone")
    else:
        after = f"and the next one uses {lowest_scale(hooks).lower(tried):g}"
        logger.info(RUN_AGAIN, tried, used, after)
