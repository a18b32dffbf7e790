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

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.keywords import checked_call, checked_methods, missing_attribute
from ..framework.wording import shown
from ..policy.active import chose_float32
from ..policy.targets import check_bool
from .passes import passes
from .scaler import LossScaler, positive_number
from .state import Stage, State
from .trainer import active_hook, attach_hook, check_unscaled, hook_of, scale_losses

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
    "the gradients of this step carry a scale of %g, of another GradScaler: call scale, step and "
    "update of one GradScaler"
)


#: The losses of one step that are looked at after an overflow.
_LOSSES = 100

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
        # Since the last update: results of steps, unscaled losses, and the trainers' states.
        self._results: List[bool] = []
        self._losses: List[NDArray] = []
        self._first = 1.0, -1  #: the scale of the first of these losses, and count of passes before
        self._stepped: "weakref.WeakSet[State]" = weakref.WeakSet()

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
        check_unscaled(loss)
        if self.get_scale() != 1:
            passes.open()
        scaled, unscaled = scale_losses(loss, self.get_scale(), [self._active.number])
        if not self._losses:
            self._first = self.get_scale(), passes.count
        self._losses = [*self._losses, *unscaled][-_LOSSES:]
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
            self._warn_of_other_losses(hook)
            hook.mark_scaled(*self._first)
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
            self._warn_of_other_losses(hook)
        hook.mark_scaled(*self._first, self._losses)
        trainer.step(batch_size, ignore_stale_grad)
        hook.set_stepped(True)
        self._stepped.add(hook)

    def _warn_of_other_losses(self, hook: State) -> None:
        """Warn if the gradients of a trainer do not come from losses of this scaler."""
        own, carried = self.get_scale(), hook.gradients.carried
        is_unseen = self._losses and passes.count == self._first[1]
        if is_unseen or self._scaler.number in hook.gradients.owners:
            return
        if self._losses and own != 1 and carried == 1:
            logger.warning(NOT_SCALED, own)
        elif not self._losses and carried != 1:
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
        if new_scale is None and not self._results:
            raise StateError(NOTHING_TO_UPDATE)
        before = self.get_scale()
        if new_scale is not None:
            self._scaler.set_scale(positive_number("new_scale", new_scale))
        elif self._active.checks:
            self._scaler.update(all(self._results))
        if self.get_scale() != before:
            logger.info("loss scale %g -> %g", before, self.get_scale())
        self._losses, self._first = [], (1.0, -1)
        self._results.clear()
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

    def __getstate__(self) -> Dict[str, Any]:
        # Steps since the last update stay with the original.
        scaler = copy.copy(self._scaler)
        own = {"_scaler": scaler, "_results": [*self._results], "_losses": [], "_stepped": None}
        own.update({"_active": scaler} if "_active" in vars(self) else {})
        return {**vars(self), **own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _stepped=weakref.WeakSet())

    def __getattr__(self, name: str) -> Any:
        public = [known for known in dir(type(self)) if not known.startswith("_")]
        raise AttributeError(missing_attribute("'GradScaler' object", name, public, _ELSEWHERE))

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
            raise StateError(OTHER_GRAD_SCALER)
        return hook

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale():g}{'' if self._enabled else ', enabled=False'})"
