"""`tune`: the layers to keep in float32 for an accuracy, and the fastest form of the model.

Bisection over the layers, largest error first, finds which have to stay in float32. The forms that
are accurate enough are then timed once, in turns with float32.
"""

import contextlib
import copy
import fnmatch
import functools
import itertools
import logging
import math
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.gluon import Block, HybridBlock

from ...convert.blocks import build_block, trace
from ...convert.models import convert_hybrid_block, convert_model
from ...convert.outputs import Distance, error_reason
from ...errors import AmpError, ArgumentError, StateError
from ...framework import machine
from ...framework.arrays import cast
from ...framework.files import write_file
from ...framework.keywords import checked_call
from ...framework.tables import text_table
from ...framework.wording import shortened, shown
from ...graph.ir import Graph
from ...patches.autocast import autocast
from ...policy.active import suspended
from ...policy.overrides import exact_pattern
from ...policy.policy import Policy, requested_policy
from ...policy.targets import DEFAULT_TARGET, check_target
from ...scaling.scaler import positive_number, whole_number
from ..debugging.batches import batches_of, block_of, check_loss
from ..debugging.explain import explain
from ..debugging.measured import arrays_in, explained_errors, loss_of
from .turns import (
    Timed,
    channels_note,
    check_float32,
    quartiles,
    repeats_of,
    rounds,
    seconds_of,
    step_function,
)

logger = logging.getLogger("mxamp")

#: The number of batches of `data` that are used.
MOST_BATCHES = 16
#: The default tolerances: of outputs in inference and in training, and of all gradients together.
OUTPUTS, TRAINING_OUTPUTS, GRADIENTS = 0.05, 0.2, 0.5
#: A form has to be so many times as fast as float32 to take its place.
_MARGIN = 1.02
#: The share of the budget that the search leaves for the timing.
_FOR_TIMING = 0.3
#: Metrics of which less is better.
_LOSSES = (
    mx.metric.MAE,
    mx.metric.MSE,
    mx.metric.RMSE,
    mx.metric.CrossEntropy,
    mx.metric.Loss,
    mx.metric.NegativeLogLikelihood,
    mx.metric.Perplexity,
)

BAD_METRIC = (
    "metric must be a metric of MXNet's of which more is better, its name, or a function of label "
    "and prediction (NumPy arrays), not {given}"
)
METRIC_ALONE = "a metric is measured in inference of a block, without a loss; min_metric needs it"
BELOW = "no policy satisfies min_metric={wanted}: the float32 model itself has {found:g}"
OTHER_DEVICE = "the policy is for the {own}, and the data is on {data}: put both on one device"
NOT_LOWERED = "the policy computes all in float32: give one that lowers operators"
NO_GRAPH = "block {name!r} can't be traced on this data: hybridized, a call shows why"
NOT_MEASURED = "the model does not run on this data: {why}"
NOT_FINITE = (
    "the model can't be tuned: in float32 already, elements of {name} are Inf or NaN. "
    "mxamp.debugging.check_numerics finds the operator that they come from"
)

MORE_DATA = f"Of the data, the first {MOST_BATCHES} batches were used."
NO_KERNELS = "This CPU has no bfloat16 kernels: only float32 was tried."
NOT_TIMED = "Nothing was timed: the policy was tuned for accuracy alone."
FLOAT32 = "Nothing that is accurate enough was faster than float32: run the model as it is."
STOPPED = "The search was stopped by Ctrl-C."
OUT_OF_TIME = "The `budget` was too short to try all: a larger one may find a faster policy."
#: Operators that select and sort boxes.
DETECTION = frozenset({"_contrib_box_nms", "_contrib_MultiBoxDetection", "_contrib_Proposal"})
BOXES = (
    "The model selects and sorts boxes, and a small error reorders them: the errors above mean "
    "little. Tune the model without that selection, or give a metric."
)
STATIC = (
    "Call hybridize(static_alloc=True, static_shape=True) on a block imported from its files: only "
    "so are fused weights kept packed."
)
_HEADER = """\
# Tuned by mxamp.tune on {date}. `Policy.load` ignores these comments.
# It may be slower than float32 for another model, machine or number of threads.
# Form: {way}
#
{report}
#
"""


@dataclass(frozen=True)
class Trial:
    """One timed form of the model, in `Tuning.trials`.

    Parameters
    ----------
    way : str
        "plain" (hybridized, mixed precision off), "autocast" (hybridized under the policy, in
        training), "converted" or "fused".
    precision : str
        "float32", "bfloat16" or "float16".
    milliseconds : float
        The median time of a run.
    speedup : float
        Plain float32's time divided by the trial's, the median over rounds.
    quartiles : tuple of float
        The first and third quartile of that ratio.
    error : float
        The largest relative error of an output; infinite where finite elements were lost.
    within : bool
        Whether the form is within the tolerance.
    """

    way: str
    precision: str
    milliseconds: float
    speedup: float
    quartiles: Tuple[float, float]
    error: float
    within: bool


@dataclass(frozen=True)
class Tuning:
    """A policy tuned for one model on one machine, and the measurements behind it.

    ::

        tuning = amp.tune(net, batches, loss_function)
        print(tuning)  # the report
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # Policy.load("net.toml") reads the policy

    Parameters
    ----------
    policy : Policy
        The policy that `tune` found.
    way : str
        How to run the model with it: "plain", "autocast", "converted" or "fused"; see `Trial`.
    mode : str
        "inference" or "training".
    kept : tuple of str
        The layers that the search keeps in float32, in the order of the graph.
    operators, low : int
        The number of operators in the model, and of those in low precision under `policy`.
    machine : str
        The CPU, the number of threads and the version of MXNet that were measured.
    tolerance : float, optional
        The largest relative error of an output that was allowed.
    error : float
        The largest relative error of an output in any batch, under `policy`.
    gradient_error : float, optional
        The same for gradients.
    metric, min_metric : float, optional
        Your own metric under `policy`, and the least value that was allowed.
    evaluations : int
        The number of policies and forms whose accuracy was measured.
    seconds : float
        The time that tuning took.
    seed : int
        The seed of the random numbers.
    complete : bool
        False where the time budget or Ctrl-C ended the search.
    notes : tuple of str
        Sentences on the search and its result.
    trials : tuple of Trial
        All timed forms, float32 first; empty where nothing was timed.
    """

    policy: Policy
    way: str
    mode: str
    kept: Tuple[str, ...]
    operators: int
    low: int
    machine: str
    tolerance: Optional[float]
    error: float
    gradient_error: Optional[float]
    metric: Optional[float]
    min_metric: Optional[float]
    evaluations: int
    seconds: float
    seed: int
    complete: bool
    notes: Tuple[str, ...] = ()
    trials: Tuple[Trial, ...] = ()

    @property
    def chosen(self) -> Optional[Trial]:
        """The trial of the chosen form; None where nothing was timed."""
        return next((trial for trial in self.trials if trial.way == self.way), None)

    @property
    def convert_options(self) -> Dict[str, bool]:
        """The arguments of `convert_*` that convert the model as it was measured.

        ::

            fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        """
        return {
            "cast_optional_params": self.way in ("converted", "fused"),
            "fuse": self.way == "fused",
        }

    def save(self, path: Union[str, Path]) -> None:
        """Write the policy to a TOML file, under comments that say how it was tuned.

        `Policy.load` reads the policy back, and ignores the comments. An existing file is replaced
        whole. Raises `ArgumentError` where `path` can't name a file, `WriteError` where writing
        fails.
        """
        report = "\n".join(f"# {line}" for line in (*self._sentences(), *self.notes))
        date = datetime.now().astimezone().isoformat(" ", "minutes")
        header = _HEADER.format(date=date, way=self.way, report=report)
        write_file(path, (header + self.policy.to_toml()).encode())

    def __str__(self) -> str:
        blocks = ["\n".join(self._sentences())]
        if self.trials:
            rows = [
                (
                    one.way,
                    one.precision,
                    one.milliseconds,
                    one.speedup,
                    *one.quartiles,
                    one.error,
                    "yes" if one.within else "",
                )
                for one in self.trials
            ]
            head = "way", "precision", "ms", "speedup", "lower", "upper", "error", "within"
            blocks.append(f"Trials\n{text_table(head, rows)}")
        blocks += ["\n".join(["Notes", *self.notes])] if self.notes else []
        return "\n\n".join(blocks)

    def _sentences(self) -> List[str]:
        """Return the report's first sentences: the choice, its errors, and the search."""
        limit = "without a tolerance"
        if self.tolerance is not None:
            limit = f"within a relative error of {self.tolerance:.4g}"
        error = f"The largest relative error of an output is {self.error:.4g}"
        if self.gradient_error is not None:
            error += f", and of a gradient {self.gradient_error:.4g}"
        kept = f"{len(self.kept)} ({shortened(self.kept)})" if self.kept else "none"
        low = f"{self.low} of {self.operators} operators"
        said = [
            f"Tuned for {self.mode}, {limit}.",
            f"Chosen: {self._choice()}.",
            f"In low precision: {low}; layers that the search keeps in float32: {kept}.",
            f"{error}.",
        ]
        if self.metric is not None:
            least = "" if self.min_metric is None else f", of at least {self.min_metric:.4g}"
            said.append(f"The metric is {self.metric:.4g}{least}.")
        said += [
            f"{self.evaluations} accuracy tests, {self.seconds:.4g} seconds, seed {self.seed}.",
            f"Measured on {self.machine}.",
        ]
        if not self.complete:
            said.append("The search ended early: there may be a better policy.")
        return said

    def _choice(self) -> str:
        """Return the chosen form and its speed, as part of a sentence."""
        trial = self.chosen
        if trial is None:
            return self.way
        if trial.way == "plain":
            return f"float32 as it is, {trial.milliseconds:.4g} ms a run"
        speed = f"{trial.speedup:.3g} times as fast as plain float32"
        return f"{trial.way} in {trial.precision}, {speed} ({trial.milliseconds:.4g} ms a run)"


@checked_call
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
    policy: Optional[Policy] = None,
    timed: bool = True,
) -> Tuning:
    """Measure a model, and find the fastest form within a tolerance of float32's results.

    ::

        tuning = amp.tune(net, [data1, data2], budget="60s")
        print(tuning)  # the measurements, and the layers kept in float32
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # and Policy.load("net.toml") later

    `tune` runs the model on your data, in float32 and under mxamp's policy. If the errors exceed
    the tolerance, a bisection over the layers finds which to keep in float32. Then float32 and the
    forms that are accurate enough run in turns on the first batch: for training under the policy,
    for inference converted, and converted with `fuse=True`. If no form is faster than float32, the
    policy changes nothing.

    Parameters
    ----------
    net : HybridBlock, or (symbol, arg_params, aux_params)
        The float32 model. It is not changed, except that parameters with deferred initialization
        get a shape. The state of MXNet's random number generator, which can't be read, changes.
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
        The largest relative error (in the L2 norm) of an output in any batch, and of all
        parameters' gradients together. By default 0.05 for outputs in inference; in training 0.2
        for outputs, since normalization by a batch is sensitive, and 0.5 for gradients.
    metric : EvalMetric, str or callable, optional
        In place of `rtol`, or beside it: as `mx.metric.create` takes it. More is better.
    min_metric : float, optional
        The least value of the metric. By default 99 % of the float32 model's.
    budget : float or str, default "60s"
        Seconds, or a text such as "90s", "5m", "1h". The search stops there, or at Ctrl-C, with
        the best policy so far. The float32 baseline runs are always made.
    seed : int, default 0
        The seed of MXNet's random numbers. `Dropout` passes all elements while errors are measured.
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
        The float32 model gives Inf or NaN, or has a metric below `min_metric`.

    Holds a copy of the parameters for each form that is timed, and all activations of one batch.
    """
    if policy is None:
        base = Policy.default(target_dtype or machine.default_dtype())
    else:
        given = DEFAULT_TARGET if target_dtype is None else check_target(target_dtype)
        base = requested_policy(given, policy=policy)
    if not base.lowers:
        raise ArgumentError(NOT_LOWERED)
    seed = whole_number("seed", seed)
    rtol = None if rtol is None else positive_number("`rtol`", rtol)
    metric = _checked_metric(metric, min_metric, loss is None and isinstance(net, Block))
    began, ends = time.monotonic(), time.monotonic() + seconds_of(budget)
    resume_from = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())
    with autocast(enabled=False):
        try:
            model = _Model(net, data, loss, metric, min_metric, rtol, seed)
            if machine.device_kind(model.context) != base.device:
                raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=model.context))
            tuner = _Tuner(model, base, ends, timed)
            tuner.run()
            return tuner.tuning(began)
        finally:
            mx.random.seed(resume_from)


def _checked_metric(metric: Any, min_metric: Any, alone: bool) -> Any:
    """Return the metric as MXNet's class, or None; raise for one that can't be used."""
    if metric is None and min_metric is None:
        return None
    if metric is None or not alone:
        raise ArgumentError(METRIC_ALONE)
    try:
        created = mx.metric.create(metric)
        if min_metric is not None:
            float(min_metric)
    except Exception as error:  # MXNet raises what its registry does
        raise ArgumentError(f"{BAD_METRIC.format(given=shown(metric))}: {error}") from None
    if isinstance(created, _LOSSES):
        raise ArgumentError(BAD_METRIC.format(given=shown(metric)))
    return created


def smallest_set(works: Callable[[FrozenSet[str]], bool], order: Sequence[str]) -> FrozenSet[str]:
    """Return a set of layers that works, from which none can be taken away.

    `works` returns whether the model is accurate enough with a set of layers in float32; with all
    of them it is. `order` holds all layers, those that most likely have to stay first. The last
    layer of the shortest prefix of `order` that works can't be done without, and is found by
    bisection: k layers of n take about k (log2(n) + 2) calls.
    """
    found: List[str] = []
    rest = list(order)
    while rest and not works(frozenset(found)):
        fails, enough = 0, len(rest)
        while enough - fails > 1:
            middle = (fails + enough) // 2
            if works(frozenset([*found, *rest[:middle]])):
                enough = middle
            else:
                fails = middle
        found, rest = [*found, rest[enough - 1]], rest[: enough - 1]
    for one in found[:-1]:
        if works(frozenset(found) - {one}):
            found.remove(one)
    return frozenset(found)


#: The float32 arrays of a run: outputs by number, and "gradients", all in one.
Results = Dict[Any, Any]


class _Errors(NamedTuple):
    """The errors of the model under a policy, and whether they are within the tolerance."""

    error: float = 0.0
    gradient_error: Optional[float] = None
    metric: Optional[float] = None
    within: bool = True


class _Model:
    """The model to tune, as a copy with its own parameters, its data, and float32's results."""

    def __init__(
        self, model: Any, data: Any, loss: Any, metric: Any, min_metric: Any, rtol: Any, seed: int
    ) -> None:
        check_loss(loss)
        labelled = loss is not None or metric is not None
        self.loss, self.metric, self.seed = loss, metric, seed
        self.saved = None if isinstance(model, Block) else model
        #: What Gluon puts before the names of the model's layers.
        self.prefix: str = model.prefix if isinstance(model, Block) else ""
        batches = batches_of(data, labelled)
        if self.saved is not None:
            model, batches = block_of(model, batches)
        self.batches = list(itertools.islice(batches, MOST_BATCHES))
        self.more = next(iter(batches), None) is not None
        inputs = self.batches[0].inputs
        check_float32(model)
        with explained_errors(model, inputs, labelled, label_by="loss= or metric="):
            try:
                model(*inputs)  # the error of a model that does not run; deferred parameters
                self.block = _traced_copy(model, inputs)
            except MXNetError as error:
                raise ArgumentError(NOT_MEASURED.format(why=error_reason(error))) from None
        self.block.hybridize(static_alloc=True, static_shape=True)
        self.variables, self.symbol = self.block._cached_graph
        self.graph = Graph.from_symbol(self.symbol)
        self.inputs = {v.name: array for v, array in zip(self.variables, arrays_in(inputs))}
        self.context = arrays_in(inputs)[0].context
        self.params = [p for p in self.block.collect_params().values() if p.grad_req != "null"]
        for param in self.params:
            param.grad_req = "write"
        self.tolerance = rtol or (None if metric else TRAINING_OUTPUTS if loss else OUTPUTS)
        self._gradients, self._scale = rtol or GRADIENTS, 2.0**16
        self.use_dropout(False)
        self.evaluations, self.min_metric = -1, None
        self._plain: List[Results] = []
        try:
            self._plain = self._run(None, self.block)
        except MXNetError as error:
            raise ArgumentError(NOT_MEASURED.format(why=error_reason(error))) from None
        for name, values in (item for run in self._plain for item in run.items()):
            if not np.isfinite(values).all():
                what = name if name == "gradients" else f"output {name}"
                raise StateError(NOT_FINITE.format(name=what))
        self.plain = self.errors(None)
        if metric is not None:
            found = self.plain.metric or 0.0
            self.min_metric = found - 0.01 * abs(found) if min_metric is None else min_metric
            if not found >= self.min_metric:
                raise StateError(BELOW.format(wanted=min_metric, found=found))

    def use_dropout(self, used: bool) -> None:
        """Run the model with `Dropout`, or as if nothing was dropped, for equal results."""
        symbol = self.symbol
        if not used:
            nodes = [
                replace(node, attrs={**node.attrs, "p": "0"})
                if node.operator in ("Dropout", "RNN")
                else node
                for node in self.graph.nodes
            ]
            symbol = replace(self.graph, nodes=nodes).to_symbol(type(symbol))
        self._set_graph(symbol, self.block._out_format)

    def errors(self, policy: Optional[Policy], block: Optional[HybridBlock] = None) -> _Errors:
        """Return the errors of the model under a policy, or of a converted `block` of it."""
        runs = self._run(policy, block or self.block)
        self.evaluations += 1
        largest: Dict[Any, float] = {}
        for plain, run in zip(self._plain, runs):
            for name, values in plain.items():
                error = _relative_error(values, run[name])
                largest[name] = max(largest.get(name, 0.0), error)
        gradient_error = largest.pop("gradients", None)
        error = max(largest.values(), default=0.0)
        within = self.tolerance is None or error <= self.tolerance
        within = within and (gradient_error or 0.0) <= self._gradients
        metric = None
        if self.metric is not None:
            fresh = copy.deepcopy(self.metric)
            fresh.reset()
            for batch, run in zip(self.batches, runs):
                fresh.update(arrays_in([batch.label]), [mx.nd.array(a) for a in run.values()])
            metric = float(fresh.get()[1])
            within = within and (self.min_metric is None or metric >= self.min_metric)
        return _Errors(error, gradient_error, metric, within)

    def _run(self, policy: Optional[Policy], block: HybridBlock) -> List[Results]:
        """Return the results of each batch under a policy, or in float32 with None."""
        found = []
        with autocast(enabled=policy is not None, policy=policy):
            for batch in self.batches:
                mx.random.seed(self.seed)
                if self.loss is None:
                    with autograd.pause(train_mode=False):
                        outputs = block(*batch.inputs)
                    found.append(_outputs(outputs))
                else:
                    found.append(self._run_backward(batch, policy, block))
        return found

    def _run_backward(self, batch: Any, policy: Optional[Policy], block: HybridBlock) -> Results:
        """Return a batch's outputs and gradients; scale float16's until they are finite."""
        scaled = policy is not None and policy.target_dtype == "float16"
        while True:
            scale = self._scale if scaled else 1.0
            for param in self.params:
                param.zero_grad()
            with autograd.record():
                output = block(*batch.inputs)
                losses = arrays_in(loss_of(self.loss, output, batch.label))
                heads = [one.astype("float32") * scale for one in losses]
            autograd.backward(heads)
            gradients = [_values(p.list_grad()[0]).ravel() / scale for p in self.params]
            together = np.concatenate([*gradients, np.zeros(0, "float32")])
            if scale == 1.0 or np.isfinite(together).all():
                return {**_outputs(output), "gradients": together}
            self._scale /= 4

    def ordered_layers(self, base: Policy) -> List[str]:
        """Return the layers that `base` lowers, those that add most error first.

        The error that a layer adds is that of its output, in a run of the whole model in low
        precision, less the largest error of its inputs.
        """
        plan = explain(self.block, policy=base)
        names = {node.name for node in plan if node.precision == base.target_dtype}
        graph = Graph.from_symbol(self.block._cached_graph[1])
        layers = [i for i, n in enumerate(graph.nodes) if not n.is_variable and n.name in names]
        try:
            plain, low = (self._activations(graph, layers, policy) for policy in (None, base))
        except (MXNetError, AmpError) as error:  # then in the order of the graph
            logger.debug("tune: no activations: %s", error)
            plain = low = []
        errors = dict(zip(layers, map(_relative_error, plain, low)))
        added = dict.fromkeys((n.name for n in graph.all_nodes if n.name in names), 0.0)
        reached: List[float] = []
        for i, node in enumerate(graph.nodes):
            before = max([reached[source] for source, _ in node.inputs], default=0.0)
            reached.append(errors.get(i, before))
            if node.name in added and math.isfinite(before):
                added[node.name] = max(added[node.name], reached[i] - before)
        return sorted(added, key=lambda name: -added[name])

    def _activations(
        self, graph: Graph, layers: Sequence[int], policy: Optional[Policy]
    ) -> List[Any]:
        """Return the first outputs of nodes for the first batch, as float32 NumPy arrays."""
        block, nesting = self.block, self.block._out_format
        own = block._cached_graph
        symbol = replace(graph, heads=[(i, 0) for i in layers]).to_symbol(type(self.symbol))
        self._set_graph(symbol, [0] * len(layers))
        try:
            with autocast(enabled=policy is not None, policy=policy), autograd.pause(
                train_mode=self.loss is not None
            ):
                return [*_outputs(block(*self.batches[0].inputs)).values()]
        finally:
            self._set_graph(own[1], nesting)

    def _set_graph(self, symbol: Any, nesting: Any) -> None:
        """Have the block run another graph, with outputs nested as in Gluon's format."""
        self.block._cached_graph, self.block._out_format = (self.variables, symbol), nesting
        self.block._clear_cached_op()


def _traced_copy(net: Block, inputs: Sequence[Any]) -> HybridBlock:
    """Return the graph of `net` as a block with parameters of its own."""
    try:
        traced = trace(net, inputs)
    except Exception as error:  # the user's own code runs in the trace
        raise ArgumentError(NO_GRAPH.format(name=net.name)) from error
    context = arrays_in(inputs)[0].context
    return build_block(net, traced, traced.symbol, traced.param_values(), [context])


def _outputs(output: Any) -> Results:
    return {i: _values(array) for i, array in enumerate(arrays_in(output))}


def _values(array: Any) -> Any:
    """Return an array's values as a float32 NumPy array."""
    with suspended():
        return cast(array.tostype("default"), "float32").asnumpy()


def _relative_error(reference: Any, measured: Any) -> float:
    """Return the relative error of an array; Inf if finite elements were lost."""
    distance = Distance()
    distance.add("", reference, measured)
    return math.inf if distance.lost else distance.relative


class _Form(Timed):
    """A form of the model, with its errors and times."""

    def __init__(self, way: str, policy: Optional[Policy], model: _Model, block: Any) -> None:
        batch, loss = model.batches[0], None
        if model.loss is not None:
            loss = functools.partial(loss_of, model.loss, label=batch.label)
        super().__init__(
            step_function(block, batch.inputs, policy if way == "autocast" else None, loss)
        )
        self.way, self.block, self.errors = way, block, model.plain
        low = policy is not None and policy.lowers
        self.precision = policy.target_dtype if policy is not None and low else "float32"

    def wins(self) -> bool:
        """Return whether the form is accurate, and faster than float32 by more than chance."""
        fast = self.speedup >= _MARGIN and quartiles(self.ratios)[0] >= 1.0
        return self.errors.within and fast


class _OutOfTimeError(Exception):
    """The budget is spent."""


class _Tuner:
    """A search for the policy of one model, with what it has measured so far."""

    def __init__(self, model: _Model, base: Policy, ends: float, timed: bool) -> None:
        self._model, self._base, self._ends = model, base, ends
        self.timed = timed and (base.target_dtype, base.device) != ("float16", "cpu")
        self.notes = [MORE_DATA] * model.more + [NOT_TIMED] * (not self.timed)
        self.complete = True
        self._for_timing = _FOR_TIMING * (ends - time.monotonic()) * self.timed
        #: The layers that stay in float32; None until some are known to be enough.
        self.kept: Optional[FrozenSet[str]] = None
        self.errors = model.plain
        self.forms: List[_Form] = []

    def run(self) -> None:
        """Search, and time the forms, until the budget or Ctrl-C ends it."""
        try:
            with contextlib.suppress(_OutOfTimeError):
                self._search()
            with contextlib.suppress(_OutOfTimeError):
                self._time_forms()
        except KeyboardInterrupt:
            self.complete = False
            self.notes.append(STOPPED)
        if not self.complete and STOPPED not in self.notes:
            self.notes.append(OUT_OF_TIME)

    def _search(self) -> None:
        """Find the layers to keep in float32."""
        if self.timed and self._base.rule("Convolution").missing:
            self.notes.append(NO_KERNELS)
        elif not self._works(frozenset()):
            smallest_set(self._works, self._model.ordered_layers(self._base))

    def _check_time(self, needed: float = 0.0) -> None:
        """Raise if fewer than `needed` seconds are left."""
        if time.monotonic() + needed > self._ends:
            self.complete = False
            raise _OutOfTimeError

    def _works(self, kept: FrozenSet[str]) -> bool:
        """Return whether the model is accurate enough with layers in float32; record the best."""
        self._check_time(self._for_timing)
        policy = self._keeping(kept)
        try:
            if self._model.loss is None:
                errors = self._model.errors(None, self._block("converted", policy))
            else:
                errors = self._model.errors(policy)
        except (AmpError, MXNetError) as error:
            logger.warning("tune: the model does not run in low precision: %s", error)
            return False
        if errors.within and (self.kept is None or len(kept) < len(self.kept)):
            self.kept, self.errors = kept, errors
        return errors.within

    def _keeping(self, kept: FrozenSet[str]) -> Policy:
        """Return the base policy with the layers of these names in float32."""
        return self._base.override(fp32_layers=[self._pattern(name) for name in sorted(kept)])

    def _pattern(self, name: str) -> str:
        """Return a `fp32_layers` pattern for a layer, independent of the block's name if possible.

        Gluon numbers blocks by their order in the process. The pattern is relative to the block
        ("*stage1_conv0_fwd") if it then matches no other layer, else the whole name.
        """
        prefix = self._model.prefix
        rest = name[len(prefix) :] if prefix and name.startswith(prefix) else ""
        pattern = f"*{exact_pattern(rest)}"
        names = {node.name for node in self._model.graph.all_nodes if not node.is_variable}
        # A name without "_" is that of the block's own operator, such as "fwd": too common.
        if "_" in rest and {n for n in names if fnmatch.fnmatchcase(n, pattern)} == {name}:
            return pattern
        return exact_pattern(name)

    def policy(self) -> Policy:
        """Return the best policy so far; in float32 where none in low precision is known."""
        return self._base.in_float32() if self.kept is None else self._keeping(self.kept)

    def _time_forms(self) -> None:
        """Measure the errors of the forms, and time them in turns with float32."""
        if not self.timed:
            return
        model, policy = self._model, self.policy()
        model.use_dropout(True)
        plain = _Form("plain", None, model, model.block)
        ways = ["converted", "fused"] if policy.lowers else ["fused"]
        seconds, forms = min(plain.mean_seconds() for _ in range(3)), [plain]
        for way in ways if model.loss is None else ["autocast"]:
            self._check_time()
            try:
                form = _Form(way, policy, model, self._block(way, policy))
                form.mean_seconds(2)
                fused = way == "fused"
                form.errors = model.errors(None, form.block) if fused else self.errors
            except (AmpError, MXNetError) as error:
                logger.debug("tune: %s does not run: %s", way, error)
                continue
            forms.append(form)
        for needed in rounds(forms, repeats_of(seconds)):
            self.forms = forms
            self._check_time(needed)

    def _block(self, way: str, policy: Policy) -> HybridBlock:
        """Return the model in a form: as its files run for a saved one."""
        if way == "autocast":
            return self._model.block
        options: Dict[str, Any] = {
            "policy": policy,
            "cast_optional_params": True,
            "fuse": way == "fused",
        }
        if self._model.saved is None:
            block = convert_hybrid_block(self._model.block, ctx=self._model.context, **options)
        else:
            block, _ = block_of(convert_model(*self._model.saved, **options), iter(()))
        block.hybridize(static_alloc=True, static_shape=True)
        return block

    def tuning(self, began: float) -> Tuning:
        """Return the result: the fastest form that is accurate, or the policy if none was timed."""
        model, policy, notes = self._model, self.policy(), self.notes
        way, errors = "autocast" if policy.lowers else "plain", self.errors
        if self.timed:
            best = max((f for f in self.forms if f.wins()), key=lambda f: f.speedup, default=None)
            way, errors = ("plain", model.plain) if best is None else (best.way, best.errors)
            speedups = [form.speedup for form in self.forms[1:] if policy.lowers]
            notes += channels_note(model.symbol, policy.target_dtype, max(speedups, default=2.0))
            if best is None:
                policy = self._base.in_float32()
                notes += [FLOAT32] * self.complete
        if DETECTION & model.graph.operators and model.metric is None:
            notes.append(BOXES)
        notes += [STATIC] * (way == "fused")
        kept = self.kept if self.kept is not None and policy.lowers else frozenset()
        names = dict.fromkeys(n.name for n in model.graph.all_nodes if n.name in kept)
        plan = explain(model.block, policy=policy)
        trials = [
            Trial(
                one.way,
                one.precision,
                one.milliseconds,
                one.speedup,
                quartiles(one.ratios),
                one.errors.error,
                one.errors.within,
            )
            for one in self.forms
        ]
        return Tuning(
            policy=policy,
            way=way,
            mode="inference" if model.loss is None else "training",
            kept=tuple(names),
            operators=len(plan),
            low=sum(node.precision == policy.target_dtype for node in plan) * policy.lowers,
            machine=f"{machine.cpu_name()}, {machine.threads()} threads, MXNet {mx.__version__}",
            tolerance=model.tolerance,
            error=errors.error,
            gradient_error=errors.gradient_error,
            metric=errors.metric,
            min_metric=model.min_metric,
            evaluations=model.evaluations,
            seconds=time.monotonic() - began,
            seed=model.seed,
            complete=self.complete,
            notes=tuple(notes),
            trials=tuple(trials),
        )
