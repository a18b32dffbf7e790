"""Giving a trainer its loss scaling: the scaler it gets, and what is switched off for it."""

import logging
from typing import Any, Optional

from mxnet.gluon import Trainer

from ..errors import ArgumentError, StateError
from ..framework.distributed import is_horovod_optimizer
from ..framework.wording import shown
from ..policy.active import chose_float32, current_policy
from .asking import ask_before_updates
from .checkpoint import taken_state
from .finite import all_finite, multiply
from .float32 import Float32Scaler
from .hook import TrainerHook
from .reduction import check_trainer, fresh_gradients
from .scaler import LossScaler, NoScaler, Scaler

__all__ = ["attach_hook", "hook_in_force", "hook_of"]

logger = logging.getLogger("mxamp")

NO_POLICY = (
    "mixed precision is off, so init_trainer can't tell which loss scaler this trainer needs: "
    "call mxamp.init() first, or pass loss_scaler="
)
NOT_INITIALIZED = "this trainer has no loss scaler yet: call mxamp.init_trainer(trainer) first"
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
OTHER_SCALE_LOSS = (
    "mxamp scales the losses of this trainer, and this scale_loss is mxnet.contrib.amp's own: use "
    "mxamp.scale_loss, or import scale_loss after mxamp.patch_contrib()"
)


class _OriginalScale(float):
    """A trainer's own `_scale`, which the `scale_loss` of `mxnet.contrib.amp` can't use.

    That one divides it by the loss scale, and leaves the result in `trainer._scale`. mxamp divides
    too: updates would be far too small.
    """

    def __truediv__(self, other: Any) -> float:
        raise StateError(OTHER_SCALE_LOSS)


def attach_hook(
    trainer: Trainer,
    loss_scaler: Optional[Scaler],
    max_consecutive_skips: Optional[int] = None,
    scaled_by: str = "init_trainer",
    after_backward: bool = False,
) -> None:
    """Give a trainer the hook of `init_trainer`, for losses that the API `scaled_by` scales.

    A trainer that has one keeps it, with what is given replaced. One that has loaded states goes on
    from those, whatever scaler is given. `after_backward` tells that the gradients that are there
    come from a loss that this API has scaled.
    """
    hook = hook_in_force(trainer)
    if hook is not None and hook.trainer is trainer:
        hook.check_scaled_by(scaled_by)
        if isinstance(hook.scaler, Float32Scaler) and current_policy() is not None:
            loss_scaler = loss_scaler or _default_scaler()
        if loss_scaler is not None:
            _make_ready(trainer, loss_scaler)
            hook.scaler = loss_scaler
            hook.publish(trainer.amp_last_step)
        if max_consecutive_skips is not None:
            hook.watch.limit = max_consecutive_skips
        return
    scaler = loss_scaler if loss_scaler is not None else _default_scaler()
    _make_ready(trainer, scaler)
    hook = TrainerHook(trainer, scaler, max_consecutive_skips, scaled_by)
    retired = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(retired, TrainerHook) and retired.trainer is trainer:
        hook.take_over(retired)
    saved = taken_state(trainer) or (hook.loaded if loss_scaler is None else None)
    if saved is not None:
        hook.load_state_dict(saved)
    left = _take_from_contrib(trainer)
    _attach(trainer, hook)
    if left is not None and not after_backward:
        pending = [g for _, of_one in fresh_gradients(trainer._params) for g in of_one]
        multiply(pending, 1.0 / left)
        if not all_finite(pending):
            hook.mark_scaled()  # the next step is skipped, as it would have been


def _default_scaler() -> Scaler:
    policy = current_policy()
    if policy is None and chose_float32():
        return Float32Scaler()
    if policy is None:
        raise StateError(NO_POLICY)
    return LossScaler() if policy.target_dtype == "float16" else NoScaler()


def hook_in_force(trainer: Any) -> Optional[TrainerHook]:
    """Return a trainer's hook, None where it has none, or that of an automatic run that ended."""
    hook = getattr(trainer, "_amp_loss_scaler", None)
    return hook if isinstance(hook, TrainerHook) and not hook.retired else None


def hook_of(trainer: Any) -> TrainerHook:
    """Return the hook that `init_trainer` gave to a trainer."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"the trainer must be a gluon.Trainer, not {shown(trainer)}")
    hook = hook_in_force(trainer)
    if hook is None:
        raise StateError(NOT_INITIALIZED)
    return hook


def _attach(trainer: Trainer, hook: TrainerHook) -> None:
    """Put the hook where MXNet asks for it, and in the way of the trainer's files."""
    # Methods of the hook, not functions made here: so that a copied trainer has its own.
    trainer.save_states, trainer.load_states = hook.save_states, hook.load_states
    trainer._allreduce_grads = hook.reduce
    trainer._amp_original_scale = _OriginalScale(trainer._scale)
    trainer._amp_loss_scaler = hook
    ask_before_updates(trainer)


def _take_from_contrib(trainer: Trainer) -> Optional[float]:
    """Give a trainer that `mxnet.contrib.amp` has scaled its own `_scale` back.

    Returns the loss scale that was left there, and that gradients waiting for their step carry.
    """
    original = getattr(trainer, "_amp_original_scale", None)
    if original is None or isinstance(original, _OriginalScale):
        return None
    last = getattr(trainer._amp_loss_scaler, "loss_scale", 1.0)
    # The step may have changed the scale since. Any other `_scale` has been set by the user.
    scales = [s for s in (last, last * 2, last / 2) if trainer._scale == original / s]
    if scales or trainer._scale == 1:  # 1 is what `unscale` leaves
        trainer._scale = original
    return scales[0] if scales else None


def _make_ready(trainer: Trainer, scaler: Scaler) -> None:
    """Keep a trainer's updates where they can be skipped; raise where `scaler` has to and can't."""
    if scaler.checks and is_horovod_optimizer(trainer._optimizer):
        raise StateError(HOROVOD_OPTIMIZER)
    _keep_updates_off_kvstore(trainer, needed=scaler.checks)
    if scaler.checks:
        check_trainer(trainer)


def _keep_updates_off_kvstore(trainer: Trainer, needed: bool) -> None:
    """Move updates off the kvstore; raise where that can't be done and is `needed`."""
    try:
        _move_updates_off_kvstore(trainer)
    except StateError:
        if needed:
            raise


def _move_updates_off_kvstore(trainer: Trainer) -> None:
    if trainer._kv_initialized:
        if trainer._kvstore is not None and trainer._update_on_kvstore:
            raise StateError(ON_KVSTORE)
        return
    if trainer._contains_sparse_weight:
        raise StateError(ON_KVSTORE + " (row_sparse parameters, which need it, can't be scaled)")
    kvstore = trainer._kvstore_params["kvstore"]
    if "async" in str(getattr(kvstore, "type", kvstore)):
        raise StateError(ASYNCHRONOUS)
    settings = trainer._kvstore_params
    if settings["update_on_kvstore"]:
        logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
    settings["update_on_kvstore"] = False
