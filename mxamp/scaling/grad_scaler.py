"""Loss scaling with PyTorch's API: one scaler, any number of trainers, explicit calls.

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
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.keywords import checked_call, checked_methods, missing_attribute
from ..framework.wording import shown
from ..policy.active import chose_float32
from ..policy.targets import check_bool
from .hook import Stage, TrainerHook
from .passes import ScaledLosses, passes
from .scaler import OTHER_KIND, LossScaler, Scaler, from_state_dict, positive_number
from .trainer import active_hook, attach_hook, check_unscaled, hook_of, map_losses, scaled_loss

__all__ = ["GradScaler"]

logger = logging.getLogger("mxamp")

NOTHING_TO_UPDATE = "update() comes after step(trainer, batch_size), and no trainer has stepped"
OTHER_GRAD_SCALER = (
    "this trainer has its own GradScaler already: call scale, step and update of that one"
)
NO_BATCH_SIZE = (
    "step needs the batch size, as Trainer.step does: scaler.step(trainer, batch_size), which is 1 "
    "where the loss is a mean"
)
NOTHING_SCALED = (
    "step is about to divide gradients by the scale of %g, and no loss was scaled since the last "
    "update(): call scaler.scale(loss).backward(), not loss.backward()"
)
NOT_SCALED = (
    "a loss was scaled by %g, but backward was called on a loss that is not scaled: small float16 "
    "gradients may be lost. Call scaler.scale(loss).backward(), not loss.backward()"
)
OTHER_LOSSES = (
    "the gradients of this step carry a scale of %g, of another GradScaler or from before the last "
    "update(): call scale, step and update of one GradScaler, and update() after all steps"
)


#: What to write for methods of Paddle's GradScaler, TensorFlow's optimizers and Keras'.
_ELSEWHERE = {
    "apply_gradients": "write scaler.step(trainer, batch_size) and scaler.update()",
    "get_init_loss_scaling": "write scaler.get_scale()",
    "get_loss_scaling": "write scaler.get_scale()",
    "get_scaled_loss": "write scaler.scale(loss)",
    "get_unscaled_gradients": "write scaler.unscale_(trainer)",
    "is_enable": "write scaler.is_enabled()",
    "loss_scale": "write scaler.get_scale()",
    "minimize": "write scaler.step(trainer, batch_size) and scaler.update()",
    "set_init_loss_scaling": "write scaler.update(new_scale)",
    "unscale": "write scaler.unscale_(trainer)",
}


class _ForwardingScaler(Scaler):
    """Scaler of one trainer's hook that forwards to the `GradScaler` of all its trainers."""

    def __init__(self, owner: "GradScaler") -> None:
        super().__init__(1.0)
        self.owner = owner

    @property
    def loss_scale(self) -> float:
        return self.owner.get_scale()

    @property
    def origin(self) -> Scaler:
        return self.owner._scaler

    @property
    def checks(self) -> bool:
        return self.owner._scales

    def update(self, finite: bool) -> float:
        self.owner._finite.append(finite)
        return self.loss_scale

    def state_dict(self) -> Dict[str, Any]:
        return self.owner.state_dict()

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Load a saved state into the `GradScaler`; return this scaler."""
        self.owner._resume(state)
        return self


@checked_methods
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
        With False, the scale is 1, and `step` is a plain `trainer.step`.

    If `init("auto")` has chosen float32 before the scaler is first used, the scale is 1 and no
    step is skipped. States move between such a machine and others.

    Calls out of order raise `StateError`: a second `step` before `update`, `unscale_` twice or
    after `step`, `update` before any `step`.
    """

    @checked_call(
        device="arrays on any device are scaled: leave the device out, as in GradScaler()",
        init_loss_scaling="write init_scale=",
        loss_scale="write init_scale=",
    )
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
        grows = growth_factor, backoff_factor, growth_interval
        self._scaler = LossScaler(init_scale, *grows, min_scale, max_scale, hysteresis)
        self._enabled = check_bool("enabled", enabled)
        self._resumes: Optional[LossScaler] = None  #: from a file, from the next update on
        # Since the last update: the results of steps, the unscaled losses, and the trainers' hooks.
        self._finite: List[bool] = []
        self._losses: List[NDArray] = []
        self._stepped: "weakref.WeakSet[TrainerHook]" = weakref.WeakSet()

    def is_enabled(self) -> bool:
        """Return whether the scaler was made with `enabled=True`.

        >>> GradScaler(enabled=False).is_enabled()
        False
        """
        return self._enabled

    @cached_property
    def _scales(self) -> bool:
        """Whether losses are scaled: decided once, so that a loss and its step agree."""
        return self._enabled and not chose_float32()

    def get_scale(self) -> float:
        """Return the scale of the next loss; 1 if disabled, or if "auto" chose float32.

        >>> GradScaler(init_scale=1024).get_scale()
        1024.0
        """
        return self._scaler.loss_scale if self._scales else 1.0

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return float(self._settings["growth_factor"])

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows: more than 1."""
        self._scaler.change(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale falls at an overflow."""
        return float(self._settings["backoff_factor"])

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale falls at an overflow: between 0 and 1."""
        self._scaler.change(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return after how many finite steps in a row the scale grows."""
        return int(self._settings["growth_interval"])

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many finite steps in a row the scale grows: at least 1."""
        self._scaler.change(growth_interval=new_interval)

    @property
    def _settings(self) -> Dict[str, Any]:
        """State of the scaler as a dictionary, settings included."""
        return self._scaler.state_dict()

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale; also all losses in lists, tuples and dicts.

        Works inside `autograd.record()` and outside.

        Parameters
        ----------
        loss : NDArray, or lists, tuples and dicts of them
            The scaled loss has the same containers.
        """
        if not self._enabled:
            return loss
        check_contrib_is_off()
        scale = self.get_scale()
        check_unscaled(loss)
        losses = ScaledLosses(scale, (self,), scales_outputs=True)

        def scale_array(array: NDArray) -> NDArray:
            self._losses.append(array.detach())
            scaled = scaled_loss(array, scale)
            if scaled is not array:
                losses.scaled[id(scaled)] = scaled
            return scaled

        with autograd.record(train_mode=autograd.is_training()):
            result = map_losses(loss, scale_array)
        passes.add(losses)
        return result

    def unscale_(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by the scale, to clip or read them before `step`.

        ::

            scaler.scale(loss).backward()
            scaler.unscale_(trainer)
            gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 1.0)
            scaler.step(trainer, batch_size)
            scaler.update()

        Parameters
        ----------
        trainer : gluon.Trainer
            The trainer of the parameters that the loss depends on.
        """
        if not self._enabled:
            return
        hook = self._attached_hook(trainer)
        if hook.stage is Stage.NONE:
            self._warn_of_other_losses(trainer)
            hook.mark_scaled()
        hook.unscale()

    @checked_call(optimizer="give the trainer first: scaler.step(trainer, batch_size)")
    def step(
        self, trainer: Trainer, batch_size: Any = None, ignore_stale_grad: bool = False
    ) -> None:
        """Call `trainer.step(batch_size)` on unscaled gradients; skip it if one is not finite.

        The first step after `trainer.load_states` resumes from the scaler's state in the file.

        Parameters
        ----------
        trainer : gluon.Trainer
            The trainer of the parameters that the loss depends on.
        batch_size, ignore_stale_grad
            The arguments of `Trainer.step`; `batch_size` has to be given.

        Raises
        ------
        StateError
            This trainer has stepped since the last `update`, or another API scales its losses.
        """
        if batch_size is None:
            raise ArgumentError(NO_BATCH_SIZE)
        if not self._enabled:
            trainer.step(batch_size, ignore_stale_grad)
            return
        hook = self._attached_hook(trainer)
        hook.check("step")
        if hook.stage is Stage.NONE:
            self._warn_of_other_losses(trainer)
        hook.mark_scaled(self._losses)
        trainer.step(batch_size, ignore_stale_grad)
        hook.set_stepped(True)
        self._stepped.add(hook)

    def _warn_of_other_losses(self, trainer: Trainer) -> None:
        """Warn if the gradients of a trainer do not come from losses of this scaler."""
        own, carried = self.get_scale(), passes.scale_of(trainer)
        if self._losses and own != 1 and carried == 1:
            logger.warning(NOT_SCALED, own)
        elif not self._losses and carried not in (None, 1):
            logger.warning(OTHER_LOSSES, carried)
        elif not self._losses:
            logger.warning(NOTHING_SCALED, own)

    def update(self, new_scale: Optional[float] = None) -> None:
        """Set the scale of the next losses: by the steps since the last update, or to `new_scale`.

        Raises `StateError` if no trainer has stepped since, and `ArgumentError` for a `new_scale`
        outside the limits.
        """
        if not self._enabled:
            return
        if new_scale is None and not self._finite:
            raise StateError(NOTHING_TO_UPDATE)
        before = self.get_scale()
        if self._resumes is not None:
            self._scaler, self._resumes = self._resumes, None
        if new_scale is not None:
            self._scaler.set_scale(positive_number("new_scale", new_scale))
        elif self._scales:
            self._scaler.update(all(self._finite))
        if self.get_scale() != before:
            logger.info("loss scale %g -> %g", before, self.get_scale())
        self._finite, self._losses = [], []
        passes.forget(self)
        for hook in list(self._stepped):
            hook.set_stepped(False)
        self._stepped.clear()

    def state_dict(self) -> Dict[str, Any]:
        """Return the scaler's whole state; {} if disabled.

        >>> GradScaler(init_scale=1024).state_dict()["loss_scale"]
        1024.0
        """
        return self._scaler.state_dict() if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` that `state_dict` has returned.

        >>> scaler = GradScaler()
        >>> scaler.load_state_dict(GradScaler(init_scale=1024).state_dict())
        >>> scaler.get_scale()
        1024.0
        """
        if self._enabled:
            self._scaler.load_state_dict(state)
            self._resumes = None

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Resume from the state in a trainer's file; losses scaled already keep their scale."""
        saved = from_state_dict(state)
        if not isinstance(saved, LossScaler):
            logger.warning(OTHER_KIND, saved, self)
        elif self._losses:
            self._resumes = saved
        else:
            self._scaler = saved

    def __getstate__(self) -> Dict[str, Any]:
        # Steps since the last update stay with the original.
        own = {"_scaler": copy.copy(self._scaler), "_resumes": copy.copy(self._resumes)}
        return {**vars(self), **own, "_finite": [*self._finite], "_losses": [], "_stepped": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _stepped=weakref.WeakSet())

    def __getattr__(self, name: str) -> Any:
        public = [known for known in dir(type(self)) if not known.startswith("_")]
        raise AttributeError(missing_attribute("'GradScaler' object", name, public, _ELSEWHERE))

    def _attached_hook(self, trainer: Trainer) -> TrainerHook:
        """Return a trainer's hook, attached at first use; raise if it is another scaler's."""
        if active_hook(trainer) is None:
            if not isinstance(trainer, Trainer):
                raise ArgumentError(f"a GradScaler takes a gluon.Trainer, not {shown(trainer)}")
            attach_hook(trainer, _ForwardingScaler(self), scaled_by="GradScaler")
        hook = hook_of(trainer)
        hook.check_scaled_by("GradScaler")
        if not isinstance(hook.scaler, _ForwardingScaler) or hook.scaler.owner is not self:
            raise StateError(OTHER_GRAD_SCALER)
        return hook

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale():g}{'' if self._enabled else ', enabled=False'})"
