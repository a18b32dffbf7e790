"""Ways to run a model (autocast, converted, fused, ...), with their errors and times.

In each round every form runs once, float32 first, and the ratio to float32 in the same
round counts: a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
import time
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Trainer

from ...convert.models import convert_hybrid_block
from ...convert.outputs import Distance, error_reason
from ...errors import AmpError, ArgumentError, unknown
from ...framework.wording import shown
from ...graph.inspect import FLOATS
from ...patches.autocast import autocast
from ...policy.active import suspended
from ...policy.policy import Policy
from ...scaling.trainer import init_trainer, scale_loss
from ..debugging import measured
from ..debugging.explain import explain
from ..debugging.measured import Batch, Data, Net, arrays_in, loss_of
from ..onnx import OpenVINO
from ..tables import text_table

#: The steps of `benchmark` and `tune`, as log lines of level INFO.
progress = logging.getLogger("mxamp.progress")

TRAINING, INFERENCE = "training", "inference"
#: The forms: the model with mixed precision off, and under a policy; then those of inference alone,
#: with parameters of their own.
PLAIN, AUTOCAST = "plain", "autocast"
CONVERTED, FUSED, OPENVINO = "converted", "fused", "openvino"

BUDGET = "`budget` must be seconds above 0, or a text such as '90s', '5m' or '1h', not {given}"
#: What a user does to have a form of inference.
HOW = {
    CONVERTED: "convert the model with `cast_optional_params=True`",
    # Under other flags, fused operators pack their weights anew at each call.
    FUSED: "convert the model with `fuse=True` and hybridize(static_alloc=True, static_shape=True)",
    OPENVINO: "export the model by `export_onnx`, and run it on OpenVINO in {precision} (its "
    "INFERENCE_PRECISION_HINT)",
}

_DURATION = re.compile(r"\s*(\d*\.?\d+(?:e[-+]?\d+)?)\s*([smh]?)\s*")
#: The least seconds of a turn, in which fast forms run several times; the rounds that are timed
#: while the budget lasts half as long again, whatever the budget, and at most.
_SHORTEST, _LEAST, _LATE, _MOST = 0.01, 3, 2, 15
#: How many times as long as the fastest a form's first run may take, if it takes over a second;
#: and the seconds after the budget in which forms that are not tried yet still are.
_HOPELESS, _PATIENCE, GRACE = 5, 1.0, 5
ERROR = "error: the largest relative error of an output, in the L2 norm, against plain float32"
NOTHING_LOWERED = "In {dtype} every layer of this model stays in float32: only float32 was timed."
NOT_TRIED = "{form} was not timed: the `budget` is over, pass a larger one."
EAGER = "The block can't be traced: it was timed without being hybridized."
NO_KERNELS = "This CPU has no bfloat16 instructions: bfloat16 is slow, and only float32 was tried."
GIVEN_UP = "{form} was given up after a run of {seconds:.1f} s, {times:.0f} times the fastest."

NO_CLASSES = "labels must be class numbers, and outputs of the labels' shape too"

#: Metrics of which less is better.
_LOSSES = {"MAE", "MSE", "RMSE", "CrossEntropy", "Loss", "NegativeLogLikelihood", "Perplexity"}

Loss = Optional[Callable[[Any, Any], Any]]


class Timing(NamedTuple):
    """The measured speed of one way to run a model, in results of `benchmark` and `tune`.

    Parameters
    ----------
    task : str
        "training" (forward pass, backward pass and an update by SGD) or "inference".
    way : str
        "plain" (without mxamp) or "autocast" (under a policy), both hybridized, or eager if the
        block can't be traced; "converted", "fused" or "openvino" (exported by `export_onnx`, on
        OpenVINO).
    precision : str
        "float32", "bfloat16" or "float16".
    milliseconds : float
        The median time of a run.
    speedup : float
        The time of float32 in the same task divided by the form's, the median over rounds.
    quartiles : tuple of float
        The first and third quartile of that ratio.
    error : float, optional
        The largest relative error of an output; infinite where finite elements were lost. None for
        training in `benchmark`.
    within : bool, optional
        Whether the form is within the tolerance of `tune`.
    """

    task: str
    way: str
    precision: str
    milliseconds: float
    speedup: float
    quartiles: tuple[float, float]
    error: float | None = None
    within: bool | None = None


def table(timings: Sequence[Timing]) -> str:
    """Return timings as a text table, with a line below that explains the error column."""
    return f"{text_table(Timing._fields, timings)}\n{ERROR}"


class Form:
    """One way to run a model, at one precision, such as fused in bfloat16; it can be timed.

    It runs inference; with a `loss`, a training step. The learning rate is 0, so that each step
    runs on the same values.
    """

    def __init__(
        self, way: str, block: Any, batch: Batch, policy: Policy | None = None, loss: Loss = None
    ) -> None:
        self.way, self.block, self.policy = way, block, policy
        own = policy.precision if policy else "float32"
        self.precision: str = block.precision if way == OPENVINO else own
        #: The policy that the block runs under; a block with parameters of its own needs none.
        self.inside = policy if way == AUTOCAST else None
        self.seconds: list[float] = []
        #: The "error" and that of "gradients" against float32, and the "metric", where measured.
        self.errors: dict[str, float] = {}
        self._batch, self._loss = batch, loss
        if loss is not None:
            params = [p for p in block.collect_params().values() if p.grad_req != "null"]
            self._trainer = Trainer(params, "sgd", {"learning_rate": 0}, kvstore=None)
            if self.inside is not None:
                with autocast(policy=policy):
                    init_trainer(self._trainer)

    def __str__(self) -> str:
        return f"{self.way} in {self.precision}{', training,' if self._loss else ''}"

    def forward(self, batch: Batch) -> tuple[Any, list[Any]]:
        """Run the model on a batch; return its output and, in training, the losses."""
        if self._loss is None:
            with mx.autograd.pause(train_mode=False):
                return self.block(*batch.inputs), []
        with mx.autograd.record():
            output = self.block(*batch.inputs)
            return output, arrays_in(loss_of(self._loss, output, batch.label))

    def run(self) -> None:
        """Run one inference pass or training step on the first batch, and wait for its end."""
        losses = self.forward(self._batch)[1]
        if losses:
            checked = scale_loss(losses, self._trainer) if self.inside else nullcontext(losses)
            with checked as scaled:
                mx.autograd.backward(scaled)
            self._trainer.step(1, ignore_stale_grad=True)
        mx.nd.waitall()

    def mean_seconds(self, repeats: int = 1) -> float:
        """Run the model `repeats` times; return the mean time of a run in seconds."""
        with autocast(policy=self.inside) if self.inside else suspended():
            began = time.perf_counter()
            for _ in range(repeats):
                self.run()
            return (time.perf_counter() - began) / repeats

    def timing(self, plain: Form, within: bool | None = None) -> Timing:
        """Return the form's `Timing`: its median time, and its speedup over `plain`."""
        ratios = [other / own for own, other in zip(self.seconds, plain.seconds)]
        low, middle, high = map(float, np.percentile(ratios, (25, 50, 75)))
        task = INFERENCE if self._loss is None else TRAINING
        times = float(np.median(self.seconds)) * 1e3, middle, (round(low, 3), round(high, 3))
        return Timing(task, self.way, self.precision, *times, self.errors.get("error"), within)


class Model:
    """A float32 model to measure: a copy of the net, the batches, and the float32 results.

    `restart` makes the random numbers of each run the same.
    """

    def __init__(
        self, net: Any, data: Iterable[Batch], restart: Callable[[], None], loss: Loss, metric: Any
    ) -> None:
        self.loss, self._metric, self._restart, self._scale = loss, metric, restart, 2.0**16
        self._is_saved = not isinstance(net, Block)
        if self._is_saved:
            net, data = measured.block_of(net, data)
        self.batches = list(data)
        self.block: Any = measured.copied(net, self.batches[0].inputs, FLOATS - {"float32"})
        self.is_traced = bool(getattr(self.block, "_cached_graph", None))
        if self.is_traced:
            self.block.hybridize(static_alloc=True, static_shape=True)
        self.context = arrays_in(self.batches[0].inputs)[0].context
        #: The model in float32, and what it returns for each batch.
        self.plain, self.results = self.form(PLAIN), []
        for batch in self.batches:
            with measured.explained_errors(net, batch.inputs):
                self.results.append(self._run(batch, self.plain))
        self.measure(self.plain, self.results)
        #: The monotonic time after which no other form is made.
        self.ends = math.inf
        #: Sentences on the forms that do not run.
        self.notes = [] if self.is_traced else [EAGER]

    def form(self, way: str, policy: Policy | None = None, loss: Loss = None) -> Form:
        """Return a `Form` that runs the model in one way, such as "fused".

        It runs training steps if there is a loss, this one or the model's.
        """
        block = self.block
        if way in (CONVERTED, FUSED):
            options = {**convert_options(way), "example_inputs": self.batches[0].inputs}
            block = convert_hybrid_block(block, policy=policy, ctx=self.context, **options)
            if self._is_saved:
                block._source = None  # its files hold a graph that is not tuned to shapes
        elif way == OPENVINO and policy:
            block = OpenVINO(block, [one.inputs for one in self.batches], policy.target_dtype)
        return Form(way, block, self.batches[0], policy, loss or self.loss)

    def forms(self, ways: Iterable[tuple[str, Policy]]) -> list[Form]:
        """Return a `Form`, with measured errors, for each of `ways` in which the model runs.

        `notes` gets a sentence on each other way.
        """
        forms: list[Form] = []
        for way, policy in ways:
            name = f"{way} in {policy.target_dtype}"
            if time.monotonic() > self.ends:
                self.notes.append(NOT_TRIED.format(form=name))
                continue
            progress.info("Running %s", name)
            try:
                form = self.form(way, policy)
                self.measure(form)
                forms.append(form)
            except (AmpError, RuntimeError, KeyError) as error:  # noqa: PERF203  # MXNet's and OpenVINO's
                self.notes.append(f"{name} does not run: {error_reason(error)}.")
        return forms

    def lowers(self, policy: Policy) -> bool:
        """Return whether a policy runs any operator of the model in 16 bits."""
        call = self.batches[0].inputs
        for mode in (TRAINING, INFERENCE):
            plan = explain(self.block, policy=policy, example_inputs=call, mode=mode)
            if policy.target_dtype in plan.counts():
                return True
        self.notes.append(NOTHING_LOWERED.format(dtype=policy.target_dtype))
        return False

    def measure(self, form: Form, found: Sequence[dict[str, list[Any]]] = ()) -> None:
        """Store a form's errors against float32, and its metric, in `form.errors`."""
        found = found or [self._run(batch, form) for batch in self.batches]
        for name in found[0]:
            distance = Distance()
            for plain, run in zip(self.results, found):
                for i, pair in enumerate(zip(plain[name], run[name])):
                    distance.add(str(i), *pair)
            form.errors[name] = math.inf if distance.lost else distance.relative
        if self._metric is not None:
            labels = [batch.label for batch in self.batches]
            form.errors["metric"] = metric_of(self._metric, labels, [run["error"] for run in found])

    def _run(self, batch: Batch, form: Form) -> dict[str, list[Any]]:
        """Run one form of the model on a batch; return its outputs and, in training, gradients."""
        # Dropout draws the same elements in one dtype alone.
        still = form.inside and form.inside.override(fp32=["Dropout"])
        while True:
            scale = self._scale if still and still.target_dtype == "float16" else 1.0
            self._restart()
            with autocast(enabled=still is not None, policy=still):
                output, losses = form.forward(batch)
                found = measured.gradients_of(losses, form.block, scale) if losses else []
            if scale == 1 or all(np.isfinite(one).all() for one in found):
                results = {"error": [measured.in_float32(one) for one in arrays_in(output)]}
                if losses:
                    results["gradients"] = [np.concatenate([one.ravel() for one in found])]
                return results
            self._scale /= 4


@contextmanager
def opened(
    net: Net, data: Data, labeled: bool, most: int, loss: Loss = None, metric: object = None
) -> Iterator[Model]:
    """Return a context that yields a net as a `Model` to measure, with mixed precision off."""
    with autocast(enabled=False), measured.alike_numbers() as restart:
        batches = itertools.islice(measured.batches_of(data, labeled), most)
        yield Model(net, batches, restart, loss, metric)


def checked_metric(metric: object) -> mx.metric.EvalMetric:
    """Return an `EvalMetric` for a metric argument; raise unless larger values are better."""
    try:
        made = copy.deepcopy(mx.metric.create(metric))
    except Exception as error:
        names = mx.registry.get_registry(mx.metric.EvalMetric)
        if isinstance(metric, str) and metric.lower() not in names:
            raise unknown("metric", metric, names) from None
        raise ArgumentError(f"metric {shown(metric)} can't be made by name: {error}") from error
    if type(made).__name__ in _LOSSES:
        raise ArgumentError(f"metric must be one of which more is better, not {made.name}")
    return made


def metric_of(metric: mx.metric.EvalMetric, labels: Iterable[Any], outputs: Iterable[Any]) -> float:
    """Return the value of a metric for the outputs and labels of all batches."""
    metric.reset()
    try:
        for label, output in zip(labels, outputs):
            given = arrays_in([label])
            if not all(np.isfinite(one.asnumpy()).all() for one in given):
                raise ValueError("a label holds NaN or infinity")  # noqa: TRY301
            # Of outputs in the labels' shape MXNet takes no argmax: it cuts them to whole numbers.
            uncut = isinstance(metric, mx.metric.Accuracy) and given[0].shape == output[0].shape
            if uncut and (given[0].ndim > 1 or (abs(np.modf(output[0])[0]) > 0).any()):
                raise ValueError(NO_CLASSES)  # noqa: TRY301
            metric.update(given, [*map(mx.nd.array, output)])
        return float(metric.get()[1])
    except Exception as error:  # also of a user's own function
        raise ArgumentError(f"metric {metric.name}: {error_reason(error)}") from error


def convert_options(way: str) -> dict[str, Any]:
    """Return the arguments of `convert_hybrid_block` for a form: "converted" or "fused"."""
    return {"cast_optional_params": way in (CONVERTED, FUSED), "fuse": way == FUSED}


def time_in_turns(forms: list[Form], ends: float, notes: list[str], limit: float) -> list[Form]:
    """Time all forms of a model in several rounds; return those that were not given up.

    Float32 comes first in each round.

    A form is given up if its first run takes over five times as long as that of the fastest, or if
    it would begin after the monotonic time `limit`; `notes` gets a sentence on each. There are 3 to
    15 rounds, as many as end before the monotonic time `ends`, or 2 if 3 would take half as long
    again as there is time for.
    """
    given = ends - time.monotonic()
    timed: list[Form] = []
    for form in forms:
        if timed and time.monotonic() > limit:
            notes.append(NOT_TRIED.format(form=form))
            continue
        progress.info("Timing %s once", form)
        seconds = form.mean_seconds()
        form.seconds = [seconds]  # of a form that is given up, and where time is short
        best = min((one.seconds[0] for one in timed), default=math.inf)
        if seconds > max(_HOPELESS * best, _PATIENCE):
            notes.append(GIVEN_UP.format(form=form, seconds=seconds, times=seconds / best))
        else:
            timed.append(form)
    began = time.monotonic()
    if began + 3 * sum(one.seconds[0] for one in timed) > ends + 0.5 * max(given, 0):
        return timed
    progress.info("Timing %d forms in turns", len(timed))
    for form in timed:
        form.mean_seconds()  # the first run has made the graph, this one makes the memory
        form.seconds = []
    repeats = max(1, math.ceil(_SHORTEST / timed[0].mean_seconds()))
    for count in range(_MOST):
        now = time.monotonic()
        end_of_next = now + (now - began) / (count + 1)
        if count >= _LATE and end_of_next > ends + (0.5 * given if count < _LEAST else 0):
            break
        for form in timed:
            form.seconds.append(form.mean_seconds(repeats))
    return timed


def seconds_of(budget: float | str) -> float:
    """Return the argument `budget`, a number or a text such as "5m", in seconds.

    >>> seconds_of("90s"), seconds_of(" 1.5m"), seconds_of(30), seconds_of(1e-6)
    (90.0, 90.0, 30.0, 1e-06)
    """
    found = _DURATION.fullmatch(str(budget))
    seconds = float(found[1]) * {"m": 60.0, "h": 3600.0}.get(found[2], 1.0) if found else 0.0
    if not 0 < seconds < math.inf:
        raise ArgumentError(BUDGET.format(given=shown(budget)))
    return seconds
