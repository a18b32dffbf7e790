"""Forms of a model raced against float32: with and without low precision, converted, fused.

In each round every form runs once, float32 first, and the ratio to float32 in the same round
counts: a machine that slows down slows all of them.
"""

import contextlib
import logging
import math
import statistics
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.models import convert_hybrid_block
from ...errors import AmpError, StateError
from ...framework.arrays import plain_array
from ...patches.autocast import autocast
from ...policy.active import enter_region, leave_region
from ...policy.policy import Policy
from ..debugging.isolated import arrays_in, loss_of, trained_arrays
from .accuracy import Accuracy, Verdict
from .deadline import Deadline, OutOfTimeError
from .model import Subject
from .tuning import Trial

__all__ = ["MARGIN", "PLAIN", "Form", "Race", "step_speedups"]

logger = logging.getLogger("mxamp")

#: The least seconds of a turn: fast forms run several times in one.
_SHORTEST = 0.01
#: Forms below this share of the fastest speed leave the race: after the first round, and later.
_HOPELESS = (0.5, 0.85)
#: Forms whose first calls take so many times as long as float32 do not race at all.
_TOO_SLOW = 8.0
#: A form has to be so many times as fast as another to take its place.
MARGIN = 1.02
#: Two forms are equally fast if neither has more than so many times the other's speed.
_AS_FAST = 1.01
#: The accuracy of so many forms is measured even after the deadline.
_AFTER_DEADLINE = 2

NOT_RUNNING = "the model does not run in float32 as a hybridized block"


class Form(NamedTuple):
    """A way to run the model, under a policy."""

    way: str  #: "plain", "autocast", "converted" or "fused"
    policy: Optional[Policy] = None

    @property
    def lowers(self) -> bool:
        """Whether the form is in low precision."""
        return self.policy is not None and self.policy.lowers


PLAIN = Form("plain")


class _Runner:
    """A form that is ready to run, and its times."""

    def __init__(self, form: Form, block: HybridBlock, step: Callable[[], None]) -> None:
        self.form, self.block, self.step = form, block, step
        self.seconds: List[float] = []  #: of one run, by turn
        self.ratios: List[float] = []  #: float32's seconds over these, of the same round
        self.given_up = False  #: far too slow

    def turn(self, repeats: int) -> float:
        """Return the seconds of a run, as the mean of some."""
        began = time.perf_counter()
        for _ in range(repeats):
            self.step()
        return (time.perf_counter() - began) / repeats

    def add(self, seconds: float, plain: float) -> None:
        """Add a turn; `plain` are float32's seconds in the same round."""
        self.seconds.append(seconds)
        self.ratios.append(plain / seconds)

    @property
    def speedup(self) -> float:
        """The median ratio to float32; 0 before the first turn."""
        return statistics.median(self.ratios) if self.ratios else 0.0

    @property
    def is_faster(self) -> bool:
        """Whether the form was faster than float32 by more than chance."""
        return self.speedup >= MARGIN and _quartiles(self.ratios)[0] >= 1.0


class Race:
    """A race between forms of a model on its first batch; the fastest accurate one wins.

    `applied` are the substitutions in the model's graph.
    """

    def __init__(self, accuracy: Accuracy, applied: Sequence[str], deadline: Deadline) -> None:
        self._accuracy, self._applied, self._deadline = accuracy, list(applied), deadline
        self._subject: Subject = accuracy.subject
        self._verdicts: Dict[Form, Verdict] = {PLAIN: accuracy.of_plain()}
        self.winner = PLAIN
        self._runners: Dict[Form, _Runner] = {}
        with autocast(enabled=False):
            plain = self._runner(PLAIN)
            if plain is None:
                raise StateError(NOT_RUNNING)
            plain.seconds.append(min(plain.turn(1) for _ in range(2)))
        self._plain = plain
        self._repeats = max(1, math.ceil(_SHORTEST / plain.seconds[0]))

    def forms(self, policy: Policy, removed: Sequence[str] = ()) -> List[Form]:
        """Return the forms of the model under a policy, without some of its substitutions."""
        policy = policy.override(substitutions=sorted({*policy.substitutions} - {*removed}))
        changes = policy.lowers or not {*self._applied} <= {*removed}
        forms = [Form("autocast", policy)] if changes else []
        if self._subject.training:
            return forms
        # In float32 there is nothing to cast offline.
        forms += [Form("converted", policy)] if policy.lowers else []
        return [*forms, Form("fused", policy)]

    # ------------------------------------------------------------------ times

    def run(self, forms: Sequence[Form], rounds: int, until: float) -> None:
        """Time forms in turns with float32, without the hopelessly slow ones.

        Ends before the share `until` of the budget is spent, but not before the first round.
        """
        with autocast(enabled=False):
            runners = [runner for runner in map(self._runner, forms) if runner is not None]
            runners = [runner for runner in runners if not runner.given_up]
            for number in range(rounds):
                last = [runner.seconds[-1] for runner in (self._plain, *runners) if runner.seconds]
                if number or self._deadline.stopped:
                    self._deadline.check(sum(last) * self._repeats, until)
                self._round(runners)
                best = max((runner.speedup for runner in runners), default=0.0)
                least = max(best, 1.0) * _HOPELESS[min(number, 1)]
                runners = [runner for runner in runners if runner.speedup >= least]

    def _round(self, runners: Sequence[_Runner]) -> None:
        plain = self._plain.turn(self._repeats)
        self._plain.add(plain, plain)
        for runner in runners:
            runner.add(runner.turn(self._repeats), plain)
            self._deadline.tick()

    def _runner(self, form: Form) -> Optional[_Runner]:
        """Return a form ready to run; None if it can't run."""
        if form in self._runners:
            return self._runners[form]
        self._deadline.check()
        try:
            block = self._block(form)
            runner = _Runner(form, block, self._step(form, block))
            # The first call makes the graph, the second one the memory.
            seconds = min(runner.turn(1), runner.turn(1))
        except (AmpError, MXNetError) as error:
            logger.debug("tune: %s does not run: %s", form, error)
            return None
        self._runners[form] = runner
        plain = self._runners[PLAIN].seconds[-1] if form is not PLAIN else seconds
        runner.given_up = seconds > plain * _TOO_SLOW
        if runner.given_up:
            runner.add(seconds, plain)
        return runner

    def _block(self, form: Form) -> HybridBlock:
        if form.way not in ("converted", "fused"):
            return self._subject.block
        return convert_hybrid_block(
            self._subject.block,
            policy=form.policy,
            ctx=self._subject.context,
            cast_optional_params=True,
            fuse=form.way == "fused",
        )

    def _step(self, form: Form, block: HybridBlock) -> Callable[[], None]:
        batch, loss = self._subject.batches[0], self._subject.loss
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

    def was_timed(self, forms: Sequence[Form]) -> bool:
        """Return whether any of these forms was timed."""
        return any(self._speedup(form) for form in forms)

    def best(self, forms: Sequence[Form]) -> float:
        """Return the best speed of these forms, as a multiple of float32's."""
        return max(map(self._speedup, forms), default=0.0)

    def _speedup(self, form: Form) -> float:
        return self._runners[form].speedup if form in self._runners else 0.0

    def _timed(self) -> List[Form]:
        return [form for form, runner in self._runners.items() if runner.ratios]

    # ------------------------------------------------------------------ the choice

    def choose(self, policies: Sequence[Policy]) -> None:
        """Let the fastest accurate form of these policies win; float32 if there is none.

        Each policy counts with any of its substitutions.
        """
        allowed = {(policy.lowers, policy.fp32_layers) for policy in policies}
        left = [
            form
            for form in self._timed()
            if form.policy and (form.policy.lowers, form.policy.fp32_layers) in allowed
        ]
        # Of equally fast forms, float32 comes first, and then the one that was tried first.
        left.sort(key=lambda form: form.lowers)
        self.winner, extra = PLAIN, _AFTER_DEADLINE
        while left:
            fastest = self.best(left)
            form = next(one for one in left if self._speedup(one) * _AS_FAST >= fastest)
            left.remove(form)
            if not self._runners[form].is_faster:
                continue
            try:
                within = self.verdict(form).within
            except OutOfTimeError:
                extra -= 1
                within = extra >= 0 and self.verdict(form, forced=True).within
            if within:
                self.winner = form
                return

    def verify(self) -> None:
        """Measure the accuracy of all timed forms, as far as there is time."""
        with contextlib.suppress(OutOfTimeError):
            for form in self._timed():
                self.verdict(form)

    def try_switches(self, rounds: int, until: float) -> None:
        """Time the winner without each of its substitutions, and without all of them."""
        policy, way = self.winner.policy, self.winner.way
        if policy is None or not self._applied:
            return
        without = [[name] for name in self._applied]
        without += [self._applied] if len(self._applied) > 1 else []
        forms = [form for names in without for form in self.forms(policy, names)]
        self.run([self.winner, *(form for form in forms if form.way == way)], rounds, until)

    def verdict(self, form: Form, forced: bool = False) -> Verdict:
        """Return how accurate a form is; `forced`: even after the deadline."""
        if form not in self._verdicts and form.policy is not None:
            own = self._runners[form].block
            block = None if own is self._subject.block else own
            self._verdicts[form] = self._accuracy.of(form.policy, block, forced=forced)
        return self._verdicts[form]

    def trials(self) -> Tuple[Trial, ...]:
        """Return the measurements of all timed forms."""
        return tuple(map(self.trial, self._timed()))

    def trial(self, form: Form) -> Trial:
        """Return the measurements of a form."""
        runner, verdict = self._runners[form], self._verdicts.get(form)
        low, high = _quartiles(runner.seconds)
        policy = form.policy
        return Trial(
            form.way,
            policy.target_dtype if policy is not None and policy.lowers else "float32",
            tuple(name for name in self._applied if policy and name in policy.substitutions),
            len(policy.fp32_layers) if policy is not None and policy.lowers else 0,
            statistics.median(runner.seconds) * 1e3,
            (high - low) * 1e3,
            runner.speedup,
            float("nan") if verdict is None else verdict.error,
            verdict is not None and verdict.within,
        )


def _quartiles(values: Sequence[float]) -> "tuple[float, float]":
    if len(values) < 2:  # noqa: PLR2004
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


# ---------------------------------------------------------------------- optimizer steps

_ROUNDS = 3
_OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}}


def step_speedups(subject: Subject, policy: Policy, deadline: Deadline) -> Dict[str, float]:
    """Return how many times as fast as MXNet's own each optimizer step of the policy is here.

    The steps change copies of the model's parameters. Both compute the same, bit for bit.
    """
    found = {}
    arrays = list(trained_arrays(subject.block).values())
    for name in sorted(_OPTIMIZERS.keys() & policy.substitutions.keys()):
        deadline.check()
        with autocast(enabled=False):
            steps = [_Steps(name, arrays) for _ in range(2)]
            # The first step makes the optimizer's state.
            turns = [
                [step.take(one) for step, one in zip(steps, (None, policy))]
                for _ in range(_ROUNDS + 1)
            ][1:]
        found[name] = min(plain for plain, _ in turns) / min(fast for _, fast in turns)
    return found


class _Steps:
    def __init__(self, name: str, arrays: List[Any]) -> None:
        optimizer = mx.optimizer.create(name, learning_rate=1e-6, **_OPTIMIZERS[name])
        self._updater = mx.optimizer.get_updater(optimizer)
        self._weights = [plain_array(array).copy() for array in arrays]
        self._gradients = [array.zeros_like() for array in self._weights]

    def take(self, policy: Optional[Policy]) -> float:
        """Return the seconds of one step under a policy, or without."""
        numbers = list(range(len(self._weights)))
        mx.nd.waitall()
        began = time.perf_counter()
        enter_region(policy)
        try:
            self._updater(numbers, self._gradients, self._weights)
        finally:
            leave_region()
        mx.nd.waitall()
        return time.perf_counter() - began
