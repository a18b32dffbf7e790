"""`benchmark`: a Gluon block timed in float32 and in low precision, in each way that it can run."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import Any, Callable, Dict, Iterable, List, Tuple

from mxnet.base import MXNetError
from mxnet.context import current_context
from mxnet.gluon import Block, HybridBlock, SymbolBlock, Trainer

from ...convert.models import convert_hybrid_block
from ...errors import AmpError
from ...framework.keywords import checked_call
from ...framework.machine import default_dtype, device_kind
from ...patches.autocast import autocast
from ...policy.policy import Policy
from ...scaling.trainer import init_trainer
from ..debugging import measured
from ..debugging.results import Result, Table
from .turns import Timed, channels_note, check_float32, seconds_of, step_function, time_in_turns

TRAINING, INFERENCE = "training", "inference"
#: How a block runs.
EAGER, HYBRIDIZED, CONVERTED = "eager", "hybridized", "converted"
#: The dtype of oneDNN's fused operators.
FUSED = "bfloat16"
#: Ratios within this distance of 1 are "as fast"; a wider spread around 1 is noise.
_AS_FAST = 0.05

NOT_PAID = "Stay in float32 for this model, or let mxamp.tune look for a faster form of it."
CONVERT = "For serving, convert the model with `{option}=True`: it then {speed}."


@dataclass(frozen=True)
class Timing:
    """The times of one task in one mode, in float32 and in low precision.

    Parameters
    ----------
    task : str
        "training" (forward, backward, and an update by SGD) or "inference".
    mode : str
        "eager", "hybridized", or "converted": the model that `convert_hybrid_block` returns with
        `cast_optional_params=True`, in bfloat16 on a CPU also with `fuse=True`, against the
        hybridized one in float32.
    float32_ms, low_ms : float
        The median milliseconds of a run in float32, and in low precision.
    speedup : float
        The median over rounds of float32's time over that of low precision.
    quartiles : tuple of float
        The first and third quartile of that ratio.
    """

    task: str
    mode: str
    float32_ms: float
    low_ms: float
    speedup: float
    quartiles: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """Times that `benchmark` measured; printing gives a table and a sentence on what to do.

    ::

        result = amp.benchmark(net, data, budget="20s")
        print([(timing.mode, timing.speedup) for timing in result.timings])
        print(result.summary())

    Parameters
    ----------
    dtype : str
        The low dtype.
    timings : tuple of Timing
        The times of each task and mode.
    notes : tuple of str
        What holds the model back.
    """

    dtype: str
    timings: tuple[Timing, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return whether low precision pays for this model, and what to do, in a few sentences."""
        converted = [timing for timing in self.timings if timing.mode == CONVERTED]
        # The last one of a task is hybridized, where the model can be.
        best = {timing.task: timing for timing in self.timings if timing.mode != CONVERTED}
        speeds = map(_speed, best.values(), (" this model", " it"), (" as float32", ""))
        said = [f"{self.dtype} {', and '.join(speeds)}.", *self.notes]
        if all(timing.quartiles[1] < 1 for timing in (*best.values(), *converted)):
            said.append(NOT_PAID)
        elif converted and converted[0].quartiles[0] > max(1, best[INFERENCE].speedup):
            option = "fuse" if self.dtype == FUSED else "cast_optional_params"
            said.append(CONVERT.format(option=option, speed=_speed(converted[0], "", "")))
        return " ".join(said)

    def _tables(self) -> Iterable[Table]:
        heads = "", "", "float32 ms", f"{self.dtype} ms", "times as fast", "quartiles"
        yield heads, [astuple(timing) for timing in self.timings]


def _speed(timing: Timing, model: str, reference: str) -> str:
    """Return the speed against float32 in words, "too noisy to tell" where it can't be told."""
    does = f"{'trains' if timing.task == TRAINING else 'runs'}{model}"
    low, high = timing.quartiles
    if not low <= 1 <= high:
        return f"{does} {timing.speedup:.2g} times as fast{reference}"
    if max(1 - low, high - 1) <= _AS_FAST:
        return f"{does} as fast{reference}"
    return f"{does} {low:.2f} to {high:.2f} times as fast{reference}, too noisy to tell"


@checked_call
def benchmark(
    net: Any,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    target_dtype: Any = None,
    budget: Any = "20s",
) -> Benchmark:
    """Time a training step and inference of a block, in float32 and in low precision.

    ::

        print(amp.benchmark(net, (data, label), loss_function, budget="20s"))

    The block runs eager and hybridized, and in inference also converted. Each round times float32
    and then low precision, and compares the two. A training step is a forward pass, a backward pass
    and an update by SGD, in low precision with the overflow check. The report ends with a sentence
    that says whether low precision pays for this model on this machine, or is "too noisy to tell".
    `tune` measures accuracy too.

    Parameters
    ----------
    net : Block, or (symbol, arg_params, aux_params)
        The float32 model. Deep copies run; the state of MXNet's random number generator, which
        can't be read, changes.
    batch : NDArray or tuple
        The arguments of one call; with a loss, the label is the last element; for a saved model, a
        dict of inputs by name. An iterable of batches, such as a DataLoader, gives its first batch.
    loss : callable, optional
        Called with the net's output and the label; by default the sum of the outputs.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; by default float16 where the batch is on a GPU, else bfloat16.
    budget : float or str, default "20s"
        Seconds, or a text such as "90s" or "5m". At least 3 rounds are timed, and at most 15.

    Returns
    -------
    Benchmark
        The times. Printing it gives a table and the sentence.

    Raises
    ------
    ArgumentError
        The model is not in float32 or does not run on the batch.

    Holds two copies of the model, and the converted model.
    """
    measured.check_loss(loss)
    ends = time.monotonic() + seconds_of(budget)
    batches = measured.batches_of(batch, labeled=loss is not None)
    if not isinstance(net, Block):
        net, batches = measured.block_of(net, batches)
    data = next(batches)
    arrays = measured.arrays_in(data.inputs)
    device = device_kind(arrays[0].context if arrays else current_context())
    policy = Policy.default(target_dtype or default_dtype(device), device)
    with autocast(enabled=False):
        check_float32(net)
        with measured.explained_errors(net, data.inputs):
            nets = _nets(net, data)
        ways = _training(nets, data, loss or (lambda output, _: output), policy)
        for mode, block in nets.items():
            steps = (step_function(block, data, one) for one in (None, policy))
            ways[INFERENCE, mode] = [*map(Timed, steps)]
        if isinstance(net, HybridBlock) and HYBRIDIZED in nets:
            ways[INFERENCE, HYBRIDIZED] += _converted(nets[HYBRIDIZED], data, policy)
        time_in_turns([*ways.values()], ends)
    timings = tuple(
        Timing(task, name, plain.measured(plain)[0], *low.measured(plain))
        for (task, mode), (plain, *others) in ways.items()
        for name, low in zip((mode, CONVERTED), others)
    )
    best = max(timing.speedup for timing in timings)
    notes = channels_note(nets.get(HYBRIDIZED), policy.target_dtype, best)
    return Benchmark(policy.target_dtype, timings, tuple(notes))


#: The ways to run a task in a mode: in float32, in low precision, and converted.
Ways = Dict[Tuple[str, str], List[Timed]]


def _nets(net: Block, data: measured.Batch) -> dict[str, Block]:
    """Return copies of a net by the modes that it runs in."""
    hybrid, eager = (measured.copied(net, data.inputs) for _ in range(2))
    for block in measured.blocks_in(eager):
        block._active = False
    # A SymbolBlock always runs its graph.
    nets = {} if isinstance(net, SymbolBlock) else {EAGER: eager}
    if any(getattr(block, "_active", False) for block in measured.blocks_in(hybrid)):
        nets[HYBRIDIZED] = hybrid
    return nets


def _training(
    nets: dict[str, Block], data: measured.Batch, loss: Callable[[Any, Any], Any], policy: Policy
) -> Ways:
    """Return training steps of nets by mode; none where no parameter gets a gradient.

    The learning rate is 0, so that each step runs on the same values.
    """
    ways: Ways = {}
    for mode, net in nets.items():
        params = [p for p in net.collect_params().values() if p.grad_req != "null" and p._data]
        if not params:
            continue
        plain, low = (Trainer(params, "sgd", {"learning_rate": 0}, kvstore=None) for _ in range(2))
        with autocast(policy=policy):
            init_trainer(low)
        pairs = (None, plain), (policy, low)
        steps = (step_function(net, data, one, loss, trainer) for one, trainer in pairs)
        ways[TRAINING, mode] = [*map(Timed, steps)]
    return ways


def _converted(net: HybridBlock, data: measured.Batch, policy: Policy) -> list[Timed]:
    """Return inference by the converted model; nothing where that does not run."""
    fuse = policy.target_dtype == FUSED
    options: dict[str, Any] = {"policy": policy, "cast_optional_params": True, "fuse": fuse}
    try:
        way = Timed(step_function(convert_hybrid_block(net, **options), data, None))
        way.mean_seconds()
    except (AmpError, MXNetError):
        return []
    return [way]
