"""The loss-scaling state of one trainer, and the overflow check before each update.

`Trainer._update` calls `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. By then `step` has reduced the gradients of all devices and set the optimizer's
`rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is a state of the trainer:

    none ── a loss is scaled ──► scaled ── unscale ──► unscaled
      ▲                            │                      │
      └─────────── step or update, done or skipped ───────┘

With a `GradScaler` the step leads to "stepped", and the scaler's `update()` from there to "none".
Which scale each gradient carries is recorded by the backward passes (see `passes`). A step in
"none" is MXNet's plain step, and a `StateError` if another trainer's loss has scaled its gradients.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LBSGD

from ..errors import StateError
from ..framework.arrays import as_float, dtype_of
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.wording import shortened, shown
from .checkpoint import load_states, parse_state, save_states
from .distributed import Reduction
from .finite import all_finite, multiply
from .float16_optimizers import check_float16_update
from .optimizer_states import follow_weights
from .passes import Entry, gradients_of, passes
from .scaler import OTHER_KIND, LossScaler, from_state_dict, whole_number

logger = logging.getLogger("mxamp")

#: After this many skipped steps in a row a run counts as stuck: a search for the scale is shorter.
_STUCK = 10
#: The losses of one step that are looked at after an overflow: those of validation may be many.
LOSSES = 100
_HALF = {"float16", "bfloat16"}

SCALED_TWICE = (
    "the losses of this trainer are scaled by {one} already; {other} would scale them twice: "
    "remove {rest}"
)
SKIPPED = "step skipped, gradients of %s are not finite; %s"
TOO_MANY_SKIPS = (
    "skipped %d steps in a row, and the loss scale is down to %g. The first had gradients that are "
    "not finite in %s.%s Look for a learning rate that is too high, and for a division by zero or "
    "a logarithm of zero."
)
LOSS_NOT_FINITE = " The loss itself was not finite either."
ASSIGNED = (
    "trainer.amp_loss_scale only shows the scale, and {given} was assigned to it: to set the "
    "scale, write init_trainer(trainer, LossScaler(init_scale=128))"
)
NOT_SCALED = (
    "the gradients of this step carry no loss scale, and small float16 ones may be lost: call "
    "backward on the scaled loss, `with mxamp.scale_loss(loss, trainer) as scaled` or "
    "scaler.scale(loss)"
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
    nonfinite: tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN
    loss_finite: bool = True  #: False if the loss was Inf or NaN before it was scaled


#: Held while a state changes its stage: several threads may scale losses of one trainer.
_lock = threading.Lock()


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
    scales this trainer's losses.
    """

    def __init__(
        self,
        trainer: Trainer,
        scaler: LossScaler,
        scaled_by: str = "init_trainer",
    ) -> None:
        self.trainer, self.scaler, self.scaled_by = trainer, scaler, scaled_by
        self.gradients = gradients_of(trainer)
        #: The results of steps for a GradScaler's `update`; None: each step updates the scaler.
        self.results: list[bool] | None = None
        #: Weights and master weights to set to them: parameters may be loaded after the states.
        self._new_masters: list[tuple[NDArray, NDArray]] = []
        self.retired = False  #: the API that scaled the losses has ended; another may take over
        self.loaded: Mapping[str, Any] | None = None  #: the state from a file
        self._skips_in_a_row, self._has_warned_of_skips = 0, False
        self._first_nonfinite: tuple[str, ...] = ()  #: of these skips
        self.steps = self.skips = 0
        self._stage, self._scale = Stage.NONE, 1.0  #: the scale of the losses since the last step
        self._losses: list[NDArray] = []  #: these losses, unscaled
        self._is_probed = False  #: its optimizer can update these weights
        self._is_reduced = False  #: summed over devices already
        self.last_stage = Stage.SCALED  #: of the gradients in the last step
        self._may_warn = not self.is_shared  #: of gradients without a scale
        self.reduction = Reduction(trainer)
        self.publish(None)

    @property
    def is_shared(self) -> bool:
        """Whether a scale that never leaves the backward pass is shared with other trainers."""
        return self.scaled_by not in ("init_trainer", "initialize", "GradScaler")

    @property
    def stage(self) -> Stage:
        """The stage of the gradients: whether they carry the scale now."""
        # A pass from a loss that was scaled before the last step, or before `unscale`. A trainer of
        # a GradScaler steps by the GradScaler alone.
        again = self.results is None and self._stage in (Stage.NONE, Stage.UNSCALED)
        if again and self.scaler.number in self.gradients.owners:
            return Stage.SCALED
        return self._stage

    @property
    def loss_scale(self) -> float:
        """The scale of the current gradients and of the next loss."""
        if self.stage is not Stage.SCALED:
            return self.scaler.loss_scale
        return self.gradients.carried if self.gradients.is_known else self._scale

    @property
    def next_scale(self) -> float:
        """The scale of the next loss: until the step, that of the losses before it."""
        return self._scale if self._stage is Stage.SCALED else self.scaler.loss_scale

    def _assign_scale(self, scale: float) -> None:
        """Set the scale of the scaler and `trainer.amp_loss_scale`."""
        self.scaler.assign_scale(scale)
        self._publish_scale()

    # The attributes of contrib's scaler, which scripts save and restore by themselves.
    _loss_scale = _next_loss_scale = property(lambda one: one.scaler.loss_scale, _assign_scale)
    _unskipped = _forwarded("_clean_steps", partial(whole_number, "_unskipped"))
    _scale_seq_len = _forwarded("_growth_interval", partial(whole_number, "steps", least=1))
    _max_loss_scale = _forwarded("_max_scale", float)

    def check_scaled_by(self, *allowed: str) -> None:
        """Raise `StateError` if an API that is not `allowed` scales this trainer's losses."""
        if self.scaled_by not in allowed:
            one, other = self.scaled_by, allowed[0]
            rest = " or ".join(sorted({one, other} - {"GradScaler"}))
            raise StateError(SCALED_TWICE.format(one=one, other=other, rest=rest))

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
        self.check("scale")
        before = self._stage, self._scale, self._losses
        self.mark_scaled(scale, [*self._losses, *losses][-LOSSES:])
        self._is_reduced = False
        try:
            yield
        except BaseException:
            self._stage, self._scale, self._losses = before
            raise

    def mark_scaled(self, scale: float, losses: Sequence[NDArray]) -> None:
        """Mark the gradients as scaled; the first unscaled `losses` since a step set the scale."""
        with _lock:
            if self._stage in (Stage.NONE, Stage.STEPPED):
                self._scale = scale
                self._stage = Stage.SCALED  # after the scale: other threads read both
            self._losses = [*losses]
        passes.trainers.add(self.trainer)  # a copied trainer has run no constructor

    def mark_unscaled(
        self, scale: float, overflown: set[int], losses: Sequence[NDArray] = ()
    ) -> None:
        """Record a backward pass that has scaled its losses and unscaled the gradients.

        `overflown` are arrays, by `id`, whose gradients are not finite. `losses` are the losses of
        the pass. Losses of earlier passes, possibly for other trainers, are forgotten.
        """
        entries = self.gradients.entries() if overflown else []
        found = ((one.key, one.gradient) for one in entries if id(one.data) in overflown)
        self.gradients.overflown.update(found)
        self._stage, self._scale, self._losses = Stage.UNSCALED, scale, [*losses]

    def unscale(self) -> None:
        """Divide the gradients of all devices by the scale, and record which are not finite."""
        self.check("unscale")
        self._scale = self.loss_scale
        self._equalize()
        self.gradients.unscale()
        self._stage = Stage.UNSCALED

    def leave_passes(self) -> None:
        """Unscale the gradients, because no backward pass is seen from now on."""
        if self.stage is Stage.SCALED and self.gradients.is_known:
            self.unscale()
        self.gradients.unscale()

    def set_stepped(self, stepped: bool) -> None:
        """Set the stage to STEPPED, in which another `step` raises, or back to NONE."""
        self._stage = Stage.STEPPED if stepped else Stage.NONE
        self._publish_scale()

    def reduce(self) -> None:
        """Sum the gradients over devices and workers."""
        check_contrib_is_off()  # its init_trainer may have replaced this trainer's scaler
        if self._is_reduced:  # to clip them, before `step`
            return
        self._equalize()
        self.reduction.wait_for_weights()
        if self.scaler.checks:
            self.reduction.compare_workers(self.scaler)
            computed = self.stage is not Stage.NONE or self.gradients.fresh()
            if self.reduction.workers is not None and not computed:
                # Only other workers have computed gradients: scaled as in the last step.
                self._scale, self._stage = self.loss_scale, self.last_stage
                self.gradients.carried = self._scale if self._stage is Stage.SCALED else 1.0
        self.reduction.sum(self.gradients)
        self._is_reduced = self.stage is not Stage.NONE

    def _equalize(self) -> float:
        """Bring all gradients to one scale, and return it.

        Raises `StateError` if another trainer's loss has scaled them.
        """
        if self._stage is Stage.SCALED:
            self.gradients.assume(self._scale)
        elif self.stage is Stage.NONE:
            self.gradients.check_unscaled()
        carried = self.gradients.equalize()
        # A trainer of a GradScaler may step without it.
        mine = self._stage is (Stage.NONE if self.results is None else Stage.SCALED)
        plain = carried == 1 and self.gradients.is_known and (mine or self._stage is Stage.SCALED)
        if self._may_warn and plain and self.scaler.loss_scale != 1:
            self._may_warn = False
            logger.warning(NOT_SCALED)
        return carried

    def has_overflow(self, params: Any = None) -> bool:
        """Record a step, and return whether `Trainer._update`, the caller, has to skip it."""
        del params  # the trainer's
        carried, stage = self._equalize(), self.stage
        if not self._is_probed:
            check_float16_update(self.trainer)
            self._is_probed = True
        follow_weights(self._new_masters)
        self._new_masters = []
        optimizer = self.trainer._optimizer
        # An array if `step` was given one: MXNet's operators parse its text.
        optimizer.rescale_grad = as_float(optimizer.rescale_grad)
        self.last_stage = stage
        if stage is Stage.NONE:
            self._notify(StepReport(True, 1.0, self.loss_scale))
            return False
        gradients, known = self.gradients, self._stage is stage and self._scale != 1
        scale = self._scale if known else carried
        # All workers use the gradients that one of them has computed.
        used = gradients.entries() if self.reduction.workers is not None else gradients.fresh()
        used = used if self.scaler.checks or scale != 1 else []
        finite = not any(map(gradients.is_overflown, used))
        finite = finite and all_finite([entry.gradient for entry in used])
        arrays = [entry.gradient for entry in used]
        if finite and carried != 1 and unscale_update(optimizer, arrays, carried):
            gradients.exceptions.update((entry.key, 1.0) for entry in used)
            gradients.tell_others(used)
        report = self._update_scaler(finite, scale, used)
        self._losses = []
        self._stage, self._is_reduced = Stage.NONE, False
        gradients.end_step()
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        if self.scaler.scales and self.scaler.checks:
            gradients.statistics.after_step(finite, gradients.running_statistics)
        self.publish(report)
        self._notify(report)
        self._log(report)
        return not finite

    def _notify(self, report: StepReport) -> None:
        """Call the functions of `debugging.on_step`."""
        for function in tuple(vars(self.trainer).get("_amp_observers", ())):
            function(report)

    def _log(self, report: StepReport) -> None:
        """Log a step that was skipped or has changed the scale; warn of many skips in a row."""
        changes = report.next_loss_scale != report.loss_scale
        scale = f"loss scale {report.loss_scale:g}"
        scale += f" -> {report.next_loss_scale:g}" if changes else ""
        if report.stepped:
            self._skips_in_a_row = 0
            if changes:
                logger.info(scale)
            return
        logger.info(SKIPPED, shortened(report.nonfinite), scale)
        if not self._skips_in_a_row:
            self._first_nonfinite, self._has_warned_of_skips = report.nonfinite, False
        self._skips_in_a_row += 1
        steps = self._skips_in_a_row
        stuck = steps >= _STUCK or (steps > 1 and self.scaler.is_lowest)
        if stuck and not self._has_warned_of_skips:
            self._has_warned_of_skips = True
            loss = "" if report.loss_finite else LOSS_NOT_FINITE
            names = shortened(self._first_nonfinite)
            logger.warning(TOO_MANY_SKIPS, steps, report.next_loss_scale, names, loss)

    def _update_scaler(self, finite: bool, scale: float, used: Sequence[Entry]) -> StepReport:
        """Update the loss scale after a step with these gradients; return the step's report."""
        names: tuple[str, ...] = ()
        if not finite:
            gone = self.gradients.is_overflown
            bad = [one for one in used if gone(one) or not all_finite([one.gradient])]
            names = tuple(dict.fromkeys(entry.param.name for entry in bad))
            # Otherwise a later step with ignore_stale_grad=True would use the skipped gradients.
            for entry in used:
                entry.data._fresh_grad = False
            if not self.is_shared:  # the lowest of several scales may be that of an idle trainer
                self.scaler.back_off_from(scale)
        if self.results is None:
            self.scaler.update(finite)
        else:
            self.results.append(finite)
        loss_finite = finite or all_finite(self._losses)
        return StepReport(finite, scale, self.scaler.loss_scale, names, loss_finite)

    def publish(self, report: StepReport | None) -> None:
        """Set the trainer's `amp_loss_scale`, `amp_last_step`, `amp_steps` and `amp_skips`."""
        self._publish_scale()
        self.trainer.amp_last_step = report
        self.trainer.amp_steps, self.trainer.amp_skips = self.steps, self.skips

    def _publish_scale(self) -> None:
        self.trainer.amp_loss_scale = self._published_scale = self.scaler.loss_scale

    def save_states(self, fname: str) -> None:
        """Write the trainer's states with the loss scaler's: the whole file or none."""
        save_states(self.trainer, fname, self.state_dict(), self.scaled_by == "initialize")

    def load_states(self, fname: str) -> None:
        """Read the trainer's states with the loss scaler's; an error changes nothing.

        Load only files that you trust: MXNet unpickles them.
        """
        by_level = self.scaled_by == "initialize"
        self._new_masters = load_states(self.trainer, fname, self.load_state_dict, by_level)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the counts of steps and skips."""
        scaler = self.scaler.state_dict()
        if self.is_shared:
            scaler.update(shared_steps=self.scaler.steps, shared_skips=self.scaler.skips)
        return {"scaler": scaler, "steps": self.steps, "skips": self.skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raise `ArgumentError` if `state` is something else."""
        scaler, steps, skips = parse_state(state)
        if self.scaled_by == "GradScaler" and scaler.get("kind") != self.scaler.kind:
            logger.warning(OTHER_KIND, from_state_dict(scaler), self.scaler)
        else:
            self.scaler.resume(scaler)
        self.steps, self.skips, self.loaded = steps, skips, state
        self.publish(None)

    def take_over(self, retired: "State") -> None:
        """Take waiting gradients and loaded states from the state of an API that has ended."""
        self._stage, self._scale, self._losses = retired._stage, retired._scale, retired._losses
        self.loaded = retired.loaded

    def __repr__(self) -> str:
        return f"<State of {self.scaled_by}: {self.scaler!r}, gradients {self.stage.value}>"


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
