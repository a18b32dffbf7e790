"""Loss scaling for a Gluon Trainer, from `init_trainer` and `scale_loss` to the step.

`Trainer._update` calls `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. By then `step` has reduced the gradients of all devices and set the optimizer's
`rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is a state of the trainer:

    none ── a loss is scaled ──► scaled ── unscale ──► unscaled
      ▲                          │    ▲                 │    │
      │                          │    └ a loss is scaled┘    │
      └────────── step or update, done or skipped ───────────┘

With a `GradScaler` the step leads to "stepped", and the scaler's `update()` from there to "none".
A backward pass from a loss that was scaled before the last step leads to "scaled" too. Which scale
each gradient carries is recorded by the backward passes (see `passes`). A step in "none" is
MXNet's plain step.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, Sequence

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LBSGD

from ..errors import ArgumentError, StateError
from ..framework.arrays import as_float, as_list, dtype_of
from ..framework.contrib_amp import RefusedScale, check_contrib_is_off
from ..framework.distributed import is_distributed, is_horovod_optimizer, is_horovod_trainer
from ..framework.keywords import checked_call
from ..framework.patching import Original
from ..framework.wording import shortened, shown
from ..policy.active import chose_float32, current_policy
from .checkpoint import follow_weights, load_states, resume, save_states, share_step_counts
from .distributed import check_kvstore, compare_workers, sum_gradients, wait_for_weights
from .finite import all_finite, multiply, square_sum
from .float16_optimizers import check_float16_update
from .passes import Entry, entries_of, fresh, gradients, passes, scale_losses
from .scaler import LossScaler, NoScaler, positive_number, whole_number
from .statistics import running_statistics

logger = logging.getLogger("mxamp")

#: After this many skipped steps in a row a run counts as stuck: a search for the scale is shorter.
#: After 30, the warning comes again: any scale from 2**24 down has fallen to 1 by then.
_STUCK = (10, 30)
_HALF = {"float16", "bfloat16"}
#: The default scaler in bfloat16 and float32; `init_trainer` replaces it after `init("float16")`.
_UNSCALED = NoScaler()

SCALED_TWICE = "losses are scaled by {} already; {} would scale them twice: remove one of the two"
TOO_MANY_SKIPS = (
    "skipped %d steps in a row, and the loss scale is down to %g: the gradients of %s are not "
    "finite. Look for an overflow in float16, a learning rate that is too high, a division by zero "
    "or a logarithm of zero: mxamp.debugging.check_numerics names the operator."
)
NOT_SCALED = "the gradients of this step carry no loss scale: call backward on the scaled loss"
UNSCALED = "float16 needs loss scaling: call init_trainer(trainer), and backward inside scale_loss"
NO_POLICY = "mixed precision is off: call mxamp.init() before init_trainer, or pass loss_scaler="
NO_SCALER = "loss_scaler must be a LossScaler, StaticLossScaler or NoScaler, not {}"
NOT_INITIALIZED = "the trainer of {} has no loss scaler: call mxamp.init_trainer(trainer) first"
UNSKIPPABLE = "this trainer updates parameters {}, where an overflow can't be kept out: {}"


class Stage(Enum):
    """Whether a trainer's gradients carry the loss scale."""

    NONE = "none"
    SCALED = "scaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"  #: by a GradScaler, before its update()


#: The illegal moves: the error of an action in a stage. All other moves are legal.
_ILLEGAL = {
    ("unscale", Stage.NONE): "there are no scaled gradients: unscale or clip after scale_loss",
    ("unscale", Stage.UNSCALED): "gradients are unscaled already: unscale once before each step",
    ("unscale", Stage.STEPPED): "this trainer has stepped already: call unscale_ before step",
    ("step", Stage.STEPPED): "this trainer has stepped already: call the scaler's update() first",
}


class StepReport(NamedTuple):
    """The outcome of an update: `trainer.amp_last_step`."""

    stepped: bool  #: False if the update was skipped
    loss_scale: float  #: the scale of the step's first loss
    next_loss_scale: float
    nonfinite: tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN


def _forwarded(name: str, check: Callable[[Any], Any]) -> Any:
    """Return a property of states for an attribute of their scalers."""
    return property(
        lambda state: getattr(state.scaler, name),
        lambda state, value: setattr(state.scaler, name, check(value)),
    )


class State:
    """One trainer's loss scaling: the object in `trainer._amp_loss_scaler`.

    `loss_scale` is the scale of the current gradients, as scripts written for `mxnet.contrib.amp`
    read it. `steps` and `skips` count updates done and skipped. `scaled_by` names the API that
    scales this trainer's losses; it is empty when that has ended, and another may take over.
    """

    def __init__(self, trainer: Trainer, scaler: LossScaler, scaled_by: str) -> None:
        self.trainer, self.scaler, self.scaled_by = trainer, scaler, scaled_by
        self._stage, self._scale = Stage.NONE, 1.0  #: the scale of the losses since the last step
        #: Whether gradients were finite, for a GradScaler's `update`; None: steps update the scale.
        self.results: dict[State, bool] | None = None
        #: Weights and master weights to set to them: parameters may be loaded after the states.
        self.new_masters: list[tuple[NDArray, NDArray]] = []
        self.steps = self.skips = self._skips_in_a_row = 0
        self._is_probed = False  #: its optimizer can update these weights
        self._overflown_at = -1  #: the number of steps before the last overflow of `mark_unscaled`
        self.last_stage = Stage.SCALED  #: of the gradients in the last step
        self._may_warn = not self.is_shared  #: of gradients without a scale
        #: The kvstore through which the workers have compared settings. None in a run of one
        #: process, and where "auto" has chosen float32.
        self.workers: Any = None
        self._uninitialized: int | None = None  #: number of parameters, at the last sum
        self.publish(None)

    @property
    def is_shared(self) -> bool:
        """Whether a scale that never leaves the backward pass is shared with other trainers."""
        return self.scaled_by not in ("init_trainer", "initialize", "GradScaler")

    @property
    def stage(self) -> Stage:
        """Whether the gradients carry a scale now."""
        # Their loss was scaled before the last step, or for another trainer.
        again = self._stage is Stage.NONE and gradients.carry_scale(self.trainer)
        return Stage.SCALED if again else self._stage

    @property
    def loss_scale(self) -> float:
        """The scale of the current gradients and of the next loss."""
        if self.stage is not Stage.SCALED:
            return self.scaler.loss_scale
        return gradients.carried(self.trainer) if fresh(self.trainer) else self._scale

    def _assign_scale(self, scale: float) -> None:
        """Set the scale of the scaler and `trainer.amp_loss_scale`."""
        self.scaler.set_scale(scale)
        self.publish(self.trainer.amp_last_step)

    # The attributes of contrib's scaler, which scripts save and restore by themselves.
    _loss_scale = _next_loss_scale = property(lambda one: one.scaler.loss_scale, _assign_scale)
    _unskipped = _forwarded("_clean_steps", partial(whole_number, "_unskipped"))
    _scale_seq_len = _forwarded("_growth_interval", partial(whole_number, "steps", least=1))
    _max_loss_scale = _forwarded("_max_scale", float)

    def check_scaled_by(self, *allowed: str) -> None:
        """Raise `StateError` if an API that is not `allowed` scales this trainer's losses."""
        if self.scaled_by not in allowed:
            raise StateError(SCALED_TWICE.format(self.scaled_by, allowed[0]))

    def check(self, action: str) -> None:
        """Raise `StateError` if `action` ("unscale" or "step") is illegal now."""
        stage = self.stage if action == "unscale" else self._stage
        if (action, stage) in _ILLEGAL:
            raise StateError(_ILLEGAL[action, stage])

    def mark_scaled(self, scale: float) -> None:
        """Mark the gradients as scaled; the first loss since a step sets the scale."""
        gradients.add(self.trainer)  # a copied trainer has run no constructor
        if self._stage is Stage.NONE:
            self._scale = scale
            self._stage = Stage.SCALED  # after the scale: other threads read both

    def end_update(self) -> None:
        """Record that the scale was updated without a step of this trainer, or after it."""
        self._stage = Stage.NONE
        self.publish(self.trainer.amp_last_step)

    @property
    def _is_plain(self) -> bool:
        """Whether steps after the first are plain MXNet's: nothing is scaled, in one process."""
        alone = self._is_probed and self.workers is None and self.results is None
        return alone and not (self.new_masters or self.scaler.scales) and gradients.all_carry(1)

    @property
    def _is_reduced(self) -> bool:
        """Whether the gradients are summed over devices already."""
        summed_at = gradients.reduced_at.get(self.trainer)
        return self._stage is not Stage.NONE and summed_at == gradients.passes

    @property
    def overflown(self) -> bool | None:
        """Whether unscaled gradients overflow; None while other workers may find otherwise."""
        store = self.trainer._kvstore_params["kvstore"]
        has_workers = is_distributed(store) or is_horovod_trainer(self.trainer)
        if has_workers and not self._is_reduced:
            return None
        return any(map(gradients.is_overflown, fresh(self.trainer)))

    def drop(self) -> None:
        """Record that the program, which scales another loss, has dropped unscaled gradients."""
        if self._stage is Stage.UNSCALED:
            if self.overflown:
                self.scaler.update(False)
            self.end_update()

    def mark_unscaled(self, scale: float, overflown: set[int]) -> None:
        """Record a backward pass that has scaled its losses and unscaled the gradients.

        `overflown` are arrays, by `id`, whose gradients are not finite. A program that drops them
        takes no step: the next overflow lowers the scale.
        """
        bad = [e for e in entries_of(self.trainer) if id(e.data) in overflown] if overflown else []
        if not all(map(gradients.is_overflown, bad)):  # not in a sum that held the overflow before
            if self.workers is None and self._overflown_at == self.scaler.steps + self.scaler.skips:
                self.scaler.update(False)
            self._overflown_at = self.scaler.steps + self.scaler.skips
        for entry in bad:
            gradients.note(entry, gradients.note_of(entry).scale, entry.gradient)
        self._stage, self._scale = Stage.UNSCALED, scale

    def unscale(self) -> None:
        """Divide the gradients of all devices by the scale, and record which are not finite."""
        self.check("unscale")
        self._equalize()
        gradients.unscale(self.trainer)
        self._stage = Stage.UNSCALED
        if self.results is not None and self.overflown is not None:
            self.results[self] = not self.overflown  # the program may leave out the step

    def reduce(self) -> None:
        """Sum the gradients over devices and workers."""
        check_contrib_is_off()  # its init_trainer may have replaced this trainer's scaler
        if self._is_plain and self._uninitialized == 0 and self.trainer._kvstore is None:
            type(self.trainer)._allreduce_grads(self.trainer)
            return
        if self._is_reduced:  # to clip them, before `step`
            return
        carried = self._equalize()
        self._uninitialized = wait_for_weights(self.trainer, self._uninitialized)
        if self.workers is None and not chose_float32():
            self.workers = compare_workers(self.trainer, self.scaler)
        if self.workers is not None and self._stage is Stage.NONE and not fresh(self.trainer):
            # Only other workers have computed gradients: scaled as in the last step.
            self._scale, self._stage = self.scaler.loss_scale, self.last_stage
            carried = self._scale if self._stage is Stage.SCALED else 1.0
        sum_gradients(self.trainer, carried, self.workers is not None)
        if self._stage is not Stage.NONE:
            gradients.reduced_at[self.trainer] = gradients.passes

    def _equalize(self) -> float:
        """Bring all gradients to one scale, and return it."""
        carried = gradients.equalize(self.trainer)
        if self.stage is not self._stage:
            self._stage, self._scale = self.stage, carried
        # A trainer of a GradScaler may step without it.
        mine = self._stage is (Stage.NONE if self.results is None else Stage.SCALED)
        plain = carried == 1 and (mine or self._stage is Stage.SCALED)
        if self._may_warn and plain and self.scaler.loss_scale != 1 and fresh(self.trainer):
            self._may_warn = False
            logger.warning(NOT_SCALED)
        return carried

    def has_overflow(self, _params: Any = None) -> bool:
        """Record a step, and return whether `Trainer._update`, the caller, has to skip it."""
        optimizer = self.trainer._optimizer
        # An array if `step` was given one: MXNet's operators parse its text.
        optimizer.rescale_grad = as_float(optimizer.rescale_grad)
        if self._is_plain and self._stage is not Stage.NONE:
            self.steps += 1
            self._notify(self._update_scaler(True, ()))
            return False
        if not self._is_probed:
            check_float16_update(self.trainer)
            self._is_probed = True
        follow_weights(self.new_masters)
        self.new_masters = []
        carried = self._equalize()
        self.last_stage = self._stage
        gradients.reduced_at.pop(self.trainer, None)
        if self._stage is Stage.NONE:
            self._notify(StepReport(True, 1.0, self.loss_scale))
            return False
        # All workers use the gradients that one of them has computed.
        used = (fresh if self.workers is None else entries_of)(self.trainer)
        used = used if self.scaler.scales or carried != 1 else []
        arrays = [entry.gradient for entry in used]
        finite = not any(map(gradients.is_overflown, used)) and all_finite(arrays)
        if finite and carried != 1 and unscale_update(optimizer, arrays, carried):
            for entry in used:
                gradients.note(entry, 1.0)
        report = self._update_scaler(finite, used)
        gradients.end_step(self.trainer)
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        statistics = gradients.trainers.get(self.trainer)
        if self.scaler.scales and statistics is not None:
            statistics.after_step(finite, partial(running_statistics, self.trainer))
        self._notify(report)
        self._log(report)
        return not finite

    def _update_scaler(self, finite: bool, used: Sequence[Entry]) -> StepReport:
        """Update the loss scale after a step with these gradients; return the step's report."""
        names: tuple[str, ...] = ()
        if not finite:
            bad = [e for e in used if gradients.is_overflown(e) or not all_finite([e.gradient])]
            names = tuple(dict.fromkeys(entry.param.name for entry in bad))
            # Otherwise a later step with ignore_stale_grad=True would use the skipped gradients.
            for entry in used:
                entry.data._fresh_grad = False
            if not self.is_shared:  # the lowest of several scales may be that of an idle trainer
                self.scaler.back_off_from(self._scale)
        if self.results is None:
            self.scaler.update(finite)
            self._stage = Stage.NONE
        else:
            self.results[self] = finite and self.results.get(self, True)
            self._stage = Stage.STEPPED
        return StepReport(finite, self._scale, self.scaler.loss_scale, names)

    def _notify(self, report: StepReport) -> None:
        """Publish a step's report, and call the functions of `debugging.on_step` with it."""
        self.publish(report)
        for function in tuple(vars(self.trainer).get("_amp_observers", ())):
            function(report)

    def _log(self, report: StepReport) -> None:
        """Log a step that was skipped or has changed the scale; warn of many skips in a row."""
        names = shortened(report.nonfinite)
        change = f"loss scale {report.loss_scale:g} -> {report.next_loss_scale:g}"
        self._skips_in_a_row = 0 if report.stepped else self._skips_in_a_row + 1
        if not report.stepped:
            logger.info("step skipped, gradients of %s are not finite; %s", names, change)
        elif report.next_loss_scale != report.loss_scale:
            logger.info(change)
        if self._skips_in_a_row in _STUCK:
            logger.warning(TOO_MANY_SKIPS, self._skips_in_a_row, report.next_loss_scale, names)

    def publish(self, report: StepReport | None) -> None:
        """Set the trainer's `amp_loss_scale`, `amp_last_step`, `amp_steps` and `amp_skips`."""
        self.trainer.amp_loss_scale = self.scaler.loss_scale
        self.trainer.amp_last_step = report
        self.trainer.amp_steps, self.trainer.amp_skips = self.steps, self.skips

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the counts of steps and skips."""
        return {"scaler": self.scaler.state_dict(), "steps": self.steps, "skips": self.skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`."""
        steps, skips = (whole_number(name, state[name]) for name in ("steps", "skips"))
        self.scaler.resume(state["scaler"])
        self.steps, self.skips = steps, skips
        self.publish(None)


def state_of(trainer: Any) -> State | None:
    """Return a trainer's state; None if it has no loss scaling."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"the trainer must be a gluon.Trainer, not {shown(trainer)}")
    state = getattr(trainer, "_amp_loss_scaler", None)
    return state if isinstance(state, State) else None


def patched_update(original: Original, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Call `Trainer._update`; warn once of a trainer in float16 whose losses nothing scales."""
    policy = None if hasattr(trainer, "_amp_loss_scaler") else current_policy()
    if policy is not None and policy.target_dtype == "float16" and policy.lowers:
        trainer._amp_loss_scaler = None
        logger.warning(UNSCALED)
    original(trainer, *args, **kwargs)


def unscale_update(optimizer: Any, gradients: Sequence[NDArray], scale: float) -> bool:
    """Divide an optimizer's `rescale_grad`, or else the gradients, by the loss scale.

    Returns whether it was the gradients. MXNet's optimizers multiply them by `rescale_grad`, which
    costs nothing extra. Optimizers that may not do so, or read gradients before, get gradients that
    are divided here.
    """
    dtypes = set(map(dtype_of, gradients))
    # LBSGD sums unrescaled gradients over steps, and takes its warm-up from their norm. In float16
    # MXNet multiplies the learning rate by `rescale_grad` first, which may give 0.
    underflows = "float16" in dtypes and not optimizer.multi_precision
    # Division in half precision would lose the small values that the scale preserves.
    trusted = type(optimizer).__module__.startswith("mxnet.optimizer") or dtypes & _HALF
    if trusted and not underflows and not isinstance(optimizer, LBSGD):
        optimizer.rescale_grad /= scale
        return False
    multiply(gradients, 1.0 / scale)
    return True


@checked_call
def init_trainer(optimizer_or_trainer: Trainer, loss_scaler: LossScaler | None = None) -> None:
    """Give a Gluon Trainer loss scaling.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(1)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    >>> amp.init_trainer(trainer, amp.LossScaler(init_scale=1024))
    >>> trainer.amp_loss_scale
    1024.0

    After the call, `trainer.amp_loss_scale` is the scale of the next loss, and
    `trainer.amp_last_step` is the `StepReport` of the last update. `trainer.amp_steps` counts the
    updates, and `trainer.amp_skips` the skipped updates. `save_states` and `load_states` include
    the scaler and the counts.

    A second call with a scaler replaces the scaler. A second call without a scaler does nothing.

    Parameters
    ----------
    optimizer_or_trainer : gluon.Trainer
        The trainer. mxamp switches the trainer's `update_on_kvstore` off, because an update on a
        kvstore can't be skipped. An Optimizer raises `ArgumentError`: only the argument's name
        comes from `mxnet.contrib.amp`.
    loss_scaler : LossScaler, StaticLossScaler or NoScaler, optional
        The default is `LossScaler()` in float16, and `NoScaler()` in bfloat16, which has float32's
        range. Steps with Inf or NaN gradients are skipped, but not with a `NoScaler`, which leaves
        updates to plain MXNet. Where `init("auto")` has chosen float32, any scaler is a `NoScaler`.

    Raises
    ------
    ArgumentError
        An argument is not a Trainer, or not a scaler.
    StateError
        Mixed precision is off and no scaler is given. Or the scaler is no `NoScaler`, and the
        trainer has updated parameters on its kvstore already, or can update them only there.
    """
    if loss_scaler is not None and not isinstance(loss_scaler, LossScaler):
        raise ArgumentError(NO_SCALER.format(shown(loss_scaler)))
    scaler = None if chose_float32() else loss_scaler
    if attach_hook(optimizer_or_trainer, scaler).loss_scale != 1:
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

    `unscale` divides the gradients on all devices. If a gradient has overflowed, the next step is
    skipped, even if you change the gradient to a finite value, unless the scaler is a `NoScaler`.
    If you have cast parameters to float16, their gradients lose the small values that the loss
    scale has preserved. `unscale` waits until the gradients are computed.

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

    The norm is the L2 norm of all gradients together. `clip_grad_global_norm` sums the gradients
    over devices before clipping, so that every device clips by the same factor. `step` does not sum
    the gradients again. If the norm is Inf or NaN, nothing is clipped, and the next step is
    skipped, unless the scaler is a `NoScaler`. The call waits until the gradients are computed.

    `step(batch_size)` divides the clipped gradients by the batch size.

    Parameters
    ----------
    trainer : gluon.Trainer
        After `init_trainer`, `scale_loss` and the backward pass.
    max_norm : float
        If the norm is larger, the gradients are multiplied by `max_norm / norm`. With Inf, the call
        clips nothing and only returns the norm.

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
    gradients = [entry.gradient for entry in fresh(trainer)]
    first = trainer._contexts[0]
    norm = math.sqrt(square_sum([g for g in gradients if g.context == first]))
    if math.isfinite(norm) and norm > limit:
        multiply(gradients, limit / norm)
    return norm


def active_hook(trainer: Any) -> State | None:
    """Return a trainer's state; None if no API scales its losses, or that API has ended."""
    state = state_of(trainer)
    return state if state is not None and state.scaled_by else None


def hook_of(trainer: Any) -> State:
    """Return a trainer's state; raise if the trainer has no loss scaling."""
    state = active_hook(trainer)
    if state is None:
        raise StateError(NOT_INITIALIZED.format(shortened([p.name for p in trainer._params], 1)))
    return state


def attach_hook(
    trainer: Trainer, loss_scaler: LossScaler | None, scaled_by: str = "init_trainer"
) -> State:
    """Give a trainer a state for losses that the API `scaled_by` scales, or update its state.

    An existing state stays, with the given scaler. A trainer that has loaded states resumes from
    them, whatever scaler is given.
    """
    state = state_of(trainer)
    check_contrib_is_off()
    policy = current_policy()
    if state is not None and state.scaled_by:
        state.check_scaled_by(scaled_by)
        if loss_scaler is None and (state.scaler is not _UNSCALED or policy is None):
            return state
    if loss_scaler is None and policy is None and not chose_float32():
        raise StateError(NO_POLICY)
    is_float16 = policy is not None and policy.target_dtype == "float16"
    scaler = loss_scaler or (LossScaler() if is_float16 else _UNSCALED)
    _keep_updates_skippable(trainer, scaler)
    if state is not None:
        state.scaler, state.scaled_by = scaler, scaled_by
        state.publish(trainer.amp_last_step)
        return state
    state = State(trainer, scaler, scaled_by)
    share_step_counts(trainer)
    resume(state)
    # Partial functions of the state, and its method: a copied trainer gets its own.
    trainer.save_states = partial(save_states, state)
    trainer.load_states = partial(load_states, state)
    trainer._allreduce_grads = state.reduce
    trainer._amp_loss_scaler, trainer._amp_original_scale = state, RefusedScale()
    return state


def _keep_updates_skippable(trainer: Trainer, scaler: LossScaler) -> None:
    """Move updates off the kvstore; raise if they can't be skipped and `scaler` needs that."""
    settings = trainer._kvstore_params
    kvstore, begun = settings["kvstore"], trainer._kv_initialized
    obstacle = None
    if scaler.scales and is_horovod_optimizer(trainer._optimizer):
        obstacle = "by Horovod's optimizer", "make it with hvd.DistributedTrainer alone"
    elif trainer._update_on_kvstore or (trainer._contains_sparse_weight and not begun):
        obstacle = "on the kvstore", "make it of dense parameters, with update_on_kvstore=False"
    elif not begun and "async" in str(getattr(kvstore, "type", kvstore)):
        obstacle = "on asynchronous servers", "use a synchronous kvstore, such as 'dist_sync'"
    if obstacle is None:
        if settings["update_on_kvstore"]:
            logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
        settings["update_on_kvstore"] = False
    elif scaler.scales:
        raise StateError(UNSKIPPABLE.format(*obstacle))
    if scaler.scales:
        check_kvstore(trainer)


@checked_call
def scale_loss(loss: Any, optimizer_or_trainer: Trainer | Sequence[Trainer]) -> ContextManager[Any]:
    """Return a context with the loss times the trainer's loss scale; mark gradients as scaled.

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
        The loss. The scaled loss has the same lists, tuples and dicts, and is in float32. A scale
        of 1, as in bfloat16, leaves the loss as it is.
    optimizer_or_trainer : gluon.Trainer, or list of gluon.Trainer
        The trainers of all parameters that the loss depends on, each after `init_trainer`. The
        smallest scale of these trainers multiplies the loss. Each trainer checks its own gradients.
        If a gradient of a trainer overflows, only this trainer skips its step and lowers its scale.

    You may scale a loss inside `autograd.record()` or outside. You may scale several losses before
    one step, also in several threads, because the scale changes only in steps.

    Raises
    ------
    StateError
        The loss is scaled already. A trainer that has gradients of the scaled loss, but is not in
        `optimizer_or_trainer`, raises `StateError` in its step.
    """
    hooks = list(dict.fromkeys(map(hook_of, as_list(optimizer_or_trainer))))
    if not hooks:
        raise ArgumentError("scale_loss takes a gluon.Trainer or a list of them, not an empty list")
    for hook in hooks:
        hook.check_scaled_by("scale_loss", "init_trainer", "initialize")
        hook.drop()
    # A NoScaler scales by 1 because bfloat16 needs no scale; a larger one does no harm.
    scale = min([hook.scaler.loss_scale for hook in hooks if hook.scaler.scales], default=1.0)
    scaled = scale_losses(loss, scale, any(hook._stage is Stage.SCALED for hook in hooks))
    for hook in hooks:
        hook.mark_scaled(scale)
    return nullcontext(scaled)
