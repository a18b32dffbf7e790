"""The fastest form of a model among those that are accurate enough."""

import contextlib
from typing import Dict, List, Optional, Sequence, Tuple

from ...policy.evidence import Trial
from ...policy.policy import Policy
from .accuracy import Accuracy, Verdict
from .deadline import Deadline, OutOfTimeError
from .trials import PLAIN, Form, Trials

__all__ = ["Chooser"]

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
        self._trials = Trials(accuracy.subject, deadline)
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

    def race(self, forms: Sequence[Form], rounds: int, until: float) -> None:
        """Time forms in turns with float32, until a share of the budget is spent."""
        self._trials.race(forms, rounds, until)

    def was_timed(self, forms: Sequence[Form]) -> bool:
        """Tell whether any of some forms was."""
        return any(form in self._trials.timed() for form in forms)

    def best(self, forms: Sequence[Form]) -> float:
        """Return the speed of the fastest of some forms, in times that of float32."""
        return max((self._trials.speedup(form) for form in forms), default=0.0)

    def choose(self, policies: Sequence[Policy]) -> None:
        """Take the fastest form of these policies that is accurate enough; float32 if none is.

        Policies are taken with and without substitutions.
        """
        allowed = {_switched(policy) for policy in policies}
        left = [
            form
            for form in self._trials.timed()
            if form.policy is not None and _switched(form.policy) in allowed
        ]
        # Of what is as fast, float32 comes first, and what was tried first.
        left.sort(key=lambda form: form.policy is not None and form.policy.lowers)
        self.winner, self._forced = PLAIN, 0
        while left:
            fastest = self.best(left)
            form = next(f for f in left if self._trials.speedup(f) * _AS_FAST >= fastest)
            if self._trials.is_faster(form) and self._is_within(form):
                self.winner = form
                return
            left.remove(form)

    def _is_within(self, form: Form) -> bool:
        """Tell whether a form is accurate enough.

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
            for form in self._trials.timed():
                self.verdict(form)

    def try_switches(self, rounds: int, until: float) -> None:
        """Time the winner without each of its substitutions, and without all of them."""
        policy, way = self.winner.policy, self.winner.way
        if policy is None or not self._applied:
            return
        without = [[name] for name in self._applied]
        without += [list(self._applied)] if len(self._applied) > 1 else []
        forms = [form for names in without for form in self.forms(policy, names)]
        self.race([self.winner, *(form for form in forms if form.way == way)], rounds, until)

    def verdict(self, form: Form, forced: bool = False) -> Verdict:
        """Return how accurate a form is; see `Accuracy.of`."""
        if form not in self._verdicts:
            if form.policy is None:
                found = self._accuracy.of_plain()
            else:
                block = self._trials.block_of(form)
                found = self._accuracy.of(form.policy, block, forced=forced)
            self._verdicts[form] = found
        return self._verdicts[form]

    def evidence(self) -> Tuple[Trial, ...]:
        """Return what was timed."""
        return tuple(self._trial(form) for form in self._trials.timed())

    def _trial(self, form: Form) -> Trial:
        verdict: Optional[Verdict] = self._verdicts.get(form)
        if form.policy is None:
            verdict = self.verdict(form)
        policy, trials = form.policy, self._trials
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
