"""`tune`: a policy for one model on one machine, found by measuring both."""

import copy
import fnmatch
import functools
import numbers
from dataclasses import replace
from typing import Any, Callable, FrozenSet, Iterable, List, Optional, Sequence, Tuple

import mxnet as mx

from ...convert.files import DETECTION
from ...errors import ArgumentError, unknown
from ...framework.arrays import on_device
from ...framework.keywords import checked_call
from ...framework.machine import default_dtype
from ...framework.wording import counted, shown
from ...graph.speed.fuse import IN_FUSED_FILES
from ...policy.active import suspended
from ...policy.overrides import exact_pattern
from ...policy.policy import Policy
from ...policy.targets import DEFAULT_TARGET, check_target
from ...scaling.scaler import positive_number, whole_number
from .accuracy import MOST_BATCHES, OUTPUTS, Accuracy, Subject, Tolerance, Verdict
from .deadline import Deadline, seconds_of
from .layers import Search, lowered_layers, measured_layers
from .race import Form, Race
from .tuning import Tuning, machine_of, none_if_nan
from .turns import quartiles

__all__ = ["STOPPED", "USED", "WAYS", "Tuner", "tune"]

#: Metrics of which less is better.
_LOSSES = (
    mx.metric.MAE, mx.metric.MSE, mx.metric.RMSE, mx.metric.CrossEntropy, mx.metric.Loss,
    mx.metric.NegativeLogLikelihood, mx.metric.Perplexity,
)  # fmt: skip

METRIC_MODE = (
    "a metric is measured in inference, and a loss asks for training: give one of the two, or rtol "
    "beside the loss"
)
NOT_A_METRIC = (
    "metric must be a metric of MXNet's, its name, or a function of label and prediction (NumPy "
    "arrays) that returns a number, not {given}"
)
OTHER_DEVICE = (
    "the policy to start from is for the {own}, and the data is on {data}: put net and data there, "
    "or give a policy for where they are"
)
NOT_LOWERED = (
    "the policy to start from computes all in float32: give one that lowers operators, such as "
    "Policy.default('bfloat16')"
)
LESS_IS_BETTER = (
    "of the metric {given} less is better, and tune needs one of which more is better: give a "
    "function that returns its negative"
)
NO_METRIC = "min_metric is the least value of a metric: give the metric too"

NO_KERNELS = (
    "This CPU has no bfloat16 kernels (or DNNL_MAX_CPU_ISA hides them): only float32 was tried."
)
NOT_TIMED = "Nothing was timed{why}: the policy was tuned for accuracy alone."
NOT_LOW = "No policy in {dtype} within the tolerance was found: this one computes in float32."
FLOAT32 = (
    "Nothing that is accurate enough was faster than float32 by more than chance: the policy "
    "changes nothing."
)
CLOSE = "Too {kind} to tell: {way} in {dtype}, at {low:.2f} to {high:.2f} times float32's speed."
UNDECIDED = "The measurements so far were not enough to choose anything but float32."
NOT_PAID = (
    "{dtype} does not pay for this model on this machine: it had {low:.2f} times float32's speed "
    "at best; the fastest form without it, {others:.2f} times."
)
STOPPED = "The search was stopped by Ctrl-C."
OUT_OF_TIME = (
    "The budget was too short to try all: the next measurement would have passed it. A larger one "
    "may find a faster policy."
)
BOXES = (
    "{names} selects and sorts boxes, and a small error reorders them: the errors above mean "
    "little. Tune the model without that selection, or give a metric."
)
IN_FILES = (
    "Exported files keep MXNet's operators in place of {names}: load them under `mxamp.init`, or "
    "they run slower than measured here."
)
STATIC = (
    "Call hybridize(static_alloc=True, static_shape=True) on a block imported from its files: only "
    "so are fused weights kept packed."
)
SEARCHED = "With {kept} of {layers} in float32 the model is accurate enough{proof}."
MORE_DATA = f"Of the data, the first {MOST_BATCHES} batches were used."
USED = "Measured as it runs by {call}."
#: How to run a model in each way.
WAYS = {
    "autocast": "init(policy=policy) or autocast(policy=policy), hybridized",
    "converted": "`convert_hybrid_block(net, policy=policy)` with `cast_optional_params`",
    "fused": "`convert_hybrid_block(net, policy=policy)` with `fuse=True`",
}

#: The shares of the budget at which each phase ends.
_FIRST_RACE, _LAYERS, _SEARCH, _SECOND_RACE = 0.3, 0.4, 0.65, 0.95
#: The rounds of the first race, and of the second.
_FEW, _MORE = 3, 5


@checked_call(dtype="write target_dtype='bfloat16'")
def tune(
    net: Any,
    data: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    target_dtype: Any = None,
    rtol: Optional[float] = None,
    metric: Any = None,
    min_metric: Optional[float] = None,
    budget: Any = "60s",
    seed: int = 0,
    progress: bool = True,
    policy: Optional[Policy] = None,
    timed: bool = True,
) -> Tuning:
    """Measure a model, and find the fastest policy within a tolerance of float32's results.

    ::

        tuning = amp.tune(net, [data1, data2], budget="60s")
        print(tuning)  # the measurements, and the layers by what they cost
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # and Policy.load("net.toml") later

    `tune` runs the model on your data, in float32 and under mxamp's policy. If the errors exceed
    the tolerance, it searches for the smallest set of layers to keep in float32; the report says
    whether a smaller set is ruled out. Then it times the forms of the model in turns, on the first
    batch: low precision, and float32 with faster equivalents of operators; for inference also
    converted, and converted with `fuse=True`. If no form is faster than plain float32, the policy
    changes nothing.

    Parameters
    ----------
    net : HybridBlock, or (symbol, arg_params, aux_params)
        The float32 model. It is not changed, except that parameters with deferred initialization
        get a shape. If the model draws random numbers other than for `Dropout`, the state of
        MXNet's generator, which can't be read, changes.
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or a few; of an iterable the first 16 are used. With a loss or a metric, a batch
        is a tuple of the net's inputs and the label; for a saved model, a dict of inputs by name.
    loss : callable, optional
        Called with the net's output and the label. With a loss, gradients are compared too, and
        training steps are timed.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; by default float16 for GPUs and bfloat16 for CPUs. float16 on a CPU
        is never fast: it is tuned for accuracy alone, and nothing is timed.
    rtol : float, optional
        The largest relative error (in the L2 norm) of an output in any batch, and of a
        parameter's gradient. By default 0.05 for outputs, and 0.5 for gradients. In training the
        default allows for sensitive nets: an output may have twice the error that rounding the
        weights causes, and a gradient that rounding changes by half of the limit is not compared.
    metric : EvalMetric, str or callable, optional
        In place of `rtol`, or beside it: as `mx.metric.create` takes it. More is better.
    min_metric : float, optional
        The least value of the metric. By default 99 % of the float32 model's.
    budget : float or str, default "60s"
        Seconds, or a text such as "90s", "5m", "1h". The search stops there, or at Ctrl-C, with
        the best policy so far. The float32 baseline runs are always made.
    seed : int, default 0
        The seed of the random numbers. The same seed gives the same layers; of two forms that are
        as fast, either may win.
    progress : bool, default True
        Show a bar with the time left, if standard error is a terminal.
    policy : Policy, optional
        Where the search starts, in place of mxamp's own policy.
    timed : bool, default True
        False tunes the accuracy alone: the policy is in low precision even if that is slow here.
        Use it for a model that will run on another machine.

    Returns
    -------
    Tuning
        The policy, and the measurements behind it.

    Raises
    ------
    ArgumentError
        The model is not in float32 or can't be traced, the data does not fit, or arguments
        contradict each other.
    StateError
        The float32 model gives Inf or NaN, changes too much by one rounding of its weights, or has
        a metric below `min_metric`.

    Holds a copy of the parameters for each form that is timed, and all activations of one batch.
    """
    base = _checked_base_policy(target_dtype, policy)
    seed = whole_number("seed", seed)
    tolerance = _tolerance(rtol, metric, min_metric, loss is not None)
    deadline = Deadline(seconds_of(budget))
    subject = Subject(net, data, loss, labelled=loss is not None or metric is not None)
    if not on_device(list(subject.inputs.values()), base.device):
        raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=subject.context))
    with deadline.watched(progress), subject.seeds.restored(), suspended():
        accuracy = Accuracy(subject, base.target_dtype, tolerance, deadline, seed)
        return Tuner(accuracy, base, seed, timed).run()


def _checked_base_policy(target_dtype: Any, policy: Optional[Policy]) -> Policy:
    """Return the policy that the search starts from; raise if it computes all in float32."""
    if policy is None:
        return Policy.default(target_dtype or default_dtype())
    given = DEFAULT_TARGET if target_dtype is None else check_target(target_dtype)
    base = Policy.from_lists(given, policy=policy)
    if not base.lowers:
        raise ArgumentError(NOT_LOWERED)
    return base


def _tolerance(rtol: Any, metric: Any, min_metric: Any, training: bool) -> Tolerance:
    """Return the tolerance in the arguments of `tune`; raise if they contradict each other."""
    if rtol is not None:
        rtol = positive_number("`rtol`", rtol)
    if metric is None:
        if min_metric is not None:
            raise ArgumentError(NO_METRIC)
        return Tolerance(rtol)
    if training:
        raise ArgumentError(METRIC_MODE)
    if min_metric is not None and not isinstance(min_metric, numbers.Real):
        raise ArgumentError(f"min_metric must be a number, not {shown(min_metric)}")
    try:
        created = mx.metric.create(metric)
    except Exception:  # MXNet raises what its registry does
        names = mx.registry.get_registry(mx.metric.EvalMetric)
        if isinstance(metric, str) and metric.lower() not in names:
            raise unknown("metric", metric, names) from None
        raise ArgumentError(NOT_A_METRIC.format(given=shown(metric))) from None
    if isinstance(created, _LOSSES):
        raise ArgumentError(LESS_IS_BETTER.format(given=shown(metric)))
    least = None if min_metric is None else float(min_metric)
    return Tolerance(rtol, functools.partial(_metric_value, created), least)


def _metric_value(metric: Any, labels: Sequence[Any], predictions: Sequence[Any]) -> float:
    """Return a metric's value over all batches; `metric` itself stays as it is."""
    fresh = copy.deepcopy(metric)
    fresh.reset()
    for label, prediction in zip(labels, predictions):
        fresh.update(label, prediction)
    value = fresh.get()[1]
    if not isinstance(value, numbers.Real):
        raise ArgumentError(NOT_A_METRIC.format(given=f"one of {shown(value)}"))
    return float(value)


class Tuner:
    """A search for the policy of one model, with what it has measured so far."""

    def __init__(self, accuracy: Accuracy, base: Policy, seed: int, timed: bool) -> None:
        self.accuracy, self.subject, self.deadline = accuracy, accuracy.subject, accuracy.deadline
        self.base, self.plain, self.seed = base, base.in_float32(), seed
        self.layers, self.substitutions = lowered_layers(self.subject, base)
        self.notes: List[str] = [MORE_DATA] if self.subject.more else []
        emulated = base.target_dtype == "float16" and base.device == "cpu"
        self.timed = timed and not emulated
        if not self.timed:
            why = ", as float16 on a CPU is for trying and testing" if emulated else ""
            self.notes.append(NOT_TIMED.format(why=why))
        self.race: Optional[Race] = None
        #: The layers that stay in float32; None until some are known to be enough.
        self.kept: Optional[FrozenSet[str]] = None

    def run(self) -> Tuning:
        """Return the result of the search, at its end or when the budget or Ctrl-C ends it."""
        with self.deadline.stoppable():
            self._run_phases()
        return self._build_tuning()

    def _run_phases(self) -> None:
        """Measure accuracy, time all forms, search for the layers to keep, time the best forms."""
        lowers = not (self.timed and self.base.rule("Convolution").missing)
        if not lowers:
            self.notes.append(NO_KERNELS)
        within, pays = False, lowers
        with self.deadline.phase(self.base.target_dtype):
            within = lowers and self.accuracy.measure(self.base).within
        if self.timed:
            with self.deadline.phase("forms of the model", _FIRST_RACE):
                self.deadline.check(whole=True)
                self.race = Race(self.accuracy, self.substitutions)
                self.race.run([self.base, self.plain] if lowers else [self.plain], _FEW)
            pays = pays and (self.race is None or self.race.low_may_win())
        if within:
            self.kept = frozenset()
        elif pays:
            # The search needs the costs of the layers; otherwise they are for the report alone.
            self._measure_layers(_LAYERS)
            self._search_layers()
        with self.deadline.phase("the fastest forms", _SECOND_RACE):
            if self.race is not None:
                low = [self._keeping_float32(self.kept)] if pays and self.kept is not None else []
                self.race.run([*low, self.plain], _MORE)
        if lowers and (within or not pays):
            self._measure_layers(1.0)

    def _measure_layers(self, share: float) -> None:
        """Store each layer's error and gain in `layers`, until a share of the budget is spent."""
        with self.deadline.phase("layers", share):
            arguments = self.base, self.seed, self.deadline
            self.layers = measured_layers(self.subject, self.layers, *arguments)

    def _keeping_float32(self, names: Iterable[str]) -> Policy:
        """Return the base policy with the layers of these names in float32."""
        return self.base.override(fp32_layers=[self._layer_pattern(name) for name in sorted(names)])

    def _layer_pattern(self, name: str) -> str:
        """Return a `fp32_layers` pattern for a layer, independent of the block's name if possible.

        Gluon numbers blocks by their order in the process. The pattern is relative to the block
        ("*stage1_conv0_fwd") if it then matches no other layer, else the whole name.
        """
        prefix = self.subject.prefix
        rest = name[len(prefix) :] if prefix and name.startswith(prefix) else ""
        pattern = f"*{exact_pattern(rest)}"
        names = {node.name for node in self.subject.graph.all_nodes if not node.is_variable}
        # A name without "_" is that of the block's own operator, such as "fwd": too common.
        if "_" in rest and {n for n in names if fnmatch.fnmatchcase(n, pattern)} == {name}:
            return pattern
        return exact_pattern(name)

    def _search_layers(self) -> None:
        """Store in `kept` the smallest set of float32 layers found that is accurate enough."""
        # The most expensive layer comes first; of equals, the one that runs first.
        order = sorted(self.layers.values(), key=lambda layer: -(none_if_nan(layer.error) or 0.0))
        names = [layer.name for layer in order]

        def is_accurate(kept: FrozenSet[int]) -> bool:
            self.deadline.check(self.accuracy.seconds)
            return self.accuracy.measure(self._keeping_float32(names[i] for i in kept)).within

        search = Search(is_accurate, range(len(names)))
        try:
            with self.deadline.phase("layers to keep", _SEARCH if self.timed else 1.0):
                search.run()
        finally:
            if len(search.best) < len(names):
                self.kept = frozenset(names[i] for i in search.best)
                proof = "; no smaller set will do" if search.proven else ""
                layers = counted(len(names), "layer")
                kept = f"{len(self.kept):,}"
                self.notes.append(SEARCHED.format(kept=kept, layers=layers, proof=proof))

    # ------------------------------------------------------------------ the result

    def _choose_form(self) -> Tuple[str, Policy, Verdict]:
        """Return the way to run the model, its policy, and the errors under that policy."""
        if not self.timed and self.kept is not None:
            policy = self._keeping_float32(self.kept)
            return "autocast", policy, self.accuracy.measure(policy)
        winner = self.race.winner() if self.race is not None else None
        if winner is not None and winner.policy is not None and winner.verdict is not None:
            return winner.way, winner.policy, winner.verdict
        return "plain", self.plain.override(substitutions=[]), self.accuracy.plain

    def _build_tuning(self) -> Tuning:
        """Return the chosen policy and all measurements as a `Tuning`."""
        way, policy, verdict = self._choose_form()
        accuracy, race = self.accuracy, self.race
        by_metric = accuracy.plain.metric is not None and accuracy.tolerance.rtol is None
        kept = self.kept or frozenset() if policy.lowers else frozenset()
        layers = [replace(layer, kept=layer.name in kept) for layer in self.layers.values()]
        if not self.timed:
            layers = [replace(layer, gain=None) for layer in layers]
        return Tuning(
            policy=policy,
            way=way,
            mode="training" if self.subject.training else "inference",
            operators=sum(not node.is_variable for node in self.subject.graph.nodes),
            inputs=self.subject.described(),
            # Errors are the same on every machine.
            machine=machine_of(policy.device) if self.timed else (),
            tolerance=None if by_metric else accuracy.tolerance.rtol or OUTPUTS,
            error=verdict.error,
            gradient_error=verdict.gradient_error,
            metric=verdict.metric,
            min_metric=accuracy.min_metric,
            evaluations=accuracy.evaluations,
            seconds=round(self.deadline.spent, 3),
            seed=self.seed,
            complete=self.deadline.complete,
            notes=tuple(self._notes(way, policy)),
            chosen=race.winner().trial(race.substitutions) if race is not None else None,
            trials=race.trials() if race is not None else (),
            layers=tuple(one for one in layers if one.kept or none_if_nan(one.error) is not None),
        )

    def _notes(self, way: str, policy: Policy) -> List[str]:
        """Return the sentences on the search and its result."""
        notes, dtype = [*self.notes], self.base.target_dtype
        if not self.deadline.complete:
            notes.append(STOPPED if self.deadline.stopped else OUT_OF_TIME)
        if way == "plain" and not self.timed:
            notes.append(NOT_LOW.format(dtype=dtype))
        elif way == "plain":
            notes.append(FLOAT32 if self.deadline.complete else UNDECIDED)
        if self.race is not None:
            best = self.race.winner()
            notes += [_close_note(form, best) for form in self.race.undecided()]
        if self.race is not None and not policy.lowers and not self.race.low_may_win():
            low = self.race.best_speedup(lowers=True)
            others = max(self.race.best_speedup(lowers=False), 1.0)
            notes.append(NOT_PAID.format(dtype=dtype, low=low, others=others))
        notes += self.accuracy.notes()
        boxes = sorted(DETECTION & self.subject.graph.operators)
        if boxes and self.accuracy.tolerance.rtol is None and self.accuracy.plain.metric is None:
            notes.append(BOXES.format(names=", ".join(boxes)))
        lost = [n for n in self.substitutions if way != "fused" or n not in IN_FUSED_FILES]
        if way in ("converted", "fused") and lost:
            notes.append(IN_FILES.format(names=", ".join(lost)))
        if way == "fused":
            notes.append(STATIC)
        if self.timed and way in WAYS:
            notes.append(USED.format(call=WAYS[way]))
        return notes


def _close_note(form: Form, best: Form) -> str:
    """Return a note on a form that may be faster than the chosen one: its ratios' quartiles."""
    low, high = quartiles(form.ratios)
    dtype = form.policy.target_dtype if form.policy is not None and form.lowers else "float32"
    kind = "noisy" if low <= best.speedup <= high else "close"
    return CLOSE.format(kind=kind, way=form.way, dtype=dtype, low=low, high=high)
