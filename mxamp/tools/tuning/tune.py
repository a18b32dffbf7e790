"""`tune`: find layers to keep in float32 for accuracy, and the fastest way to run a model.

Bisection over the layers, largest error first, finds which have to stay in float32. The forms that
are accurate enough are then timed once, in turns with float32.
"""

from __future__ import annotations

import functools
import glob
import math
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

from ...errors import ArgumentError, StateError
from ...framework import machine
from ...framework.files import write_file
from ...framework.keywords import checked_call
from ...framework.wording import counted, shortened
from ...policy.policy import Policy, requested_policy
from ...policy.targets import DEFAULT_TARGET, default_dtype
from ...scaling.scaler import positive_number
from ..debugging.explain import explain
from ..debugging.measured import Data, Net
from ..debugging.tensor_errors import compare
from . import forms
from .forms import HOW, Form, Model, Timing, opened, seconds_of, table

#: How many batches of `data` are used, which share of the budget is for the search (the rest is for
#: the timing), and how many times as fast as float32 a form has to be to take its place.
MOST_BATCHES, _FOR_SEARCH, _MARGIN = 16, 0.7, 1.02
#: The default tolerances: of outputs in inference and in training, and of all gradients together.
OUTPUTS, TRAINING_OUTPUTS, GRADIENTS = 0.05, 0.2, 0.5

METRIC_ALONE = "a metric is measured in inference, without a loss; `min_metric` needs a `metric`"
BELOW = "no policy satisfies `min_metric` {wanted}: the float32 model itself has {found:g}"
OTHER_DEVICE = "policy for the {own}, data on {data}: use one device, or float16 with `timed=False`"
NO_GRAPH = "block {name!r} can't be traced on this data: hybridized, a call shows why"
NOT_FINITE = "the float32 model gives Inf or NaN: debugging.check_numerics finds the cause"

NOT_TIMED = "Nothing was timed: the policy was tuned for accuracy alone."
STAYS_FLOAT32 = "Nothing that is accurate enough was faster than float32: run the model as it is."
STOPPED = "The search was stopped by Ctrl-C: there may be a better policy."
OUT_OF_TIME = "The `budget` was too short to try all: a larger one may find a better policy."


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`: a policy for one model on one machine, with measurements.

    ::

        tuning = amp.tune(net, batches, loss_function)
        print(tuning)  # the report
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # Policy.load("net.toml") reads the policy

    Parameters
    ----------
    policy : Policy
        The policy of the fastest way to run the model in MXNet.
    way : str
        The fastest way to run the model: "plain", "autocast", "converted" or "fused" with `policy`,
        or "openvino" without it. See `Timing`.
    kept : tuple of str
        The layers that the search keeps in float32, in the order of the graph.
    error : float
        The largest relative error of an output in any batch, run in this way.
    gradient_error : float, optional
        The same for all gradients together.
    metric : float, optional
        Your own metric, run in this way.
    complete : bool
        False where the time budget or Ctrl-C ended the search.
    notes : tuple of str
        The report: sentences on the result and the search.
    timings : tuple of Timing
        All timed forms, float32 first; empty where nothing was timed.
    chosen : Timing, optional
        The timing of the fastest form; None where nothing was timed.
    in_mxnet : Timing, optional
        The timing of the fastest form in MXNet, which is `chosen` unless that is "openvino".
    """

    policy: Policy
    way: str
    kept: tuple[str, ...]
    error: float
    gradient_error: float | None
    metric: float | None
    complete: bool
    notes: tuple[str, ...]
    timings: tuple[Timing, ...]
    chosen: Timing | None
    in_mxnet: Timing | None

    @property
    def way_in_mxnet(self) -> str:
        """The fastest way to run the model in MXNet, such as "converted"."""
        return self.in_mxnet.way if self.in_mxnet else self.way

    @property
    def convert_options(self) -> dict[str, bool]:
        """The arguments of `convert_*` for the fastest way to run the model in MXNet.

        ::

            fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        """
        return forms.convert_options(self.way_in_mxnet)

    def save(self, path: str | Path) -> None:
        """Write the policy to a TOML file, with the report as comments.

        `Policy.load` reads the policy back: the report is comments, and the key `form` is for
        `mxamp convert`. An existing file is replaced whole. Raises `ArgumentError` where `path`
        can't name a file, `WriteError` where writing fails.
        """
        first = "Tuned by mxamp.tune: `Policy.load` ignores these comments."
        report = textwrap.indent("\n".join([first, *self.notes]), "# ")
        text = f'{report}\nform = "{self.way_in_mxnet}"\n\n{self.policy.to_toml()}'
        write_file(path, text.encode())

    def __str__(self) -> str:
        report = "\n".join(self.notes)
        return f"{report}\n\n{table(self.timings)}" if self.timings else report


@checked_call
def tune(
    net: Net,
    data: Data,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    target_dtype: machine.Dtype | None = None,
    rtol: float | None = None,
    metric: mx.metric.EvalMetric | str | Callable[..., Any] | None = None,
    min_metric: float | None = None,
    budget: float | str = "60s",
    policy: Policy | None = None,
    timed: bool = True,
) -> Tuning:
    """Measure a model; find its fastest way to run within a tolerance of float32's results.

    ::

        tuning = amp.tune(net, [data1, data2], budget="60s")
        print(tuning)  # the measurements, and the layers kept in float32
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # and Policy.load("net.toml") later

    `tune` runs the model on your data, in float32 and under mxamp's policy. If the errors exceed
    the tolerance, a bisection over the layers finds the layers to keep in float32. Then `tune`
    times float32, and each form that is accurate enough, in turns on the first batch. The form for
    training is the model under the policy. The forms for inference are the converted model, the
    model converted with `fuse=True`, and OpenVINO if OpenVINO is installed. The policy is that of
    the fastest form in MXNet, also if OpenVINO is faster; plain float32's changes nothing.

    Parameters
    ----------
    net : HybridBlock, or (symbol, arg_params, aux_params)
        The float32 model. The model does not change, as only a deep copy runs. The state of MXNet's
        random number generator changes.
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or an iterable of batches, of which the first 16 are used. With a loss or a
        metric, a batch is a tuple of the net's inputs and the label. For a saved model, a dict of
        inputs by name takes the place of the inputs.
    loss : callable, optional
        A function of the net's output and the label. With a loss, `tune` compares gradients too,
        and times training steps.
    target_dtype : str or dtype, optional
        "float16", "bfloat16" or "float32". The default is float16 on GPUs and bfloat16 on CPUs. For
        float16 on a CPU, which is never fast, `tune` looks at the accuracy alone, and times
        nothing. In float32 it times float32's faster forms alone.
    rtol : float, optional
        The largest relative error (in the L2 norm) of an output in any batch, and of all
        parameters' gradients together. In inference, the default is 0.05 for outputs. In training,
        the default is 0.5 for gradients, and 0.2 for outputs, because batch normalization is
        sensitive to errors.
    metric : EvalMetric, str or callable, optional
        An argument of `mx.metric.create`, to judge accuracy by in place of `rtol` or besides. A
        higher value of the metric has to be better.
    min_metric : float, optional
        The least value of the metric. The default is 99 % of the float32 model's value.
    budget : float or str, default "60s"
        The time to spend: seconds, or a text such as "90s", "5m", "1h". When the time is up, or at
        Ctrl-C, `tune` returns the best policy so far. The float32 baseline runs in any case.
    policy : Policy, optional
        The policy where the search starts. The default is mxamp's own policy.
    timed : bool, default True
        False tunes the accuracy alone: the policy is in 16 bits even if 16 bits are slow on this
        machine. Pass False for a model that will run on another machine. The policy may then be
        for GPUs, `Policy.default("float16", "gpu")`, with the data on the CPU.

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

    Memory: a copy of the parameters for each form that is timed, and all activations of one batch.
    """
    default = DEFAULT_TARGET if policy else default_dtype()
    base = requested_policy(target_dtype or default, policy=policy)
    rtol = None if rtol is None else positive_number("`rtol`", rtol)
    if metric is not None or min_metric is not None:
        if metric is None or loss is not None:
            raise ArgumentError(METRIC_ALONE)
        metric = forms.checked_metric(metric)
    began, seconds = time.monotonic(), seconds_of(budget)
    labeled = loss is not None or metric is not None
    with opened(net, data, labeled, MOST_BATCHES, loss, metric) as model:
        if not model.is_traced:
            raise ArgumentError(NO_GRAPH.format(name=model.block.name))
        search = _Search(model, base, timed, _Limits.of(model, rtol, min_metric))
        search.run(began + _FOR_SEARCH * seconds, began + seconds)
        return search.tuning()


def smallest_set(works: Callable[[frozenset[str]], bool], order: Sequence[str]) -> frozenset[str]:
    """Return a minimal set of layers to keep in float32 so that the model is accurate.

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


@dataclass(frozen=True)
class _Limits:
    """The tolerances of `tune`: the largest relative errors, and the lowest metric."""

    error: float
    gradients: float
    metric: float | None

    @classmethod
    def of(cls, model: Model, rtol: float | None, least: float | None) -> _Limits:
        """Return the tolerances that were passed to `tune`, or a model's defaults.

        Raises `StateError` if the float32 model itself has a lower metric.
        """
        found = model.plain.errors.get("metric")
        default = TRAINING_OUTPUTS if model.loss else OUTPUTS
        if found is None:
            return cls(rtol or default, rtol or GRADIENTS, None)
        least = found - 0.01 * abs(found) if least is None else least
        if not found >= least:
            raise StateError(BELOW.format(wanted=least, found=found))
        return cls(rtol or math.inf, rtol or GRADIENTS, least)

    def allow(self, form: Form) -> bool:
        """Return whether a form's errors and metric are within the tolerances."""
        errors = form.errors
        is_close = errors.get("error", 0.0) <= self.error
        is_close = is_close and errors.get("gradients", 0.0) <= self.gradients
        return is_close and (self.metric is None or errors["metric"] >= self.metric)

    def __str__(self) -> str:
        error = f", within a relative error of {self.error:.4g}" if self.error < math.inf else ""
        return error + ("" if self.metric is None else f", with a metric from {self.metric:.4g}")


class _Search:
    """The search of `tune` for one model's policy, with its measurements so far."""

    def __init__(self, model: Model, base: Policy, timed: bool, limits: _Limits) -> None:
        here = machine.device_kind(model.context)
        if here != base.device and (timed or base.target_dtype == "bfloat16"):
            raise ArgumentError(OTHER_DEVICE.format(own=base.device, data=model.context))
        self._model, self._base, self.best = model, replace(base, device=here), model.plain
        self._device = base.device
        lists = (arrays for result in model.results for arrays in result.values())
        if not all(np.isfinite(array).all() for arrays in lists for array in arrays):
            raise StateError(NOT_FINITE)
        self._limits = limits
        #: The layers that stay in float32 in the best form; None until enough are known.
        self.kept: frozenset[str] | None = None
        self.forms: list[Form] = []
        self.timed = timed and (base.target_dtype, here) != ("float16", "cpu")

    def run(self, search_ends: float, ends: float) -> None:
        """Search for layers to keep in float32, then time forms, until the budget ends."""
        self._ends, base, model = search_ends, self._base, self._model
        model.notes += [] if self.timed else [NOT_TIMED]
        works = functools.lru_cache(maxsize=None)(self._works)  # smallest_set begins with none, too
        try:
            if self.timed and base.rule("Convolution").no_kernel:
                model.notes.append(forms.NO_KERNELS)  # such a form takes a hundred times as long
            elif base.lowers and not works(frozenset()):
                smallest_set(works, self._ordered_layers())
            if self.timed:
                model.ends = ends + forms.GRACE
                self.forms = list(dict.fromkeys([model.plain, self.best]))
                wide = Policy.default("float32", base.device) if base.lowers else base
                self.forms += model.forms([(forms.AUTOCAST, wide)] if wide.substitutions else [])
                if model.loss is None and base.device == "cpu":
                    policies = dict.fromkeys([wide, self.best.policy])
                    fused = [(forms.FUSED, one) for one in policies if one]
                    self.forms += model.forms([*fused, (forms.OPENVINO, wide)])
                self.forms = forms.time_in_turns(self.forms, ends, model.notes, model.ends)
                model.notes += [OUT_OF_TIME] if time.monotonic() > model.ends else []
        except KeyboardInterrupt:
            model.notes.append(STOPPED)

    def _works(self, kept: frozenset[str]) -> bool:
        """Return whether the model is accurate enough with layers `kept` in float32.

        After the deadline anything works, which ends the search.
        """
        if time.monotonic() > self._ends:
            self._model.notes.append(OUT_OF_TIME)
            return True
        policy = self._base.override(fp32_layers=[self._pattern(name) for name in sorted(kept)])
        way = forms.CONVERTED if self._model.loss is None else forms.AUTOCAST
        found = self._model.forms([(way, policy)])
        if not found or not self._limits.allow(found[0]):
            return False
        if self.kept is None or len(kept) < len(self.kept):
            self.kept, self.best = kept, found[0]
        return True

    def _ordered_layers(self) -> list[str]:
        """Return the layers that run in 16 bits, those that add the largest errors first.

        The error that a layer adds is that of its output, less that of the layer before it.
        """
        model, base, before = self._model, self._base, 0.0
        plan = explain(model.block, policy=base)
        added = {node.name: 0.0 for node in plan if node.precision == base.target_dtype}
        inputs, training = model.batches[0].inputs, model.loss is not None
        for one in compare(model.block, inputs, train_mode=training, policy=base).outputs:
            error = one.relative + one.lost
            if one.name in added:
                added[one.name] = max(added[one.name], error - before)
            before = error
        return sorted(added, key=lambda name: -added[name])

    def _pattern(self, name: str) -> str:
        """Return a pattern for `fp32_layers` that matches a layer whatever its block's prefix.

        Gluon numbers blocks by their order in the process: the pattern is relative to the block
        ("*stage1_conv0_fwd"), and measured as it is.
        """
        prefix = self._model.block.prefix  # "" for a saved model
        rest = name[len(prefix) :] if prefix and name.startswith(prefix) else ""
        # A name without "_" is that of the block's own operator, such as "fwd": too common.
        return f"*{glob.escape(rest)}" if "_" in rest else glob.escape(name)

    def tuning(self) -> Tuning:
        """Return the result: the fastest accurate form, or the best one found if not timed."""
        model, best, own = self._model, self.best, self.best
        timed = {f: f.timing(model.plain, self._limits.allow(f)) for f in self.forms if f.seconds}
        if self.timed:
            fast = [f for f, t in timed.items() if t.speedup >= _MARGIN and t.quartiles[0] >= 1]
            good = sorted((f for f in fast if timed[f].within), key=lambda f: timed[f].speedup)
            best = [model.plain, *good][-1]
            own = [model.plain, *(form for form in good if form.way != forms.OPENVINO)][-1]
        plain = Policy.default("float32", self._device).untuned()
        policy = replace(own.policy or plain, device=self._device)
        kept = tuple(sorted(self.kept or ())) if policy.lowers else ()
        notes = [*dict.fromkeys(model.notes)]
        complete = not {STOPPED, OUT_OF_TIME} & set(notes)
        if best is model.plain and complete:
            notes.append(STAYS_FLOAT32)
        errors = best.errors["error"], best.errors.get("gradients"), best.errors.get("metric")
        texts = (*self._report(dict.fromkeys([best, own]), timed, kept), *notes)
        rows, chosen = tuple(timed.values()), (timed.get(best), timed.get(own))
        return Tuning(policy, best.way, kept, *errors, complete, texts, rows, *chosen)

    def _report(
        self, found: Iterable[Form], timed: dict[Form, Timing], kept: Sequence[str]
    ) -> Iterator[str]:
        """Yield the first sentences of the report: task, fastest forms, and layers in float32.

        `found` are the fastest form, and the fastest one in MXNet unless that is the same.
        """
        task = "training" if self._model.loss else "inference"
        place = f" on {machine.cpu_name()}, {counted(machine.threads(), 'thread')}"
        yield f"Tuned for {task}{place if self.timed else ''}{self._limits}."
        for head, form in zip(("Chosen", "The fastest in MXNet"), found):
            text = f"{head}: {form.way} in {form.precision}"
            if form in timed and form.way != forms.PLAIN:
                text += f", {timed[form].speedup:.3g} times as fast as plain float32"
            figures = (f"{name} {one:.4g}" for name, one in form.errors.items())
            text += f". Measured: {', '.join(figures)}."
            if form.way != forms.PLAIN:
                how = HOW.get(form.way, "call `init(policy=tuning.policy)`")
                text += f" To run it, {how.format(precision=form.precision)}."
            yield text
        yield f"Layers that the search keeps in float32: {shortened(kept) or 'none'}."
