"""Loss scaling for a Gluon Trainer, from `init_trainer` and `scale_loss` to the step.

`state` holds the trainer's state.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, contextmanager
from typing import Any, Iterator, Sequence

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import Optimizer

from ..errors import ArgumentError, StateError
from ..framework.arrays import dtype_of, map_arrays
from ..framework.contrib_amp import RefusedScale, check_contrib_is_off
from ..framework.distributed import is_horovod_optimizer
from ..framework.keywords import checked_call
from ..framework.wording import shortened, shown
from ..policy.active import chose_float32, current_policy
from .checkpoint import pop_scaler_state
from .distributed import check_kvstore
from .finite import multiply, square_sum
from .optimizer_states import share_step_counts
from .passes import mark_of, marked, marks_behind, passes
from .scaler import LossScaler, NoScaler, positive_number, unchecked_scaler
from .state import Stage, State

logger = logging.getLogger("mxamp")

NO_POLICY = (
    "mixed precision is off, so init_trainer can't choose a loss scaler for this trainer: "
    "call mxamp.init() first, or pass loss_scaler="
)
NOT_INITIALIZED = (
    "the trainer of {names} has no loss scaler: call mxamp.init_trainer(trainer) with it first"
)
UNSKIPPABLE = (
    "this trainer updates its parameters {where}, where a gradient that overflowed can't be kept "
    "out: {instead}"
)
_OFF_KVSTORE = "make it with Trainer(..., update_on_kvstore=False)"
_SYNCHRONOUS = "use a synchronous kvstore, such as 'dist_sync' or 'device'"
_HOROVOD = "make it with hvd.DistributedTrainer, and without hvd.DistributedOptimizer"
NO_LOSS = "a loss must be an NDArray, or lists, tuples and dicts of NDArrays, not {given}"
SCALED_ALREADY = (
    "this loss has been scaled already: scale each loss once, and call backward on the scaled loss"
)


@checked_call
def init_trainer(
    optimizer_or_trainer: Trainer,
    loss_scaler: LossScaler | None = None,
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

    Raises
    ------
    ArgumentError
        Not a Trainer, or not a scaler.
    StateError
        Mixed precision is off and no scaler is given; or the trainer has updated parameters on
        its kvstore already, or has to.
    """
    trainer = optimizer_or_trainer
    if not isinstance(trainer, Trainer):
        hint = "; call it once for each" if isinstance(trainer, (list, tuple)) else ""
        if isinstance(trainer, Optimizer):
            hint = ": an Optimizer alone can't skip a step; make a Trainer with it, or decorate it"
        raise ArgumentError(f"init_trainer takes a gluon.Trainer, not {shown(trainer)}{hint}")
    if loss_scaler is not None and not isinstance(loss_scaler, LossScaler):
        raise ArgumentError(
            "loss_scaler must be a LossScaler, StaticLossScaler or NoScaler of mxamp, such as "
            f"LossScaler() or StaticLossScaler(128), not {shown(loss_scaler)}"
        )
    attach_hook(trainer, None if chose_float32() else loss_scaler)
    if hook_of(trainer).loss_scale != 1:
        passes.open()


@checked_call
def unscale(optimizer_or_trainer: Trainer) -> None:
    """Divide a trainer's gradients by the loss scale, to clip or read them before the step.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        amp.unscale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 1.0)
        trainer.step(batch_size)

    Covers all devices. If a gradient has overflowed, the step will be skipped, even if you change
    the gradient to a finite value. Waits for the gradients. Float16 gradients (of parameters cast
    to float16) lose the small values that the scale has preserved.

    Parameters
    ----------
    optimizer_or_trainer : gluon.Trainer
        After `init_trainer`, `scale_loss` and the backward pass.

    Raises
    ------
    StateError
        The gradients are not scaled, or are unscaled already.
    """
    hook_of(optimizer_or_trainer).unscale()


@checked_call
def clip_grad_global_norm(trainer: Trainer, max_norm: float) -> float:
    """Unscale and clip a trainer's gradients; return their global norm before clipping.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        norm = amp.clip_grad_global_norm(trainer, 1.0)
        trainer.step(1)

    The norm is that of all gradients together. Gradients are summed over devices first, so that
    every device clips by the same factor; `step` does not sum them again. If the norm is Inf or
    NaN, nothing is clipped, and the step will be skipped. Waits for the gradients.

    `step(batch_size)` divides gradients by the batch size after they have been clipped.

    Parameters
    ----------
    trainer : gluon.Trainer
        After `init_trainer`, `scale_loss` and the backward pass.
    max_norm : float
        Gradients with a larger norm are multiplied by `max_norm / norm`. Inf clips nothing, to
        read the norm alone.

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
    limit = max_norm if max_norm == math.inf else positive_number("max_norm", max_norm)
    hook.check("unscale")
    trainer.allreduce_grads()
    hook.unscale()
    gradients = [entry.gradient for entry in hook.gradients.fresh()]
    first = trainer._contexts[0]
    norm = math.sqrt(square_sum([g for g in gradients if g.context == first]))
    if math.isfinite(norm) and norm > limit:
        multiply(gradients, limit / norm)
    return norm


def active_hook(trainer: Any) -> State | None:
    """Return a trainer's hook; None if it has none, or a retired one."""
    hook = getattr(trainer, "_amp_loss_scaler", None)
    return hook if isinstance(hook, State) and not hook.retired else None


def hook_of(trainer: Any) -> State:
    """Return a trainer's hook; raise if the trainer has no loss scaling."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"the trainer must be a gluon.Trainer, not {shown(trainer)}")
    hook = active_hook(trainer)
    if hook is None:
        names = shortened([param.name for param in trainer._params], 1)
        raise StateError(NOT_INITIALIZED.format(names=names))
    return hook


def attach_hook(
    trainer: Trainer, loss_scaler: LossScaler | None, scaled_by: str = "init_trainer"
) -> None:
    """Give a trainer a hook for losses that the API `scaled_by` scales, or update its hook.

    An existing hook stays, with the given scaler. A trainer that has loaded states resumes from
    them, whatever scaler is given.
    """
    check_contrib_is_off()
    hook = active_hook(trainer)
    if hook is not None and hook.trainer is trainer:
        hook.check_scaled_by(scaled_by)
        if not hook.scaler.checks and current_policy() is not None:
            loss_scaler = loss_scaler or _default_scaler()
        if loss_scaler is not None:
            _keep_updates_skippable(trainer, loss_scaler)
            hook.scaler = loss_scaler
            hook.publish(trainer.amp_last_step)
        return
    scaler = loss_scaler or _default_scaler()
    _keep_updates_skippable(trainer, scaler)
    hook = State(trainer, scaler, scaled_by)
    retired = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(retired, State) and retired.trainer is trainer:
        hook.take_over(retired)
    share_step_counts(trainer)
    saved = pop_scaler_state(trainer) or (hook.loaded if loss_scaler is None else None)
    if saved is not None:
        hook.load_state_dict(saved)
    _install(trainer, hook)


def _default_scaler() -> LossScaler:
    """Return the scaler for the current policy; raise `StateError` if mixed precision is off."""
    policy = current_policy()
    if policy is None and chose_float32():
        return unchecked_scaler()
    if policy is None:
        raise StateError(NO_POLICY)
    return LossScaler() if policy.target_dtype == "float16" else NoScaler()


def _install(trainer: Trainer, hook: State) -> None:
    """Install the hook as the trainer's loss scaler, and wrap its save, load and allreduce."""
    # Methods of the hook, not closures: a copied trainer gets its own.
    trainer.save_states, trainer.load_states = hook.save_states, hook.load_states
    trainer._allreduce_grads = hook.reduce
    trainer._amp_loss_scaler, trainer._amp_original_scale = hook, RefusedScale()


def _keep_updates_skippable(trainer: Trainer, scaler: LossScaler) -> None:
    """Move updates off the kvstore; raise if they can't be skipped and `scaler` needs that."""
    settings, obstacle = trainer._kvstore_params, None
    kvstore = settings["kvstore"]
    if scaler.checks and is_horovod_optimizer(trainer._optimizer):
        obstacle = "by Horovod's optimizer", _HOROVOD
    elif trainer._kv_initialized:
        if trainer._kvstore is not None and trainer._update_on_kvstore:
            obstacle = "on the kvstore", _OFF_KVSTORE
    elif trainer._contains_sparse_weight:
        obstacle = "on the kvstore because row_sparse parameters need it", _OFF_KVSTORE
    elif "async" in str(getattr(kvstore, "type", kvstore)):
        obstacle = "on an asynchronous kvstore's servers", _SYNCHRONOUS
    if obstacle is None:
        if settings["update_on_kvstore"]:
            logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
        settings["update_on_kvstore"] = False
    elif scaler.checks:
        raise StateError(UNSKIPPABLE.format(where=obstacle[0], instead=obstacle[1]))
    if scaler.checks:
        check_kvstore(trainer)


@checked_call
@contextmanager
def scale_loss(loss: Any, optimizer_or_trainer: Trainer | Sequence[Trainer]) -> Iterator[Any]:
    """Yield the loss times the trainer's loss scale, and mark the gradients as scaled.

    ::

        amp.init_trainer(trainer, amp.LossScaler())
        with autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(batch_size)

    Parameters
    ----------
    loss : NDArray, or lists, tuples and dicts of them
        The scaled loss has the same containers. A float16 loss is scaled to a float32 loss.
    optimizer_or_trainer : gluon.Trainer, or list of gluon.Trainer
        The trainers of all parameters that the loss depends on, each after `init_trainer`. The loss
        is scaled by the smallest of their scales. Each trainer checks its own gradients: if one
        overflows, it skips its step and lowers its scale.

    Works inside `autograd.record()` and outside. Several losses may be scaled before one step, also
    in several threads: the scale changes only in steps. An error inside leaves the trainer
    unchanged. Scaling a loss twice raises `StateError`. So does the step of a trainer with
    gradients of the scaled loss that was not passed here.
    """
    trainers = optimizer_or_trainer
    listed = trainers if isinstance(trainers, (list, tuple)) else [trainers]
    hooks = list(dict.fromkeys(hook_of(trainer) for trainer in listed))
    if not hooks:
        raise ArgumentError("scale_loss takes a gluon.Trainer or a list of them, not an empty list")
    for hook in hooks:
        hook.check_scaled_by("scale_loss", "init_trainer", "initialize")
    # A NoScaler scales by 1 because bfloat16 needs no scale; a larger one does no harm.
    scales = [hook.next_scale for hook in hooks if hook.scaler.scales]
    scale = min(scales, default=hooks[0].next_scale)
    others = any(hook.stage is Stage.SCALED for hook in hooks)
    scaled, unscaled = scale_losses(loss, scale, [hook.scaler.number for hook in hooks], others)
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.scaling(scale, unscaled))
        yield scaled


def scale_losses(
    loss: Any, scale: float, owners: Sequence[int], others: bool
) -> tuple[Any, list[NDArray]]:
    """Return marked losses times a scale, in the same containers, and the unscaled ones.

    Raises `StateError` if one is scaled already. With `others`, losses scaled since the last step
    may lie behind it: this reads its whole graph.
    """
    unscaled: list[NDArray] = []

    def scaled_in_float32(array: NDArray) -> NDArray:
        if mark_of(array) or (others and marks_behind(array)):
            raise StateError(SCALED_ALREADY)
        unscaled.append(array.detach())
        if dtype_of(array) not in ("float32", "float64"):
            array = array.astype("float32")  # 65504 is float16's largest number
        return marked(array, scale, owners)

    with autograd.record(train_mode=autograd.is_training()):
        mapped = map_arrays(loss, scaled_in_float32, _raise_no_loss)
    if not unscaled:
        _raise_no_loss(loss)
    if scale != 1:
        passes.open()
    return _Losses(mapped) if type(mapped) is list else mapped, unscaled


class _Losses(list):  # type: ignore[type-arg]
    """A list of losses with the method `backward` that one loss has."""

    def backward(self, *args: Any, **keywords: Any) -> None:
        """Compute the gradients of all losses: `autograd.backward` of the list."""
        autograd.backward(self, *args, **keywords)


def _raise_no_loss(value: Any) -> Any:
    raise ArgumentError(NO_LOSS.format(given=shown(value)))
