"""`tune`: the layers to keep in float32 for an accuracy, and the fastest form of the model.

Bisection over the layers, largest error first, finds which have to stay in float32. The forms that
are accurate enough are then timed once, in turns with float32.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import MXNetError, autograd
from mxnet.gluon import Block, HybridBlock

from ...convert.models import convert_hybrid_block, convert_model
from ...convert.outputs import Distance
from ...errors import AmpError, ArgumentError, StateError
from ...framework import machine
from ...framework.arrays import cast
from ...framework.files import write_file
from ...framework.keywords import checked_call
from ...framework.tables import text_table
from ...framework.wording import shortened
from ...patches.autocast import autocast, policy_for
from ...policy.overrides import exact_pattern
from ...policy.policy import Policy
from ...scaling.scaler import positive_number
from ..debugging import measured
from ..debugging.explain import explain
from ..debugging.tensor_errors import compare
from .turns import Timed, channels_note, check_float32, seconds_of, step_function, time_in_turns

#: The number of batches of `data` that are used.
MOST_BATCHES = 16
#: The default tolerances: of outputs in inference and in training, and of all gradients together.
OUTPUTS, TRAINING_OUTPUTS, GRADIENTS = 0.05, 0.2, 0.5
#: A form has to be so many times as fast as float32 to take its place.
_MARGIN = 1.02
#: The share of the budget for the search; the rest is for the timing.
_FOR_SEARCH = 0.7
#: Metrics of which less is better.
_LOSSES = {"MAE", "MSE", "RMSE", "CrossEntropy", "Loss", "NegativeLogLikelihood", "Perplexity"}

BAD_METRIC = "metric must be one of which more is better, not {given}"
METRIC_ALONE = "a metric is measured in inference of a block, without a loss; min_metric needs it"
BELOW = "no policy satisfies min_metric={wanted}: the float32 model itself has {found:g}"
OTHER_DEVICE = "the policy is for the {own}, and the data is on {data}: put both on one device"
NO_GRAPH = "block {name!r} can't be traced on this data: hybridized, a call shows why"
NOT_FINITE = "the float32 model gives Inf or NaN: debugging.check_numerics finds the cause"

NO_KERNELS = "This CPU has no bfloat16 kernels: only float32 was tried."
NOT_TIMED = "Nothing was timed: the policy was tuned for accuracy alone."
FLOAT32 = "Nothing that is accurate enough was faster than float32: run the model as it is."
STOPPED = "The search was stopped by Ctrl-C: there may be a better policy."
OUT_OF_TIME = "The `budget` was too short to try all: a larger one may find a better policy."
STATIC = "Call hybridize(static_alloc=True, static_shape=True), or weights are packed at each call."
_HEADER = """\
# Tuned by mxamp.tune: `Policy.load` ignores these comments.
# Form: {way}
# {report}
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
    quartiles: tuple[float, float]
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
    kept : tuple of str
        The layers that the search keeps in float32, in the order of the graph.
    error : float
        The largest relative error of an output in any batch, under `policy`.
    gradient_error : float, optional
        The same for all gradients together.
    metric : float, optional
        Your own metric under `policy`.
    complete : bool
        False where the time budget or Ctrl-C ended the search.
    notes : tuple of str
        The report: sentences on the result and the search.
    trials : tuple of Trial
        All timed forms, float32 first; empty where nothing was timed.
    chosen : Trial, optional
        The trial of the chosen form; None where nothing was timed.
    """

    policy: Policy
    way: str
    kept: tuple[str, ...]
    error: float
    gradient_error: float | None
    metric: float | None
    complete: bool
    notes: tuple[str, ...]
    trials: tuple[Trial, ...]
    chosen: Trial | None

    @property
    def convert_options(self) -> dict[str, bool]:
        """The arguments of `convert_*` that convert the model as it was measured.

        ::

            fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        """
        casts = self.way in ("converted", "fused")
        return {"cast_optional_params": casts, "fuse": self.way == "fused"}

    def save(self, path: str | Path) -> None:
        """Write the policy to a TOML file, under comments that say how it was tuned.

        `Policy.load` reads the policy back, and ignores the comments. An existing file is replaced
        whole. Raises `ArgumentError` where `path` can't name a file, `WriteError` where writing
        fails.
        """
        header = _HEADER.format(way=self.way, report="\n# ".join(self.notes))
        write_file(path, (header + self.policy.to_toml()).encode())

    def __str__(self) -> str:
        report = "\n".join(self.notes)
        if not self.trials:
            return report
        heads = [field.name for field in fields(Trial)]
        return f"{report}\n\n{text_table(heads, [*map(astuple, self.trials)])}"


@checked_call
def tune(
    net: Any,
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    target_dtype: Any = None,
    rtol: float | None = None,
    metric: Any = None,
    min_metric: float | None = None,
    budget: Any = "60s",
    policy: Policy | None = None,
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
        The float32 model. A deep copy runs; the state of MXNet's random number generator, which
        can't be read, changes.
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
    base = policy_for(target_dtype or (None if policy else machine.default_dtype()), policy)
    rtol = None if rtol is None else positive_number("`rtol`", rtol)
    measured.check_loss(loss)
    if metric is not None or min_metric is not None:
        if metric is None or loss is not None or not isinstance(net, Block):
            raise ArgumentError(METRIC_ALONE)
        metric = copy.deepcopy(mx.metric.create(metric))
        if type(metric).__name__ in _LOSSES:
            raise ArgumentError(BAD_METRIC.format(given=metric.name))
    began, seconds = time.monotonic(), seconds_of(budget)
    with autocast(enabled=False), measured.alike_numbers() as seed:
        model = _Model(net, data, loss, metric, min_metric, rtol, seed)
        if machine.device_kind(model.context) != base.device:
            raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=model.context))
        search = _Search(model, base, timed, began + _FOR_SEARCH * seconds)
        search.run(began + seconds)
        return search.tuning()


def smallest_set(works: Callable[[frozenset[str]], bool], order: Sequence[str]) -> frozenset[str]:
    """Return a set of layers that works, from which none can be taken away.

    `works` returns whether the model is accurate enough with a set of layers in float32; with all
    of them it is. `order` holds all layers, those that most likely have to stay first. The last
    layer of the shortest prefix of `order` that works can't be done without, and is found by
    bisection: k layers of n take about k (log2(n) + 2) calls.
    """
    found: list[str] = []
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


class _Errors(NamedTuple):
    """The errors of the model under a policy, and whether they are within the tolerance."""

    error: float
    gradient_error: float | None
    metric: float | None
    within: bool


class _Model:
    """The model to tune, as a copy with its own parameters, its data, and float32's results."""

    def __init__(
        self, model: Any, data: Any, loss: Any, metric: Any, min_metric: Any, rtol: Any, seed: Any
    ) -> None:
        self.loss, self.metric, self._seed = loss, metric, seed
        labeled = loss is not None or metric is not None
        self.saved = None if isinstance(model, Block) else model
        batches = measured.batches_of(data, labeled)
        if self.saved is not None:
            model, batches = measured.block_of(model, batches)
        self.batches = list(itertools.islice(batches, MOST_BATCHES))
        inputs = self.batches[0].inputs
        self.context = measured.arrays_in(inputs)[0].context
        check_float32(model)
        with measured.explained_errors(model, inputs):
            self.block = measured.copied(model, inputs)
        if not getattr(self.block, "_cached_graph", None):
            raise ArgumentError(NO_GRAPH.format(name=model.name))
        self.block.hybridize(static_alloc=True, static_shape=True)
        self.tolerance = rtol or (math.inf if metric else TRAINING_OUTPUTS if loss else OUTPUTS)
        self._gradient_tolerance, self._scale = rtol or GRADIENTS, 2.0**16
        self.least = -math.inf
        self._plain: list[Any] = []
        for batch in self.batches:
            with measured.explained_errors(model, batch.inputs):
                self._plain.append(self._run(batch, None, self.block))
        arrays = (array for outputs, gradients in self._plain for array in (*outputs, gradients))
        if not all(np.isfinite(array).all() for array in arrays):
            raise StateError(NOT_FINITE)
        if metric is not None:
            found = self.errors(None, self.block).metric or 0.0
            self.least = found - 0.01 * abs(found) if min_metric is None else min_metric
            if not found >= self.least:
                raise StateError(BELOW.format(wanted=self.least, found=found))

    def converted(self, policy: Policy, fuse: bool) -> HybridBlock:
        """Return the converted model: as its files run for a saved one."""
        options: dict[str, Any] = {"policy": policy, "cast_optional_params": True, "fuse": fuse}
        if self.saved is None:
            block = convert_hybrid_block(self.block, ctx=self.context, **options)
        else:
            block, _ = measured.block_of(convert_model(*self.saved, **options), iter(()))
        block.hybridize(static_alloc=True, static_shape=True)
        return block

    def errors(self, policy: Policy | None, block: HybridBlock) -> _Errors:
        """Return the errors of a block under a policy, in all batches."""
        runs = [self._run(batch, policy, block) for batch in self.batches]
        outputs, gradients = Distance(), Distance()
        for plain, run in zip(self._plain, runs):
            for i, pair in enumerate(zip(plain[0], run[0])):
                outputs.add(str(i), *pair)
            gradients.add("gradients", plain[1], run[1])
        error, other = (math.inf if one.lost else one.relative for one in (outputs, gradients))
        within = error <= self.tolerance and other <= self._gradient_tolerance
        metric = None
        if self.metric is not None:
            self.metric.reset()
            for batch, (arrays, _) in zip(self.batches, runs):
                self.metric.update(measured.arrays_in([batch.label]), [*map(mx.nd.array, arrays)])
            metric = float(self.metric.get()[1])
            within = within and metric >= self.least
        return _Errors(error, None if self.loss is None else other, metric, within)

    def _run(self, batch: measured.Batch, policy: Policy | None, block: HybridBlock) -> Any:
        """Run a batch under a policy, or in float32; scale float16's loss as training would."""
        training = self.loss is not None
        # Dropout draws the same elements in one dtype alone.
        still = policy and policy.override(fp32=["Dropout"])
        region = autocast(enabled=policy is not None, policy=still)
        while True:
            self._seed()
            recording = autograd.record() if training else autograd.pause(train_mode=False)
            with region, recording:
                output = block(*batch.inputs)
                loss = measured.loss_of(self.loss, output, batch.label) if training else None
            dense = [array.tostype("default") for array in measured.arrays_in(output)]
            outputs = [cast(array, "float32").asnumpy() for array in dense]
            if loss is None:
                return outputs, np.zeros(0)
            scale = self._scale if policy and policy.target_dtype == "float16" else 1.0
            with region:
                found = measured.gradients_of(loss, block, scale)
            gradients = np.concatenate([one.ravel() for one in found])
            if scale == 1 or np.isfinite(gradients).all():
                return outputs, gradients
            self._scale /= 4

    def ordered_layers(self, base: Policy) -> list[str]:
        """Return the layers that `base` lowers, those that add most error first.

        The error that a layer adds is that of its output, less that of the layer before it.
        """
        plan = explain(self.block, policy=base)
        added = {node.name: 0.0 for node in plan if node.precision == base.target_dtype}
        inputs, before, training = self.batches[0].inputs, 0.0, self.loss is not None
        for one in compare(self.block, inputs, train_mode=training, policy=base).outputs:
            error = one.relative + one.lost
            if one.name in added:
                added[one.name] = max(added[one.name], error - before)
            before = error
        return sorted(added, key=lambda name: -added[name])


class _Form(Timed):
    """A form of the model under a policy, with its errors and times."""

    def __init__(self, way: str, policy: Policy, model: _Model) -> None:
        block, inside = model.block, policy if way == "autocast" else None
        if way in ("converted", "fused"):
            block = model.converted(policy, fuse=way == "fused")
        super().__init__(step_function(block, model.batches[0], inside, model.loss))
        self.way, self.policy, self.errors = way, policy, model.errors(inside, block)
        self.precision = policy.target_dtype if policy.lowers else "float32"


class _Search:
    """A search for the policy of one model, with what it has measured so far."""

    def __init__(self, model: _Model, base: Policy, timed: bool, search_ends: float) -> None:
        self._model, self._base, self._ends = model, base, search_ends
        self.plain = self.best = _Form("plain", base.in_float32(), model)
        #: The layers that stay in float32 in the best form; None until enough are known.
        self.kept: frozenset[str] | None = None
        self.forms: list[_Form] = []
        self.timed = timed and (base.target_dtype, base.device) != ("float16", "cpu")
        self.notes = [] if self.timed else [NOT_TIMED]

    def run(self, ends: float) -> None:
        """Search, and time the forms, until the budget or Ctrl-C ends it."""
        try:
            if self.timed and self._base.rule("Convolution").missing:
                self.notes.append(NO_KERNELS)  # such a form takes a hundred times as long
            elif not self._works(frozenset()):
                smallest_set(self._works, self._model.ordered_layers(self._base))
            if self.timed:
                self._time_forms(ends)
        except KeyboardInterrupt:
            self.notes.append(STOPPED)

    def _works(self, kept: frozenset[str]) -> bool:
        """Return whether the model is accurate enough with layers in float32; record the best.

        After the deadline anything works, which ends the search.
        """
        if time.monotonic() > self._ends:
            self.notes.append(OUT_OF_TIME)
            return True
        policy = self._base.override(fp32_layers=[self._pattern(name) for name in sorted(kept)])
        form = self._form("converted" if self._model.loss is None else "autocast", policy)
        if form is None or not form.errors.within:
            return False
        if self.kept is None or len(kept) < len(self.kept):
            self.kept, self.best = kept, form
        return True

    def _form(self, way: str, policy: Policy) -> _Form | None:
        """Return a form of the model; None where the model does not run so."""
        try:
            return _Form(way, policy, self._model)
        except (AmpError, MXNetError) as error:
            self.notes.append(f"The model does not run {way}: {error}.")
            return None

    def _pattern(self, name: str) -> str:
        """Return a `fp32_layers` pattern for a layer, independent of the block's name if possible.

        Gluon numbers blocks by their order in the process: the pattern is relative to the block
        ("*stage1_conv0_fwd"), and measured as it is.
        """
        prefix = self._model.block.prefix  # "" for a saved model
        rest = name[len(prefix) :] if prefix and name.startswith(prefix) else ""
        # A name without "_" is that of the block's own operator, such as "fwd": too common.
        return f"*{exact_pattern(rest)}" if "_" in rest else exact_pattern(name)

    def _time_forms(self, ends: float) -> None:
        """Measure the errors of the fused forms, and time all in turns with float32."""
        self.forms = list(dict.fromkeys([self.plain, self.best]))
        policies = [form.policy for form in self.forms] if self._model.loss is None else []
        self.forms += filter(None, [self._form("fused", policy) for policy in policies])
        time_in_turns([self.forms], ends)

    def tuning(self) -> Tuning:
        """Return the result: the fastest form that is accurate, or the best if none was timed."""
        model, best, notes = self._model, self.best, [*dict.fromkeys(self.notes)]
        trials = {
            form: Trial(form.way, form.precision, *form.measured(self.plain), *form.errors[::3])
            for form in self.forms
            if len(form.seconds) > 1
        }
        if self.timed:
            fast = [f for f, t in trials.items() if t.speedup >= _MARGIN and t.quartiles[0] >= 1]
            good = [form for form in fast if form.errors.within]
            best = max(good, key=lambda form: trials[form].speedup, default=self.plain)
            low = [trial.speedup for form, trial in trials.items() if form.policy.lowers]
            notes += channels_note(model.block, self._base.target_dtype, max(low, default=math.inf))
        complete = not {STOPPED, OUT_OF_TIME} & set(notes)
        notes += {"plain": [FLOAT32] * complete, "fused": [STATIC]}.get(best.way, [])
        chosen, errors = trials.get(best), best.errors
        kept = tuple(sorted(self.kept or ())) if best.policy.lowers else ()
        speed = ""
        if chosen and chosen.way != "plain":
            speed = f", {chosen.speedup:.3g} times as fast as plain float32"
        names = zip(("error", "gradients", "metric"), errors)
        figures = [f"{name} {one:.4g}" for name, one in names if one is not None]
        report = (
            f"Tuned for {'training' if model.loss else 'inference'} on {machine.cpu_name()}, "
            f"{machine.threads()} threads, within a relative error of {model.tolerance:.4g}.",
            f"Chosen: {best.way}{speed}. Measured: {', '.join(figures)}.",
            f"Layers that the search keeps in float32: {shortened(kept) or 'none'}.",
        )
        texts, rows = (*report, *notes), tuple(trials.values())
        return Tuning(best.policy, best.way, kept, *errors[:3], complete, texts, rows, chosen)
