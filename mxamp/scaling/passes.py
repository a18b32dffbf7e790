"""Backward passes, and the loss scale that each gradient carries after them.

A scaled loss scales the gradient of every parameter behind it, of any trainer. Each backward pass
records the scale that it gave to each trainer's gradients, and a step looks it up. While all
gradients of a trainer carry one scale, the record is one number, and no array is read. Where a
pass brings another scale, MXNet's flag `_fresh_grad` of each parameter's array tells which
gradients the pass has written.
"""

import functools
import gc
import logging
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.locks import hold_during_forks
from ..framework.patching import FrontEnd, Patch
from ..graph.ir import Graph
from .finite import multiply
from .loss_outputs import scaled_heads

__all__ = ["Gradients", "ScaledLosses", "fresh_gradients", "passes"]

logger = logging.getLogger("mxamp")

UNSCALED = (
    "inside scale_loss, backward was called on a loss that is not scaled: the step takes its "
    "gradients as they are, and small float16 ones may be lost. Call it on the loss that "
    "`with amp.scale_loss(loss, trainer) as scaled` yields: autograd.backward(scaled)"
)
FOREIGN = (
    "the gradients of this trainer come from a loss that was scaled, by {scale:g}, for another "
    "trainer: after init_trainer for each, scale the loss for both, "
    "`with mxamp.scale_loss(loss, [trainer, other]) as scaled`; with a GradScaler call "
    "scaler.step(trainer, batch_size)"
)

SEVERAL_SCALES = (
    "this backward pass starts from losses that were scaled apart, or not all scaled: scale them "
    "together, `with mxamp.scale_loss([one, other], [trainer, ...]) as scaled`, or call backward "
    "for each"
)

#: Parameters, each with its gradients on all devices.
Gradients = List[Tuple[Parameter, List[NDArray]]]

#: The operators that multiply a loss by its scale.
_TIMES = frozenset({"_mul_scalar", "_npi_multiply_scalar"})


def fresh_gradients(params: Sequence[Parameter], stale: bool = False) -> Gradients:
    """Return the gradients written by backward since the last step; with `stale`, all gradients."""
    found = []
    for param in params:
        if param.grad_req == "null" or param._grad is None:
            continue
        pairs = zip(param.list_data(), param.list_grad())
        gradients = [gradient for data, gradient in pairs if stale or data._fresh_grad]
        if gradients:
            found.append((param, gradients))
    return found


def _gradients_of(trainer: Trainer) -> Iterator[Tuple[str, NDArray, NDArray]]:
    """Yield `grad_req`, array and gradient of a trainer's parameters on each device."""
    for param in trainer._params:
        if param.grad_req != "null" and param._grad is not None:
            for data, gradient in zip(param.list_data(), param.list_grad()):
                yield param.grad_req, data, gradient


class _GradientScales(NamedTuple):
    """The scale of a trainer's fresh gradients; exceptions by `id` of parameters' arrays."""

    scale: float
    others: Dict[int, float]

    def of(self, array: NDArray) -> float:
        return self.others.get(id(array), self.scale)

    def are_all(self, scale: float) -> bool:
        return self.scale == scale and not self.others


@contextmanager
def _kept_apart(
    trainer: Trainer, before: _GradientScales, after: _GradientScales
) -> Iterator[None]:
    """Keep a trainer's gradients apart from those that a pass of another scale writes.

    Gradients that the pass may add to are brought to its scale. `after` receives the exceptions.
    """
    fresh, added_to = [], []
    for grad_req, data, gradient in _gradients_of(trainer):
        if data._fresh_grad:
            fresh.append(data)
            data._fresh_grad = False
        if grad_req == "add":  # the pass also adds to gradients that an earlier step has used
            with autograd.pause():
                added_to.append((data, gradient, gradient.copy()))
            multiply([gradient], after.scale / before.of(data))
    try:
        yield
    finally:
        untouched = [data for data in fresh if not data._fresh_grad]
        for data, gradient, old in added_to:
            if not data._fresh_grad:
                with autograd.pause():
                    old.copyto(gradient)
                untouched.append(data)
        for data in untouched:
            if before.of(data) != after.scale:
                after.others[id(data)] = before.of(data)
        for data in fresh:
            data._fresh_grad = True


@dataclass(eq=False)
class ScaledLosses:
    """The losses of one `scale_loss` or `GradScaler.scale`, kept until their step."""

    scale: float
    owners: Sequence[Any]  #: hooks of the trainers that step, or a `GradScaler`
    given: Dict[int, NDArray] = field(default_factory=dict)  #: unscaled losses, by `id`
    made: Dict[int, NDArray] = field(default_factory=dict)  #: scaled losses, by `id`
    #: Whether the pass sets the scale of output operators, which no scaled head reaches.
    sets_outputs: bool = False

    def has_made(self, heads: Sequence[NDArray]) -> bool:
        """Return whether one of `heads` is one of the scaled losses."""
        return any(id(head) in self.made for head in heads)


#: The innermost `scale_loss` around the running code.
_inside: "ContextVar[Optional[ScaledLosses]]" = ContextVar("mxamp_scaled_losses", default=None)


class _Passes(FrontEnd):
    """Patches of backward passes and trainers' steps, and the record of the gradients' scales."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: Dict[int, ScaledLosses] = {}  #: by `id`; changed by several threads
        self._trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._scales: "weakref.WeakKeyDictionary[Trainer, _GradientScales]" = (
            weakref.WeakKeyDictionary()
        )
        #: Held by passes and steps of several trainers while they read and set flags.
        self._alone = threading.RLock()
        self._thread = threading.local()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(autograd, "backward", self._build_backward),
            Patch(NDArray, "backward", self._build_backward),
            Patch(Trainer, "__init__", self._build_init),
            Patch(Trainer, "step", self._build_step),
            Patch(Trainer, "update", self._build_step),
        ]

    def open(self) -> None:
        """Apply the patches, and find existing trainers, of which MXNet keeps no list."""
        if not self.is_open:
            alive = [one for one in gc.get_objects() if issubclass(type(one), Trainer)]
            self._trainers.update(alive)
        super().open()

    def close(self) -> None:
        """Undo the patches, and forget losses and trainers."""
        super().close()
        self._losses.clear()
        self._trainers.clear()
        self._scales.clear()

    def is_scaled(self, losses: Sequence[NDArray]) -> bool:
        """Return whether one of these losses is scaled already."""
        return any(one.has_made(losses) for one in list(self._losses.values()))

    def add(self, losses: ScaledLosses) -> None:
        """Record scaled losses until `forget`."""
        if losses.scale != 1:
            self.open()
            self._losses[id(losses)] = losses
            # A copied trainer has run no constructor.
            self._trainers.update(one.trainer for one in losses.owners if hasattr(one, "trainer"))

    @contextmanager
    def inside(self, losses: ScaledLosses) -> Iterator[None]:
        """Expect backward passes from `losses` inside; an error forgets the losses."""
        self.add(losses)
        before = _inside.set(losses)
        try:
            yield
        except BaseException:
            self._losses.pop(id(losses), None)
            raise
        finally:
            _inside.reset(before)

    def forget(self, owner: Any, trainer: Optional[Trainer] = None) -> None:
        """Forget the losses of an owner, and the gradients of its trainer after a step."""
        for one in list(self._losses.values()):
            if owner in one.owners:
                self._losses.pop(id(one), None)
        if trainer is not None:
            self._forget_scales(trainer)

    def _forget_scales(self, trainer: Trainer) -> None:
        """Forget the scales of a trainer's gradients, unless later passes add to them."""
        if all(param.grad_req != "add" for param in trainer._params):
            self._scales.pop(trainer, None)

    def check_own(self, trainer: Trainer) -> None:
        """Raise `StateError` if gradients carry a scale that this trainer will not take out."""
        scales = self._scales.get(trainer)
        if scales is None or scales.are_all(1):
            return
        found = {scales.of(data) for _, data, _ in _gradients_of(trainer) if data._fresh_grad}
        if found - {1.0}:
            raise StateError(FOREIGN.format(scale=max(found - {1.0})))

    def convert(self, trainer: Trainer, scale: float) -> None:
        """Bring all fresh gradients of a trainer to one scale."""
        scales = self._scales.get(trainer)
        if scales is None or scales.are_all(scale):
            return
        for grad_req, data, gradient in _gradients_of(trainer):
            if data._fresh_grad or grad_req == "add":
                multiply([gradient], scale / scales.of(data))
        self.set_scale(trainer, scale)

    def set_scale(self, trainer: Trainer, scale: float) -> None:
        """Record that all fresh gradients of a trainer carry `scale`."""
        if self.is_open:
            self._scales[trainer] = _GradientScales(scale, {})

    @property
    def _several(self) -> bool:
        return len(self._trainers) > 1

    def _losses_of(self, heads: Sequence[NDArray]) -> Optional[ScaledLosses]:
        """Return the scaled losses that a backward pass from `heads` starts from, or one of them.

        Raises `StateError` if the pass would mix several scales.
        """
        inside, known = _inside.get(), list(self._losses.values())
        found = [one for one in known if one.has_made(heads)]
        for head in heads if found else ():
            of_head = [one for one in found if one.has_made([head])]
            apart = any(one.owners != found[0].owners for one in of_head)
            if apart or not (of_head or _are_scaled([head], found[0].scale)):
                raise StateError(SEVERAL_SCALES)
        if not found and not any(id(head) in one.given for one in known for head in heads):
            # For example the sum of scaled losses.
            found = [one for one in known if _are_scaled(heads, one.scale)][-1:]
        if not found and inside is not None and inside.scale != 1:
            logger.warning(UNSCALED)
        return found[0] if found else None

    @contextmanager
    def _one_pass(self, scale: float) -> Iterator[None]:
        """Run a backward pass that gives gradients a scale, and record it."""
        if not self._several and not self._mixed_by(scale):
            yield
            return
        with self._alone, ExitStack() as stack:
            for trainer, before in self._mixed_by(scale):
                after = self._scales[trainer] = _GradientScales(scale, {})
                stack.enter_context(_kept_apart(trainer, before, after))
            yield

    def _mixed_by(self, scale: float) -> List[Tuple[Trainer, _GradientScales]]:
        """Return the trainers with gradients of another scale, and these scales."""
        scales = [
            (trainer, self._scales.setdefault(trainer, _GradientScales(scale, {})))
            for trainer in list(self._trainers)
        ]
        return [(trainer, before) for trainer, before in scales if not before.are_all(scale)]

    def _build_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(heads: Any, *args: Any, **kwargs: Any) -> None:
            # MXNet runs Python functions in its own threads, as part of another pass.
            foreign = isinstance(threading.current_thread(), threading._DummyThread)
            if foreign or getattr(self._thread, "runs", False):
                original(heads, *args, **kwargs)
                return
            self._thread.runs = True
            try:
                losses = self._losses_of([heads] if isinstance(heads, NDArray) else heads)
                scale = losses.scale if losses else 1.0
                outputs = scale if losses and losses.sets_outputs else 1.0
                with scaled_heads(outputs), self._one_pass(scale):
                    original(heads, *args, **kwargs)
            finally:
                self._thread.runs = False

        return backward

    def _build_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(trainer: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(trainer, *args, **kwargs)
            self._trainers.add(trainer)

        return __init__

    def _build_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            hook = getattr(trainer, "_amp_loss_scaler", None)
            if not hasattr(hook, "stage"):  # nothing takes the scale out
                self.check_own(trainer)
            with self._alone if self._several else nullcontext():
                original(trainer, *args, **kwargs)
            self._forget_scales(trainer)
            if trainer._update_on_kvstore:  # then MXNet does not clear the flags
                self.set_scale(trainer, 1.0)

        return step


#: One per process, like the functions that it patches.
passes = _Passes()
hold_during_forks(passes._alone)


def _are_scaled(heads: Sequence[NDArray], scale: float) -> bool:
    """Return whether autograd's graph of one of these heads multiplies by `scale`."""
    for head in heads:
        try:
            graph = Graph.from_symbol(autograd.get_symbol(head))
        except MXNetError:
            continue  # not the result of a recorded call
        for node in graph.nodes:
            if node.op in _TIMES and float(node.attrs["scalar"]) == scale:
                return True
    return False
