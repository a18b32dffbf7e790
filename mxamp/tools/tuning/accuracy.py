"""The error of a model under a policy, and whether it is within the tolerance."""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.gluon import HybridBlock

from ...convert.outputs import Distance, reason
from ...errors import ArgumentError, StateError
from ...framework.wording import counted, shortened
from ...policy.policy import Policy
from ..debugging.isolated import arrays_in
from .deadline import Deadline
from .model import Results, Subject, next_numbers, rounded

__all__ = ["Accuracy", "Tolerance", "Verdict"]

#: The relative errors that are allowed by default: of outputs, and of gradients.
OUTPUTS, GRADIENTS = 0.05, 0.5
#: In training, an output may have so many times the error that rounding the weights causes.
_TIMES_ROUNDED = 2.0
#: The largest share of the tolerance that noise may have.
_NOISE = 0.25

NOT_MEASURED = "the model does not run on this data: {why}"
NOT_FINITE = (
    "the model can't be tuned: in float32 already, {elements} of its {what} are Inf or NaN. "
    "mxamp.debugging.check_numerics finds the operator that they come from"
)
UNSTABLE = (
    "the model can't be tuned: its outputs change by {noise:.1e} when each weight moves to the "
    "next number of float32, which hides errors of {limit:.1e}. Give other data{more}"
)
NO_NUMBER = "the metric of the float32 model is {found}: give one that has a finite value for it"
BELOW = "no policy satisfies min_metric={wanted:g}: the float32 model itself has {found:g}"


@dataclass(frozen=True)
class Tolerance:
    """The tolerance: relative errors up to `rtol`, or a metric of at least `min_metric`."""

    rtol: Optional[float] = None
    metric: Optional[Callable[[Sequence[Any], Sequence[Any]], float]] = None
    min_metric: Optional[float] = None


@dataclass(frozen=True)
class Verdict:
    """The errors of the model under a policy."""

    #: the largest relative error of an output in a batch; Inf where finite elements were lost
    error: float
    gradient_error: Optional[float]  #: the same of the parameters' gradients
    metric: Optional[float]
    within: bool  #: all of it is within the tolerance


class Accuracy:
    """Compares runs of a model with float32 baseline runs, which are made once.

    Raises `StateError` if float32 can't be the baseline: its outputs are not finite, or one
    rounding of the weights changes them about as much as the tolerance.
    """

    def __init__(
        self, subject: Subject, dtype: str, tolerance: Tolerance, deadline: Deadline, seed: int
    ) -> None:
        self.subject, self.tolerance, self.deadline = subject, tolerance, deadline
        self.evaluations = 0
        self.seconds = 0.0  #: of the longest evaluation
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
        #: The allowed relative error of each output, and of each gradient that can be compared.
        self.limits = self._limits(noise, moved)
        #: Gradients that are left out: rounding changes them in float32 too.
        self.unknown = sorted(set(noise) - set(self.limits))

    def of(
        self, policy: Policy, block: Optional[HybridBlock] = None, forced: bool = False
    ) -> Verdict:
        """Return the errors of the model under a policy, or of a converted form of it.

        Raises `OutOfTimeError` if there is no time left, unless it is `forced`.
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
        """Return the errors without a policy: none."""
        return Verdict(0.0, 0.0 if self.subject.training else None, self.metric, within=True)

    # ------------------------------------------------------------------ runs and their errors

    def _runs(self, policy: Optional[Policy], block: Optional[HybridBlock] = None) -> List[Results]:
        return [self.subject.run(batch, policy, block) for batch in self.subject.batches]

    def _distances(self, runs: Sequence[Results]) -> Dict[str, Distance]:
        """Return the distance of each output and gradient from float32, in its worst batch."""
        found: Dict[str, Distance] = {}
        for plain, run in zip(self._plain, runs):
            there = _named(run)
            for name, values in _named(plain).items():
                distance = found.setdefault(name, Distance())
                if name.startswith(_OUTPUT) or values.any() or not np.isfinite(there[name]).all():
                    distance.add(name, values, there[name])
                # A gradient that is zero for this batch has no relative error.
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

    # ------------------------------------------------------------------ the float32 baseline

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
            size = _size(distance)
            rounding = moved[name].relative if name in moved else 0.0
            if name.startswith(_OUTPUT):
                limits[name] = self._output_limit(size, rounding)
                continue
            limit = self.tolerance.rtol or GRADIENTS
            known = max(size, rounding * _NOISE) <= limit * _NOISE
            # A gradient that is zero in float32 has no relative error.
            if known and any(np.any(run.gradients[name]) for run in self._plain):
                limits[name] = limit
        return limits

    def _output_limit(self, noise: float, rounding: float) -> float:
        rtol = self.tolerance.rtol
        limit = max(rtol or OUTPUTS, _TIMES_ROUNDED * rounding)
        if noise > limit * _NOISE:
            more = "" if rtol is None else f", or an `rtol` of {noise / _NOISE:.1e} or more"
            raise StateError(UNSTABLE.format(noise=noise, limit=limit, more=more))
        return limit

    # ------------------------------------------------------------------ the user's metric

    def _metric_of(self, runs: Sequence[Results]) -> Optional[float]:
        if self.tolerance.metric is None:
            return None
        labels = [arrays_in([batch.label]) for batch in self.subject.batches]
        predictions = [[mx.nd.array(values) for values in run.outputs] for run in runs]
        return float(self.tolerance.metric(labels, predictions))

    def _min_metric(self) -> Optional[float]:
        """Return the least metric; by default 99 % of float32's."""
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
        """Return a sentence on the gradients that are left out."""
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
