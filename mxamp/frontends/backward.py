"""Backward passes that scale, for scripts that scale no loss themselves.

`autograd.backward`, `NDArray.backward` and `autograd.grad` multiply the gradients of their heads by
the shared scale, and take it out of the gradients that come back. Trainers skip what overflowed.
"""

import functools
import logging
import threading
import weakref
from contextlib import contextmanager
from typing import AbstractSet, Any, Callable, Iterator, List, Optional, Sequence

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import AmpError
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Patch
from ..policy.active import suspended
from ..scaling.finite import all_finite
from ..scaling.hook import TrainerHook
from ..scaling.loss_outputs import scaled_heads
from ..scaling.shared_scale import (
    SharedScale,
    attach,
    hook_with_shared_scale,
    scale_in_force,
    scale_of,
)
from .python_functions import RunningPass
from .scaled_pass import Heads, PassResult, inner_pass, lower_scales, scaled_pass
from .variables import Variable, Variables

__all__ = ["backward_patches"]

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


class _BackwardPatches(FrontEnd):
    """Patches of backward passes and trainers; the trainers and variables there are."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers whose optimizer has no scale of its own; None leaves them as they are.
        self.default: Optional[SharedScale] = None
        self.trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self.variables = Variables()
        #: A pass sets what is fresh of all variables: one at a time.
        self._one_pass = threading.RLock()
        self._running_in: Optional[int] = None  # the thread of the pass
        self.pass_ = RunningPass()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Trainer, "__init__", _build_init),
            Patch(autograd, "backward", _build_backward),
            Patch(NDArray, "backward", _build_method),
            Patch(autograd, "grad", _build_grad),
            *self.variables.patches(),
            self.pass_.patch(),
        ]

    def close(self) -> None:
        """Take the patches off, and forget trainers and variables."""
        super().close()
        self.default = None
        self.trainers.clear()
        self.variables.clear()

    def attach(self, trainer: Trainer, shared: SharedScale) -> None:
        """Let a trainer skip the steps whose backward pass has overflowed."""
        attach(trainer, shared)
        self.trainers.add(trainer)
        for param in trainer._params:
            # Marked before these patches were, maybe.
            if param._grad is not None:
                self.variables.add(param.list_data(), param.grad_req)

    @contextmanager
    def running(self) -> Iterator[List[Variable]]:
        """Let one backward pass run at a time; yield the variables."""
        with self._one_pass:
            self._running_in = threading.get_ident()
            try:
                yield self.variables.all()
            finally:
                self._running_in = None
                # Only now: a script may have dropped an array whose gradient it has kept.
                self.variables.prune()

    def is_inner(self) -> bool:
        """Tell whether the caller runs inside a pass: as a function written in Python.

        What it is given is scaled already. MXNet calls it in the thread of the pass or in one
        that it has made itself, which Python does not know.
        """
        if self._running_in is None:
            return False
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return foreign or self._running_in == threading.get_ident()

    def hooks(self) -> List[TrainerHook]:
        """Return the hooks of the attached trainers."""
        found = [hook_with_shared_scale(trainer) for trainer in list(self.trainers)]
        return [hook for hook in found if hook is not None]


#: One a process, as the functions that it patches are.
backward_patches = _BackwardPatches()


def _build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        asked = getattr(given, "scaling", None) or scale_of(self._optimizer)
        if asked is not None:
            backward_patches.attach(self, asked)
        elif backward_patches.default is not None:
            _attach_if_possible(self, backward_patches.default)

    return __init__


def _attach_if_possible(trainer: Trainer, shared: SharedScale) -> None:
    try:
        backward_patches.attach(trainer, shared)
    except AmpError as error:
        logger.warning("%s: this trainer is left as it is: %s", shared.scaled_by, error)


def _build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        heads: Any, head_grads: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        hooks = backward_patches.hooks()
        if not hooks:
            original(heads, head_grads, retain_graph, train_mode)
            return
        listed = Heads(heads, head_grads)

        def compute(scale: float, keep_graph: bool) -> None:
            gradients = listed.scaled_gradients(scale)
            with scaled_heads(scale):
                original(listed.heads, gradients, retain_graph or keep_graph, train_mode)

        if backward_patches.is_inner():
            if backward_patches.pass_.in_function:
                inner_pass(compute, backward_patches.variables.all(), backward_patches.pass_)
            else:  # in a custom operator, whose gradients are scaled already
                original(heads, head_grads, retain_graph, train_mode)
            return
        result = _run(compute, hooks, listed)
        losses = listed.losses()
        for hook in hooks:
            hook.mark_unscaled(*result, losses)

    return backward


def _build_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        self: NDArray, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        if backward_patches.trainers:
            # Looked up now: the patched one, while it is.
            autograd.backward([self], [out_grad], retain_graph, train_mode)
        else:
            original(self, out_grad, retain_graph, train_mode)

    return backward


def _build_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def grad(
        heads: Any,
        variables: Any,
        head_grads: Any = None,
        retain_graph: Optional[bool] = None,
        create_graph: bool = False,
        train_mode: bool = True,
    ) -> Any:
        hooks = backward_patches.hooks()
        listed = Heads(heads, head_grads)
        scale = _scale_for(hooks, listed) if hooks else 1.0
        if scale == 1:
            return original(heads, variables, head_grads, retain_graph, create_graph, train_mode)
        tried, scales = scale, iter(lower_scales(scale))
        while True:
            with scaled_heads(scale):
                gradients = listed.scaled_gradients(scale)
                # The graph is kept: where it overflows it is run again.
                found = original(listed.heads, variables, gradients, True, create_graph, train_mode)
            with suspended():
                found = [gradient * (1 / scale) for gradient in found]
            finite = all_finite(found)
            if scale <= 1 or finite:
                _note_overflow(hooks, tried, scale, finite)
                return found
            scale = next(scales)

    return grad


def _run(
    compute: Callable[[float, bool], None], hooks: Sequence[TrainerHook], heads: Heads
) -> PassResult:
    scale = _scale_for(hooks, heads)
    if scale == 1:
        # Nothing to take out; trainers look at what they are about to use.
        compute(scale, False)
        return PassResult(scale, frozenset(), frozenset())
    with backward_patches.running() as variables:
        owned, statistics = _owned(hooks), _statistics(hooks)
        running = backward_patches.pass_
        result = scaled_pass(compute, scale, variables, owned, statistics, running)
    _note_overflow(hooks, scale, result.scale, finite=result.overflown <= owned)
    return result


def _owned(hooks: Sequence[TrainerHook]) -> AbstractSet[int]:
    """Return the arrays whose updates trainers skip, by `id`."""
    params = (param for hook in hooks for param in hook.trainer._params)
    return {id(data) for param in params if param._grad is not None for data in param.list_data()}


def _statistics(hooks: Sequence[TrainerHook]) -> List[NDArray]:
    """Return the parameters that get no gradients: BatchNorm's running statistics among them."""
    params = (param for hook in hooks for param in hook.trainer._params)
    return [
        array
        for param in params
        if param.grad_req == "null" and param._data is not None
        for array in param.list_data()
    ]


def _note_overflow(hooks: Sequence[TrainerHook], tried: float, used: float, finite: bool) -> None:
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


def _scale_for(hooks: Sequence[TrainerHook], heads: Heads) -> float:
    scale = scale_in_force(hooks).loss_scale
    if any(dtype_name(head.dtype) == "float16" for head in heads.heads):
        scale = min(scale, _HALF_LIMIT)
    return scale
