"""How far a policy takes a model from float32, and whether that is within what was asked."""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.compare import reason
from ...convert.distance import Distance
from ...errors import ArgumentError, StateError
from ...framework.wording import counted, shortened
from ...policy.policy import Policy
from ..debugging.isolated import arrays_in
from .deadline import Deadline
from .subject import Results, Subject, next_numbers, rounded

__all__ = ["Accuracy", "Tolerance", "Verdict"]

#: The relative errors that are allowed by default: of outputs, and of gradients.
OUTPUTS, GRADIENTS = 0.05, 0.5
#: In training, an output's error may be so many times what rounding the weights makes of float32.
_TIMES_ROUNDED = 2.0
#: A tolerance can't be told from noise that is more than this share of it.
_NOISE = 0.25

NOT_MEASURED = "the model does not run on this data: {why}"
NOT_FINITE = (
    "the model can't be tuned: in float32 already, {elements} of its {what} are Inf or NaN. "
    "mxamp.tools.debugging.check_numerics finds the operator that they come from"
)
UNSTABLE = (
    "the model can't be tuned: its {what} change by {noise:.1e} when each weight moves to the next "
    "number of float32, which is too much to tell errors of {limit:.1e} from. Give other data{more}"
)
NO_NUMBER = "the metric of the float32 model is {found}: give one that has a finite value for it"
BELOW = (
    "no policy satisfies min_metric={wanted:g}: the float32 model itself has {found:g}, and is "
    "what came closest"
)


@dataclass(frozen=True)
class Tolerance:
    """What was asked for: relative errors up to `rtol`, or a metric of at least `min_metric`."""

    rtol: Optional[float] = None
    metric: Optional[Callable[[Sequence[Any], Sequence[Any]], float]] = None
    min_metric: Optional[float] = None


@dataclass(frozen=True)
class Verdict:
    """What a policy does to the model."""

    #: the largest relative error of an output in a batch; Inf where finite elements were lost
    error: float
    gradient_error: Optional[float]  #: the same of the parameters' gradients
    metric: Optional[float]
    within: bool  #: all of it is within the tolerance


class Accuracy:
    """Compares runs of a model with those in float32, which are made once.

    Raises `StateError` where float32 itself is no measure: outputs that are not finite, or that
    one rounding of the weights changes about as much as the tolerance.
    """

    def __init__(
        self, subject: Subject, dtype: str, tolerance: Tolerance, deadline: Deadline, seed: int
    ) -> None:
        self.subject, self.tolerance, self.deadline = subject, tolerance, deadline
        self.evaluations = 0
        self.seconds = 0.0  #: what an evaluation took, at most
        self._known: Dict[Policy, Verdict] = {}
        deadline.phase("float32")
        try:
            self._plain = [subject.run(batch, None) for batch in subject.batches]
        except MXNetError as error:
            raise ArgumentError(NOT_MEASURED.format(why=reason(error))) from None
        self._check_finite()
        self.metric = self._metric_of(self._plain)
        self.min_metric = self._min_metric()
        deadline.phase("float32, disturbed")
        with subject.with_weights(next_numbers(seed)):
            noise = self._distances(self._runs(None))
        moved: Mapping[str, Distance] = {}
        if subject.training and tolerance.rtol is None:
            with subject.with_weights(rounded(dtype)):
                moved = self._distances(self._runs(None))
        #: The relative errors that are allowed, of what float32 is a measure for.
        self.limits = self._limits(noise, moved)
        #: Gradients that are left out: float32 does not know them either.
        self.unknown = sorted(set(noise) - set(self.limits))

    def of(
        self, policy: Policy, block: Optional[HybridBlock] = None, forced: bool = False
    ) -> Verdict:
        """Return what a policy does to the model, or to another form of it.

        Raises `OutOfTimeError` where there is no time left, unless it is `forced`.
        """
        if block is None and policy in self._known:
            return self._known[policy]
        if not forced:
            self.deadline.check(self.seconds)
        began = self.deadline.spent
        runs = self._runs(None if block is not None else policy, block)
        verdict = self._verdict(runs)
        self.evaluations += 1
        self.seconds = max(self.seconds, self.deadline.spent - began)
        if block is None:
            self._known[policy] = verdict
        return verdict

    def of_plain(self) -> Verdict:
        """Return what no policy at all does to the model: nothing."""
        return Verdict(0.0, 0.0 if self.subject.training else None, self.metric, within=True)

    # ------------------------------------------------------------------ runs and their errors

    def _runs(self, policy: Optional[Policy], block: Optional[HybridBlock] = None) -> List[Results]:
        return [self.subject.run(batch, policy, block) for batch in self.subject.batches]

    def _distances(self, runs: Sequence[Results]) -> Dict[str, Distance]:
        """Return how far each output and each gradient is from float32, in its worst batch."""
        found: Dict[str, Distance] = {}
        for plain, run in zip(self._plain, runs):
            there = _named(run)
            for name, values in _named(plain).items():
                distance = found.setdefault(name, Distance())
                if name.startswith(_OUTPUT) or values.any() or not np.isfinite(there[name]).all():
                    distance.add(name, values, there[name])
                # Else a gradient is zero for this batch: a relative error says nothing of it.
        return found

    def _verdict(self, runs: Sequence[Results]) -> Verdict:
        errors = {name: _size(d) for name, d in self._distances(runs).items()}
        known = {name: errors[name] for name in self.limits}
        outputs = [error for name, error in errors.items() if name.startswith(_OUTPUT)]
        gradients = [error for name, error in known.items() if not name.startswith(_OUTPUT)]
        within = all(error <= self.limits[name] for name, error in known.items())
        metric = self._metric_of(runs)
        if metric is not None and self.min_metric is not None:
            within = metric >= self.min_metric and (self.tolerance.rtol is None or within)
        return Verdict(
            max(outputs, default=0.0),
            max(gradients, default=0.0) if self.subject.training else None,
            metric,
            within,
        )

    # ------------------------------------------------------------------ float32 as the measure

    def _check_finite(self) -> None:
        for what, is_output in (("outputs", True), ("gradients", False)):
            bad = sum(
                int((~np.isfinite(values)).sum())
                for run in self._plain
                for name, values in _named(run).items()
                if name.startswith(_OUTPUT) == is_output
            )
            if bad:
                elements = counted(bad, "element")
                raise StateError(NOT_FINITE.format(elements=elements, what=what))

    def _limits(
        self, noise: Mapping[str, Distance], moved: Mapping[str, Distance]
    ) -> Dict[str, float]:
        limits: Dict[str, float] = {}
        for name, distance in noise.items():
            is_output = name.startswith(_OUTPUT)
            limit = self.tolerance.rtol or (OUTPUTS if is_output else GRADIENTS)
            rounding = moved[name].relative if name in moved else 0.0
            if is_output:
                limit = max(limit, _TIMES_ROUNDED * rounding)
            if is_output and _size(distance) > limit * _NOISE:
                raise self._unstable("outputs", _size(distance), limit)
            known = max(_size(distance), rounding * _NOISE) <= limit * _NOISE
            if is_output or (known and not self._is_zero(name)):
                limits[name] = limit
        return limits

    def _is_zero(self, name: str) -> bool:
        """Tell whether a tensor is zero in float32: then a relative error says nothing of it."""
        return not any(np.any(_named(run)[name]) for run in self._plain)

    def _unstable(self, what: str, noise: float, limit: float) -> StateError:
        more = (
            "" if self.tolerance.rtol is None else f", or an `rtol` of {noise / _NOISE:.1e} or more"
        )
        return StateError(UNSTABLE.format(what=what, noise=noise, limit=limit, more=more))

    # ------------------------------------------------------------------ the user's metric

    def _metric_of(self, runs: Sequence[Results]) -> Optional[float]:
        if self.tolerance.metric is None:
            return None
        labels = [arrays_in([batch.label]) for batch in self.subject.batches]
        predictions = [[mx.nd.array(values) for values in run.outputs] for run in runs]
        return float(self.tolerance.metric(labels, predictions))

    def _min_metric(self) -> Optional[float]:
        """Return the metric that is asked for; by default 99 % of what float32 has."""
        wanted = self.tolerance.min_metric
        if self.metric is None:
            return None
        if not math.isfinite(self.metric):
            raise StateError(NO_NUMBER.format(found=self.metric))
        if wanted is None:
            return self.metric - 0.01 * abs(self.metric)
        if not self.metric >= wanted:
            raise StateError(BELOW.format(wanted=wanted, found=self.metric))
        return wanted

    def said_of_unknown(self) -> str:
        """Return a sentence on the gradients that are left out; none where there are none."""
        if not self.unknown:
            return ""
        names = shortened(self.unknown)
        return (
            f"{counted(len(self.unknown), 'gradient')} could not be compared: they are zero, or "
            f"rounding the weights alone changes most of them: {names}."
        )


_OUTPUT = "output "


def _named(results: Results) -> Dict[str, Any]:
    outputs = {f"{_OUTPUT}{i}": values for i, values in enumerate(results.outputs)}
    return {**outputs, **results.gradients}


def _size(distance: Distance) -> float:
    return float("inf") if distance.lost else distance.relative
