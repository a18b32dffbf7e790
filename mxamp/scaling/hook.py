"""Per-trainer loss-scaling state, and the overflow check before each update.

`Trainer._update` asks `self._amp_loss_scaler.has_overflow(params)` before it updates, and skips
the update on True. That question is all the hook needs: by then `step` has reduced the gradients
of all devices and set the optimizer's `rescale_grad`, which takes the scale out again.

Whether gradients carry the scale is a state of the trainer:

    none ── scale_loss ──► scaled ── unscale ──► unscaled
      ▲                      │                      │
      └────────── step or update, done or skipped ──┘

A step without `scale_loss` finds "none" and is a plain step of MXNet's. A `StateError`, where its
gradients come from a loss that was scaled for another trainer (`passes`).
"""

import threading
from contextlib import contextmanager
from typing import AbstractSet, Any, Dict, Iterator, Mapping, Optional, Sequence

from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.arrays import as_float
from .checkpoint import load_states, save_states, saved_state
from .contrib_names import ContribNames
from .finite import all_finite, unscale
from .passes import passes
from .pending import PendingGradients, Stage
from .reduction import Gradients, Reduction, fresh_gradients
from .report import SkipWatch, StepReport, log_step, warn_of_no_scaling
from .rescaling import take_out_scale
from .scaler import Scaler
from .step_observers import tell_observers

__all__ = ["Stage", "TrainerHook"]

SCALED_TWICE = (
    "the losses of this trainer are scaled by {one} already; {other} would scale them twice: leave "
    "one of the two out"
)
STEP_BEFORE_SCALING = (
    "these gradients have been unscaled and not been used: call trainer.step() or update() "
    "before the next scale_loss"
)
NOTHING_TO_UNSCALE = (
    "there are no scaled gradients: unscale, or clip, after scale_loss and backward, before step"
)
UNSCALED_TWICE = "these gradients are unscaled already: unscale, or clip, once before each step"


class TrainerHook(ContribNames):
    """One trainer's loss scaling; what `trainer._amp_loss_scaler` is.

    `loss_scale` is the scale that the current gradients carry, as scripts written for
    `mxnet.contrib.amp` read it. `steps` and `skips` count updates done and skipped. `scaled_by`
    names the API that scales this trainer's losses. The attributes of contrib's own scaler can be
    read and assigned too.
    """

    def __init__(
        self,
        trainer: Trainer,
        scaler: Scaler,
        max_consecutive_skips: Optional[int] = None,
        scaled_by: str = "init_trainer",
    ) -> None:
        self.trainer, self.scaler, self.scaled_by = trainer, scaler, scaled_by
        self.retired = False  #: the API that scaled the losses has ended; another may take over
        self.loaded: Optional[Mapping[str, Any]] = None  #: what a state file held
        self.watch = SkipWatch(max_consecutive_skips)
        self.steps = self.skips = 0
        self.most_losses = 0  #: that were scaled for one step
        self.reduction = Reduction(trainer)
        self._lock = threading.Lock()
        self._pending = PendingGradients()
        self.last_stage = Stage.SCALED  #: what gradients were in the last step
        self._may_warn = scaled_by in ("init_trainer", "initialize")  # of losses never scaled
        self.publish(None)

    @property
    def loss_scale(self) -> float:
        """The scale of the current gradients and of the next loss."""
        scaled = self.stage is Stage.SCALED
        return self._pending.scale if scaled else self.scaler.loss_scale

    def check_scaled_by(self, *allowed: str) -> None:
        """Raise `StateError` where an API that is not `allowed` scales this trainer's losses."""
        if self.scaled_by not in allowed:
            raise StateError(SCALED_TWICE.format(one=self.scaled_by, other=allowed[0]))

    @property
    def stage(self) -> Stage:
        """Whether the gradients carry the scale now."""
        return self._pending.stage

    @property
    def losses(self) -> int:
        """How many losses were scaled since the last step, for this trainer or for all."""
        return self._pending.losses

    @contextmanager
    def scaling(self, scale: float, values: Sequence[NDArray]) -> Iterator[None]:
        """Mark the gradients of losses scaled by `scale`; an error inside takes that back.

        `values` are the losses before they are scaled, to be looked at if the step overflows.
        """
        with self._lock:
            if self.stage is Stage.UNSCALED:
                raise StateError(STEP_BEFORE_SCALING)
            pending = self._pending
            pending.add(scale, values)
            pending.reduced, self._may_warn = False, False
        try:
            yield
        except BaseException:
            with self._lock:
                pending.take_back(values)
            raise

    def reduce(self) -> None:
        """Sum scaled gradients over devices, once: clipping needs the sum before `step` does."""
        if self._pending.reduced:
            return
        self._settle()
        self.reduction.wait_for_weights()
        if self.scaler.checks:
            self.reduction.compare_workers(self.scaler)
            if self.reduction.is_compressed and not self._unscale_to_compress():
                return
            self._follow_others()
        self.reduction.sum(self._pending.overflown)
        self._pending.reduced = self.stage is not Stage.NONE

    def _settle(self) -> None:
        """Have all gradients carry what this trainer takes them to carry; raise where it can't."""
        if self.stage is Stage.NONE:
            passes.check_own(self.trainer)
        else:
            own = self._pending.scale if self.stage is Stage.SCALED else 1.0
            passes.convert(self.trainer, own)

    def _follow_others(self) -> None:
        """Take the sum for what it was in the last step, where this worker has computed nothing."""
        if self.stage is Stage.NONE and self.reduction.comes_from_others:
            self._pending.stage, self._pending.scale = self.last_stage, self.loss_scale

    def _unscale_to_compress(self) -> bool:
        """Take the scale out of gradients about to be compressed; False where one overflowed.

        Compression rounds by a threshold, which is meant for gradients without the scale.
        """
        fresh = fresh_gradients(self.trainer._params)
        if self.stage is Stage.SCALED:
            self.unscale()
        overflown = any(self._has_overflown(param) for param, _ in fresh)
        return not overflown and all_finite([g for _, of_one in fresh for g in of_one])

    def mark_scaled(self, values: Sequence[NDArray] = ()) -> None:
        """Mark the gradients as scaled, even if `scale_loss` was not used.

        `values` are the losses, as in `scaling`.
        """
        with self._lock:
            self._pending.add(self.loss_scale, values)

    def mark_unscaled(
        self,
        scale: float,
        replaced: AbstractSet[int],
        overflown: AbstractSet[int],
        values: Sequence[NDArray] = (),
    ) -> None:
        """Take note of a backward pass that has scaled, and taken the scale out again.

        By `id` of their arrays: the gradients it has replaced, and those that were not finite.
        `values` are the losses that it began with; those of earlier passes, which may have been
        other trainers', are forgotten.
        """
        with self._lock:
            found = (self._pending.overflown - replaced) | overflown
            losses = self._pending.losses + 1
            self._pending = PendingGradients(Stage.UNSCALED, scale, losses, list(values), found)

    def unscale(self) -> None:
        """Divide the gradients of all devices by the scale, and note which are not finite."""
        if self.stage is Stage.NONE:
            raise StateError(NOTHING_TO_UNSCALE)
        if self.stage is Stage.UNSCALED:
            raise StateError(UNSCALED_TWICE)
        self._settle()
        pairs = [(p, g) for p, of_one in fresh_gradients(self.trainer._params) for g in of_one]
        bad = unscale([gradient for _, gradient in pairs], self._pending.scale)
        if self._checks:
            self._pending.overflown |= {id(pairs[i][0].list_data()[0]) for i in bad}
        self._pending.stage = Stage.UNSCALED
        passes.set_scale(self.trainer, 1.0)

    @property
    def _checks(self) -> bool:
        return self.scaler.checks or self._pending.scale != 1

    def has_overflow(self, params: Sequence[Parameter]) -> bool:
        """Answer `Trainer._update`: True, and the update is skipped."""
        self._settle()
        optimizer = self.trainer._optimizer
        # An array where `step` was given one: MXNet's operators parse its text.
        optimizer.rescale_grad = as_float(optimizer.rescale_grad)
        stage = self.last_stage = self.stage
        if stage is Stage.NONE:
            if self._may_warn:
                warn_of_no_scaling(self.loss_scale)
            self._may_warn = False
            report = StepReport(True, 1.0, self.loss_scale)
            tell_observers(self.trainer, report, ())
            self.reduction.compare_step(self.steps + self.skips, stage.value, report)
            return False
        pending, scale = self._pending, self._pending.scale
        fresh = self.reduction.used(params) if self._checks else []
        arrays = [gradient for _, of_one in fresh for gradient in of_one]
        # A script may have hidden what overflowed since, say by clipping element by element.
        hidden = any(self._has_overflown(param) for param, _ in fresh)
        finite = not hidden and all_finite(arrays)
        if finite and stage is Stage.SCALED:
            take_out_scale(optimizer, arrays, scale)
        report = self._report(finite, scale, fresh)
        self._pending = PendingGradients()
        self.most_losses = max(self.most_losses, pending.losses)
        passes.forget(self.trainer, self)
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        self.publish(report)
        log_step(report)
        tell_observers(self.trainer, report, pending.values)
        self.reduction.compare_step(self.steps + self.skips, stage.value, report)
        self.watch.see(report)
        return not finite

    def _report(self, finite: bool, scale: float, fresh: Gradients) -> StepReport:
        if finite:
            return StepReport(True, scale, self.scaler.update(True))
        names = tuple(
            param.name
            for param, gradients in fresh
            if self._has_overflown(param) or not all_finite(gradients)
        )
        # Else a later step with ignore_stale_grad=True would use what is skipped here.
        for param, _ in fresh:
            for data in param.list_data():
                data._fresh_grad = False
        loss_finite = all_finite(self._pending.values)
        self.scaler.back_off_from(scale)
        return StepReport(False, scale, self.scaler.update(False), names, loss_finite)

    def _has_overflown(self, param: Parameter) -> bool:
        return any(id(data) in self._pending.overflown for data in param.list_data())

    def publish(self, report: Optional[StepReport]) -> None:
        """Show the state on the trainer."""
        self.trainer.amp_loss_scale = self.loss_scale
        self.trainer.amp_last_step = report
        self.trainer.amp_steps, self.trainer.amp_skips = self.steps, self.skips

    def save_states(self, fname: str) -> None:
        """Write the trainer's states, the loss scaler's among them: the whole file or none."""
        save_states(self.trainer, fname, self.state_dict())

    def load_states(self, fname: str) -> None:
        """Read the trainer's states, and go on from the loss scaler's; an error changes nothing.

        Load only files that you trust: MXNet unpickles them.
        """
        load_states(self.trainer, fname, self.load_state_dict)

    def state_dict(self) -> Dict[str, Any]:
        """Return what `save_states` keeps: the scaler and the counts."""
        return {"scaler": self.scaler.state_dict(), "steps": self.steps, "skips": self.skips}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; raises `ArgumentError` where it did not."""
        scaler, steps, skips = saved_state(state)
        self.scaler, self.steps, self.skips = self.scaler.resumed(scaler), steps, skips
        self.loaded = state
        self.publish(None)

    def take_over(self, retired: "TrainerHook") -> None:
        """Go on from a hook that has ended: gradients that wait for their step, states loaded."""
        self._pending = retired._pending
        self.loaded = retired.loaded

    def __repr__(self) -> str:
        return f"<TrainerHook of {self.scaled_by}: {self.scaler!r}, gradients {self.stage.value}>"

    def __getstate__(self) -> Dict[str, Any]:
        # Copies and pickles of trainers hold their hook; locks can be neither.
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
