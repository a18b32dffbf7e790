"""Loss scaling for a Gluon Trainer: `init_trainer`, `scale_loss`, and the step.

`Trainer._update` calls `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. By then `step` has reduced the gradients of all devices and set the optimizer's
`rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is the stage of the trainer:

    none ── a loss is scaled ──► scaled ── unscale ──► unscaled
      ▲                          │    ▲                 │    │
      │                          │    └ a loss is scaled┘    │
      └────────── step or update, done or skipped ───────────┘

With a `GradScaler` the step leads to "stepped", and the scaler's `update()` from there to "none".
A backward pass from a loss that was scaled before the last step leads to "scaled" too. Which scale
each gradient carries stands in the ledger. A step in "none" is MXNet's plain step.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Callable, ContextManager, Mapping, NamedTuple, NoReturn, Sequence

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LBSGD, AdaDelta

from ..errors import ArgumentError, StateError
from ..framework.arrays import as_float, as_list
from ..framework.contrib_amp import RefusedScale, check_contrib_is_off
from ..framework.distributed import is_horovod_optimizer
from ..framework.keywords import checked_call
from ..framework.patching import Original
from ..framework.wording import shortened, shown
from ..policy.active import chose_float32, current_policy
from .backward_passes import scale_losses, scaling_patches
from .checkpoint import load_states, refresh_masters, resume, save_states, share_step_counts
from .distributed import (
    check_kvstore,
    check_settings,
    sum_gradients,
    wait_for_weights,
    workers_of,
)
from .finite import all_finite, layout_of, multiply, nonfinite, square_sum
from .float16_optimizers import check_float16_update, divide_updates
from .ledger import Entry, GradientRecord, entries_of, fresh, gradients_of, ledger
from .scaler import LossScaler, NoScaler, positive_number, whole_number
from .statistics import running_statistics

logger = logging.getLogger("mxamp")

#: After this many skipped steps in a row a run counts as stuck: a search for the scale is shorter.
#: After 30, the warning comes again: any scale from 2**24 down has fallen to 1 by then.
_STUCK = (10, 30)
#: The default scaler in bfloat16 and float32. A second `init_trainer`, after `init("float16")`,
#: replaces it.
_UNSCALED = NoScaler()
#: MXNet's optimizers that write to their gradients, or read them before they multiply them by
#: `rescale_grad`: they get gradients that are divided by the loss scale.
_NEED_DIVIDED = (AdaDelta, LBSGD)

SCALED_TWICE = "losses are scaled by {} already; {} would scale them twice: use one of the two"
TOO_MANY_SKIPS = (
    "skipped %d steps in a row, and the loss scale is down to %g: the gradients of %s are not "
    "finite. Look for an overflow in float16, a learning rate that is too high, a division by zero "
    "or a logarithm of zero: mxamp.debugging.check_numerics names the operator."
)
NOT_SCALED = "the gradients of this step carry no loss scale: call backward on the scaled loss"
UNSCALED = "float16 needs loss scaling: call init_trainer(trainer), and backward inside scale_loss"
NO_POLICY = "mixed precision is off: call mxamp.init() before init_trainer, or pass loss_scaler="
NO_SCALER = "loss_scaler must be a LossScaler, StaticLossScaler(128) or NoScaler, not {}"
NOT_INITIALIZED = "the trainer of {} has no loss scaler: call init_trainer, or GradScaler.unscale_"
UNSKIPPABLE = (
    "this trainer updates parameters {}, where an overflow can't be kept out: call init_trainer "
    "before its first step, and {}"
)


class Stage(Enum):
    """Stage of a trainer's gradients between steps: not scaled, scaled, unscaled or stepped."""

    NONE = "none"
    SCALED = "scaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"  #: by a GradScaler, before its update()


#: The error of each action that is illegal in a stage. All others are legal.
_ILLEGAL = {
    ("unscale", Stage.NONE): "there are no scaled gradients: unscale or clip after scale_loss",
    ("unscale", Stage.UNSCALED): "gradients are unscaled already: unscale once before each step; "
    "gluon.utils.clip_global_norm clips unscaled ones",
    ("unscale", Stage.STEPPED): "this trainer has stepped already: call unscale_ before step",
    ("step", Stage.STEPPED): "this trainer has stepped already: call the scaler's update() first",
}


#: Attributes that trainers with loss scaling get, each with the attribute of `State` it reads.
_SHOWN = {
    "amp_loss_scale": "scaler.loss_scale", "amp_last_step": "report", "amp_steps": "steps",
    "amp_skips": "skips",
}  # fmt: skip


class StepReport(NamedTuple):
    """The outcome of a trainer's last step, in `trainer.amp_last_step`."""

    stepped: bool  #: False if the update was skipped
    loss_scale: float  #: the scale of the step's first loss
    next_loss_scale: float
    nonfinite: tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN


class PendingGradients(NamedTuple):
    """Gradients that await a trainer's step: their loss scale, and whether they are unscaled."""

    scale: float  #: the scale of the first of these losses
    stage: Stage = Stage.SCALED


def _forwarded(name: str, check: Callable[[Any], Any]) -> Any:
    """Return a property of `State` that reads and sets an attribute of its loss scaler."""
    return property(
        lambda state: getattr(state.scaler, name),
        lambda state, value: setattr(state.scaler, name, check(value)),
    )


class State:
    """The loss scaling state of one trainer, in `trainer._amp_loss_scaler`.

    `loss_scale` is the scale of the current gradients, as scripts written for `mxnet.contrib.amp`
    read it. `steps` and `skips` count updates done and skipped. `scaled_by` names the API that
    scales this trainer's losses; it is empty when that has ended, and another may take over.
    """

    def __init__(self, trainer: Trainer, scaler: LossScaler, scaled_by: str) -> None:
        self.trainer, self.scaler, self.scaled_by = trainer, scaler, scaled_by
        #: None if no loss was scaled since the last step.
        self.pending: PendingGradients | None = None
        self.report: StepReport | None = None  #: of the last step
        self.steps = self.skips = 0
        #: Pairs of a weight and its master weight from a loaded file. The next step, not the
        #: loading, makes them agree: a script may load parameters after states.
        self.loaded_masters: list[tuple[NDArray, NDArray]] = []
        #: The kvstore through which the workers have compared settings. None before that, in a run
        #: of one process, and where "auto" has chosen float32.
        self.workers: Any = None
        #: The number of parameters that had no shape yet at the last sum: not sent to the kvstore.
        self._unsent: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the trainer shares a loss scale with others, by `decorate` or an automatic run.

        The script itself then scales no loss.
        """
        return self.scaled_by not in ("init_trainer", "initialize", "GradScaler")

    @property
    def stage(self) -> Stage:
        """The trainer's `Stage`: whether its gradients are scaled now."""
        if self.pending is not None:
            return self.pending.stage
        if self in (self.scaler.finite_by_state or ()):
            return Stage.STEPPED
        # The gradients of a loss that was scaled before the last step, or for another trainer.
        return Stage.SCALED if ledger.has_scaled(self.trainer) else Stage.NONE

    @property
    def loss_scale(self) -> float:
        """The loss scale of the current gradients and of the next loss."""
        if self.stage is not Stage.SCALED:
            return self.scaler.loss_scale
        if self.pending is not None and not fresh(self.trainer):
            return self.pending.scale
        return ledger.lowest_scale(self.trainer)

    # Attributes of contrib's scaler: scripts such as Sockeye save and restore them.
    _loss_scale = _next_loss_scale = property(
        lambda state: state.scaler.loss_scale,
        lambda state, scale: state.scaler.set_scale(scale),
    )
    _unskipped = _forwarded("_clean_steps", partial(whole_number, "_unskipped"))
    _scale_seq_len = _forwarded("_growth_interval", partial(whole_number, "steps", least=1))
    _max_loss_scale = _forwarded("_max_scale", float)

    def check_scaled_by(self, *allowed: str) -> None:
        """Raise unless the API that scales this trainer's losses is one of `allowed`."""
        if self.scaled_by not in allowed:
            raise StateError(SCALED_TWICE.format(self.scaled_by, allowed[0]))

    def check(self, action: str) -> None:
        """Raise if `action` ("unscale" or "step") is illegal now, such as a second unscale."""
        if (action, self.stage) in _ILLEGAL:
            raise StateError(_ILLEGAL[action, self.stage])

    def note_scaled(self, scale: float) -> None:
        """Record that a loss was scaled; the first loss since a step sets the step's scale."""
        ledger.add(self.trainer)  # a copied trainer has run no constructor
        if not scaling_patches.is_open:
            # Nothing will see the coming backward pass, which makes gradients that are not summed.
            ledger.note_sum(self.trainer, False)
        self.pending = self.pending or PendingGradients(scale)

    @property
    def overflown(self) -> bool | None:
        """Whether a gradient of the trainer was Inf or NaN when it was unscaled.

        None if there are several workers and gradients are not summed: the sum decides.
        """
        if workers_of(self.trainer) is not None and not ledger.is_summed(self.trainer):
            return None
        return bool(ledger.overflown_among(partial(fresh, self.trainer)))

    def drop(self) -> None:
        """Discard unscaled gradients if a new loss is scaled before a step has used them.

        If they have overflowed, the scale is lowered, as by a skipped step.
        """
        if self.pending is not None and self.pending.stage is Stage.UNSCALED:
            if self.overflown:
                self.scaler.update(False)
            self.pending = None

    def note_unscaled(self, scale: float, overflown: set[int], has_dropped: bool = False) -> None:
        """Record a backward pass that scaled the loss and unscaled the gradients internally.

        `overflown` are arrays, by `id`, whose gradients are not finite. If the program
        `has_dropped` such gradients without a step, a second overflow lowers the scale.
        """
        bad = [e for e in entries_of(self.trainer) if id(e.data) in overflown] if overflown else []
        # If every bad gradient was bad before, it is a sum that still holds the first overflow.
        is_new = len(ledger.overflown_among(lambda: bad)) < len(bad)
        if has_dropped and is_new and self.workers is None:
            self.scaler.update(False)
        for entry in bad:
            ledger.note(entry, GradientRecord(ledger.of(entry).scale, True))
        self.pending = PendingGradients(scale, Stage.UNSCALED)

    def unscale(self) -> None:
        """Divide the trainer's gradients by the loss scale, and record Inf and NaN in them."""
        self.check("unscale")
        scale = self._equalize()
        ledger.remove_scales(self.trainer)
        self.pending = (self.pending or PendingGradients(scale))._replace(stage=Stage.UNSCALED)
        if self.scaler.finite_by_state is not None and self.overflown is not None:
            # Already now: the program may leave out the step.
            self.scaler.finite_by_state[self] = not self.overflown

    def reduce(self) -> None:
        """Sum the trainer's gradients over devices and workers."""
        check_contrib_is_off()  # its init_trainer may have replaced this trainer's scaler
        trainer = self.trainer
        if ledger.is_summed(trainer) and self.stage is not Stage.NONE:
            return  # `clip_grad_global_norm` or the script has summed them before `step`
        scale = self._equalize()
        self._unsent = wait_for_weights(trainer, self._unsent)
        if self.workers is None and not chose_float32():
            workers = workers_of(trainer)
            if workers is not None:
                check_settings(workers, self.scaler.state_dict())
            self.workers = workers
        if self.workers is not None and self.stage is Stage.NONE and not fresh(trainer):
            # Only other workers have computed gradients. They are scaled if the last step's were.
            first, last, scale = self.scaler.loss_scale, self.report, 1.0
            if last is None or last.loss_scale != 1 or first == 1:
                stage = Stage.UNSCALED if self.is_shared else Stage.SCALED
                self.pending = PendingGradients(first, stage)
                scale = 1.0 if self.is_shared else first
        sum_gradients(trainer, scale, self.workers is not None)

    def _equalize(self) -> float:
        """Bring all gradients of the trainer to one loss scale, and return that scale."""
        scale = ledger.equalize(self.trainer)
        if self.stage is Stage.SCALED:
            self.pending = self.pending or PendingGradients(scale)
        return scale

    def has_overflow(self, _params: object = None) -> bool:
        """Check the gradients of a step; return whether `Trainer._update` has to skip the update.

        Unscales them, updates the scale, and passes the report to `debugging.on_step` hooks.
        """
        scale = self._prepare()
        bad = self._find_overflow(scale)
        if not bad and scale != 1:
            self._unscale_update(scale)
        self.report = self._record(scale, bad)
        for function in tuple(vars(self.trainer).get("_amp_observers", ())):
            function(self.report)
        return bool(bad)

    def _prepare(self) -> float:
        """Check the optimizer before a step; return the one loss scale of all gradients."""
        optimizer = self.trainer._optimizer
        # `step` may have been given an array, and MXNet's operators would parse its text.
        optimizer.rescale_grad = as_float(optimizer.rescale_grad)
        if self.report is None:
            check_float16_update(self.trainer)
        if self.loaded_masters:
            refresh_masters(self.loaded_masters)
            self.loaded_masters = []
        scale = self._equalize()
        if scale == 1:
            self._warn_of_no_scale()
        return scale

    def _used(self) -> list[Entry]:
        """Return the gradients with which this step updates the parameters.

        With several workers, all; otherwise those that a backward pass has written since the last
        update.
        """
        return (fresh if self.workers is None else entries_of)(self.trainer)

    def _warn_of_no_scale(self) -> None:
        """Warn at the first of consecutive steps whose gradients were not scaled."""
        # A trainer of a GradScaler may take a step of its own, with a plain loss.
        has_grad_scaler = self.scaler.finite_by_state is not None
        warned = (Stage.SCALED,) if has_grad_scaler else (Stage.NONE, Stage.SCALED)
        is_first = self.report is None or self.report.loss_scale != 1
        may_warn = is_first and self.scaler.loss_scale != 1 and not self.is_shared
        if may_warn and self.stage in warned and fresh(self.trainer):
            logger.warning(NOT_SCALED)

    def _find_overflow(self, scale: float) -> list[Entry]:
        """Return the gradients that contain Inf or NaN, or did when they were unscaled."""
        if self.stage is Stage.NONE or (scale == 1 and not self.scaler.is_scaling):
            return []
        # To leave out stale gradients costs more than to check them.
        if not ledger.overflown_among(self._used) and all_finite(gradients_of(self.trainer)):
            return []
        used = self._used()
        found = {*nonfinite([entry.gradient for entry in used])}
        return [e for i, e in enumerate(used) if i in found or ledger.of(e).overflown]

    def _unscale_update(self, scale: float) -> None:
        """Make the optimizer's next update divide gradients by the loss scale.

        MXNet's optimizers multiply gradients by `rescale_grad`, so dividing that costs nothing. A
        user-defined optimizer may ignore it, so its gradients are divided: in float32 if it has
        master weights.
        """
        optimizer = self.trainer._optimizer
        is_known = type(optimizer).__module__.startswith("mxnet.optimizer")
        # In float16 MXNet multiplies the learning rate by `rescale_grad` first, which may give 0.
        dtypes = (layout_of(gradient).dtype for gradient in gradients_of(self.trainer))
        underflows = not optimizer.multi_precision and "float16" in dtypes
        if is_known and not underflows and not isinstance(optimizer, _NEED_DIVIDED):
            optimizer.rescale_grad /= scale
        elif optimizer.multi_precision:
            divide_updates(optimizer, scale)
        else:
            ledger.rescale(self._used(), 1.0)

    def _record(self, scale: float, bad: Sequence[Entry]) -> StepReport:
        """Update the loss scale and the gradients' records after a step; return its report."""
        stage, scaler, finite = self.stage, self.scaler, not bad
        if stage is Stage.NONE:
            return StepReport(True, 1.0, self.loss_scale)
        if self.pending and stage is Stage.UNSCALED:
            scale = self.pending.scale
        names = tuple(dict.fromkeys(entry.param.name for entry in bad))
        if bad:
            # A later step with ignore_stale_grad=True must not use the skipped gradients.
            for entry in self._used():
                entry.data._fresh_grad = False
            if not self.is_shared:  # a shared scale may be the lower one of an idle trainer
                scaler.back_off_from(scale)
        if scaler.finite_by_state is None:
            scaler.update(finite)
        else:
            scaler.finite_by_state[self] = finite and scaler.finite_by_state.get(self, True)
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        ledger.end_step(self.trainer)
        statistics = ledger.trainers.get(self.trainer)
        if scaler.is_scaling and statistics is not None:
            statistics.after_step(finite, partial(running_statistics, self.trainer))
        self.pending = None
        report = StepReport(finite, scale, scaler.loss_scale, names)
        self._log(report)
        return report

    def _log(self, report: StepReport) -> None:
        """Log a skipped step or a new loss scale; warn of many skipped steps in a row."""
        names = shortened(report.nonfinite)
        change = f"loss scale {report.loss_scale:g} -> {report.next_loss_scale:g}"
        if not report.stepped:
            logger.info("step skipped, gradients of %s are not finite; %s", names, change)
        elif report.next_loss_scale != report.loss_scale:
            logger.info(change)
        in_a_row = self.scaler.skips_in_a_row + (self.scaler.finite_by_state is not None)
        if not report.stepped and in_a_row in _STUCK:
            logger.warning(TOO_MANY_SKIPS, in_a_row, report.next_loss_scale, names)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scaler's state, and the counts of steps and skips."""
        return {"scaler": self.scaler.state_dict(), "steps": self.steps, "skips": self.skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loss scaler's state and counts that `state_dict` returned."""
        steps, skips = (whole_number(name, state[name]) for name in ("steps", "skips"))
        self.scaler.resume(state["scaler"])
        self.steps, self.skips, self.report = steps, skips, None


def state_of(trainer: object) -> State | None:
    """Return the loss scaling state of a trainer; None if it has none."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"the trainer must be a gluon.Trainer, not {shown(trainer)}")
    state = getattr(trainer, "_amp_loss_scaler", None)
    return state if isinstance(state, State) else None


def patched_update(original: Original, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Call `Trainer._update`; warn once of a trainer in float16 without loss scaling."""
    policy = None if hasattr(trainer, "_amp_loss_scaler") else current_policy()
    if policy is not None and policy.target_dtype == "float16" and policy.lowers:
        trainer._amp_loss_scaler = None
        logger.warning(UNSCALED)
    original(trainer, *args, **kwargs)


@checked_call
def init_trainer(optimizer_or_trainer: Trainer, loss_scaler: LossScaler | None = None) -> None:
    """Add loss scaling to a Gluon Trainer.

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
        updates to plain MXNet. Where `init` has chosen float32, any scaler is a `NoScaler`.

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
    if attach_state(optimizer_or_trainer, scaler).scaler.is_scaling:
        scaling_patches.open()


@checked_call
def unscale(optimizer_or_trainer: Trainer) -> None:
    """Divide a trainer's gradients by the loss scale, to clip or read them before the step.

    ::

        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
        amp.unscale(trainer)
        params = net.collect_params().values()
        gradients = [p.grad() for p in params if p.grad_req != "null"]
        gluon.utils.clip_global_norm(gradients, 1.0)
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
    scaling_state(optimizer_or_trainer).unscale()


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
    state = scaling_state(trainer)
    limit = max_norm if max_norm == math.inf else positive_number("max_norm", max_norm)
    state.check("unscale")
    trainer.allreduce_grads()
    ledger.note_sum(trainer)  # for `step`
    state.unscale()
    used = fresh(trainer)
    # Each device that has computed a gradient holds the sum.
    norm = math.sqrt(square_sum([*{entry.param: entry.gradient for entry in used}.values()]))
    if math.isfinite(norm) and norm > limit:
        multiply([entry.gradient for entry in used], limit / norm)
    return norm


def active_state(trainer: Any) -> State | None:
    """Return the loss scaling state of a trainer; None if nothing scales its losses now."""
    state = state_of(trainer)
    return state if state is not None and state.scaled_by else None


def scaling_state(trainer: Any) -> State:
    """Return the loss scaling state of a trainer; raise if nothing scales its losses."""
    state = active_state(trainer)
    if state is None:
        raise StateError(_not_initialized(trainer))
    return state


def _not_initialized(trainer: Trainer) -> str:
    return NOT_INITIALIZED.format(shortened([param.name for param in trainer._params], 1))


def attach_state(
    trainer: Trainer, loss_scaler: LossScaler | None, scaled_by: str = "init_trainer"
) -> State:
    """Create a trainer's loss scaling state, or set its scaler; return the state.

    An existing state stays, with the given scaler. A trainer that has loaded states resumes from
    them, whatever scaler is given.
    """
    state = state_of(trainer)
    check_contrib_is_off()
    policy = current_policy()
    if state is not None and state.scaled_by:
        state.check_scaled_by(scaled_by)
        if loss_scaler is None and (policy is None or state.scaler is not _UNSCALED):
            return state
    if loss_scaler is None and policy is None and not chose_float32():
        raise StateError(NO_POLICY)
    is_float16 = policy is not None and policy.target_dtype == "float16"
    scaler = loss_scaler or (LossScaler() if is_float16 else _UNSCALED)
    if check_skippable(trainer, scaler):
        if trainer._kvstore_params["update_on_kvstore"]:
            logger.warning("update_on_kvstore=True switched off: updates there can't be skipped")
        trainer._kvstore_params["update_on_kvstore"] = False
    if state is not None:
        state.scaler, state.scaled_by = scaler, scaled_by
        return state
    state = State(trainer, scaler, scaled_by)
    share_step_counts(trainer)
    resume(state)
    # Bound to the state and no closures, so that a deep copy of the trainer calls its own state.
    trainer.save_states = partial(save_states, state)
    trainer.load_states = partial(load_states, state)
    trainer._allreduce_grads = state.reduce
    trainer._amp_loss_scaler, trainer._amp_original_scale = state, RefusedScale()
    for name, value in _SHOWN.items():
        setattr(Trainer, name, property(partial(_shown, value)))
    return state


def _shown(name: str, trainer: Trainer) -> Any:
    """Return an attribute of a trainer's loss scaling state; raise AttributeError without one."""
    state = state_of(trainer)
    if state is None:
        raise AttributeError(_not_initialized(trainer))
    return attrgetter(name)(state)


def check_skippable(trainer: Trainer, scaler: LossScaler) -> bool:
    """Return whether updates can be skipped: no kvstore or Horovod optimizer applies them.

    Raises `StateError` if they can't, and `scaler` has to be able to skip updates.
    """
    kvstore, begun = trainer._kvstore_params["kvstore"], trainer._kv_initialized
    obstacle = None
    if scaler.is_scaling and is_horovod_optimizer(trainer._optimizer):
        obstacle = "by Horovod's optimizer", "make it with hvd.DistributedTrainer alone"
    elif trainer._update_on_kvstore or (trainer._contains_sparse_weight and not begun):
        obstacle = "on the kvstore", "make it of dense parameters, with update_on_kvstore=False"
    elif not begun and "async" in str(getattr(kvstore, "type", kvstore)):
        obstacle = "on asynchronous servers", "use a synchronous kvstore, such as 'dist_sync'"
    if obstacle and scaler.is_scaling:
        raise StateError(UNSKIPPABLE.format(*obstacle))
    if scaler.is_scaling:
        check_kvstore(trainer)
    return obstacle is None


class ScaledLoss(nullcontext):  # type: ignore[type-arg]  # Python 3.8 has no nullcontext[Any]
    """Context manager that `scale_loss` returns; it yields the scaled loss."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"scale_loss returns a context, without {name!r}: write `with amp.scale_loss(loss, "
            "trainer) as scaled: scaled.backward()`"
        )


@checked_call
def scale_loss(loss: Any, optimizer_or_trainer: Trainer | Sequence[Trainer]) -> ContextManager[Any]:
    """Return a context that yields the loss times the trainer's loss scale.

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
    states = list(dict.fromkeys(map(scaling_state, as_list(optimizer_or_trainer))))
    if not states:
        raise ArgumentError("scale_loss takes a gluon.Trainer or a list of them, not an empty list")
    for state in states:
        state.check_scaled_by("scale_loss", "init_trainer", "initialize")
        state.drop()
    # A NoScaler sets no limit: it only says that its trainer needs no loss scale.
    scale = min(
        [state.scaler.loss_scale for state in states if state.scaler.is_scaling], default=1.0
    )
    scaled = scale_losses(loss, scale)
    for state in states:
        state.note_scaled(scale)
    return ScaledLoss(scaled)
