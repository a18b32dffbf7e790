"""Backward passes, and the loss scale that each gradient carries after them.

A scaled loss scales the gradient of every parameter behind it, of any trainer. Each backward pass
records the scale that it gave to each trainer's gradients, and a step looks it up. While all
gradients of a trainer carry one scale, the record is one number, and no array is read. Where a
pass brings another scale, MXNet's flag `_fresh_grad` of each parameter's array marks the
gradients that the pass has written.
"""

import gc
import logging
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.locks import hold_during_forks
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..graph.ir import Graph
from .finite import multiply
from .loss_outputs import scaled_outputs

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
    """Return the gradients that backward wrote since the last step; with `stale`, all."""
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
    exceptions: Dict[int, float]

    def of(self, array: NDArray) -> float:
        """Return the scale of the gradient of a parameter's array."""
        return self.exceptions.get(id(array), self.scale)

    def are_all(self, scale: float) -> bool:
        """Return whether every gradient has this scale."""
        return self.scale == scale and not self.exceptions


@contextmanager
def _tracked_scales(
    trainer: Trainer, before: _GradientScales, after: _GradientScales
) -> Iterator[None]:
    """Context of a backward pass with a new scale: note in `after` which gradients keep the old.

    `before` are the scales of the trainer's gradients so far. Gradients that the pass may add to
    are brought to its scale. `after` receives the gradients that the pass did not write.
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
                after.exceptions[id(data)] = before.of(data)
        for data in fresh:
            data._fresh_grad = True


@dataclass(eq=False)
class ScaledLosses:
    """The losses of one `scale_loss` or `GradScaler.scale`, kept until their step."""

    scale: float
    owners: Sequence[Any]  #: hooks of the trainers that step, or a `GradScaler`
    unscaled: Dict[int, NDArray] = field(default_factory=dict)  #: by `id`
    scaled: Dict[int, NDArray] = field(default_factory=dict)  #: by `id`
    #: Whether the pass sets the scale of output operators, which no scaled head reaches.
    scales_outputs: bool = False

    def includes(self, heads: Sequence[NDArray]) -> bool:
        """Return whether one of `heads` is one of the scaled losses."""
        return any(id(head) in self.scaled for head in heads)


#: The losses of the innermost `scale_loss` around the running code.
_innermost: "ContextVar[Optional[ScaledLosses]]" = ContextVar("mxamp_scaled_losses", default=None)


class _Passes(FrontEnd):
    """Patches of backward passes and steps, which record the scale of each trainer's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: Dict[int, ScaledLosses] = {}  #: by `id`; changed by several threads
        self._trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._scales: "weakref.WeakKeyDictionary[Trainer, _GradientScales]" = (
            weakref.WeakKeyDictionary()
        )
        #: Held by passes and steps of several trainers while they read and set flags.
        self._pass_lock = threading.RLock()
        self._thread = threading.local()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(autograd, "backward", wrapping(self._patched_backward)),
            Patch(NDArray, "backward", wrapping(self._patched_backward)),
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            Patch(Trainer, "step", wrapping(self._patched_step)),
            Patch(Trainer, "update", wrapping(self._patched_step)),
        ]

    def open(self) -> None:
        """Patch backward passes and trainers, and find the existing trainers in memory."""
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
        return any(one.includes(losses) for one in list(self._losses.values()))

    def add(self, losses: ScaledLosses) -> None:
        """Record scaled losses, until `forget`, so that backward passes know their scale."""
        if losses.scale != 1:
            self.open()
            self._losses[id(losses)] = losses
            # A copied trainer has run no constructor.
            self._trainers.update(one.trainer for one in losses.owners if hasattr(one, "trainer"))

    @contextmanager
    def within_scale_loss(self, losses: ScaledLosses) -> Iterator[None]:
        """Context of one `scale_loss`: `add` its losses, and forget them if the body fails."""
        self.add(losses)
        before = _innermost.set(losses)
        try:
            yield
        except BaseException:
            self._losses.pop(id(losses), None)
            raise
        finally:
            _innermost.reset(before)

    def forget(self, owner: Any, trainer: Optional[Trainer] = None) -> None:
        """Forget an owner's losses and, after a step, the scales of its trainer's gradients."""
        for one in list(self._losses.values()):
            if owner in one.owners:
                self._losses.pop(id(one), None)
        if trainer is not None:
            self._forget_scales(trainer)

    def _forget_scales(self, trainer: Trainer) -> None:
        """Forget the scales of a trainer's gradients, unless later passes add to them."""
        if all(param.grad_req != "add" for param in trainer._params):
            self._scales.pop(trainer, None)

    def check_gradients_unscaled(self, trainer: Trainer) -> None:
        """Raise `StateError` if a fresh gradient of a trainer carries a loss scale."""
        scales = self._scales.get(trainer)
        if scales is None or scales.are_all(1):
            return
        found = {scales.of(data) for _, data, _ in _gradients_of(trainer) if data._fresh_grad}
        if found - {1.0}:
            raise StateError(FOREIGN.format(scale=max(found - {1.0})))

    def rescale(self, trainer: Trainer, scale: float) -> None:
        """Multiply a trainer's fresh gradients so that all carry `scale`."""
        scales = self._scales.get(trainer)
        if scales is None or scales.are_all(scale):
            return
        for grad_req, data, gradient in _gradients_of(trainer):
            if data._fresh_grad or grad_req == "add":
                multiply([gradient], scale / scales.of(data))
        self.set_scale(trainer, scale)

    def scale_of(self, trainer: Trainer) -> Optional[float]:
        """Return the scale of all of a trainer's gradients; None if unknown or not one."""
        scales = self._scales.get(trainer)
        return None if scales is None or scales.exceptions else scales.scale

    def set_scale(self, trainer: Trainer, scale: float) -> None:
        """Record that all fresh gradients of a trainer carry `scale`."""
        if self.is_open:
            self._scales[trainer] = _GradientScales(scale, {})

    @property
    def _has_several_trainers(self) -> bool:
        return len(self._trainers) > 1

    def _losses_of(self, heads: Sequence[NDArray]) -> Optional[ScaledLosses]:
        """Return the `ScaledLosses` that `heads` come from, or None if they are not scaled.

        Raises `StateError` if the pass would mix several scales.
        """
        inside, known = _innermost.get(), list(self._losses.values())
        found = [one for one in known if one.includes(heads)]
        for head in heads if found else ():
            of_head = [one for one in found if one.includes([head])]
            apart = any(one.owners != found[0].owners for one in of_head)
            if apart or not (of_head or _is_any_scaled([head], found[0].scale)):
                raise StateError(SEVERAL_SCALES)
        if not found and not any(id(head) in one.unscaled for one in known for head in heads):
            # For example the sum of scaled losses.
            found = [one for one in known if _is_any_scaled(heads, one.scale)][-1:]
        if not found and inside is not None and inside.scale != 1:
            logger.warning(UNSCALED)
        return found[0] if found else None

    @contextmanager
    def _recorded_pass(self, scale: float) -> Iterator[None]:
        """Context of a backward pass from losses with `scale`: record it for each trainer."""
        if not self._has_several_trainers and not self._other_scales(scale):
            yield
            return
        with self._pass_lock, ExitStack() as stack:
            for trainer, before in self._other_scales(scale):
                after = self._scales[trainer] = _GradientScales(scale, {})
                stack.enter_context(_tracked_scales(trainer, before, after))
            yield

    def _other_scales(self, scale: float) -> List[Tuple[Trainer, _GradientScales]]:
        """Return the trainers with gradients of other scales than `scale`, and their scales."""
        scales = [
            (trainer, self._scales.setdefault(trainer, _GradientScales(scale, {})))
            for trainer in list(self._trainers)
        ]
        return [(trainer, before) for trainer, before in scales if not before.are_all(scale)]

    def _patched_backward(self, original: Original, heads: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and record for each trainer the scale of its gradients."""
        # MXNet runs Python functions in its own threads, as part of another pass.
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        if foreign or getattr(self._thread, "runs", False):
            original(heads, *args, **kwargs)
            return
        self._thread.runs = True
        try:
            losses = self._losses_of([heads] if isinstance(heads, NDArray) else heads)
            scale = losses.scale if losses else 1.0
            output_scale = scale if losses and losses.scales_outputs else 1.0
            with scaled_outputs(output_scale), self._recorded_pass(scale):
                original(heads, *args, **kwargs)
        finally:
            self._thread.runs = False

    def _patched_init(
        self, original: Original, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> None:
        """Initialize a trainer, and add it to the known trainers."""
        original(trainer, *args, **kwargs)
        self._trainers.add(trainer)

    def _patched_step(
        self, original: Original, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> None:
        """Call `Trainer.step`; raise if gradients are scaled and nothing will unscale them."""
        hook = getattr(trainer, "_amp_loss_scaler", None)
        if not hasattr(hook, "stage"):  # nothing takes the scale out
            self.check_gradients_unscaled(trainer)
        with self._pass_lock if self._has_several_trainers else nullcontext():
            original(trainer, *args, **kwargs)
        self._forget_scales(trainer)
        if trainer._update_on_kvstore:  # then MXNet does not clear the flags
            self.set_scale(trainer, 1.0)


#: One per process, like the functions that it patches.
passes = _Passes()
hold_during_forks(passes._pass_lock)


def _is_any_scaled(heads: Sequence[NDArray], scale: float) -> bool:
    """Return whether autograd's graph of one of `heads` holds a multiplication by `scale`."""
    for head in heads:
        try:
            graph = Graph.from_symbol(autograd.get_symbol(head))
        except MXNetError:
            continue  # not the result of a recorded call
        for node in graph.nodes:
            if node.op in _TIMES and float(node.attrs["scalar"]) == scale:
                return True
    return False
