"""Loss scaling for a Gluon Trainer: `init_trainer`, `unscale` and `clip_grad_global_norm`.

`hook` holds the trainer's state, and `losses` scales its losses.
"""

import logging
import math
from typing import Any, Optional

from mxnet.contrib.amp.loss_scaler import LossScaler as StockScaler
from mxnet.gluon import Trainer
from mxnet.optimizer import Optimizer

from ..errors import ArgumentError, StateError
from ..framework.distributed import is_horovod_optimizer
from ..framework.wording import shortened, shown
from ..policy.active import chose_float32, current_policy
from .checkpoint import taken_state
from .distributed import check_trainer
from .finite import multiply, square_sum
from .hook import TrainerHook, check_before_updates
from .passes import fresh_gradients, passes
from .scaler import Float32Scaler, LossScaler, NoScaler, Scaler, count, positive_number

__all__ = [
    "attach_hook",
    "clip_grad_global_norm",
    "hook_in_force",
    "hook_of",
    "init_trainer",
    "unscale",
]

logger = logging.getLogger("mxamp")

UNUSED_SCALER = "'auto' has chosen float32 here, which needs no loss scale: %r is not used"
NO_POLICY = (
    "mixed precision is off, so init_trainer can't choose a loss scaler for this trainer: "
    "call mxamp.init() first, or pass loss_scaler="
)
NOT_INITIALIZED = (
    "the trainer of {names} has no loss scaler: call mxamp.init_trainer(trainer) with it first"
)
ON_KVSTORE = (
    "this trainer updates its parameters on the kvstore, where a gradient that overflowed can't "
    "be kept out any more: make it with Trainer(..., update_on_kvstore=False)"
)
ASYNCHRONOUS = (
    "an asynchronous kvstore updates parameters on its servers, where a gradient that overflowed "
    "can't be kept out: use a synchronous one, such as 'dist_sync' or 'device'"
)
HOROVOD_OPTIMIZER = (
    "the optimizer of this trainer has Horovod sum the gradients in each update, where a gradient "
    "that overflowed in one worker alone can't be kept out in all: make the trainer with "
    "hvd.DistributedTrainer, and with the optimizer as it was before hvd.DistributedOptimizer"
)
STOCK_SCALER = (
    "mxnet.contrib.amp has initialized this trainer already and scales its losses: remove its "
    "init_trainer, or call mxamp.patch_contrib() before it"
)
OTHER_SCALE_LOSS = (
    "mxamp scales the losses of this trainer, and this scale_loss is mxnet.contrib.amp's own: use "
    "mxamp.scale_loss, or import scale_loss after mxamp.patch_contrib()"
)


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

    Afterwards `trainer.amp_loss_scale` is the scale of the next loss, `trainer.amp_last_step` the
    `StepReport` of the last update, and `trainer.amp_steps` and `trainer.amp_skips` count updates
    done and skipped. `save_states` and `load_states` include the scaler and the counts.

    A second call without a scaler does nothing; with one, it replaces the scaler.

    Parameters
    ----------
    optimizer_or_trainer : gluon.Trainer
        The trainer. Its `update_on_kvstore` is switched off, as updates there can't be skipped.
        An Optimizer is an error: the argument keeps its name from `mxnet.contrib.amp`.
    loss_scaler : LossScaler, StaticLossScaler or NoScaler, optional
        By default `LossScaler()` for float16, and a scale of 1 for bfloat16, which has float32's
        range. Steps with non-finite gradients are skipped either way. Where `init("auto")` has
        chosen float32, the scaler is not used: the scale is 1, and no step is skipped.
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
        max_consecutive_skips = count("max_consecutive_skips", max_consecutive_skips, least=1)
    if loss_scaler is not None and chose_float32():
        logger.info(UNUSED_SCALER, loss_scaler)
        loss_scaler = None
    attach_hook(trainer, loss_scaler, max_consecutive_skips)
    if hook_of(trainer).loss_scale != 1:
        passes.open()


def unscale(optimizer_or_trainer: Trainer) -> None:
    """Divide a trainer's gradients by the loss scale, to clip or read them before the step.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        amp.unscale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in params], 1.0)
        trainer.step(batch_size)

    Covers all devices. If a gradient has overflowed, the step will be skipped, even if you change
    the gradient to a finite value. Waits for the gradients. Raises `StateError` if the gradients
    are not scaled, or are unscaled already. Float16 gradients (of parameters cast to float16) lose
    the small values that the scale has preserved.
    """
    hook_of(optimizer_or_trainer).unscale()


def clip_grad_global_norm(trainer: Trainer, max_norm: float) -> float:
    """Unscale a trainer's gradients and clip them to a global norm; return the norm before.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        norm = amp.clip_grad_global_norm(trainer, 1.0)
        trainer.step(1)

    The norm is that of all gradients together. They are reduced over devices first, so that every
    device clips by the same factor; `step` does not reduce them again. If the norm is Inf or NaN,
    nothing is clipped, and the step will be skipped. Waits for the gradients.

    `step(batch_size)` divides gradients by the batch size after they have been clipped.

    Parameters
    ----------
    trainer : gluon.Trainer
        After `init_trainer`, `scale_loss` and the backward pass.
    max_norm : float
        Gradients with a larger norm are multiplied by `max_norm / norm`.

    Returns
    -------
    float
        The norm before clipping; Inf or NaN if the step will be skipped.

    Raises
    ------
    StateError
        The gradients are not scaled, or are unscaled already.
    """
    hook = hook_of(trainer)
    limit = positive_number("max_norm", max_norm)
    hook.check("unscale")
    trainer.allreduce_grads()
    hook.unscale()
    gradients = [g for _, of_one in fresh_gradients(trainer._params) for g in of_one]
    first = trainer._contexts[0]
    norm = math.sqrt(square_sum([g for g in gradients if g.context == first]))
    if math.isfinite(norm) and norm > limit:
        multiply(gradients, limit / norm)
    return norm


def hook_in_force(trainer: Any) -> Optional[TrainerHook]:
    """Return a trainer's hook; None if it has none, or only that of an API that has ended."""
    hook = getattr(trainer, "_amp_loss_scaler", None)
    return hook if isinstance(hook, TrainerHook) and not hook.retired else None


def hook_of(trainer: Any) -> TrainerHook:
    """Return a trainer's hook; raise if the trainer has no loss scaling."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"the trainer must be a gluon.Trainer, not {shown(trainer)}")
    hook = hook_in_force(trainer)
    if hook is None:
        names = shortened([param.name for param in trainer._params], 1)
        raise StateError(NOT_INITIALIZED.format(names=names))
    return hook


def attach_hook(
    trainer: Trainer,
    loss_scaler: Optional[Scaler],
    max_consecutive_skips: Optional[int] = None,
    scaled_by: str = "init_trainer",
) -> None:
    """Give a trainer a hook for losses that the API `scaled_by` scales.

    An existing hook stays, with the given scaler and limit. A trainer that has loaded states
    resumes from them, whatever scaler is given.
    """
    hook = hook_in_force(trainer)
    if hook is not None and hook.trainer is trainer:
        hook.check_scaled_by(scaled_by)
        if isinstance(hook.scaler, Float32Scaler) and current_policy() is not None:
            loss_scaler = loss_scaler or _default_scaler()
        if loss_scaler is not None:
            _keep_updates_skippable(trainer, loss_scaler)
            hook.scaler = loss_scaler
            hook.publish(trainer.amp_last_step)
        if max_consecutive_skips is not None:
            hook.max_consecutive_skips = max_consecutive_skips
        return
    if isinstance(getattr(trainer, "_amp_loss_scaler", None), StockScaler):
        raise StateError(STOCK_SCALER)
    scaler = loss_scaler if loss_scaler is not None else _default_scaler()
    _keep_updates_skippable(trainer, scaler)
    hook = TrainerHook(trainer, scaler, max_consecutive_skips, scaled_by)
    retired = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(retired, TrainerHook) and retired.trainer is trainer:
        hook.take_over(retired)
    saved = taken_state(trainer) or (hook.loaded if loss_scaler is None else None)
    if saved is not None:
        hook.load_state_dict(saved)
    _install(trainer, hook)


def _default_scaler() -> Scaler:
    policy = current_policy()
    if policy is None and chose_float32():
        return Float32Scaler()
    if policy is None:
        raise StateError(NO_POLICY)
    return LossScaler() if policy.target_dtype == "float16" else NoScaler()


class _OriginalScale(float):
    """A trainer's `_scale`, on which the `scale_loss` of `mxnet.contrib.amp` fails.

    contrib divides it by the loss scale and leaves the result in `trainer._scale`. mxamp divides
    too, so updates would be far too small.
    """

    def __truediv__(self, other: Any) -> float:
        raise StateError(OTHER_SCALE_LOSS)


def _install(trainer: Trainer, hook: TrainerHook) -> None:
    """Install the hook as the trainer's loss scaler, and wrap its save, load and allreduce."""
    # Methods of the hook, not closures: a copied trainer gets its own.
    trainer.save_states, trainer.load_states = hook.save_states, hook.load_states
    trainer._allreduce_grads = hook.reduce
    trainer._amp_original_scale = _OriginalScale(trainer._scale)
    trainer._amp_loss_scaler = hook
    check_before_updates(trainer)


def _keep_updates_skippable(trainer: Trainer, scaler: Scaler) -> None:
    """Move updates off the kvstore; raise if they can't be skipped and `scaler` needs that."""
    if scaler.checks and is_horovod_optimizer(trainer._optimizer):
        raise StateError(HOROVOD_OPTIMIZER)
    obstacle = _obstacle(trainer)
    if obstacle is None:
        if trainer._kvstore_params["update_on_kvstore"]:
            logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
        trainer._kvstore_params["update_on_kvstore"] = False
    elif scaler.checks:
        raise StateError(obstacle)
    if scaler.checks:
        check_trainer(trainer)


def _obstacle(trainer: Trainer) -> Optional[str]:
    """Return why a trainer's updates can't be kept off its kvstore; None if they can."""
    if trainer._kv_initialized:
        updates_there = trainer._kvstore is not None and trainer._update_on_kvstore
        return ON_KVSTORE if updates_there else None
    if trainer._contains_sparse_weight:
        return ON_KVSTORE + " (row_sparse parameters, which need it, can't be scaled)"
    kvstore = trainer._kvstore_params["kvstore"]
    return ASYNCHRONOUS if "async" in str(getattr(kvstore, "type", kvstore)) else None
