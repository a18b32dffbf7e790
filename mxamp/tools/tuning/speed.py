"""Whether mxamp's optimizer steps are faster than MXNet's here: timed on a model's parameters."""

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
from ..debugging.comparing.backward_passes import loss_of, trained_arrays
from ..debugging.comparing.isolated import arrays_in
from .accuracy import Accuracy, Verdict
from .deadline import Deadline, OutOfTimeError
from .model import Subject
from .tuning import Trial

__all__ = [
    "Chooser",
    "Form",
    "PLAIN",
    "Trials",
    "step_speedups",
]

_ROUNDS = 3
_OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}}


def step_speedups(subject: Subject, policy: Policy, deadline: Deadline) -> Dict[str, float]:
    """Return how many times as fast as MXNet's each optimizer step of a policy's is here.

    The steps change copies of the model's parameters. The two compute the same, bit for bit.
    """
    found = {}
    arrays = list(trained_arrays(subject.block).values())
    for name in sorted(_OPTIMIZERS.keys() & policy.substitutions.keys()):
        deadline.check()
        with autocast(enabled=False):
            steps = [_Steps(name, arrays) for _ in range(2)]
            times: List[List[float]] = [[], []]
            for number in range(_ROUNDS + 1):
                for seconds, step, one in zip(times, steps, (None, policy)):
                    taken = step.take(one)
                    # The first step makes the optimizer's state.
                    if number:
                        seconds.append(taken)
        found[name] = min(times[0]) / min(times[1])
    return found


class _Steps:
    def __init__(self, name: str, arrays: List[Any]) -> None:
        optimizer = mx.optimizer.create(name, learning_rate=1e-6, **_OPTIMIZERS[name])
        self._updater = mx.optimizer.get_updater(optimizer)
        self._weights = [plain_array(array).copy() for array in arrays]
        self._gradients = [array.zeros_like() for array in self._weights]

    def take(self, policy: "Policy | None") -> float:
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
        """Return whether a form was faster than float32, by more than chance."""
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


#: Two forms are as fast where one has not more than so many times the speed of the other.
_AS_FAST = 1.01
#: When the time is over, the accuracy of so many forms is looked at all the same.
_AT_LAST = 2


class Chooser:
    """Races forms of a model, in low precision and in float32, and chooses one.

    `applied` are the substitutions that are made in the model's graph.
    """

    def __init__(self, accuracy: Accuracy, applied: Sequence[str], deadline: Deadline) -> None:
        self._accuracy, self._applied = accuracy, list(applied)
        self._training = accuracy.subject.training
        self.trials = Trials(accuracy.subject, deadline)
        self._verdicts: Dict[Form, Verdict] = {}
        self.winner = PLAIN
        self._forced = 0  #: how many forms there was no time to look at

    def forms(self, policy: Policy, removed: Sequence[str] = ()) -> List[Form]:
        """Return the forms of the model under a policy, without some of its substitutions."""
        policy = policy.override(substitutions=sorted({*policy.substitutions} - {*removed}))
        changes = policy.lowers or not {*self._applied} <= {*removed}
        forms = [Form("autocast", policy)] if changes else []
        if self._training:
            return forms
        # In float32 there is nothing to cast offline.
        forms += [Form("converted", policy)] if policy.lowers else []
        return [*forms, Form("fused", policy)]

    def was_timed(self, forms: Sequence[Form]) -> bool:
        """Return whether any of some forms was."""
        return any(form in self.trials.timed() for form in forms)

    def best(self, forms: Sequence[Form]) -> float:
        """Return the speed of the fastest of some forms, in times that of float32."""
        return max((self.trials.speedup(form) for form in forms), default=0.0)

    def choose(self, policies: Sequence[Policy]) -> None:
        """Take the fastest form of these policies that is accurate enough; float32 if none is.

        Policies are taken with and without substitutions.
        """
        allowed = {_switched(policy) for policy in policies}
        left = [
            form
            for form in self.trials.timed()
            if form.policy is not None and _switched(form.policy) in allowed
        ]
        # Of what is as fast, float32 comes first, and what was tried first.
        left.sort(key=lambda form: form.policy is not None and form.policy.lowers)
        self.winner, self._forced = PLAIN, 0
        while left:
            fastest = self.best(left)
            form = next(f for f in left if self.trials.speedup(f) * _AS_FAST >= fastest)
            if self.trials.is_faster(form) and self._is_within(form):
                self.winner = form
                return
            left.remove(form)

    def _is_within(self, form: Form) -> bool:
        """Return whether a form is accurate enough.

        Where the time is over, so many are looked at all the same: else all that was timed would
        be lost.
        """
        try:
            return self.verdict(form).within
        except OutOfTimeError:
            self._forced += 1
            return self._forced <= _AT_LAST and self.verdict(form, forced=True).within

    def verify(self) -> None:
        """Look at the accuracy of all that was timed, as far as there is time."""
        with contextlib.suppress(OutOfTimeError):
            for form in self.trials.timed():
                self.verdict(form)

    def try_switches(self, rounds: int, until: float) -> None:
        """Time the winner without each of its substitutions, and without all of them."""
        policy, way = self.winner.policy, self.winner.way
        if policy is None or not self._applied:
            return
        without = [[name] for name in self._applied]
        without += [list(self._applied)] if len(self._applied) > 1 else []
        forms = [form for names in without for form in self.forms(policy, names)]
        self.trials.race([self.winner, *(form for form in forms if form.way == way)], rounds, until)

    def verdict(self, form: Form, forced: bool = False) -> Verdict:
        """Return how accurate a form is; see `Accuracy.of`."""
        if form not in self._verdicts:
            if form.policy is None:
                found = self._accuracy.of_plain()
            else:
                block = self.trials.block_of(form)
                found = self._accuracy.of(form.policy, block, forced=forced)
            self._verdicts[form] = found
        return self._verdicts[form]

    def trial(self, form: Form) -> Trial:
        """Return the measurements of a form."""
        verdict: Optional[Verdict] = self._verdicts.get(form)
        if form.policy is None:
            verdict = self.verdict(form)
        policy, trials = form.policy, self.trials
        low = policy is not None and policy.lowers
        used = policy.substitutions if policy is not None else {}
        return Trial(
            form.way,
            policy.target_dtype if policy is not None and low else "float32",
            tuple(name for name in self._applied if name in used),
            len(policy.fp32_layers) if policy is not None and low else 0,
            trials.seconds(form) * 1e3,
            trials.spread(form) * 1e3,
            trials.speedup(form),
            float("nan") if verdict is None else verdict.error,
            verdict is not None and verdict.within,
        )


def _switched(policy: Policy) -> Tuple[bool, Tuple[str, ...]]:
    """Return what two policies that differ in substitutions alone have in common."""
    return policy.lowers, policy.fp32_layers
