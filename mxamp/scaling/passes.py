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
import os
import threading
import weakref
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.patching import FrontEnd, Patch
from ..graph.ir import Graph
from ..policy.active import suspended
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


@dataclass(frozen=True)
class _GradientScales:
    """The scale of a trainer's fresh gradients; exceptions by `id` of parameters' arrays."""

    scale: float
    others: Dict[int, float] = field(default_factory=dict)

    def of(self, array: NDArray) -> float:
        return self.others.get(id(array), self.scale)


class _MixedGradients:
    """One trainer's gradients around a pass whose scale differs from the scale they carry."""

    def __init__(self, trainer: Trainer, scales: _GradientScales, scale: float) -> None:
        self.trainer, self._scales, self._scale = trainer, scales, scale
        self._fresh: List[NDArray] = []
        self._added_to: List[Tuple[NDArray, NDArray, NDArray]] = []

    def begin(self) -> None:
        """Clear the flags of fresh gradients; rescale gradients that the pass may add to."""
        for grad_req, data, gradient in _gradients_of(self.trainer):
            if data._fresh_grad:
                self._fresh.append(data)
                data._fresh_grad = False
            if grad_req == "add":  # the pass also adds to gradients that an earlier step has used
                with autograd.pause():
                    self._added_to.append((data, gradient, gradient.copy()))
                multiply([gradient], self._scale / self._scales.of(data))

    def end(self) -> _GradientScales:
        """Restore the flags; return the scales of the gradients that are fresh now."""
        others = {}
        for data, gradient, before in self._added_to:
            if not data._fresh_grad:
                with autograd.pause():
                    before.copyto(gradient)
                others[id(data)] = self._scales.of(data)
        for data in self._fresh:
            if not data._fresh_grad:
                data._fresh_grad = True
                others[id(data)] = self._scales.of(data)
        return _GradientScales(
            self._scale, {key: x for key, x in others.items() if x != self._scale}
        )


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
        return any(one.has_made(losses) for one in self._known())

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
        for one in self._known():
            if owner in one.owners:
                self._losses.pop(id(one), None)
        if trainer is not None:
            self._forget_scales(trainer)

    def _forget_scales(self, trainer: Trainer) -> None:
        """Forget the scales of a trainer's gradients, unless later passes add to them."""
        scales = self._scales.pop(trainer, None)
        if scales is not None and any(param.grad_req == "add" for param in trainer._params):
            self._scales[trainer] = scales

    def check_own(self, trainer: Trainer) -> None:
        """Raise `StateError` if gradients carry a scale that this trainer will not take out."""
        scales = self._scales.get(trainer)
        if scales is None or (scales.scale == 1 and not scales.others):
            return
        found = {scales.of(data) for _, data, _ in _gradients_of(trainer) if data._fresh_grad}
        if found - {1.0}:
            raise StateError(FOREIGN.format(scale=max(found - {1.0})))

    def convert(self, trainer: Trainer, scale: float) -> None:
        """Bring all fresh gradients of a trainer to one scale."""
        scales = self._scales.get(trainer)
        if scales is None or (scales.scale == scale and not scales.others):
            return
        for grad_req, data, gradient in _gradients_of(trainer):
            if data._fresh_grad or grad_req == "add":
                multiply([gradient], scale / scales.of(data))
        self.set_scale(trainer, scale)

    def set_scale(self, trainer: Trainer, scale: float) -> None:
        """Record that all fresh gradients of a trainer carry `scale`."""
        if self.is_open:
            self._scales[trainer] = _GradientScales(scale)

    def _known(self) -> List[ScaledLosses]:
        return list(self._losses.values())

    @property
    def _several(self) -> bool:
        return len(self._trainers) > 1

    def _begun_with(self, heads: Sequence[NDArray]) -> Sequence[ScaledLosses]:
        """Return the scaled losses that a backward pass from `heads` starts from."""
        inside, known = _inside.get(), self._known()
        found = [one for one in known if one.has_made(heads)]
        given = any(id(head) in one.given for one in known for head in heads)
        if not found and known and not given:
            # For example the sum of scaled losses.
            found = [one for one in known if _are_scaled(heads, one.scale)][-1:]
        if not found and inside is not None and inside.scale != 1:
            logger.warning(UNSCALED)
        # Losses of several scales are brought to the smallest of them: see `_with_one_scale`.
        scale = min((one.scale for one in found), default=1.0)
        return [one if one.scale == scale else replace(one, scale=scale) for one in found]

    @contextmanager
    def _one_pass(self, heads: Sequence[NDArray]) -> Iterator[None]:
        losses = self._begun_with(heads)
        if not self._several and not self._mixed_by(losses):
            yield
            return
        with self._alone:
            mixed = self._mixed_by(losses)
            try:
                for one in mixed:
                    one.begin()
                yield
            finally:
                for one in mixed:
                    self._scales[one.trainer] = one.end()

    def _mixed_by(self, losses: Sequence[ScaledLosses]) -> List[_MixedGradients]:
        """Return the gradients whose scale differs from that of a pass from `losses`."""
        mixed: List[_MixedGradients] = []
        for trainer in list(self._trainers):
            scale = losses[0].scale if losses else 1.0
            before = self._scales.setdefault(trainer, _GradientScales(scale))
            if before.scale != scale or before.others:
                mixed.append(_MixedGradients(trainer, before, scale))
        return mixed

    def _with_one_scale(self, heads: Sequence[NDArray], given: Any) -> Any:
        """Return head gradients that bring all losses of a pass to the smallest of their scales."""
        known = self._known()
        scales = [next((one.scale for one in known if one.has_made([h])), None) for h in heads]
        found = {scale for scale in scales if scale is not None}
        if not found or (len(found) == 1 and None not in scales):
            return given
        smallest = min(found)
        grads = [given] if isinstance(given, NDArray) else given or [None] * len(heads)

        def brought(head: NDArray, grad: Optional[NDArray], scale: Optional[float]) -> Any:
            if scale is None and any(_are_scaled([head], one) for one in found):
                return grad  # for example the sum of scaled losses
            factor = smallest / (scale or 1.0)
            return grad if factor == 1 else (head.ones_like() if grad is None else grad) * factor

        with suspended(), autograd.pause():
            return [brought(*one) for one in zip(heads, grads, scales)]

    def _scale_of_outputs(self, heads: Sequence[NDArray]) -> float:
        """Return the scale of output operators in a pass; 1 where `scale_loss` sets it."""
        found = (one.scale for one in self._known() if one.sets_outputs and one.has_made(heads))
        return next(found, 1.0)

    def _build_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(heads: Any, *args: Any, **kwargs: Any) -> None:
            # MXNet runs Python functions in its own threads, as part of another pass.
            foreign = isinstance(threading.current_thread(), threading._DummyThread)
            if foreign or getattr(self._thread, "runs", False):
                original(heads, *args, **kwargs)
                return
            self._thread.runs = True
            listed = [heads] if isinstance(heads, NDArray) else heads
            try:
                if not isinstance(heads, NDArray) and len(listed) > 1:
                    given = args[0] if args else kwargs.pop("head_grads", None)
                    args = (self._with_one_scale(listed, given), *args[1:])
                with scaled_heads(self._scale_of_outputs(listed)), self._one_pass(listed):
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
if hasattr(os, "register_at_fork"):
    # A child process would wait forever for a lock that another thread held at the fork.
    os.register_at_fork(
        before=passes._alone.acquire,
        after_in_parent=passes._alone.release,
        after_in_child=passes._alone.release,
    )


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
