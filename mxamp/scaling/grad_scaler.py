"""Loss scaling in PyTorch's manner: one scaler, any number of trainers, explicit calls.

scaler.scale(loss).backward()
scaler.unscale_(trainer)        # optional, to clip
scaler.step(trainer, batch_size)
scaler.update()
"""

import copy
import logging
import weakref
from functools import cached_property
from typing import Any, Dict, List, Mapping, Optional

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from ..framework.wording import shown
from ..policy.active import chose_float32
from ..policy.targets import check_truth, names_device
from .attach import attach_hook, hook_in_force, hook_of
from .hook import Stage, TrainerHook
from .losses import check_unscaled, map_losses, scaled_loss
from .numbers import positive_number
from .passes import ScaledLosses, passes
from .scaler import OTHER_KIND, LossScaler, Scaler, from_state_dict

__all__ = ["GradScaler"]

logger = logging.getLogger("mxamp")

STEPPED_TWICE = "this trainer has stepped already since the last update(): call update() first"
UNSCALED_TWICE = "unscale_ was called for this trainer already: call it once before each update()"
UNSCALED_LATE = "this trainer has stepped since the last update(): call unscale_ before step"
DISABLED = (
    "this is the state of a GradScaler(enabled=False), which has no scale: give a state that an "
    "enabled GradScaler has written"
)
NOTHING_TO_UPDATE = "update() comes after step(trainer, batch_size), and no trainer has stepped"
FOREIGN_TRAINER = (
    "this trainer has a loss scaler of its own, of init_trainer or of another GradScaler: use one"
)

NO_DEVICE = (
    "the first argument of GradScaler is init_scale, a positive finite number, not {given}; leave "
    "the device out, as in GradScaler()"
)
NOTHING_SCALED = (
    "step is about to divide gradients by the scale of %g, and no loss was scaled since the last "
    "update(): call scaler.scale(loss).backward(), not loss.backward()"
)


class _Recorder(Scaler):
    """What a trainer of a `GradScaler` has for a scaler: it reports, and changes nothing."""

    def __init__(self, owner: "GradScaler") -> None:
        super().__init__(1.0)
        self.owner = owner

    @property
    def loss_scale(self) -> float:
        """The scale of the `GradScaler`."""
        return self.owner.get_scale()

    @property
    def origin(self) -> Scaler:
        """The scaler of the `GradScaler`."""
        return self.owner._scaler

    @property
    def checks(self) -> bool:
        """Whether the `GradScaler` scales."""
        return self.owner._scales

    def update(self, finite: bool) -> float:
        """Tell the `GradScaler` of a step."""
        self.owner._finite.append(finite)
        return self.loss_scale

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of the `GradScaler`."""
        return self.owner.state_dict()

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Hand a trainer's saved state to the `GradScaler`."""
        self.owner._resume(state)
        return self


class GradScaler:
    """A dynamic loss scale for training loops written as for PyTorch.

    ::

        scaler = amp.GradScaler()
        with autograd.record(), amp.autocast("float16"):
            loss = loss_function(net(data), label)
        scaler.scale(loss).backward()
        scaler.step(trainer, batch_size)
        scaler.update()

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis
        As for `LossScaler`.
    enabled : bool, default True
        False makes every method do nothing but what plain MXNet would.

    Where `init("auto")` has chosen float32 before the scaler is first used, the scale is 1, and no
    step is skipped. What `state_dict` returns goes from such a machine to others, and back.

    Calls out of order raise `StateError`: a second `step` before `update`, `unscale_` twice or
    after `step`, `update` before any `step`.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
        *,
        enabled: bool = True,
    ) -> None:
        if names_device(init_scale):
            raise ArgumentError(NO_DEVICE.format(given=shown(init_scale)))
        self._scaler = LossScaler(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
        )
        self._enabled = check_truth("enabled", enabled)
        self._finite: List[bool] = []
        self._scaled = False  # a loss, since the last update
        self._losses: List[NDArray] = []  # as they were
        self._resumes: Optional[LossScaler] = None  # from a file, with the next update
        self._stepped: "weakref.WeakSet[Trainer]" = weakref.WeakSet()  # since the last update

    def is_enabled(self) -> bool:
        """Tell whether it was made with `enabled=True`."""
        return self._enabled

    @cached_property
    def _scales(self) -> bool:
        """Whether losses are scaled: for good, so that a loss and its step agree."""
        return self._enabled and not chose_float32()

    def get_scale(self) -> float:
        """Return the scale of the next loss; 1 where disabled, or where "auto" chose float32."""
        return self._scaler.loss_scale if self._scales else 1.0

    def scale(self, loss: Any) -> Any:
        """Return the loss, or all in lists, tuples and dicts, times the scale.

        Works inside `autograd.record()` and outside.
        """
        if not self._enabled:
            return loss
        scale = self.get_scale()
        check_unscaled(loss)
        self._scaled = True
        losses = ScaledLosses(scale, (self,), sets_outputs=True)

        def scaled(array: NDArray) -> NDArray:
            self._losses.append(array.detach())
            made = scaled_loss(array, scale)
            if made is not array:
                losses.made[id(made)] = made
            return made

        with autograd.record(train_mode=autograd.is_training()):
            result = map_losses(loss, scaled)
        passes.add(losses)
        return result

    def unscale_(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by the scale, to clip or look at them before `step`."""
        if not self._enabled:
            return
        hook = self._hook(trainer)
        if trainer in self._stepped:
            raise StateError(UNSCALED_LATE)
        if hook.stage is Stage.UNSCALED:
            raise StateError(UNSCALED_TWICE)
        hook.mark_scaled()
        hook.unscale()

    def step(self, trainer: Trainer, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Do `trainer.step(batch_size)` on unscaled gradients; skip it where one is not finite.

        `ignore_stale_grad` is `Trainer.step`'s. Raises `StateError` where this trainer has stepped
        since the last `update`, or has a loss scaler of its own. The first step after
        `trainer.load_states` goes on from what the file holds of the scaler.
        """
        if not self._enabled:
            trainer.step(batch_size, ignore_stale_grad)
            return
        hook = self._hook(trainer)
        if trainer in self._stepped:
            raise StateError(STEPPED_TWICE)
        if not self._scaled:
            logger.warning(NOTHING_SCALED, self.get_scale())
        hook.mark_scaled(self._losses)
        trainer.step(batch_size, ignore_stale_grad)
        self._stepped.add(trainer)

    def update(self, new_scale: Optional[float] = None) -> None:
        """Set the scale for the next losses: by the steps since the last update, or to `new_scale`.

        Raises `StateError` where no trainer has stepped since, `ArgumentError` for a `new_scale`
        outside the limits.
        """
        if not self._enabled:
            return
        if new_scale is None and not self._finite:
            raise StateError(NOTHING_TO_UPDATE)
        if self._resumes is not None:
            self._scaler, self._resumes = self._resumes, None
        if new_scale is not None:
            self._scaler.set_scale(positive_number("new_scale", new_scale))
        elif self._scales:
            self._scaler.update(all(self._finite))
        self._finite, self._scaled, self._losses = [], False, []
        passes.forget(None, self)
        for trainer in list(self._stepped):
            trainer.amp_loss_scale = self.get_scale()
        self._stepped.clear()

    def state_dict(self) -> Dict[str, Any]:
        """Return everything it takes to go on from here; {} where disabled."""
        return self._scaler.state_dict() if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if not self._enabled:
            return
        if not state:
            raise ArgumentError(DISABLED)
        self._scaler.load_state_dict(state)
        self._resumes = None

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what a trainer's file held of a `GradScaler`.

        A loss that is scaled keeps its scale until its step, where a trainer is met first.
        """
        saved = from_state_dict(state)
        if not isinstance(saved, LossScaler):
            logger.warning(OTHER_KIND, saved, self)
        elif self._scaled:
            self._resumes = saved
        else:
            self._scaler = saved

    def __getstate__(self) -> Dict[str, Any]:
        # What trainers have done since the last update stays with the original.
        state = {name: value for name, value in vars(self).items() if name != "_stepped"}
        own = {"_scaler": copy.copy(self._scaler), "_finite": list(self._finite)}
        own.update(_losses=[], _resumes=copy.copy(self._resumes))
        return {**state, **own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._stepped = weakref.WeakSet()

    def _hook(self, trainer: Trainer) -> TrainerHook:
        if hook_in_force(trainer) is None:
            if not isinstance(trainer, Trainer):
                raise ArgumentError(f"a GradScaler takes a gluon.Trainer, not {shown(trainer)}")
            attach_hook(trainer, _Recorder(self), None, "GradScaler", after_backward=True)
        hook = hook_of(trainer)
        hook.check_scaled_by("GradScaler", "init_trainer")
        if not isinstance(hook.scaler, _Recorder) or hook.scaler.owner is not self:
            raise StateError(FOREIGN_TRAINER)
        return hook

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale():g}{'' if self._enabled else ', enabled=False'})"
