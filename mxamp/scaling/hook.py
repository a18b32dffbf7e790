"""The loss-scaling state of one trainer, and the overflow check before each update.

`Trainer._update` calls `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. By then `step` has reduced the gradients of all devices and set the optimizer's
`rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is a state of the trainer:

    none ── scale_loss ──► scaled ── unscale ──► unscaled
      ▲                      │                      │
      └────────── step or update, done or skipped ──┘

With a `GradScaler` the step leads to "stepped", and the scaler's `update()` from there to "none".
A step without `scale_loss` finds "none" and is MXNet's plain step. It raises a `StateError` if its
gradients come from a loss that was scaled for another trainer (see `passes`).
"""

import logging
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import (
    AbstractSet,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    MutableMapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LBSGD

from ..errors import StateError
from ..framework.arrays import as_float, dtype_of
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.tables import html_table
from ..framework.versions import has_feature
from ..framework.wording import counted, shortened, shown
from ..policy.active import current_policy
from .checkpoint import load_states, parse_state, save_states
from .distributed import Reduction
from .finite import all_finite, multiply, unscale
from .optimizer_states import follow_weights
from .passes import Gradients, fresh_gradients, passes
from .scaler import LossScaler, Scaler, whole_number

__all__ = [
    "Stage",
    "StepReport",
    "TrainerHook",
    "install_overflow_check",
    "observe_steps",
    "stop_observing",
    "unscale_update",
]

logger = logging.getLogger("mxamp")

#: After this many skipped steps in a row a run counts as stuck: a search for the scale is shorter.
_STUCK = 10
#: The parameters that a step's report shows; its field `nonfinite` holds all of them.
_CULPRITS = 6
_HALF = {"float16", "bfloat16"}

SCALED_TWICE = (
    "the losses of this trainer are scaled by {one} already; {other} would scale them twice: "
    "remove {rest}"
)
TOO_MANY_SKIPS = (
    "skipped {steps} in a row, and the loss scale is down to {scale:g}. The first had "
    "gradients that are not finite in {names}.{loss} Look for a learning rate that is too high, a "
    "division by zero or a logarithm of zero."
)
LOSS_NOT_FINITE = " The loss itself was not finite either."
ASSIGNED = (
    "trainer.amp_loss_scale only shows the scale, and {given} was assigned to it: to set the "
    "scale, write init_trainer(trainer, LossScaler(init_scale=128)), or scaler.update(128) with a "
    "GradScaler"
)
NEVER_SCALED = (
    "a trainer with a loss scale of %g steps, and no loss was ever scaled for it: small gradients "
    "are lost in float16. Run backward from the scaled loss, "
    "`with mxamp.scale_loss(loss, trainer) as scaled`"
)
FOREIGN_SCALER = (
    "this trainer's loss scaler is a {kind} and not mxamp's, so its steps can't be observed: use "
    "mxamp.init_trainer(trainer), or mxamp.patch_contrib() for scripts of mxnet.contrib.amp"
)


class Stage(Enum):
    """Whether a trainer's gradients carry the loss scale."""

    NONE = "none"
    SCALED = "scaled"
    UNSCALED = "unscaled"
    STEPPED = "stepped"  #: by a GradScaler, before its update()


#: The illegal moves: the error of an action in a stage. All other moves are legal.
_ILLEGAL = {
    ("scale", Stage.UNSCALED): (
        "these gradients have been unscaled and not been used: call trainer.step() or update() "
        "before the next scale_loss"
    ),
    ("unscale", Stage.NONE): (
        "there are no scaled gradients: unscale, or clip, after scale_loss and backward, before "
        "step"
    ),
    ("unscale", Stage.UNSCALED): (
        "these gradients are unscaled already: unscale, or clip, once before each step"
    ),
    ("unscale", Stage.STEPPED): (
        "this trainer has stepped since the last update(): call unscale_ before step"
    ),
    ("step", Stage.STEPPED): (
        "this trainer has stepped already since the last update(): call update() first"
    ),
}


class StepReport(NamedTuple):
    """The outcome of an update: `trainer.amp_last_step`."""

    stepped: bool  #: False if the update was skipped
    loss_scale: float  #: the scale that the gradients carried
    next_loss_scale: float
    nonfinite: Tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN
    loss_finite: bool = True  #: False if the loss was Inf or NaN before it was scaled

    def __repr__(self) -> str:
        fields = {name: repr(value) for name, value in self._asdict().items()}
        if len(self.nonfinite) > _CULPRITS:
            fields["nonfinite"] = f"({shortened([*map(repr, self.nonfinite)], _CULPRITS)})"
        return f"StepReport({', '.join(f'{name}={text}' for name, text in fields.items())})"

    def _repr_html_(self) -> str:
        fields = {**self._asdict(), "nonfinite": shortened(self.nonfinite, _CULPRITS)}
        return html_table(("", ""), [(name, str(value)) for name, value in fields.items()])


@dataclass
class _Pending:
    """The gradients of one trainer between backward pass and step."""

    stage: Stage = Stage.NONE
    scale: float = 1.0  #: of the losses, and of the gradients until they are unscaled
    loss_count: int = 0  #: how many were scaled
    losses: List[NDArray] = field(default_factory=list)  #: the unscaled losses
    overflown: AbstractSet[int] = frozenset()  #: arrays with non-finite gradients, by `id`
    reduced: bool = False  #: summed over devices already

    @property
    def is_marked(self) -> bool:
        """Whether the gradients come from a scaled loss and wait for their step."""
        return self.stage in (Stage.SCALED, Stage.UNSCALED)

    def add(self, scale: float, losses: Sequence[NDArray]) -> None:
        """Record scaled losses; the first of them set `scale` and `stage` until the step."""
        if self.stage is Stage.NONE:
            self.scale, self.stage = scale, Stage.SCALED  # in this order: other threads read both
        self.loss_count += 1
        self.losses.extend(losses)

    def remove(self, losses: Sequence[NDArray]) -> None:
        """Undo `add` for losses whose scaling failed."""
        self.loss_count = max(self.loss_count - 1, 0)
        self.stage = self.stage if self.loss_count else Stage.NONE
        self.losses = [one for one in self.losses if all(one is not value for value in losses)]


#: Held while a hook marks its gradients: several threads may scale losses of one trainer.
_lock = threading.Lock()


def _loss_scaler_property(name: str, check: Callable[[Any], Any]) -> Any:
    """Return a property of hooks for the attribute `name` of their `LossScaler`.

    With any other scaler, it is the attribute of a new `LossScaler`, and can't be changed.
    """

    def read_attribute(hook: "TrainerHook") -> Any:
        return getattr(hook.scaler.origin, name, getattr(LossScaler(), name))

    def assign_checked(hook: "TrainerHook", value: Any) -> None:
        value = check(value)
        if isinstance(hook.scaler.origin, LossScaler):
            setattr(hook.scaler.origin, name, value)

    return property(read_attribute, assign_checked)


class TrainerHook:
    """One trainer's loss scaling: the object in `trainer._amp_loss_scaler`.

    `loss_scale` is the scale of the current gradients, as scripts written for `mxnet.contrib.amp`
    read it. `steps` and `skips` count updates done and skipped. `scaled_by` names the API that
    scales this trainer's losses.
    """

    def __init__(
        self,
        trainer: Trainer,
        scaler: Scaler,
        max_consecutive_skips: Optional[int] = None,
        scaled_by: str = "init_trainer",
    ) -> None:
        self.trainer, self.scaler, self.scaled_by = trainer, scaler, scaled_by
        #: Weights and master weights to set to them: parameters may be loaded after the states.
        self._new_masters: List[Tuple[NDArray, NDArray]] = []
        self.retired = False  #: the API that scaled the losses has ended; another may take over
        self.loaded: Optional[Mapping[str, Any]] = None  #: the state from a file
        self.max_consecutive_skips = max_consecutive_skips
        self._skips_in_a_row, self._has_warned_of_skips = 0, False
        self._first_nonfinite: Tuple[str, ...] = ()  #: of these skips
        self.steps = self.skips = 0
        self.max_loss_count = 0  #: the most losses scaled for one step
        self.reduction = Reduction(trainer)
        self._pending = _Pending()
        self.last_stage = Stage.SCALED  #: of the gradients in the last step
        self._may_warn = scaled_by in ("init_trainer", "initialize")  #: of a loss never scaled
        self.publish(None)

    @property
    def loss_scale(self) -> float:
        """The scale of the current gradients and of the next loss."""
        scaled = self.stage is Stage.SCALED
        return self._pending.scale if scaled else self.scaler.loss_scale

    def _assign_scale(self, scale: float) -> None:
        """Set the scale of the scaler and `trainer.amp_loss_scale`."""
        self.scaler.origin.assign_scale(scale)
        self._publish_scale()

    # The attributes of contrib's scaler, which scripts save and restore by themselves.
    _loss_scale = _next_loss_scale = property(lambda hook: hook.scaler.loss_scale, _assign_scale)
    _unskipped = _loss_scaler_property("_clean_steps", partial(whole_number, "_unskipped"))
    _scale_seq_len = _loss_scaler_property(
        "_growth_interval", partial(whole_number, "_scale_seq_len", least=1)
    )
    _max_loss_scale = _loss_scaler_property("_max_scale", float)

    def check_scaled_by(self, *allowed: str) -> None:
        """Raise `StateError` if an API that is not `allowed` scales this trainer's losses."""
        if self.scaled_by not in allowed:
            one, other = self.scaled_by, allowed[0]
            rest = " or ".join(sorted({one, other} - {"GradScaler"}))
            raise StateError(SCALED_TWICE.format(one=one, other=other, rest=rest))

    @property
    def stage(self) -> Stage:
        """The stage of the gradients: whether they carry the scale now."""
        return self._pending.stage

    @property
    def loss_count(self) -> int:
        """The number of losses scaled since the last step; with a shared scale, of any trainer."""
        return self._pending.loss_count

    def check(self, action: str) -> None:
        """Raise `StateError` if `action` ("scale", "unscale" or "step") is illegal now.

        Raises too if a script has assigned to `trainer.amp_loss_scale`, which has no effect.
        """
        if self.trainer.amp_loss_scale != self._published_scale:
            raise StateError(ASSIGNED.format(given=shown(self.trainer.amp_loss_scale)))
        if (action, self.stage) in _ILLEGAL:
            raise StateError(_ILLEGAL[action, self.stage])

    @contextmanager
    def scaling(self, scale: float, losses: Sequence[NDArray]) -> Iterator[None]:
        """Context in which `losses` are scaled: mark gradients as scaled, unless the body fails.

        `losses` are unscaled arrays, checked if the step overflows.
        """
        with _lock:
            self.check("scale")
            pending = self._pending
            pending.add(scale, losses)
            pending.reduced, self._may_warn = False, False
        try:
            yield
        except BaseException:
            with _lock:
                pending.remove(losses)
            raise

    def mark_scaled(self, losses: Sequence[NDArray] = ()) -> None:
        """Mark the gradients as scaled, without `scale_loss`; `losses` are the unscaled losses."""
        with _lock:
            self._pending.add(self.loss_scale, losses)

    def mark_unscaled(
        self,
        scale: float,
        replaced: AbstractSet[int],
        overflown: AbstractSet[int],
        losses: Sequence[NDArray] = (),
    ) -> None:
        """Record a backward pass that has scaled its losses and unscaled the gradients.

        `replaced` and `overflown` are arrays by `id`: those whose gradients the pass has replaced,
        and those whose gradients are not finite. `losses` are the losses of the pass. Losses of
        earlier passes, possibly for other trainers, are forgotten.
        """
        with _lock:
            found = (self._pending.overflown - replaced) | overflown
            loss_count = self._pending.loss_count + 1
            self._pending = _Pending(Stage.UNSCALED, scale, loss_count, list(losses), found)

    def unscale(self) -> None:
        """Divide the gradients of all devices by the scale, and record which are not finite."""
        self.check("unscale")
        self._equalize_scales()
        pairs = [(p, g) for p, of_one in fresh_gradients(self.trainer._params) for g in of_one]
        bad = unscale([gradient for _, gradient in pairs], self._pending.scale)
        if self._checks_gradients:
            self._pending.overflown |= {id(pairs[i][0].list_data()[0]) for i in bad}
        self._pending.stage = Stage.UNSCALED
        passes.set_scale(self.trainer, 1.0)

    def set_stepped(self, stepped: bool) -> None:
        """Set the stage to STEPPED, in which another `step` raises, or back to NONE."""
        self._pending.stage = Stage.STEPPED if stepped else Stage.NONE
        self._publish_scale()

    def reduce(self) -> None:
        """Sum the gradients over devices and workers."""
        check_contrib_is_off()  # its init_trainer may have replaced this trainer's scaler
        if self._pending.reduced:  # to clip them, before `step`
            return
        self._equalize_scales()
        self.reduction.wait_for_weights()
        if self.scaler.checks:
            self.reduction.compare_workers(self.scaler)
            computed = self._pending.is_marked or fresh_gradients(self.trainer._params)
            if self.reduction.workers is not None and not computed:
                # Only other workers have computed gradients: scaled as in the last step.
                self._pending.stage, self._pending.scale = self.last_stage, self.loss_scale
        self.reduction.sum(self._pending.overflown)
        self._pending.reduced = self._pending.is_marked

    def _equalize_scales(self) -> None:
        """Rescale all gradients to one scale; raise if another trainer's loss has scaled them."""
        if not self._pending.is_marked:
            passes.check_gradients_unscaled(self.trainer)
        else:
            scale = self._pending.scale if self.stage is Stage.SCALED else 1.0
            passes.rescale(self.trainer, scale)

    @property
    def _checks_gradients(self) -> bool:
        """Whether `step` checks the gradients for overflow."""
        return self.scaler.checks or self._pending.scale != 1

    def has_overflow(self, params: Sequence[Parameter]) -> bool:
        """Record a step, and return whether `Trainer._update`, the caller, has to skip it."""
        self._equalize_scales()
        follow_weights(self._new_masters)
        self._new_masters = []
        optimizer = self.trainer._optimizer
        # An array if `step` was given one: MXNet's operators parse its text.
        optimizer.rescale_grad = as_float(optimizer.rescale_grad)
        pending, scale, stage = self._pending, self._pending.scale, self.stage
        self.last_stage = stage if pending.is_marked else Stage.NONE
        if not pending.is_marked:
            self._warn_if_never_scaled()
            self._notify(StepReport(True, 1.0, self.loss_scale), ())
            return False
        # All workers use the gradients that one of them has computed.
        stale = self.reduction.workers is not None
        fresh = fresh_gradients(params, stale) if self._checks_gradients else []
        arrays = [gradient for _, of_one in fresh for gradient in of_one]
        # A script may have hidden an overflow since, for example by clipping element by element.
        hidden = bool(pending.overflown) and any(self._has_overflown(p) for p, _ in fresh)
        finite = not hidden and all_finite(arrays)
        if finite and stage is Stage.SCALED:
            unscale_update(optimizer, arrays, scale)
        report = self._update_scaler(finite, scale, fresh)
        self._pending = _Pending()
        self.max_loss_count = max(self.max_loss_count, pending.loss_count)
        passes.forget(self, self.trainer)
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        self.publish(report)
        self._notify(report, pending.losses)
        self._check_skips(report)
        return not finite

    def _notify(self, report: StepReport, losses: Sequence[NDArray]) -> None:
        """Call the trainer's observers, and stop the timer that warns of a long sum."""
        _notify_observers(self.trainer, report, losses)
        self.reduction.end_wait()

    def _check_skips(self, report: StepReport) -> None:
        """Log a step; warn of many skips in a row, and raise `StateError` at the limit."""
        _log_step(report)
        if report.stepped:
            self._skips_in_a_row = 0
            return
        if not self._skips_in_a_row:
            self._first_nonfinite, self._has_warned_of_skips = report.nonfinite, False
        self._skips_in_a_row += 1
        steps = self._skips_in_a_row
        message = TOO_MANY_SKIPS.format(
            steps=counted(steps, "step"),
            names=shortened(self._first_nonfinite),
            scale=report.next_loss_scale,
            loss="" if report.loss_finite else LOSS_NOT_FINITE,
        )
        if steps == self.max_consecutive_skips:
            self._skips_in_a_row = 0
            raise StateError(message)
        stuck = steps >= _STUCK or (steps > 1 and self.scaler.origin.is_lowest)
        if stuck and not self._has_warned_of_skips:
            self._has_warned_of_skips = True
            logger.warning(message)

    def _update_scaler(self, finite: bool, scale: float, fresh: Gradients) -> StepReport:
        """Update the loss scale after a step with these gradients; return the step's report."""
        if finite:
            return StepReport(True, scale, self.scaler.update(True))
        names = tuple(
            param.name
            for param, gradients in fresh
            if self._has_overflown(param) or not all_finite(gradients)
        )
        # Otherwise a later step with ignore_stale_grad=True would use the skipped gradients.
        for param, _ in fresh:
            for data in param.list_data():
                data._fresh_grad = False
        loss_finite = all_finite(self._pending.losses)
        self.scaler.back_off_from(scale)
        return StepReport(False, scale, self.scaler.update(False), names, loss_finite)

    def _has_overflown(self, param: Parameter) -> bool:
        """Return whether a backward pass found a gradient of the parameter that is not finite."""
        return any(id(data) in self._pending.overflown for data in param.list_data())

    def _warn_if_never_scaled(self) -> None:
        """Warn once, if steps begin without a scaled loss; bfloat16 needs none."""
        policy = current_policy()
        needed = policy is None or policy.target_dtype != "bfloat16"
        if self._may_warn and self.loss_scale != 1 and needed:
            logger.warning(NEVER_SCALED, self.loss_scale)
        self._may_warn = False

    def publish(self, report: Optional[StepReport]) -> None:
        """Set the trainer's `amp_loss_scale`, `amp_last_step`, `amp_steps` and `amp_skips`."""
        self._publish_scale()
        self.trainer.amp_last_step = report
        self.trainer.amp_steps, self.trainer.amp_skips = self.steps, self.skips

    def _publish_scale(self) -> None:
        """Set `trainer.amp_loss_scale`."""
        self.trainer.amp_loss_scale = self._published_scale = self.loss_scale

    @property
    def _by_level(self) -> bool:
        """Whether an optimization level decides the precision of the parameters."""
        return self.scaled_by == "initialize"

    def save_states(self, fname: str) -> None:
        """Write the trainer's states with the loss scaler's: the whole file or none."""
        save_states(self.trainer, fname, self.state_dict(), self._by_level)

    def load_states(self, fname: str) -> None:
        """Read the trainer's states with the loss scaler's; an error changes nothing.

        Load only files that you trust: MXNet unpickles them.
        """
        self._new_masters = load_states(self.trainer, fname, self.load_state_dict, self._by_level)

    def state_dict(self) -> Dict[str, Any]:
        """Return the scaler's state and the counts of steps and skips."""
        return {"scaler": self.scaler.state_dict(), "steps": self.steps, "skips": self.skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raise `ArgumentError` if `state` is something else."""
        scaler, steps, skips = parse_state(state)
        self.scaler, self.steps, self.skips = self.scaler.resumed(scaler), steps, skips
        self.loaded = state
        self.publish(None)

    def take_over(self, retired: "TrainerHook") -> None:
        """Take waiting gradients and loaded states from a hook whose API has ended."""
        self._pending = retired._pending
        self.loaded = retired.loaded

    def __repr__(self) -> str:
        return f"<TrainerHook of {self.scaled_by}: {self.scaler!r}, gradients {self.stage.value}>"


def _log_step(report: StepReport) -> None:
    """Log a step if it was skipped or has changed the scale."""
    scale = f"loss scale {report.loss_scale:g}"
    if report.next_loss_scale != report.loss_scale:
        scale += f" -> {report.next_loss_scale:g}"
    elif report.stepped:
        return
    skipped = f"step skipped, gradients of {shortened(report.nonfinite)} are not finite; "
    logger.info("%s%s", "" if report.stepped else skipped, scale)


def unscale_update(optimizer: Any, gradients: Sequence[NDArray], scale: float) -> None:
    """Divide an optimizer's `rescale_grad`, or else the gradients, by the loss scale.

    MXNet's optimizers multiply gradients by `rescale_grad`, which costs nothing extra. Optimizers
    that may not do so, or read gradients before, get gradients that are divided here.
    """
    dtypes = set(map(dtype_of, gradients))
    # LBSGD sums unrescaled gradients over steps, and takes its warm-up from their norm. In float16
    # MXNet multiplies the learning rate by `rescale_grad` first, which may give 0.
    underflows = "float16" in dtypes and not optimizer.multi_precision
    # Division in half precision would lose the small values that the scale preserves.
    trusted = type(optimizer).__module__.startswith("mxnet.optimizer") or dtypes & _HALF
    if trusted and not underflows and not isinstance(optimizer, LBSGD):
        optimizer.rescale_grad /= scale
    else:
        multiply(gradients, 1.0 / scale)


def install_overflow_check(trainer: Trainer) -> None:
    """Make a trainer of MXNet 1.7 call `has_overflow` before updates, as later versions do."""
    if has_feature("skipped_updates"):
        return
    trainer._update = partial(_update_if_finite, trainer)
    optimizer = trainer._optimizer  # mxnet.contrib.amp may have replaced its method
    own = getattr(optimizer, "old_update_multi_precision", None)
    if own is not None:
        optimizer.update_multi_precision = own


def _update_if_finite(trainer: Trainer, ignore_stale_grad: bool = False) -> None:
    """Update a trainer's parameters, unless its hook reports an overflow."""
    if not trainer._amp_loss_scaler.has_overflow(trainer._params):
        type(trainer)._update(trainer, ignore_stale_grad)


#: Called with the report on a step and its unscaled losses, if known. The gradients, and so the
#: losses, are computed by then.
StepObserver = Callable[[StepReport, Sequence[NDArray]], None]

#: Global, and not in the hook: a trainer without loss scaling can be observed too.
_observers: MutableMapping[Trainer, List[StepObserver]] = weakref.WeakKeyDictionary()


class _StepReporter:
    """Stands in for a loss scaler, and reports a trainer's steps to observers."""

    loss_scale = 1.0

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def has_overflow(self, params: Sequence[Any]) -> bool:
        del params
        _notify_observers(self._trainer, StepReport(True, 1.0, 1.0), ())
        return False


def observe_steps(trainer: Trainer, observer: StepObserver) -> None:
    """Call `observer` after each of a trainer's steps, until `stop_observing`."""
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is not None and not isinstance(scaler, (TrainerHook, _StepReporter)):
        raise StateError(FOREIGN_SCALER.format(kind=type(scaler).__module__))
    if scaler is None:
        trainer._amp_loss_scaler = _StepReporter(trainer)
        install_overflow_check(trainer)
    _observers.setdefault(trainer, []).append(observer)


def stop_observing(trainer: Trainer, observer: StepObserver) -> None:
    """Remove an observer; after the last one, undo the changes to the trainer."""
    _observers[trainer].remove(observer)
    if _observers[trainer]:
        return
    del _observers[trainer]
    if isinstance(getattr(trainer, "_amp_loss_scaler", None), _StepReporter):
        del trainer._amp_loss_scaler
        vars(trainer).pop("_update", None)  # of install_overflow_check


def _notify_observers(trainer: Trainer, report: StepReport, losses: Sequence[NDArray]) -> None:
    for observer in tuple(_observers.get(trainer, ())):
        observer(report, losses)
