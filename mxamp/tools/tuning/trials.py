"""Forms of a model that are timed in turns: with and without low precision, converted, fused.

In each round every form runs once, float32 first, and what counts is the ratio to float32 in the
same round: a machine that slows down slows all of them.
"""

import logging
import math
import statistics
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.models import convert_hybrid_block
from ...errors import AmpError, StateError
from ...patches.autocast import autocast
from ...policy.active import enter_region, leave_region
from ...policy.policy import Policy
from ..debugging.isolated import arrays_in, loss_of
from .deadline import Deadline
from .subject import Subject

__all__ = ["PLAIN", "Form", "Trials"]

logger = logging.getLogger("mxamp")

#: A turn lasts so many seconds at least: a form that is faster runs several times.
_SHORTEST = 0.01
#: What has less of the speed of the fastest is not timed any longer: after one round, and later.
_HOPELESS = (0.5, 0.85)
#: What takes so many times as long as float32 in its first calls is not timed at all.
_TOO_SLOW = 8.0
#: A form takes the place of another where it is so much faster.
MARGIN = 1.02


class Form(NamedTuple):
    """A way to run the model."""

    way: str  #: "plain", "autocast", "converted" or "fused"
    policy: Optional[Policy] = None


PLAIN = Form("plain")

NOT_RUNNING = "the model does not run in float32 as a hybridized block"


class _Runner:
    """A form that is ready to run, and what was measured of it."""

    def __init__(self, form: Form, block: HybridBlock, step: Callable[[], None]) -> None:
        self.form, self.block, self.step = form, block, step
        self.seconds: List[float] = []  #: of one run, by turn
        self.ratios: List[float] = []  #: float32's seconds over these, of the same round
        self.given_up = False  #: it is far too slow

    def turn(self, repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            self.step()
        return (time.perf_counter() - began) / repeats


class Trials:
    """Times forms of a model on its first batch; keeps all figures."""

    def __init__(self, subject: Subject, deadline: Deadline) -> None:
        self.subject, self.deadline = subject, deadline
        self._runners: Dict[Form, _Runner] = {}
        self._repeats = 1
        with autocast(enabled=False):
            if not self._ready(PLAIN):
                raise StateError(NOT_RUNNING)
            plain = self._runners[PLAIN]
            plain.seconds.append(min(plain.turn(1) for _ in range(2)))
        self._repeats = max(1, math.ceil(_SHORTEST / plain.seconds[0]))

    # ------------------------------------------------------------------ what was measured

    def block_of(self, form: Form) -> Optional[HybridBlock]:
        """Return the block of a form of its own; None where it is the subject's."""
        block = self._runners[form].block
        return None if block is self.subject.block else block

    def speedup(self, form: Form) -> float:
        """Return how many times as fast as float32 a form was, as the median of the rounds."""
        ratios = self._runners[form].ratios if form in self._runners else []
        return statistics.median(ratios) if ratios else 0.0

    def is_faster(self, form: Form) -> bool:
        """Tell whether a form was faster than float32, by more than chance."""
        ratios = self._runners[form].ratios
        return self.speedup(form) >= MARGIN and _quartiles(ratios)[0] >= 1.0

    def seconds(self, form: Form) -> float:
        """Return the seconds of a run, as the median."""
        return statistics.median(self._runners[form].seconds)

    def spread(self, form: Form) -> float:
        """Return the interquartile range of the seconds of a run."""
        low, high = _quartiles(self._runners[form].seconds)
        return high - low

    def timed(self) -> List[Form]:
        """Return the forms that were timed, in order."""
        return [form for form, runner in self._runners.items() if runner.ratios]

    # ------------------------------------------------------------------ measuring

    def race(self, forms: Sequence[Form], rounds: int, until: float) -> None:
        """Time those forms that can run, in turns with float32.

        Stops before the share `until` of the budget is spent, but not before the first round.
        """
        with autocast(enabled=False):
            running = [form for form in forms if self._ready(form)]
            for number in range(rounds):
                needed = sum(self._turn(form) for form in (PLAIN, *running))
                if number or self.deadline.stopped:
                    self.deadline.check(needed, until)
                self._round(running)
                best = max((self.speedup(form) for form in running), default=0.0)
                least = max(best, 1.0) * _HOPELESS[min(number, 1)]
                running = [form for form in running if self.speedup(form) >= least]

    def _turn(self, form: Form) -> float:
        seconds = self._runners[form].seconds
        return seconds[-1] * self._repeats if seconds else 0.0

    def _round(self, forms: Sequence[Form]) -> None:
        plain = self._runners[PLAIN].turn(self._repeats)
        self._runners[PLAIN].seconds.append(plain)
        self._runners[PLAIN].ratios.append(1.0)
        for form in forms:
            runner = self._runners[form]
            seconds = runner.turn(self._repeats)
            runner.seconds.append(seconds)
            runner.ratios.append(plain / seconds)
            self.deadline.tick()

    def _ready(self, form: Form) -> bool:
        """Make a form run; tell whether it can."""
        if form in self._runners:
            return not self._runners[form].given_up
        self.deadline.check()
        try:
            block = self._block(form)
            runner = _Runner(form, block, self._step(form, block))
            # The first call makes the graph, the second one the memory.
            seconds = [runner.turn(1), runner.turn(1)]
        except (AmpError, MXNetError) as error:
            logger.debug("tune: %s does not run: %s", form, error)
            return False
        self._runners[form] = runner
        if form is not PLAIN:
            plain = self._runners[PLAIN].seconds[-1]
            runner.given_up = min(seconds) > plain * _TOO_SLOW
            if runner.given_up:
                runner.seconds, runner.ratios = [min(seconds)], [plain / min(seconds)]
        return not runner.given_up

    def _block(self, form: Form) -> HybridBlock:
        if form.way not in ("converted", "fused"):
            return self.subject.block
        return convert_hybrid_block(
            self.subject.block,
            policy=form.policy,
            ctx=self.subject.context,
            cast_optional_params=True,
            fuse=form.way == "fused",
        )

    def _step(self, form: Form, block: HybridBlock) -> Callable[[], None]:
        batch, loss = self.subject.batches[0], self.subject.loss
        policy = form.policy if form.way == "autocast" else None

        def step() -> None:
            enter_region(policy)
            try:
                if loss is None:
                    with autograd.pause(train_mode=False):
                        block(*batch.inputs)
                else:
                    with autograd.record():
                        found: Any = loss_of(loss, block(*batch.inputs), batch.label)
                    autograd.backward(arrays_in(found))
                mx.nd.waitall()
            finally:
                leave_region()

        return step


def _quartiles(values: Sequence[float]) -> "tuple[float, float]":
    if len(values) < 2:  # noqa: PLR2004
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
