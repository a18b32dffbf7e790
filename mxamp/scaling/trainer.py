"""What users call with a Gluon Trainer: give it loss scaling, unscale and clip its gradients.

What happens inside a trainer is in `hook`, and `scale_loss` is in `losses`.
"""

import logging
import math
from typing import Optional

from mxnet.gluon import Trainer
from mxnet.optimizer import Optimizer

from ..errors import ArgumentError
from ..framework.wording import shown
from ..policy.active import chose_float32
from .attach import attach_hook, hook_of
from .finite import multiply, square_sum
from .hook import Stage
from .numbers import positive_count, positive_number
from .passes import passes
from .reduction import fresh_gradients
from .scaler import Scaler

logger = logging.getLogger("mxamp")

UNUSED_SCALER = "'auto' has chosen float32 here, which needs no loss scale: %r is not used"

__all__ = ["clip_grad_global_norm", "init_trainer", "unscale"]


def init_trainer(
    optimizer_or_trainer: Trainer,
    loss_scaler: Optional[Scaler] = None,
    max_consecutive_skips: Optional[int] = None,
) -> None:
    """Give a Gluon Trainer loss scaling.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    >>> amp.init_trainer(trainer, amp.LossScaler(init_scale=1024))
    >>> trainer.amp_loss_scale
    1024.0

    After it, `trainer.amp_loss_scale` is the scale of the next loss,
    `trainer.amp_last_step` the `StepReport` of the last update, and `trainer.amp_steps` and
    `trainer.amp_skips` count updates done and skipped. `save_states` and `load_states` carry the
    scaler and the counts.

    Parameters
    ----------
    optimizer_or_trainer : gluon.Trainer
        The trainer. Its `update_on_kvstore` is switched off, as updates there can't be skipped.
        An Optimizer is an error: the argument has the name that it has in `mxnet.contrib.amp`.
    loss_scaler : LossScaler, StaticLossScaler or NoScaler, optional
        By default a `LossScaler()` where the target dtype is float16, and for bfloat16, which has
        float32's range, a scale of 1. Steps with non-finite gradients are skipped either way.
        Where `init("auto")` has chosen float32, it is not used: the scale is 1, and no step is
        skipped.
    max_consecutive_skips : int, optional
        After this many skipped steps in a row, `step` raises a `StateError` that names the
        parameters whose gradients were the first to overflow. By default training goes on.

    Raises
    ------
    ArgumentError
        Not a Trainer, or not a scaler.
    StateError
        Mixed precision is off and no scaler is given; or the trainer has updated parameters on
        its kvstore already, or has to.

    A second call without a scaler does nothing; with one, the scaler is replaced.
    """
    trainer = optimizer_or_trainer
    if isinstance(trainer, Optimizer):
        raise ArgumentError(
            "init_trainer takes a gluon.Trainer; an Optimizer alone can't skip a step: make a "
            "Trainer with it, or wrap it with mxamp.decorate"
        )
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"init_trainer takes a gluon.Trainer, not {shown(trainer)}")
    if loss_scaler is not None and not isinstance(loss_scaler, Scaler):
        raise ArgumentError(
            "loss_scaler must be a LossScaler, StaticLossScaler or NoScaler, such as LossScaler() "
            f"or StaticLossScaler(128), not {shown(loss_scaler)}"
        )
    if max_consecutive_skips is not None:
        max_consecutive_skips = positive_count("max_consecutive_skips", max_consecutive_skips)
    if loss_scaler is not None and chose_float32():
        logger.info(UNUSED_SCALER, loss_scaler)
        loss_scaler = None
    attach_hook(trainer, loss_scaler, max_consecutive_skips)
    if hook_of(trainer).loss_scale != 1:
        passes.open()


def unscale(optimizer_or_trainer: Trainer) -> None:
    """Divide a trainer's gradients by the loss scale, to clip or look at them before the step.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        amp.unscale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in params], 1.0)
        trainer.step(batch_size)

    Covers all devices. A gradient that has overflowed is noted: the step is going to be skipped,
    even if what you do to the gradients hides it. Waits for the gradients. Raises `StateError`
    where gradients are not scaled, or are unscaled already. Float16 gradients (of parameters cast
    to float16) lose what the scale has kept.
    """
    hook_of(optimizer_or_trainer).unscale()


def clip_grad_global_norm(trainer: Trainer, max_norm: float) -> float:
    """Unscale a trainer's gradients and clip them to a global norm; return the norm before.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        norm = amp.clip_grad_global_norm(trainer, 1.0)
        trainer.step(1)

    The norm is that of all gradients together, reduced over devices first, so that every device
    clips by the same factor; `step` does not reduce them again. Where it is Inf or NaN nothing is
    clipped, and the step is going to be skipped. Waits for the gradients.

    With `step(batch_size)`, gradients are divided by the batch size after they have been clipped.

    Parameters
    ----------
    trainer : gluon.Trainer
        After `init_trainer`, `scale_loss` and the backward pass.
    max_norm : float
        Gradients with a larger norm are multiplied by `max_norm / norm`.

    Returns
    -------
    float
        The norm before clipping; Inf or NaN where the step is going to be skipped.

    Raises
    ------
    StateError
        The gradients are not scaled, or are unscaled already.
    """
    hook = hook_of(trainer)
    limit = positive_number("max_norm", max_norm)
    if hook.stage is not Stage.SCALED:
        hook.unscale()  # raises: there is nothing to clip, or it is unscaled already
    trainer.allreduce_grads()
    if hook.stage is Stage.SCALED:  # compression has taken the scale out already
        hook.unscale()
    gradients = [g for _, of_one in fresh_gradients(trainer._params) for g in of_one]
    first = trainer._contexts[0]
    norm = math.sqrt(square_sum([g for g in gradients if g.context == first]))
    if math.isfinite(norm) and norm > limit:
        multiply(gradients, limit / norm)
    return norm
