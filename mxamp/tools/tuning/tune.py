"""`tune`: a policy for one model on one machine, found by measuring both."""

import copy
import fnmatch
import functools
import math
import numbers
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

import mxnet as mx

from ...errors import ArgumentError
from ...framework.arrays import on_device
from ...framework.machine import default_dtype
from ...framework.wording import counted, one_of, shown
from ...graph.ir import Graph
from ...policy.active import suspended
from ...policy.overrides import exactly
from ...policy.policy import Policy
from ...policy.targets import DEFAULT_TARGET, check_target
from ...scaling.scaler import count, positive_number
from .accuracy import OUTPUTS, Accuracy, Tolerance, Verdict
from .deadline import Deadline, OutOfTimeError, seconds_of, stoppable, watched
from .layers import costs_of, lowered_layers, substitutions_in
from .model import MOST_BATCHES, Subject
from .search import Search
from .speed import MARGIN, PLAIN, Form, Race, step_speedups
from .tuning import MODES, LayerCost, Tuning, machine_of

__all__ = ["STOPPED", "USED", "WAYS", "Tuner", "tune"]

#: Metrics of which less is better.
_LOSSES = (
    mx.metric.MAE, mx.metric.MSE, mx.metric.RMSE, mx.metric.CrossEntropy, mx.metric.Loss,
    mx.metric.NegativeLogLikelihood, mx.metric.Perplexity,
)  # fmt: skip

NEEDS_LOSS = "mode='training' compares gradients too: give the loss, loss(output, label)"
NO_GRADIENTS = "mode='inference' has no use for a loss: leave one of the two out"
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

ACCURACY_ONLY = (
    "float16 on a CPU is for trying and testing: the policy was tuned for accuracy alone, and "
    "nothing was timed."
)
NO_KERNELS = (
    "This CPU has no bfloat16 kernels (or DNNL_MAX_CPU_ISA hides them): only float32 was tried."
)
NOT_TIMED = "Nothing was timed: the policy was tuned for accuracy alone."
NOT_LOW = "No policy in {dtype} within the tolerance was found: this one computes in float32."
FLOAT32 = "Nothing that is accurate enough was faster than float32."
UNDECIDED = "The measurements so far were not enough to choose anything but float32."
NOT_PAID = (
    "{dtype} does not pay for this model on this machine: it had {low:.2f} times float32's speed "
    "at best; the fastest form without it, {others:.2f} times."
)
STOPPED = "The search was stopped by Ctrl-C."
OUT_OF_TIME = "The budget was spent before all was tried: a larger one may find a faster policy."
SEARCHED = "With {kept} of {layers} in float32 the model is accurate enough{proof}."
STEPS = "Optimizer steps that are faster than MXNet's here: {steps}."
MORE_DATA = f"Of the data, the first {MOST_BATCHES} batches were used."
USED = "Measured as it runs by {call}."
NOTHING = "The policy changes nothing."
#: How to run a model in each way.
WAYS = {
    "plain": "",
    "autocast": "init(policy=policy) or autocast(policy=policy), hybridized",
    "converted": "`convert_hybrid_block(net, policy=policy)` with `cast_optional_params`",
    "fused": "`convert_hybrid_block(net, policy=policy)` with `fuse=True`",
}

#: The shares of the budget at which each phase ends.
_FIRST_RACE, _LAYERS, _SEARCH, _SECOND_RACE, _SWITCHES = 0.3, 0.4, 0.65, 0.8, 0.95
#: The rounds of the first race, and of the later ones.
_FEW, _MORE = 2, 5


def tune(
    net: Any,
    data: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    target_dtype: Any = None,
    mode: Optional[str] = None,
    rtol: Optional[float] = None,
    metric: Any = None,
    min_metric: Optional[float] = None,
    budget: Any = "60s",
    seed: int = 0,
    progress: bool = True,
    policy: Optional[Policy] = None,
    timed: bool = True,
) -> Tuning:
    """Find a policy that is as accurate as you ask, and never slower than float32, as measured.

    ::

        tuning = amp.tune(net, [batch1, batch2], budget="60s")
        print(tuning)  # the measurements, and the layers by what they cost
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # and Policy.load("net.toml") later

    The model is run in float32 and under mxamp's policy, on your data. Where the errors are larger
    than you allow, `tune` searches for a smallest set of layers to keep in float32; the report says
    whether a smaller one is ruled out. Then it times the ways to run the model in turns, on the
    first batch: in low precision and in float32, each with and without the faster equivalents of
    operators, and, for inference, under `init`, converted, and converted with `fuse=True`. Where
    nothing is faster than float32, the policy changes nothing.

    Parameters
    ----------
    net : HybridBlock, or (symbol, arg_params, aux_params)
        The float32 model. It stays as it is, except that parameters whose shape waits for a first
        input get one. (Where it draws random numbers other than for `Dropout`, MXNet's generator,
        which can't be read, is left at another point.)
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or a few; of an iterable the first 16 are used. With a loss or a metric, a batch
        is a tuple of the net's inputs and the label; for a saved model, a dict of inputs by name.
    loss : callable, optional
        Called with the net's output and the label. Its gradients are compared too then, and
        training steps are timed.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; by default float16 for GPUs and bfloat16 for CPUs. float16 on a CPU
        is never fast: it is tuned for accuracy alone, and nothing is timed.
    mode : str, optional
        "training" where a loss is given, else "inference".
    rtol : float, optional
        The largest relative error (in the L2 norm) of an output in any batch, and of a
        parameter's gradient. By default 0.05 for outputs, and 0.5 for gradients. In training the
        default allows for sensitive nets: an output may have twice the error that rounding the
        weights causes, and gradients are not compared that rounding changes by half of the limit.
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
        False looks at accuracy alone: the policy is in low precision even if that is slow here.
        For models that will run on another machine.

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
    if mode not in (None, *MODES):
        raise ArgumentError(f"mode must be {one_of(MODES)}, not {shown(mode)}")
    if mode == "training" and loss is None:
        raise ArgumentError(NEEDS_LOSS)
    if mode == "inference" and loss is not None:
        raise ArgumentError(NO_GRADIENTS)
    base = _base_of(target_dtype, policy)
    seed = count("seed", seed)
    tolerance = _tolerance(rtol, metric, min_metric, loss is not None)
    deadline = Deadline(seconds_of(budget))
    subject = Subject(net, data, loss, labelled=loss is not None or metric is not None)
    if not on_device(subject.arrays(), base.device):
        raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=subject.context))
    with watched(deadline, progress), subject.seeds.kept(), suspended():
        accuracy = Accuracy(subject, base.target_dtype, tolerance, deadline, seed)
        return Tuner(accuracy, base, deadline, seed, timed).run()


def _base_of(target_dtype: Any, policy: Optional[Policy]) -> Policy:
    if policy is None:
        return Policy.default(target_dtype or default_dtype())
    given = DEFAULT_TARGET if target_dtype is None else check_target(target_dtype)
    base = Policy.from_lists(given, policy=policy)
    if not base.lowers:
        raise ArgumentError(NOT_LOWERED)
    return base


def _tolerance(rtol: Any, metric: Any, min_metric: Any, training: bool) -> Tolerance:
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
        raise ArgumentError(NOT_A_METRIC.format(given=shown(metric))) from None
    if isinstance(created, _LOSSES):
        raise ArgumentError(LESS_IS_BETTER.format(given=shown(metric)))
    least = None if min_metric is None else float(min_metric)
    return Tolerance(rtol, functools.partial(_measured, created), least)


def _measured(metric: Any, labels: Sequence[Any], predictions: Sequence[Any]) -> float:
    """Return a metric over all batches, without changing the metric object."""
    fresh = copy.deepcopy(metric)
    fresh.reset()
    for label, prediction in zip(labels, predictions):
        fresh.update(label, prediction)
    value = fresh.get()[1]
    if not isinstance(value, numbers.Real):
        raise ArgumentError(NOT_A_METRIC.format(given=f"one of {shown(value)}"))
    return float(value)


class Tuner:
    """A search that measures a model until a policy is found, or the budget is spent."""

    def __init__(
        self, accuracy: Accuracy, base: Policy, deadline: Deadline, seed: int, timed: bool
    ) -> None:
        self.subject: Subject = accuracy.subject
        self.accuracy, self.base, self.deadline, self.seed = accuracy, base, deadline, seed
        self.traced = self.subject.trace()
        training = self.subject.training
        self.layers = lowered_layers(self.traced, base, training)
        self.applied = substitutions_in(self.traced, base, training)
        self.graph = Graph.from_symbol(self.subject.block._cached_graph[1])
        self.notes: List[str] = [MORE_DATA] if self.subject.more else []
        if base.target_dtype == "float16" and base.device == "cpu":
            self.notes.append(ACCURACY_ONLY)
            timed = False
        elif not timed:
            self.notes.append(NOT_TIMED)
        self.timed = timed
        self.race: Optional[Race] = None
        #: The layers that stay in float32; None until some are known to be enough.
        self.kept: Optional[FrozenSet[str]] = None
        #: The forms of the first race in low precision and in float32, where float32 won it.
        self.unpaid: Optional[Tuple[Sequence[Form], Sequence[Form]]] = None
        self.step_speedups: Dict[str, float] = {}
        self.complete = True

    def run(self) -> Tuning:
        """Run the search to its end, or until the budget or Ctrl-C ends it."""
        try:
            with stoppable(self.deadline):
                self._measure()
        except OutOfTimeError:
            self._ended()
        except KeyboardInterrupt:
            self.deadline.stopped = True
            self._ended()
        if self.race is not None:
            self.race.choose(self._policies())
        return self._result()

    def _policies(self) -> List[Policy]:
        """Return the policies to choose from."""
        low = [] if self.kept is None else [self._low(self.kept)]
        return [self.base.in_float32(), *low]

    def _ended(self) -> None:
        self.complete = False
        why = STOPPED if self.deadline.stopped else OUT_OF_TIME
        if why not in self.notes:
            self.notes.append(why)

    def _measure(self) -> None:
        if self.timed and self.base.rule("Convolution").missing:
            self.notes.append(NO_KERNELS)
            self.race = Race(self.accuracy, self.applied, self.deadline)
            self._choose(pays=False)
            return
        self.deadline.phase(self.base.target_dtype)
        within = self.accuracy.of(self.base).within
        pays = self._first_race() if self.timed else True
        if within:
            self.kept = frozenset()
        elif pays:
            # The search needs the costs of the layers; otherwise they are for the report alone.
            self._look_at_layers(_LAYERS)
            self._search()
        if self.timed:
            self._choose(pays)
        if within or not pays:
            self._look_at_layers(1.0)
        if self.race is not None:
            self.deadline.phase("accuracy of all forms")
            self.race.verify()

    def _look_at_layers(self, until: float) -> None:
        arguments = self.base, self.subject.training, self.seed, self.deadline, until
        self.layers = costs_of(self.traced, self.layers, *arguments)

    # ------------------------------------------------------------------ accuracy

    def _low(self, kept: Iterable[str]) -> Policy:
        """Return the base policy with these layers in float32."""
        return self.base.override(fp32_layers=[self._pattern(name) for name in sorted(kept)])

    def _pattern(self, name: str) -> str:
        """Return a pattern for a layer that also holds where Gluon numbers the block otherwise.

        It is relative to the block ("*stage1_conv0_fwd") where it matches no other layer.
        """
        prefix = self.subject.prefix
        rest = name[len(prefix) :] if prefix and name.startswith(prefix) else ""
        pattern = f"*{exactly(rest)}"
        names = {node.name for node in self.graph.all_nodes if not node.is_variable}
        # A name without "_" is that of the block's own operator: too little to be told by.
        if "_" in rest and {n for n in names if fnmatch.fnmatchcase(n, pattern)} == {name}:
            return pattern
        return exactly(name)

    def _search(self) -> None:
        """Find the layers that have to stay in float32."""
        self.deadline.phase("layers to keep")
        until = _SEARCH if self.timed else 1.0

        def works(kept: FrozenSet[int]) -> bool:
            self.deadline.check(self.accuracy.seconds, until)
            return self.accuracy.of(self._low(self.layers[i].name for i in kept)).within

        # The most expensive layer comes first; of equals, the one that runs first.
        order = sorted(range(len(self.layers)), key=lambda i: (-(self.layers[i].error or 0.0), i))
        search = Search(works, order)
        try:
            search.run()
        except OutOfTimeError:
            self._ended()
        finally:
            if len(search.best) < len(self.layers):
                self.kept = frozenset(self.layers[i].name for i in search.best)
                proof = "; no smaller set will do" if search.proven else ""
                layers = counted(len(self.layers), "layer")
                kept = f"{len(self.kept):,}"
                self.notes.append(SEARCHED.format(kept=kept, layers=layers, proof=proof))

    # ------------------------------------------------------------------ speed

    def _first_race(self) -> bool:
        """Time all forms a few times; return whether low precision may be the fastest."""
        self.deadline.phase("forms of the model")
        self.race = race = Race(self.accuracy, self.applied, self.deadline)
        low, others = race.forms(self.base), race.forms(self.base.in_float32())
        try:
            race.run([*low, *others], _FEW, _FIRST_RACE)
        except OutOfTimeError:
            self._ended()
        speeds = race.best(low), max(race.best(others), 1.0)
        if speeds[0] * MARGIN >= speeds[1] or not race.was_timed(low):
            return True
        self.unpaid = low, others
        return False

    def _choose(self, pays: bool) -> None:
        """Choose the fastest form that is accurate enough."""
        race = self.race
        if race is None:
            return
        policies = self._policies()
        try:
            self.deadline.phase("the fastest forms")
            raced = [policy for policy in policies if pays or not policy.lowers]
            forms = [form for policy in raced for form in race.forms(policy)]
            race.run(forms, _MORE, _SECOND_RACE)
            race.choose(policies)
            self.deadline.phase("switches")
            race.try_switches(_MORE, _SWITCHES)
            if self.subject.training:
                self.deadline.phase("optimizer steps")
                self.step_speedups = step_speedups(self.subject, self.base, self.deadline)
        except OutOfTimeError:
            self._ended()

    # ------------------------------------------------------------------ the result

    def _chosen(self) -> "tuple[str, Policy, Verdict]":
        """Return the way, the policy and its verdict."""
        if not self.timed and self.kept is not None:
            policy = self._low(self.kept)
            return "autocast", policy, self.accuracy.of(policy)
        winner = PLAIN if self.race is None else self.race.winner
        if self.race is not None and winner.policy is not None:
            return winner.way, winner.policy, self.race.verdict(winner)
        if not self.timed:
            self.notes.append(NOT_LOW.format(dtype=self.base.target_dtype))
        else:
            self.notes.append(FLOAT32 if self.complete else UNDECIDED)
        policy = self.base.in_float32()
        rest = sorted({*policy.substitutions} - {*self.applied})
        return "plain", policy.override(substitutions=rest), self.accuracy.of_plain()

    def _result(self) -> Tuning:
        way, policy, verdict = self._chosen()
        if not policy.lowers:
            self._note_unpaid()
        slower = {name for name, ratio in self.step_speedups.items() if ratio < 1}
        policy = policy.override(substitutions=sorted({*policy.substitutions} - slower))
        self._note_use(way)
        accuracy, race = self.accuracy, self.race
        by_metric = accuracy.metric is not None and accuracy.tolerance.rtol is None
        return Tuning(
            policy=policy,
            way=way,
            mode="training" if self.subject.training else "inference",
            operators=sum(not node.is_variable for node in self.graph.nodes),
            inputs=self.subject.inputs(),
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
            complete=self.complete,
            notes=tuple(self.notes),
            chosen=race.trial(race.winner) if race is not None else None,
            trials=race.trials() if race is not None else (),
            layers=self._layer_costs(policy),
        )

    def _note_unpaid(self) -> None:
        """Note that float32 won the first race, as far as later measurements confirm it."""
        if self.race is None or self.unpaid is None:
            return
        low, others = (self.race.best(forms) for forms in self.unpaid)
        if low < max(others, 1.0):
            dtype = self.base.target_dtype
            self.notes.append(NOT_PAID.format(dtype=dtype, low=low, others=max(others, 1.0)))

    def _note_use(self, way: str) -> None:
        faster = {name: ratio for name, ratio in self.step_speedups.items() if ratio >= MARGIN}
        if faster:
            steps = ", ".join(f"{name} {ratio:.2f} times" for name, ratio in faster.items())
            self.notes.append(STEPS.format(steps=steps))
        if self.accuracy.unknown:
            self.notes.append(self.accuracy.said_of_unknown())
        if self.timed:
            call = WAYS["autocast" if way == "plain" and faster else way]
            self.notes.append(USED.format(call=call) if call else NOTHING)

    def _layer_costs(self, policy: Policy) -> Tuple[LayerCost, ...]:
        kept = self.kept or frozenset() if policy.lowers else frozenset()
        return tuple(
            LayerCost(
                layer.name,
                layer.operator,
                layer.name in kept,
                math.nan if layer.error is None else layer.error,
                None if layer.gain is None or not self.timed else layer.gain * 1e3,
            )
            for layer in self.layers
            if layer.error is not None or layer.name in kept
        )
