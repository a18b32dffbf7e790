"""`benchmark`: a model timed in float32 and in 16 bits, in each form that it can run in."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...framework.keywords import checked_call
from ...framework.machine import Dtype, device_kind
from ...policy.policy import Policy
from ...policy.targets import default_dtype
from ..debugging.measured import Data, Net
from . import forms
from .forms import HOW, Loss, Timing, opened, seconds_of, table, time_in_turns

NOT_PAID = "Stay in float32 for this model, or let mxamp.tune look for a faster form of it."


@dataclass(frozen=True, repr=False)
class Benchmark:
    """Times that `benchmark` measured; printing gives a table and a sentence on what to do.

    ::

        result = amp.benchmark(net, data, budget="20s")
        print([(timing.way, timing.speedup) for timing in result.timings])
        print(result.summary())

    Parameters
    ----------
    dtype : str
        The 16-bit dtype.
    timings : tuple of Timing
        The times of each form; those of float32 come first in each task.
    notes : tuple of str
        What holds the model back, and forms that do not run.
    """

    dtype: str
    timings: tuple[Timing, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return whether 16 bits pay for this model, and what to do, in a few sentences."""
        ways = forms.EAGER, forms.AUTOCAST  # in training, if that was timed, then in inference
        lowered = [t for t in self.timings if t.way in ways and t.precision == self.dtype]
        serving = [one for one in self.timings if one.way in HOW]
        speeds = map(_speed, lowered, (" this model", " it"), (" as float32", ""))
        said = [f"{self.dtype} {', and '.join(speeds)}.", *self.notes]
        fastest = max([lowered[-1], *serving], key=lambda one: one.quartiles[0])
        if all(one.quartiles[1] < 1 for one in (*lowered, *serving)):
            said.append(NOT_PAID)
        elif fastest.way in HOW and fastest.quartiles[0] > max(1, lowered[-1].speedup):
            how = HOW[fastest.way].format(precision=fastest.precision)
            said.append(f"For serving, {how}: it then {_speed(fastest, '', '')}.")
        return " ".join(said)

    def __str__(self) -> str:
        return f"{table(self.timings)}\n\n{self.summary()}"

    __repr__ = __str__  # for notebooks


def _speed(timing: Timing, model: str, reference: str) -> str:
    """Return the speed against float32 in words, "too noisy to tell" where it can't be told."""
    does = f"{'trains' if timing.task == forms.TRAINING else 'runs'}{model}"
    low, high = timing.quartiles
    if not low <= 1 <= high:
        return f"{does} {timing.speedup:.2g} times as fast{reference}"
    if max(1 - low, high - 1) <= 0.05:  # noqa: PLR2004  # a wider spread around 1 is noise
        return f"{does} as fast{reference}"
    return f"{does} {low:.2f} to {high:.2f} times as fast{reference}, too noisy to tell"


@checked_call
def benchmark(
    net: Net,
    batch: Data,
    loss: Loss = None,
    *,
    target_dtype: Dtype | None = None,
    budget: float | str = "20s",
) -> Benchmark:
    """Time a training step and inference of a block, in float32 and in 16 bits.

    ::

        print(amp.benchmark(net, (data, label), loss_function, budget="20s"))

    The block runs hybridized, or eager if it can't be traced. For inference, the converted block
    runs too, also on OpenVINO if OpenVINO is installed. Each round times float32 and then each
    other form, and compares the form with float32. A training step is a forward pass, a backward
    pass and an update by SGD, in 16 bits with the overflow check. The report ends with a sentence
    that says whether 16 bits are faster for this model on this machine, or "too noisy to tell".

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
        "float16" or "bfloat16". The default is float16 if the batch is on a GPU, else bfloat16.
    budget : float or str, default "20s"
        The time to spend: seconds, or a text such as "90s" or "5m". `benchmark` times at least 3
        rounds, and at most 15.

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
        device = device_kind(model.context)
        policy = Policy.default(target_dtype or default_dtype(device), device)
        lowered = model.form(forms.AUTOCAST if model.is_traced else forms.EAGER, policy)
        model.measure(lowered)
        groups = [[model.plain, lowered]]
        if model.is_traced:
            ways = [forms.FUSED if policy.target_dtype == "bfloat16" else forms.CONVERTED]
            ways += [forms.OPENVINO] * (device == "cpu")
            groups[0] += model.forms((way, policy) for way in ways)
        if any(p.grad_req != "null" and p._data for p in model.block.collect_params().values()):
            step = loss or (lambda output, _: output)
            groups.insert(0, [model.form(one.way, one.policy, step) for one in groups[0][:2]])
        for count, group in enumerate(groups, 1):
            time_in_turns(group, began + seconds * count / len(groups))
    timings = tuple(form.timing(group[0]) for group in groups for form in group)
    return Benchmark(policy.target_dtype, timings, (*model.notes, *model.channels_note(timings)))
