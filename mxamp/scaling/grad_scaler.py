"""`GradScaler`: PyTorch's API of loss scaling, one scaler for any number of trainers.

scaler.scale(loss).backward()
scaler.unscale_(trainer)        # optional, to clip
scaler.step(trainer, batch_size)
scaler.update()
"""

from __future__ import annotations

import logging
from typing import Any, Mapping, NoReturn

from mxnet.gluon import Trainer

from ..errors import ArgumentError, StateError, unknown
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.keywords import checked_call, hint
from ..policy.active import chose_float32
from ..policy.targets import check_bool
from .backward_passes import scale_losses, scaling_patches
from .scaler import LossScaler
from .trainer import Stage, State, active_state, attach_state

logger = logging.getLogger("mxamp")

NO_BATCH_SIZE = "MXNet divides by the batch size: write scaler.step(trainer, batch_size)"


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
    *settings : float
        The settings of `LossScaler` in their order: `init_scale`, `growth_factor`,
        `backoff_factor`, `growth_interval`, `min_scale`, `max_scale` and `hysteresis`.
    **named : float
        The same settings by name, such as `init_scale=1024`.
    enabled : bool, default True
        With False, the scale is 1, and `step` is a plain `trainer.step`.

    If `init("auto")` has chosen float32 before you make the scaler, the scale is 1 and no step is
    skipped. You may load the scaler's state on machines on which "auto" chooses another dtype.

    Calls out of order raise `StateError`: a second `step` before `update`, a second `unscale_`, an
    `unscale_` after `step`, or an `update` before any `step` or `unscale_`.
    """

    @checked_call
    def __init__(self, *settings: float, enabled: bool = True, **named: float) -> None:
        known = ("init_scale", *LossScaler._settings, "enabled")
        for name in named.keys() - {*known}:
            raise unknown("argument of GradScaler", name, known)
        self._scaler = LossScaler(*settings, **named)  # type: ignore[arg-type]
        self._enabled = check_bool("enabled", enabled)
        self._scaler.is_scaling = enabled and not chose_float32()
        self._scaler.finite_by_state = {}
        if self._scaler.is_scaling:
            check_contrib_is_off()
            # Not at the first loss: functions in Python are recorded before it.
            scaling_patches.open()

    def is_enabled(self) -> bool:
        """Return whether the scaler was created with `enabled=True`.

        >>> GradScaler(enabled=False).is_enabled()
        False
        """
        return self._enabled

    def get_scale(self) -> float:
        """Return the loss scale of the next loss; 1 if disabled, or if "auto" chose float32.

        >>> GradScaler(init_scale=1024).get_scale()
        1024.0
        """
        return self._scaler.loss_scale

    def get_growth_factor(self) -> float:
        """Return the factor by which the loss scale grows."""
        return self._scaler._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the loss scale grows.

        Parameters
        ----------
        new_factor : float
            The factor, above 1.
        """
        self._change(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which an overflow lowers the loss scale."""
        return self._scaler._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which an overflow lowers the loss scale.

        Parameters
        ----------
        new_factor : float
            The factor, between 0 and 1.
        """
        self._change(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of steps without overflow after which the loss scale grows."""
        return self._scaler._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps without overflow after which the loss scale grows.

        Parameters
        ----------
        new_interval : int
            The number of steps, from 1.
        """
        self._change(growth_interval=new_interval)

    def _change(self, **setting: float) -> None:
        """Set a loss scaler's settings by name; raise for an invalid value."""
        self._scaler.load_state_dict({**self._scaler.state_dict(), **setting})

    @checked_call
    def scale(self, loss: object) -> Any:
        """Return a loss, or each loss in a container, multiplied by the loss scale.

        Works inside `autograd.record()` and outside.

        Parameters
        ----------
        loss : NDArray, or lists, tuples and dicts of them
            The scaled loss has the same containers.
        """
        if not self._enabled:
            return loss
        check_contrib_is_off()
        return scale_losses(loss, self.get_scale())

    @checked_call
    def unscale_(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by the loss scale, to clip or read them before `step`.

        ::

            scaler.scale(loss).backward()
            scaler.unscale_(trainer)
            params = net.collect_params().values()
            gradients = [p.grad() for p in params if p.grad_req != "null"]
            gluon.utils.clip_global_norm(gradients, 1.0)
            scaler.step(trainer, batch_size)
            scaler.update()

        Parameters
        ----------
        trainer : gluon.Trainer
            The trainer of the parameters that the loss depends on.
        """
        if self._enabled:
            self._attached_state(trainer).unscale()

    @checked_call
    def step(
        self, trainer: Trainer, batch_size: int | None = None, ignore_stale_grad: bool = False
    ) -> None:
        """Unscale gradients and call `trainer.step`, or skip it if a gradient is Inf or NaN.

        The first step after `trainer.load_states` resumes from the scaler's state in the file.

        Parameters
        ----------
        trainer : gluon.Trainer
            The trainer of the parameters that the loss depends on.
        batch_size : int
            The number by which `trainer.step` divides the gradients; 1 if the loss is a mean.
        ignore_stale_grad : bool, default False
            Skip parameters whose gradients no backward pass has written since the last step.
            With False, `trainer.step` raises a `UserWarning` for them.

        Raises
        ------
        ArgumentError
            There is no batch size, which PyTorch's `step` does not have.
        StateError
            This trainer has stepped since the last `update`, or another API scales its losses.
        """
        if batch_size is None:
            raise ArgumentError(NO_BATCH_SIZE)
        if self._enabled:
            self._attached_state(trainer).check("step")
        trainer.step(batch_size, ignore_stale_grad)

    def update(self, new_scale: float | None = None) -> None:
        """Lower or raise the loss scale, depending on whether steps since the last call overflowed.

        After `unscale_` alone the gradients that it found count as a step's, unless other workers
        have others.

        Parameters
        ----------
        new_scale : float, optional
            Set the scale to this number instead.

        Raises
        ------
        StateError
            No trainer has stepped since the last call, and there is no `new_scale`.
        """
        if not self._enabled:
            return
        results = self._scaler.finite_by_state or {}
        if new_scale is None and not results:
            raise StateError("update() comes after step(), and no trainer has stepped")
        before = self.get_scale()
        if new_scale is not None:
            self._scaler.set_scale(new_scale)
        elif self._scaler.is_scaling:
            self._scaler.update(all(results.values()))
        if self.get_scale() != before:
            logger.info("loss scale %g -> %g", before, self.get_scale())
        for state in results:
            state.pending = None
            if state.report is not None:
                state.report = state.report._replace(next_loss_scale=self.get_scale())
        results.clear()
        scaling_patches.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state to save; {} if disabled.

        >>> GradScaler(init_scale=1024).state_dict()["loss_scale"]
        1024.0
        """
        return self._scaler.state_dict() if self._enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; do nothing if disabled.

        >>> scaler = GradScaler()
        >>> scaler.load_state_dict(GradScaler(init_scale=1024).state_dict())
        >>> scaler.get_scale()
        1024.0

        Parameters
        ----------
        state : dict
            A state that `state_dict` has returned.
        """
        if self._enabled:
            self._scaler.load_state_dict(state)

    def _attached_state(self, trainer: Trainer) -> State:
        """Record that a trainer's loss was scaled; return the trainer's loss scaling state.

        The state is created if needed.
        """
        state = active_state(trainer) or attach_state(trainer, self._scaler, scaled_by="GradScaler")
        state.check_scaled_by("GradScaler")
        if state.stage is not Stage.STEPPED:
            state.scaler = self._scaler
            state.note_scaled(state.loss_scale)
        return state

    def __getattr__(self, name: str) -> NoReturn:
        owner, public = "'GradScaler' object", [one for one in dir(self) if one[0] != "_"]
        raise AttributeError(f"{owner} has no attribute {name!r}{hint(owner, name, public)}")

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale():g}{'' if self._enabled else ', enabled=False'})"
