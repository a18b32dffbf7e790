"""Forms of a model raced against float32: with and without low precision, converted, fused."""

import functools
import logging
import math
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.models import convert_hybrid_block
from ...errors import AmpError
from ...patches.autocast import autocast
from ...policy.policy import Policy
from ..debugging.isolated import loss_of
from .accuracy import Accuracy, Subject, Verdict
from .tuning import Trial
from .turns import Timed, quartiles, repeats_of, run_round, step_function

__all__ = ["Form", "Race"]

logger = logging.getLogger("mxamp")

#: Forms below this share of the fastest speed leave the race: in the first rounds, when one turn
#: beside other work can halve a speed, and later.
_HOPELESS = (0.25, 0.85)
_FIRST_ROUNDS = 3
#: Forms whose first calls take so many times as long as float32 do not race at all.
_TOO_SLOW = 8.0
#: A form has to be so many times as fast as float32 to take its place.
_MARGIN = 1.02
#: Two forms are equally fast if neither has more than so many times the other's speed.
_AS_FAST = 1.01


class Form(Timed):
    """The model made ready to run in one way under one policy, with its accuracy and times."""

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
        batch, loss = subject.batches[0], None
        if subject.loss is not None:
            loss = functools.partial(loss_of, subject.loss, label=batch.label)
        used = policy if way == "autocast" else None
        super().__init__(step_function(self.block, batch.inputs, used, loss))
        self.verdict: Optional[Verdict] = None

    @property
    def may_win(self) -> bool:
        """Whether the form is accurate, and faster than float32 by more than chance."""
        accurate = self.verdict is not None and self.verdict.within
        return accurate and self.speedup >= _MARGIN and quartiles(self.ratios)[0] >= 1.0

    def trial(self, substitutions: Sequence[str]) -> Trial:
        """Return the measurements as a `Trial`; `substitutions` are those in the model's graph."""
        low, high = quartiles(self.seconds) if len(self.seconds) > 1 else (math.nan, math.nan)
        policy = self.policy if self.lowers else None
        return Trial(
            self.way,
            policy.target_dtype if policy else "float32",
            tuple(substitutions) if self.policy else (),
            len(policy.fp32_layers) if policy else 0,
            self.milliseconds,
            (high - low) * 1e3,
            self.speedup,
            self.verdict.error if self.verdict else math.nan,
            self.verdict is not None and self.verdict.within,
        )


class Race:
    """Times forms of a model in turns on its first batch; the fastest accurate one wins.

    `substitutions` are the names of those in the model's graph.
    """

    def __init__(self, accuracy: Accuracy, substitutions: Sequence[str]) -> None:
        self._accuracy, self._deadline = accuracy, accuracy.deadline
        self._subject, self.substitutions = accuracy.subject, tuple(substitutions)
        self.plain = Form("plain", None, self._subject)
        self.plain.verdict = accuracy.plain
        with autocast(enabled=False):
            # The first call makes the graph, the second one the memory.
            self.plain.seconds.append(min(self.plain.mean_seconds() for _ in range(3)))
        self._forms: Dict[Tuple[str, Optional[Policy]], Form] = {("plain", None): self.plain}
        self._repeats = repeats_of(self.plain.seconds[0])

    def run(self, policies: Sequence[Policy], rounds: int) -> None:
        """Time the forms under `policies` in `rounds` with float32; drop slow ones on the way.

        The first round may go past the deadline of the phase, but not past the budget.
        """
        with autocast(enabled=False):
            racing = [form for policy in policies for form in self._forms_under(policy)]
            for number in range(rounds):
                best = max([1.0, *(form.speedup for form in racing)])
                least = best * _HOPELESS[number >= _FIRST_ROUNDS]
                racing = [form for form in racing if not form.ratios or form.speedup >= least]
                last = [form.seconds[-1] for form in (self.plain, *racing) if form.seconds]
                self._deadline.check(sum(last) * self._repeats, whole=not number)
                run_round(self.plain, racing, self._repeats)

    def _forms_under(self, policy: Policy) -> Iterator[Form]:
        """Yield the model's forms under a policy, made if new; leave out those that fail to run."""
        ways = ["autocast"] if policy.lowers or self.substitutions else []
        if not self._subject.training:
            # In float32 there is nothing to cast offline.
            ways += ["converted", "fused"] if policy.lowers else ["fused"]
        for way in ways:
            if (way, policy) not in self._forms:
                self._deadline.check(whole=True)
                try:
                    self._add_form(Form(way, policy, self._subject), policy)
                except (AmpError, MXNetError) as error:
                    logger.debug("tune: %s does not run under %s: %s", way, policy, error)
                    continue
            yield self._forms[way, policy]

    def _add_form(self, form: Form, policy: Policy) -> None:
        """Record a form after two runs, with its accuracy unless it is far too slow."""
        seconds, plain = min(form.mean_seconds(), form.mean_seconds()), self.plain.seconds[-1]
        if seconds > plain * _TOO_SLOW:
            form.add_turn(seconds, plain)
        elif form.way == "autocast":
            form.verdict = self._accuracy.measure(policy)
        elif not form.lowers or self._accuracy.measure(policy).within:
            form.verdict = self._accuracy.measure(policy, form.block)
        self._forms[form.way, policy] = form

    def best_speedup(self, lowers: bool) -> float:
        """Return the best speedup of the forms that do, or don't, lower precision; 0 if none."""
        return max([f.speedup for f in self._timed_forms() if f.lowers == lowers], default=0.0)

    def low_may_win(self) -> bool:
        """Return whether a form in low precision is, or by chance could be, the fastest.

        By chance means: as fast as in the better quarter of its turns.
        """
        turns = [quartiles(form.ratios) for form in self._timed_forms() if form.lowers]
        low = max([high for _, high in turns], default=0.0)
        return not low or low * _MARGIN >= max(self.best_speedup(lowers=False), 1.0)

    def winner(self) -> Form:
        """Return the fastest accurate form; of equally fast ones float32, then the first tried."""
        able = sorted(
            (form for form in self._timed_forms() if form.may_win), key=lambda f: f.lowers
        )
        top = max((form.speedup for form in able), default=0.0)
        return next((form for form in able if form.speedup * _AS_FAST >= top), self.plain)

    def undecided(self) -> List[Form]:
        """Return the accurate forms that are faster than the winner, by no more than chance."""
        best = self.winner()
        return [
            form
            for form in self._timed_forms()
            if form.verdict is not None
            and form.verdict.within
            and form is not best
            and form.speedup > best.speedup
        ]

    def _timed_forms(self) -> List[Form]:
        return [form for form in self._forms.values() if form.ratios]

    def trials(self) -> Tuple[Trial, ...]:
        """Return the measurements of all timed forms."""
        return tuple(form.trial(self.substitutions) for form in self._timed_forms())
