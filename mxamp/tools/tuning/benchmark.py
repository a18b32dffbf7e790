"""`benchmark`: time a model in float32 and 16 bits, by autocast, converted and fused."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Iterable

from ...framework.keywords import checked_call
from ...framework.machine import Dtype, device_kind
from ...policy.policy import Policy
from ...policy.targets import default_dtype
from ..debugging.measured import Data, Net
from . import forms
from .forms import HOW, OPENVINO, Loss, Timing, opened, seconds_of, table, time_in_turns

NOT_PAID = "Run this model in plain MXNet, or let mxamp.tune look for a faster form of it."


@dataclass(frozen=True, repr=False)
class Benchmark:
    """The result of `benchmark`, which prints as a table of times and advice.

    ::

        result = amp.benchmark(net, data, budget="20s")
        print([(timing.way, timing.speedup) for timing in result.timings])
        print(result.summary())

    Parameters
    ----------
    dtype : str
        The target dtype: a 16-bit dtype, or float32 where only its forms were timed.
    timings : tuple of Timing
        The times of each form; those of float32 come first in each task.
    notes : tuple of str
        What holds the model back, and forms that do not run.
    """

    dtype: str
    timings: tuple[Timing, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return sentences that say whether 16 bits are faster, and what to do."""
        others = [t for t in self.timings if t.way != forms.PLAIN]
        best = _fastest(one for one in others if one.way not in HOW)
        said = []
        for precision, tasks in itertools.groupby(best, lambda one: one.precision):
            equivalents = " with faster equivalents" if precision == "float32" else ""
            speeds = map(_speed, tasks, (" this model", " it"), (" as float32", ""))
            said.append(f"{precision}{equivalents} {', and '.join(speeds)}.")
        said += self.notes
        served = next(iter(_fastest(one for one in others if one.way in HOW)), None)
        if others and all(one.quartiles[1] < 1 for one in others):
            said.append(NOT_PAID)
        elif served and served.quartiles[0] > max(1.05, *(t.speedup for t in best)):
            how = HOW[served.way].format(precision=served.precision)
            said.append(f"For serving, {how}: it then {_speed(served, '', '')}.")
        return " ".join(said)

    def __str__(self) -> str:
        return f"{table(self.timings)}\n\n{self.summary()}"

    __repr__ = __str__  # for notebooks


def _fastest(timings: Iterable[Timing]) -> list[Timing]:
    """Return the fastest timing of each task: training, if it was timed, and inference."""
    tasks = itertools.groupby(timings, lambda one: one.task)
    # Another engine has to beat MXNet by 5 % to be worth its installation.
    return [max(g, key=lambda t: t.speedup / (1.05 if t.way == OPENVINO else 1)) for _, g in tasks]


def _speed(timing: Timing, model: str, reference: str) -> str:
    """Return a speedup over float32 in words, or "too noisy to tell"."""
    does = f"{'trains' if timing.task == forms.TRAINING else 'runs'}{model}"
    low, high = timing.quartiles
    if not low <= 1 <= high and f"{timing.speedup:.2g}" != "1":
        doubt = " in one round, which is too few" if low == high else ""
        return f"{does} {timing.speedup:.2g} times as fast{reference}{doubt}"
    if max(1 - low, high - 1) <= 0.05:  # noqa: PLR2004  # a wider spread around 1 is noise
        return f"{does} as fast{reference}"
    return f"{does} {low:.2f} to {high:.2f} times as fast{reference}, too noisy to tell"


def _forms(model: forms.Model, policy: Policy) -> tuple[list[forms.Form], list[forms.Form]]:
    """Return the forms of a model to time: for training and inference, and for inference only."""
    if not model.is_traced:
        return model.forms([(forms.AUTOCAST, policy)]), []
    wide = Policy.default("float32", policy.device)
    policies = [wide] if wide.substitutions else []
    policies += [policy] if policy is not wide and model.lowers(policy) else []
    ways = {"float16": forms.CONVERTED}  # oneDNN's fused operators have no float16 kernels
    served = [(ways.get(one.target_dtype, forms.FUSED), one) for one in policies]
    served += [(OPENVINO, policy)] if policy.device == "cpu" else []
    return model.forms((forms.AUTOCAST, one) for one in policies), model.forms(served)


@checked_call
def benchmark(
    net: Net,
    batch: Data,
    loss: Loss = None,
    *,
    target_dtype: Dtype | None = None,
    budget: float | str = "20s",
) -> Benchmark:
    """Time a model's training step and inference, in plain MXNet and with mxamp.

    ::

        print(amp.benchmark(net, (data, label), loss_function, budget="20s"))

    The block runs hybridized, or eager if it can't be traced. For inference, the converted block
    runs too, also on OpenVINO if OpenVINO is installed. On CPUs, forms in float32 with faster
    equivalents of operators are timed beside those in 16 bits. Each round times plain float32 and
    then each other form, and compares the form with float32. A training step is a forward pass, a
    backward pass and an update by SGD, in 16 bits with the overflow check. The report ends with a
    sentence that says which form is faster on this machine, or "too noisy to tell". It names a form
    to serve with that is at least 5 % faster, and OpenVINO if it beats MXNet's forms by 5 %.

    Parameters
    ----------
    net : Block, or (symbol, arg_params, aux_params)
        The float32 model. The model does not change, as only deep copies run. The state of MXNet's
        random number generator changes.
    batch : NDArray or tuple
        The arguments of one call. If you pass a loss, the last element is the label. For a saved
        model, a dict of inputs by name. Of an iterable of batches, such as a DataLoader, the first
        batch is used.
    loss : callable, optional
        A function of the net's output and the label. The default is the sum of the outputs.
    target_dtype : str or dtype, optional
        "float16", "bfloat16" or "float32". The default is float16 if the batch is on a GPU, else
        bfloat16, or float32 on CPUs without bfloat16 instructions.
    budget : float or str, default "20s"
        The time to spend: seconds, or a text such as "90s" or "5m". A form that takes over five
        times as long as the fastest is given up after one run. `benchmark` times 2 to 15 rounds.

    Returns
    -------
    Benchmark
        The times. Printing it gives a table and the sentence.

    Raises
    ------
    ArgumentError
        The model is not in float32 or does not run on the batch.

    Memory: two copies of the model, and the converted model.
    """
    began, seconds = time.monotonic(), seconds_of(budget)
    with opened(net, batch, loss is not None, most=1) as model:
        device, model.ends = device_kind(model.context), began + seconds + forms.GRACE
        policy = Policy.default(target_dtype or default_dtype(device), device)
        if target_dtype is None and policy.rule("Convolution").no_kernel:
            policy = Policy.default("float32", device)
            model.notes.append(forms.NO_KERNELS)
        lowered, served = _forms(model, policy)
        groups = [[model.plain, *lowered, *served]]
        params = model.block.collect_params().values()
        if any(param.grad_req != "null" and param._data for param in params):
            step = loss or (lambda output, _: output)
            trained = [model.form(one.way, one.policy, step) for one in [model.plain, *lowered]]
            groups.insert(0, trained)
        for share, group in enumerate(groups, 1):
            ends = began + seconds * share / len(groups)
            group[:] = time_in_turns(group, ends, model.notes, model.ends)
    timings = tuple(form.timing(group[0]) for group in groups for form in group)
    return Benchmark(policy.target_dtype, timings, tuple(model.notes))
