"""Backward passes that scale, for scripts that scale no loss themselves.

`autograd.backward`, `NDArray.backward` and `autograd.grad` multiply the gradients of their heads by
the shared scale, and take it out of the gradients that come back. Trainers skip what overflowed.
"""

import functools
import gc
import logging
import threading
import weakref
from contextlib import contextmanager
from typing import AbstractSet, Any, Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import AmpError
from ..framework.patching import FrontEnd, Patch
from ..framework.updated_arrays import updated_arrays
from ..policy.active import suspended
from ..scaling import custom_gradients
from ..scaling.finite import all_finite
from ..scaling.hook import TrainerHook
from ..scaling.loss_outputs import scaled_heads
from ..scaling.shared_scale import (
    SharedScale,
    attach,
    hook_with_shared_scale,
    scale_of,
)
from .scaled_pass import (
    Heads,
    PassResult,
    Repeated,
    RunningPass,
    inner_pass,
    lower_scales,
    note_overflow,
    scale_for,
    scaled_pass,
    unscaled,
)
from .variables import Variable, Variables, imported

__all__ = ["backward_patches"]

logger = logging.getLogger("mxamp")


class _BackwardPatches(FrontEnd):
    """Patches of backward passes and trainers; the trainers and variables there are."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers whose optimizer has no scale of its own; None leaves them as they are.
        self.default: Optional[SharedScale] = None
        self.trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._is_new = False  # a trainer, since the last backward pass
        self.variables = Variables()
        #: A pass sets what is fresh of all variables: one at a time.
        self._one_pass = threading.RLock()
        self._running_in: Optional[int] = None  # the thread of the pass
        self.pass_ = RunningPass()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Trainer, "__init__", _build_init),
            *imported(autograd, "backward", _build_backward),
            Patch(NDArray, "backward", _build_method),
            *imported(autograd, "grad", _build_grad),
            *self.variables.patches(),
            self.pass_.patch(),
            custom_gradients.patch(),
        ]

    def open(self) -> None:
        """Put the patches in place, and find the variables that there are."""
        with self._lock:
            if not self.is_open:
                super().open()
                self.variables.find()
                updated_arrays.watch()

    def close(self) -> None:
        """Take the patches off, and forget trainers and variables."""
        super().close()
        self.default = None
        self.trainers.clear()
        self.variables.clear()
        updated_arrays.stop()

    def attach(self, trainer: Trainer, shared: SharedScale) -> None:
        """Let a trainer skip the steps whose backward pass has overflowed."""
        attach(trainer, shared)
        self.trainers.add(trainer)
        self._is_new = True

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
        if self._is_new:
            self._is_new = False
            # Trainers and their hooks hold each other: those that this one replaces go now.
            gc.collect()
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
            original(listed.heads, gradients, retain_graph or keep_graph, train_mode)

        if backward_patches.is_inner():
            if backward_patches.pass_.in_function:
                inner_pass(compute, backward_patches.variables.all(), backward_patches.pass_)
            else:  # in a custom operator in float16, whose gradients are scaled already
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
        found: List[NDArray] = []
        inner, scale = backward_patches.is_inner(), 1.0
        if inner and backward_patches.pass_.in_function:
            scale = backward_patches.pass_.scale
        elif hooks and not inner:
            scale = scale_for(hooks, listed)
        if scale == 1:
            return original(heads, variables, head_grads, retain_graph, create_graph, train_mode)

        def compute(scale: float) -> None:
            gradients = listed.scaled_gradients(scale)
            # The graph is kept: where it overflows it is run again.
            found[:] = original(listed.heads, variables, gradients, True, create_graph, train_mode)

        if inner:
            compute(scale)
            return [unscaled(gradient, scale) for gradient in found]
        with backward_patches.running():
            used, finite = _run_until_finite(compute, scale, found)
        note_overflow(hooks, scale, used, finite)
        return found

    return grad


def _run_until_finite(
    compute: Callable[[float], None], scale: float, found: List[NDArray]
) -> Tuple[float, bool]:
    """Compute gradients with lower and lower scales; return the last one, and whether it did."""
    running, repeated = backward_patches.pass_, Repeated()
    scales = iter(lower_scales(scale))
    try:
        while True:
            running.begin(scale)
            with _scaled(scale):
                compute(scale)
            with suspended():
                found[:] = [unscaled(gradient, scale) for gradient in found]
            finite = all_finite(found)
            if scale <= 1 or finite:
                return scale, finite
            scale = next(scales)
            repeated.begin()
    finally:
        repeated.end()
        running.end()


@contextmanager
def _scaled(scale: float) -> Iterator[None]:
    """Scale what starts the backward pass inside, until all that is written in Python is done."""
    with scaled_heads(scale, stays_inside=True):
        yield
        mx.nd.waitall()


def _run(
    compute: Callable[[float, bool], None], hooks: Sequence[TrainerHook], heads: Heads
) -> PassResult:
    scale = scale_for(hooks, heads)
    if scale == 1:
        # Nothing to take out; trainers look at what they are about to use.
        compute(scale, False)
        return PassResult(scale, frozenset(), frozenset())

    def scaled(scale: float, keep_graph: bool) -> None:
        with _scaled(scale):
            compute(scale, keep_graph)

    with backward_patches.running() as variables:
        owned = _owned(hooks)
        result = scaled_pass(scaled, scale, variables, owned, backward_patches.pass_)
    note_overflow(hooks, scale, result.scale, finite=result.overflown <= owned)
    return result


def _owned(hooks: Sequence[TrainerHook]) -> AbstractSet[int]:
    """Return the arrays whose updates trainers skip, by `id`."""
    params = (param for hook in hooks for param in hook.trainer._params)
    return {id(data) for param in params if param._grad is not None for data in param._data}
