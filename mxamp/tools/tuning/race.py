"""Forms of a model raced against float32: with and without low precision, converted, fused.

In each round every form runs once, float32 first, and the ratio to float32 in the same round
counts: a machine that slows down slows all of them.
"""

import logging
import math
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.models import convert_hybrid_block
from ...errors import AmpError
from ...patches.autocast import autocast
from ...policy.active import pop_policy, push_policy
from ...policy.policy import Policy
from ..debugging.isolated import arrays_in, loss_of
from .accuracy import Accuracy, Subject, Verdict
from .tuning import Trial

__all__ = ["Form", "Race"]

logger = logging.getLogger("mxamp")

#: The least seconds of a turn: fast forms run several times in one.
_SHORTEST = 0.01
#: Forms below this share of the fastest speed leave the race: after the first round, and later.
_HOPELESS = (0.5, 0.85)
#: Forms whose first calls take so many times as long as float32 do not race at all.
_TOO_SLOW = 8.0
#: A form has to be so many times as fast as float32 to take its place.
_MARGIN = 1.02
#: Two forms are equally fast if neither has more than so many times the other's speed.
_AS_FAST = 1.01


class Form:
    """A way to run the model, under a policy, that is ready to run, and its times."""

    def __init__(self, way: str, policy: Optional[Policy], subject: Subject) -> None:
        self.way = way  #: "plain", "autocast", "converted" or "fused"
        self.policy = policy
        self.lowers = policy is not None and policy.lowers
        self.block: HybridBlock = subject.block
        if way in ("converted", "fused"):
            self.block = convert_hybrid_block(
                subject.block,
                policy=policy,
                ctx=subject.context,
                cast_optional_params=True,
                fuse=way == "fused",
            )
        self._step = _step_of(self.block, policy if way == "autocast" else None, subject)
        self.verdict: Optional[Verdict] = None
        self.seconds: List[float] = []  #: of one run, by turn
        self.ratios: List[float] = []  #: float32's seconds over these, of the same round

    def turn(self, repeats: int = 1) -> float:
        """Return the seconds of a run, as the mean of some."""
        began = time.perf_counter()
        for _ in range(repeats):
            self._step()
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
    def may_win(self) -> bool:
        """Whether the form is accurate, and faster than float32 by more than chance."""
        accurate = self.verdict is not None and self.verdict.within
        return accurate and self.speedup >= _MARGIN and _quartiles(self.ratios)[0] >= 1.0

    def trial(self, applied: Sequence[str]) -> Trial:
        """Return the measurements; `applied` are the substitutions in the model's graph."""
        low, high = _quartiles(self.seconds)
        policy = self.policy if self.lowers else None
        return Trial(
            self.way,
            policy.target_dtype if policy else "float32",
            tuple(applied) if self.policy else (),
            len(policy.fp32_layers) if policy else 0,
            statistics.median(self.seconds) * 1e3,
            (high - low) * 1e3,
            self.speedup,
            self.verdict.error if self.verdict else math.nan,
            self.verdict is not None and self.verdict.within,
        )


def _step_of(block: HybridBlock, policy: Optional[Policy], subject: Subject) -> Callable[[], None]:
    batch, loss = subject.batches[0], subject.loss

    def step() -> None:
        push_policy(policy)
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
            pop_policy()

    return step


class Race:
    """A race between forms of a model on its first batch; the fastest accurate one wins.

    `applied` are the substitutions in the model's graph.
    """

    def __init__(self, accuracy: Accuracy, applied: Sequence[str]) -> None:
        self._accuracy, self._deadline = accuracy, accuracy.deadline
        self._subject, self._applied = accuracy.subject, tuple(applied)
        self.plain = Form("plain", None, self._subject)
        self.plain.verdict = accuracy.plain
        with autocast(enabled=False):
            # The first call makes the graph, the second one the memory.
            self.plain.seconds.append(min(self.plain.turn() for _ in range(3)))
        self._forms: Dict[Tuple[str, Optional[Policy]], Form] = {("plain", None): self.plain}
        self._repeats = max(1, math.ceil(_SHORTEST / self.plain.seconds[0]))

    def run(self, policies: Sequence[Policy], rounds: int) -> None:
        """Time the forms of policies in turns with float32, without the hopelessly slow ones.

        The first round may go past the deadline of the phase, but not past the budget.
        """
        with autocast(enabled=False):
            racing = [form for policy in policies for form in self._forms_of(policy)]
            for number in range(rounds):
                best = max([1.0, *(form.speedup for form in racing)])
                least = best * _HOPELESS[number > 1]
                racing = [form for form in racing if not form.ratios or form.speedup >= least]
                last = [form.seconds[-1] for form in (self.plain, *racing) if form.seconds]
                self._deadline.check(sum(last) * self._repeats, whole=not number)
                self._round(racing)

    def _round(self, racing: Sequence[Form]) -> None:
        plain = self.plain.turn(self._repeats)
        self.plain.add(plain, plain)
        for form in racing:
            form.add(form.turn(self._repeats), plain)

    def _forms_of(self, policy: Policy) -> Iterator[Form]:
        """Yield the forms of the model under a policy that can run."""
        ways = ["autocast"] if policy.lowers or self._applied else []
        if not self._subject.training:
            # In float32 there is nothing to cast offline.
            ways += ["converted", "fused"] if policy.lowers else ["fused"]
        for way in ways:
            if (way, policy) not in self._forms:
                self._deadline.check(whole=True)
                try:
                    self._enter(Form(way, policy, self._subject), policy)
                except (AmpError, MXNetError) as error:
                    logger.debug("tune: %s does not run under %s: %s", way, policy, error)
                    continue
            yield self._forms[way, policy]

    def _enter(self, form: Form, policy: Policy) -> None:
        seconds, plain = min(form.turn(), form.turn()), self.plain.seconds[-1]
        if seconds > plain * _TOO_SLOW:
            form.add(seconds, plain)
        elif form.way == "autocast":
            form.verdict = self._accuracy.of(policy)
        elif not form.lowers or self._accuracy.of(policy).within:
            form.verdict = self._accuracy.of(policy, form.block)
        self._forms[form.way, policy] = form

    def best(self, lowers: bool) -> float:
        """Return the best speed in low precision or in float32, as a multiple of float32's."""
        return max([f.speedup for f in self._timed() if f.lowers == lowers], default=0.0)

    def may_pay(self) -> bool:
        """Return whether low precision may be the fastest."""
        low = self.best(lowers=True)
        return not low or low * _MARGIN >= max(self.best(lowers=False), 1.0)

    def winner(self) -> Form:
        """Return the fastest accurate form; of equally fast ones float32, then the first tried."""
        able = sorted((form for form in self._timed() if form.may_win), key=lambda f: f.lowers)
        top = max((form.speedup for form in able), default=0.0)
        return next((form for form in able if form.speedup * _AS_FAST >= top), self.plain)

    def _timed(self) -> List[Form]:
        return [form for form in self._forms.values() if form.ratios]

    def trials(self) -> Tuple[Trial, ...]:
        """Return the measurements of all timed forms."""
        return tuple(form.trial(self._applied) for form in self._timed())

    def chosen(self) -> Trial:
        """Return the measurements of the winner."""
        return self.winner().trial(self._applied)


def _quartiles(values: Sequence[float]) -> Tuple[float, float]:
    if len(values) < 2:  # noqa: PLR2004
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
