"""The hook into Gluon's Trainer: scaled losses in, unscaled and finite updates out.

`Trainer._update` asks `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. That question is all the hook needs: by then `step` has reduced the gradients
of all devices and set the optimizer's `rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is a state of the trainer:

    none ── scale_loss ──► scaled ── unscale ──► unscaled
      ▲                      │                      │
      └────────── step or update, done or skipped ──┘

A step without `scale_loss` finds "none" and is a plain step of MXNet's.
"""

import logging
import threading
from contextlib import contextmanager
from enum import Enum
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import Optimizer

from .autocast import active_policy, autocast
from .errors import ArgumentError, StateError
from .finite import all_finite
from .machine import dtype_name
from .scaler import LossScaler, NoScaler, StaticLossScaler

__all__ = ["StepReport", "init_trainer", "scale_loss", "unscale"]

logger = logging.getLogger("mxamp")

# So many names of parameters go into a log line.
SHOWN = 3

NO_POLICY = (
    "mixed precision is off, so init_trainer can't tell which loss scaler this trainer needs: "
    "call mxamp.init() first, or pass loss_scaler="
)
NOT_INITIALIZED = "this trainer has no loss scaler yet: call mxamp.init_trainer(trainer) first"
ON_KVSTORE = (
    "this trainer updates its parameters on the kvstore, where a gradient that overflowed can't "
    "be kept out any more: make it with Trainer(..., update_on_kvstore=False)"
)
STEP_BEFORE_SCALING = (
    "these gradients have been unscaled and not been used: call trainer.step() or update() "
    "before the next scale_loss"
)
NOTHING_TO_UNSCALE = (
    "there are no scaled gradients: unscale comes after scale_loss and backward, and before step"
)
UNSCALED_TWICE = "these gradients are unscaled already: unscale was called twice before the step"


class Stage(Enum):
    """Whether a trainer's gradients carry the loss scale."""

    NONE = "none"
    SCALED = "scaled"
    UNSCALED = "unscaled"


class StepReport(NamedTuple):
    """What became of an update: `trainer.amp_last_step`."""

    stepped: bool  #: False where it was skipped
    loss_scale: float  #: what the gradients carried
    next_loss_scale: float
    nonfinite: Tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN


class TrainerHook:
    """One trainer's loss scaling; what `trainer._amp_loss_scaler` is.

    `loss_scale` is the scale that the current gradients carry, as scripts written for
    `mxnet.contrib.amp` read it.
    """

    def __init__(self, trainer: Trainer, scaler: StaticLossScaler) -> None:
        self.trainer, self.scaler = trainer, scaler
        self.steps = self.skips = 0
        self._lock = threading.Lock()
        self._losses = 0  # scaled since the last update
        self._unscaled = False
        self._publish(None)

    @property
    def loss_scale(self) -> float:
        """The scale of the current gradients and of the next loss."""
        return self.scaler.loss_scale

    @property
    def stage(self) -> Stage:
        """Whether the gradients carry the scale now."""
        if not self._losses:
            return Stage.NONE
        return Stage.UNSCALED if self._unscaled else Stage.SCALED

    @contextmanager
    def scaling(self) -> Iterator[float]:
        """Yield the scale for losses whose gradients will carry it; an error takes that back."""
        with self._lock:
            if self.stage is Stage.UNSCALED:
                raise StateError(STEP_BEFORE_SCALING)
            self._losses += 1
        try:
            yield self.loss_scale
        except BaseException:
            with self._lock:
                self._losses = max(self._losses - 1, 0)
            raise

    def unscale(self) -> None:
        """Divide the gradients of all devices by the scale."""
        if self.stage is Stage.NONE:
            raise StateError(NOTHING_TO_UNSCALE)
        if self.stage is Stage.UNSCALED:
            raise StateError(UNSCALED_TWICE)
        inverse = 1.0 / self.loss_scale
        with autograd.pause(), autocast(enabled=False):
            for _, gradients in _fresh_gradients(self.trainer._params):
                for gradient in gradients:
                    _multiply(gradient, inverse)
        self._unscaled = True

    def has_overflow(self, params: Sequence[Parameter]) -> bool:
        """Answer `Trainer._update`: True, and the update is skipped."""
        stage = self.stage
        if stage is Stage.NONE:
            return False
        scale = self.loss_scale
        fresh = _fresh_gradients(params)
        finite = all_finite([g for _, gradients in fresh for g in gradients])
        if finite and stage is Stage.SCALED:
            self.trainer._optimizer.rescale_grad /= scale
        names = () if finite else tuple(p.name for p, grads in fresh if not all_finite(grads))
        if not finite:
            # Else a later step with ignore_stale_grad=True would use what was skipped here.
            for param, _ in fresh:
                for data in param.list_data():
                    data._fresh_grad = False
        after = self.scaler.update(finite)
        self._losses, self._unscaled = 0, False
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        self._publish(StepReport(finite, scale, after, names))
        _log(self.trainer.amp_last_step)
        return not finite

    def _publish(self, report: Optional[StepReport]) -> None:
        self.trainer.amp_loss_scale = self.loss_scale
        self.trainer.amp_last_step = report


def init_trainer(
    optimizer_or_trainer: Trainer, loss_scaler: Optional[StaticLossScaler] = None
) -> None:
    """Give a Gluon Trainer loss scaling.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    >>> amp.init_trainer(trainer, amp.LossScaler(init_scale=1024))
    >>> trainer.amp_loss_scale
    1024.0

    After it, `trainer.amp_loss_scale` is the scale of the current gradients and
    `trainer.amp_last_step` the `StepReport` of the last update.

    Parameters
    ----------
    optimizer_or_trainer : gluon.Trainer
        Or a subclass. Its `update_on_kvstore` is switched off, as updates there can't be skipped.
        An Optimizer is refused, whatever the name says, as in `mxnet.contrib.amp`.
    loss_scaler : LossScaler, StaticLossScaler or NoScaler, optional
        By default a `LossScaler()` where the target dtype is float16, and for bfloat16, which has
        float32's range, a scale of 1. Steps with non-finite gradients are skipped either way.

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
            "init_trainer takes a gluon.Trainer; an Optimizer alone has no place to skip a step"
        )
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"init_trainer takes a gluon.Trainer, not {trainer!r}")
    if loss_scaler is not None and not isinstance(loss_scaler, StaticLossScaler):
        raise ArgumentError(
            f"loss_scaler is a LossScaler, StaticLossScaler or NoScaler, not {loss_scaler!r}"
        )
    hook = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(hook, TrainerHook) and hook.trainer is trainer:
        if loss_scaler is not None:
            hook.scaler = loss_scaler
            hook._publish(trainer.amp_last_step)
        return
    if loss_scaler is None:
        policy = active_policy()
        if policy is None:
            raise StateError(NO_POLICY)
        loss_scaler = LossScaler() if policy.target_dtype == "float16" else NoScaler()
    _keep_updates_off_kvstore(trainer)
    trainer._amp_original_scale = trainer._scale
    trainer._amp_loss_scaler = TrainerHook(trainer, loss_scaler)


@contextmanager
def scale_loss(loss: Any, optimizer_or_trainer: Trainer) -> Iterator[Any]:
    """Yield the loss times the trainer's loss scale; the trainer will know of it.

    ::

        with autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(batch_size)

    Parameters
    ----------
    loss : NDArray, or lists, tuples and dicts of them
        Comes back in the same containers. A float16 loss is scaled, and comes back, in float32.
    optimizer_or_trainer : gluon.Trainer
        After `init_trainer`.

    Works inside `autograd.record()` and outside. Several losses may be scaled before one step, in
    several threads too: the scale changes in steps only. An error inside leaves the trainer as it
    was.
    """
    with _hook(optimizer_or_trainer).scaling() as scale:
        with autograd.record(train_mode=autograd.is_training()):
            scaled = _map_losses(loss, lambda array: _scaled(array, scale))
        yield scaled


def unscale(optimizer_or_trainer: Trainer) -> None:
    """Divide a trainer's gradients by the loss scale, to clip or look at them before the step.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        amp.unscale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in params], 1.0)
        trainer.step(batch_size)

    Covers all devices. Raises `StateError` where gradients are not scaled, or are unscaled
    already. Float16 gradients (of parameters cast to float16) lose what the scale has kept.
    """
    _hook(optimizer_or_trainer).unscale()


def _hook(trainer: Any) -> TrainerHook:
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"a gluon.Trainer is needed here, not {trainer!r}")
    hook = getattr(trainer, "_amp_loss_scaler", None)
    if not isinstance(hook, TrainerHook):
        raise StateError(NOT_INITIALIZED)
    return hook


def _keep_updates_off_kvstore(trainer: Trainer) -> None:
    if trainer._kv_initialized:
        if trainer._kvstore is not None and trainer._update_on_kvstore:
            raise StateError(ON_KVSTORE)
        return
    if trainer._contains_sparse_weight:
        raise StateError(ON_KVSTORE + " (row_sparse parameters, which need it, can't be scaled)")
    settings = trainer._kvstore_params
    if settings["update_on_kvstore"]:
        logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
    settings["update_on_kvstore"] = False


def _fresh_gradients(params: Sequence[Parameter]) -> List[Tuple[Parameter, List[NDArray]]]:
    """Return the gradients, on all devices, that backward has written since the last step."""
    fresh = []
    for param in params:
        if param.grad_req == "null" or param._grad is None:
            continue
        pairs = zip(param.list_data(), param.list_grad())
        gradients = [gradient for data, gradient in pairs if data._fresh_grad]
        if gradients:
            fresh.append((param, gradients))
    return fresh


def _multiply(array: NDArray, factor: float) -> None:
    array *= factor


def _map_losses(loss: Any, function: Callable[[NDArray], NDArray]) -> Any:
    if isinstance(loss, NDArray):
        return function(loss)
    if isinstance(loss, dict):
        return type(loss)((key, _map_losses(value, function)) for key, value in loss.items())
    if isinstance(loss, tuple) and hasattr(loss, "_fields"):
        return type(loss)(*(_map_losses(value, function) for value in loss))
    if isinstance(loss, (list, tuple)):
        return type(loss)(_map_losses(value, function) for value in loss)
    raise ArgumentError(f"a loss is an NDArray, or lists, tuples and dicts of them, not {loss!r}")


def _scaled(loss: NDArray, scale: float) -> NDArray:
    if dtype_name(loss.dtype) not in ("float32", "float64"):
        loss = loss.astype("float32")  # 65504 is float16's largest number
    return loss * scale if scale != 1 else loss


def _log(report: StepReport) -> None:
    change = f"loss scale {report.loss_scale:g} -> {report.next_loss_scale:g}"
    if not report.stepped:
        more = ", ..." if len(report.nonfinite) > SHOWN else ""
        names = ", ".join(report.nonfinite[:SHOWN]) + more
        logger.info("step skipped, gradients of %s are not finite; %s", names, change)
    elif report.next_loss_scale != report.loss_scale:
        logger.info(change)
