"""What became of a step: the report on it, its log line, and a watch over runs that only skip."""

import logging
from typing import NamedTuple, Optional, Tuple

from ..errors import StateError
from ..framework.wording import counted, shortened
from ..policy.active import current_policy

__all__ = ["SkipWatch", "StepReport", "log_step", "warn_of_no_scaling"]

logger = logging.getLogger("mxamp")

# After so many skipped steps in a row a run is taken to be stuck.
_STUCK = 10

TOO_MANY_SKIPS = (
    "skipped {steps} in a row, and the loss scale is down to {scale:g}. The first had "
    "gradients that are not finite in {names}.{loss} Look for a learning rate that is too high, a "
    "division by zero or a logarithm of zero."
)
NEVER_SCALED = (
    "a trainer with a loss scale of %g steps, and no loss was ever scaled for it: small gradients "
    "are lost in float16. Run backward from the scaled loss, "
    "`with mxamp.scale_loss(loss, trainer) as scaled`"
)
NOT_FINITE = " The loss itself was not finite either."


class StepReport(NamedTuple):
    """What became of an update: `trainer.amp_last_step`."""

    stepped: bool  #: False where it was skipped
    loss_scale: float  #: what the gradients carried
    next_loss_scale: float
    nonfinite: Tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN
    loss_finite: bool = True  #: False where the loss itself was Inf or NaN before it was scaled


class SkipWatch:
    """Warns of, or ends, a run that skips step after step."""

    def __init__(self, limit: Optional[int]) -> None:
        self.limit = limit
        self._count = 0
        self._first: Tuple[str, ...] = ()
        self._warned = False

    def see(self, report: StepReport) -> None:
        """Take note of a step; raise `StateError` where so many were skipped as are allowed."""
        if report.stepped:
            self._count = 0
            return
        if not self._count:
            self._first, self._warned = report.nonfinite, False
        self._count += 1
        if self._count == self.limit:
            message = self._message(report)
            self._count = 0
            raise StateError(message)
        # A scale that does not fall any more, at its floor, can't be what overflows.
        stuck = self._count >= _STUCK or (
            self._count > 1 and report.next_loss_scale == report.loss_scale
        )
        if stuck and not self._warned:
            self._warned = True
            logger.warning(self._message(report))

    def _message(self, report: StepReport) -> str:
        return TOO_MANY_SKIPS.format(
            steps=counted(self._count, "step"),
            names=shortened(self._first),
            scale=report.next_loss_scale,
            loss="" if report.loss_finite else NOT_FINITE,
        )


def log_step(report: StepReport) -> None:
    """Log a step that was skipped, or has changed the scale."""
    change = f"loss scale {report.loss_scale:g} -> {report.next_loss_scale:g}"
    if not report.stepped:
        names = shortened(report.nonfinite)
        logger.info("step skipped, gradients of %s are not finite; %s", names, change)
    elif report.next_loss_scale != report.loss_scale:
        logger.info(change)


def warn_of_no_scaling(scale: float) -> None:
    """Warn of a first step that no loss was scaled for, but in bfloat16, which needs no scale."""
    policy = current_policy()
    if scale != 1 and (policy is None or policy.target_dtype != "bfloat16"):
        logger.warning(NEVER_SCALED, scale)
