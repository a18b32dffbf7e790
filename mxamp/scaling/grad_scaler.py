"""Loss scaling with PyTorch's API: one scaler, any number of trainers, explicit calls.

scaler.scale(loss).backward()
scaler.unscale_(trainer)        # optional, to clip
scaler.step(trainer, batch_size)
scaler.update()
"""

from __future__ import annotations

import copy
import logging
import weakref
from functools import cached_property
from typing import Any, Mapping

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.keywords import checked_call
from ..framework.wording import shown
from ..policy.active import chose_float32
from ..policy.targets import check_bool
from .passes import passes
from .scaler import LossScaler, positive_number
from .state import LOSSES, Stage, State
from .trainer import active_hook, attach_hook, hook_of, scale_losses

logger = logging.getLogger("mxamp")


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

    @checked_call
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
        if self._enabled:
            check_contrib_is_off()
            passes.open()  # now: `autograd.backward(scaler.scale(loss))` looks backward up first
        # Since the last update: results of steps, unscaled losses, and the trainers' states.
        self._results: list[bool] = []
        self._losses: list[NDArray] = []
        self._first = 1.0  #: the scale of the first of these losses
        self._stepped: weakref.WeakSet[State] = weakref.WeakSet()

    def is_enabled(self) -> bool:
        """Return whether the scaler was made with `enabled=True`.

        >>> GradScaler(enabled=False).is_enabled()
        False
        """
        return self._enabled

    @cached_property
    def _active(self) -> LossScaler:
        """The scaler, which scales and checks unless "auto" chose float32 before its first use."""
        self._scaler.checks = not chose_float32()
        return self._scaler

    def get_scale(self) -> float:
        """Return the scale of the next loss; 1 if disabled, or if "auto" chose float32.

        >>> GradScaler(init_scale=1024).get_scale()
        1024.0
        """
        return self._active.loss_scale if self._enabled else 1.0

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
        owners, others = [self._active.number], bool(self._losses)
        scaled, unscaled = scale_losses(loss, self.get_scale(), owners, others)
        if not self._losses:
            self._first = self.get_scale()
        self._losses = [*self._losses, *unscaled][-LOSSES:]
        return scaled

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
            hook.mark_scaled(self._first, self._losses)
        hook.unscale()

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
            raise ArgumentError("step needs the batch size: scaler.step(trainer, batch_size)")
        if not self._enabled:
            trainer.step(batch_size, ignore_stale_grad)
            return
        hook = self._attached_hook(trainer)
        hook.check("step")
        hook.mark_scaled(self._first, self._losses)
        trainer.step(batch_size, ignore_stale_grad)
        hook.set_stepped(True)
        self._stepped.add(hook)

    def update(self, new_scale: float | None = None) -> None:
        """Set the scale of the next losses: by the steps since the last update, or to `new_scale`.

        Raises `StateError` if no trainer has stepped since, and `ArgumentError` for a `new_scale`
        outside the limits.
        """
        if not self._enabled:
            return
        if new_scale is None and not self._results:
            raise StateError("update() comes after step(), and no trainer has stepped")
        before = self.get_scale()
        if new_scale is not None:
            self._scaler.set_scale(positive_number("new_scale", new_scale))
        elif self._active.checks:
            self._scaler.update(all(self._results))
        if self.get_scale() != before:
            logger.info("loss scale %g -> %g", before, self.get_scale())
        self._losses, self._first = [], 1.0
        self._results.clear()
        for hook in list(self._stepped):
            hook.set_stepped(False)
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
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

    def __getstate__(self) -> dict[str, Any]:
        # Steps since the last update stay with the original.
        scaler = copy.copy(self._scaler)
        own = {"_scaler": scaler, "_results": [*self._results], "_losses": [], "_stepped": None}
        own.update({"_active": scaler} if "_active" in vars(self) else {})
        return {**vars(self), **own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _stepped=weakref.WeakSet())

    def _attached_hook(self, trainer: Trainer) -> State:
        """Return a trainer's state, attached at first use; raise if it is another scaler's."""
        if active_hook(trainer) is None:
            if not isinstance(trainer, Trainer):
                raise ArgumentError(f"a GradScaler takes a gluon.Trainer, not {shown(trainer)}")
            attach_hook(trainer, self._active, scaled_by="GradScaler")
            hook_of(trainer).results = self._results
        hook = hook_of(trainer)
        hook.check_scaled_by("GradScaler")
        if hook.scaler is not self._scaler:
            raise StateError("this trainer has its own GradScaler already: use that one for it")
        return hook

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale():g}{'' if self._enabled else ', enabled=False'})"
