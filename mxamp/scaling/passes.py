"""Backward passes, and the loss scale that each gradient carries after them.

A scaled loss scales the gradient of every parameter behind it, whichever trainer the loss was
scaled for. Each pass writes down the scale that it gave to the gradients of each trainer; a step
asks for it. As long as all gradients of a trainer carry one scale, that is one number, and no
array is looked at. Where a pass brings another scale, MXNet's own flag of each parameter's array,
whether its gradient is fresh, tells which gradients the pass has written.
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
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.patching import FrontEnd, Patch
from ..graph.ir import Graph
from ..policy.active import suspended
from .finite import multiply
from .gradient_scales import GradientScales, MixedGradients, gradients_of
from .loss_outputs import scaled_heads

__all__ = ["ScaledLosses", "passes"]

logger = logging.getLogger("mxamp")

UNSCALED = (
    "inside scale_loss, backward was called on a loss that is not scaled: the step takes its "
    "gradients as they are, and small float16 ones may be lost. Call it on what "
    "`with amp.scale_loss(loss, trainer) as scaled` has yielded: autograd.backward(scaled)"
)
FOREIGN = (
    "the gradients of this trainer come from a loss that was scaled, by {scale:g}, for another "
    "trainer: after init_trainer for each, scale the loss for both, "
    "`with mxamp.scale_loss(loss, [trainer, other]) as scaled`; with a GradScaler call "
    "scaler.step(trainer, batch_size)"
)


@dataclass(eq=False)
class ScaledLosses:
    """The losses of one `scale_loss`, or `GradScaler.scale`, until the step that they are for."""

    scale: float
    owners: Sequence[Any]  #: whose step it is: hooks of trainers, or a `GradScaler`
    given: Dict[int, NDArray] = field(default_factory=dict)  #: the losses before, by `id`
    made: Dict[int, NDArray] = field(default_factory=dict)  #: the scaled ones, by `id`
    #: The scale of output operators, which no scaled head reaches, is set in the pass itself.
    sets_outputs: bool = False


#: What multiplies a loss by its scale.
_TIMES = frozenset({"_mul_scalar", "_npi_multiply_scalar"})

#: The innermost `scale_loss` around the code.
_inside: "ContextVar[Optional[ScaledLosses]]" = ContextVar("mxamp_scaled_losses", default=None)


class _Passes(FrontEnd):
    """Patches of backward passes and of trainers' steps, and what is known of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: Dict[int, ScaledLosses] = {}  # by `id`: threads add and take away
        self._trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
        self._scales: "weakref.WeakKeyDictionary[Trainer, GradientScales]" = (
            weakref.WeakKeyDictionary()
        )
        #: Held while flags are read and set: by passes and steps, where there are two trainers.
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
        """Put the patches in place."""
        if not self.is_open:
            # Trainers that were made before: MXNet keeps no list of them.
            alive = [one for one in gc.get_objects() if issubclass(type(one), Trainer)]
            self._trainers.update(alive)
        super().open()

    def close(self) -> None:
        """Take the patches off, and forget losses and trainers."""
        super().close()
        self._losses.clear()
        self._trainers.clear()
        self._scales.clear()

    def is_scaled(self, losses: Sequence[NDArray]) -> bool:
        """Return whether one of these losses is a scaled one."""
        return any(id(array) in one.made for one in self._known() for array in losses)

    def add(self, losses: ScaledLosses) -> None:
        """Expect backward passes from these losses until `forget`."""
        if losses.scale != 1:
            self.open()
            self._losses[id(losses)] = losses
            # Copies of trainers too, which no constructor has made.
            self._trainers.update(one.trainer for one in losses.owners if hasattr(one, "trainer"))

    @contextmanager
    def inside(self, losses: ScaledLosses) -> Iterator[None]:
        """Take backward passes inside for passes from these losses; an error forgets them."""
        self.add(losses)
        before = _inside.set(losses)
        try:
            yield
        except BaseException:
            self._losses.pop(id(losses), None)
            raise
        finally:
            _inside.reset(before)

    def forget(self, trainer: Optional[Trainer], owner: Any) -> None:
        """Forget the gradients of a trainer that has stepped, and the losses of an owner."""
        for one in self._known():
            if owner in one.owners:
                self._losses.pop(id(one), None)
        if trainer is not None:
            self._forget_scales(trainer)

    def _forget_scales(self, trainer: Trainer) -> None:
        """Forget the scales of a trainer's gradients, but of those that passes go on adding to."""
        scales = self._scales.pop(trainer, None)
        if scales is not None and any(param.grad_req == "add" for param in trainer._params):
            self._scales[trainer] = scales

    def carried(self, trainer: Trainer) -> float:
        """Return the scale of a trainer's fresh gradients: one other than 1 where they differ."""
        scales = self._scales.get(trainer)
        if scales is None or (scales.scale == 1 and not scales.others):
            return 1.0
        found = {scales.of(data) for _, data, _ in gradients_of(trainer) if data._fresh_grad}
        return max(found - {1.0}, default=1.0)

    def convert(self, trainer: Trainer, scale: float) -> None:
        """Multiply those of a trainer's fresh gradients that carry another scale than `scale`."""
        scales = self._scales.get(trainer)
        if scales is None or (scales.scale == scale and not scales.others):
            return
        for grad_req, data, gradient in gradients_of(trainer):
            if data._fresh_grad or grad_req == "add":
                multiply([gradient], scale / scales.of(data))
        self.set_scale(trainer, scale)

    def set_scale(self, trainer: Trainer, scale: float) -> None:
        """Take note that all fresh gradients of a trainer carry `scale`."""
        if self.is_open:
            self._scales[trainer] = GradientScales(scale)

    def _known(self) -> List[ScaledLosses]:
        return list(self._losses.values())

    @property
    def _several(self) -> bool:
        return len(self._trainers) > 1

    def _begun_with(self, heads: Sequence[NDArray]) -> Sequence[ScaledLosses]:
        """Return the scaled losses that a backward pass from `heads` begins with."""
        inside, known = _inside.get(), self._known()
        found = [one for one in known if any(id(head) in one.made for head in heads)]
        if not found and known and not self._are_given(heads):
            # Such as the sum of scaled losses.
            found = [one for one in known if _are_scaled(heads, one.scale)][-1:]
        if not found and inside is not None and inside.scale != 1:
            logger.warning(UNSCALED)
        # Losses of several scales get the smallest of them: see `_with_one_scale`.
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

    def _are_given(self, heads: Sequence[NDArray]) -> bool:
        """Return whether a head is a loss as it was before it was scaled."""
        return any(id(head) in one.given for one in self._known() for head in heads)

    def _with_one_scale(self, heads: Sequence[NDArray], given: Any) -> Any:
        """Return head gradients that bring all losses of a pass to the smallest of their scales."""
        known = self._known()
        scales = [
            next((one.scale for one in known if id(head) in one.made), None) for head in heads
        ]
        found = {scale for scale in scales if scale is not None}
        if not found or (len(found) == 1 and None not in scales):
            return given
        smallest = min(found)
        grads = [given] if isinstance(given, NDArray) else given or [None] * len(heads)

        def brought(head: NDArray, grad: Optional[NDArray], scale: Optional[float]) -> Any:
            if scale is None and any(_are_scaled([head], one) for one in found):
                return grad  # such as the sum of scaled losses
            factor = smallest / (scale or 1.0)
            return grad if factor == 1 else (head.ones_like() if grad is None else grad) * factor

        with suspended(), autograd.pause():
            return [brought(*one) for one in zip(heads, grads, scales)]

    def _brought_together(
        self, heads: Sequence[NDArray], args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return the other arguments of a backward pass whose losses get one scale."""
        if args:
            return (self._with_one_scale(heads, args[0]), *args[1:]), kwargs
        grads = self._with_one_scale(heads, kwargs.get("head_grads"))
        return args, {**kwargs, "head_grads": grads}

    def _scale_of_outputs(self, heads: Sequence[NDArray]) -> float:
        """Return the scale of output operators in a pass; 1 where something else sets it."""
        for losses in self._known():
            if losses.sets_outputs and any(id(head) in losses.made for head in heads):
                return losses.scale
        return 1.0

    def _mixed_by(self, losses: Sequence[ScaledLosses]) -> List[MixedGradients]:
        """Return the gradients to which a pass from `losses` brings another scale."""
        mixed: List[MixedGradients] = []
        for trainer in list(self._trainers):
            scale = losses[0].scale if losses else 1.0
            before = self._scales.setdefault(trainer, GradientScales(scale))
            if before.scale != scale or before.others:
                mixed.append(MixedGradients(trainer, before, scale))
        return mixed

    def _build_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(heads: Any, *args: Any, **kwargs: Any) -> None:
            # MXNet runs functions in Python in threads of its own, as part of another pass.
            foreign = isinstance(threading.current_thread(), threading._DummyThread)
            if foreign or getattr(self._thread, "runs", False):
                original(heads, *args, **kwargs)
                return
            self._thread.runs = True
            listed = [heads] if isinstance(heads, NDArray) else heads
            try:
                if not isinstance(heads, NDArray) and len(listed) > 1:
                    args, kwargs = self._brought_together(listed, args, kwargs)
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
            if trainer._update_on_kvstore:  # MXNet leaves the flags set then
                self.set_scale(trainer, 1.0)

        return step

    def check_own(self, trainer: Trainer) -> None:
        """Raise `StateError` where gradients were scaled that this trainer takes for unscaled."""
        scale = self.carried(trainer)
        if scale != 1:
            raise StateError(FOREIGN.format(scale=scale))


#: One a process, as the functions that it patches are.
passes = _Passes()
if hasattr(os, "register_at_fork"):
    # A child of a process whose other thread holds the lock would wait for ever.
    os.register_at_fork(
        before=passes._alone.acquire,
        after_in_parent=passes._alone.release,
        after_in_child=passes._alone.release,
    )


def _are_scaled(heads: Sequence[NDArray], scale: float) -> bool:
    """Return whether one of these heads was computed from a loss times `scale`, by the tape."""
    for head in heads:
        try:
            graph = Graph.from_symbol(autograd.get_symbol(head))
        except MXNetError:
            continue  # it is no result of a recorded call
        for node in graph.nodes:
            if node.op in _TIMES and float(node.attrs["scalar"]) == scale:
                return True
    return False
