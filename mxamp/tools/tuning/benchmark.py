"""`benchmark`: a Gluon block timed in float32 and in low precision, in each way that it can run."""

import functools
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from mxnet.base import MXNetError
from mxnet.context import current_context
from mxnet.gluon import Block, HybridBlock, SymbolBlock, Trainer

from ...convert.models import convert_hybrid_block
from ...errors import AmpError, ArgumentError
from ...framework import machine
from ...framework.keywords import checked_call
from ...framework.machine import default_dtype, device_kind, dtype_name
from ...framework.wording import shown
from ...patches.autocast import autocast
from ...policy.policy import Policy
from ...scaling.scaler import NoScaler
from ...scaling.trainer import init_trainer
from ..debugging.batches import Batch, batches_of, check_loss
from ..debugging.measured import arrays_in, blocks_in, copied, loss_of
from ..debugging.results import Result, Table
from .turns import (
    MOST_ROUNDS,
    Timed,
    channels_note,
    check_float32,
    is_as_fast,
    quartiles,
    repeats_of,
    rounds,
    seconds_of,
    step_function,
)

logger = logging.getLogger("mxamp")

TRAINING, INFERENCE = "training", "inference"
#: How a block runs.
EAGER, HYBRIDIZED, CONVERTED = "eager", "hybridized", "converted"
#: Rounds that are timed whatever the budget.
_LEAST = 5
#: An eager step that takes so many times as long is worth a hint to hybridize.
_SLOWER = 1.1

NOT_A_BLOCK = (
    "benchmark takes a Gluon block, not {given}: import a saved model with "
    "gluon.SymbolBlock.imports(symbol_file, input_names, params_file)"
)
DOES_NOT_RUN = (
    "block {name!r} does not run on this batch: {why}. A batch holds the arguments of one call "
    "and, with a loss, the label as its last element"
)
EAGER_IS_SLOW = "Hybridize first: eager, {task} takes {times:.2g} times as long."
NOT_PAID = "Stay in float32 for this model, or let mxamp.tune look for a faster form of it."
INFERENCE_NOT_PAID = "Run inference in float32: `with amp.autocast(enabled=False)`."
CONVERT = "For serving, convert the model with `{option}=True`: it then {speed}."
NO_INSTRUCTIONS = "This machine has no bfloat16 instructions."
NOT_HYBRID = "It was timed eager only: it can't be hybridized."
EMULATED = "float16 on a CPU is for trying and testing, and never fast."


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
    quartiles: Tuple[float, float]


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
    device : str
        The kind of device, "cpu" or "gpu".
    rounds : int
        The number of times that each timing was measured.
    timings : tuple of Timing
        The times of each task and mode.
    notes : tuple of str
        What holds the model back.
    """

    dtype: str
    device: str
    rounds: int
    timings: Tuple[Timing, ...]
    notes: Tuple[str, ...] = ()

    def summary(self) -> str:
        """Return whether low precision pays for this model, and what to do, in a few sentences."""
        converted = [timing for timing in self.timings if timing.mode == CONVERTED]
        blocks = [timing for timing in self.timings if timing.mode in (EAGER, HYBRIDIZED)]
        best = {timing.task: timing for timing in blocks}  # hybridized, where it runs so
        speeds = map(_speed, best.values(), ("this model", "it"), (" as float32", ""))
        said = [f"{self.dtype} {', and '.join(speeds)}.", *self.notes]
        if self.device == "cpu" and self.dtype == "float16":
            said.insert(0, EMULATED)
        elif self.device == "cpu" and not machine.computes_bfloat16():
            said.insert(0, NO_INSTRUCTIONS)
        if not any(timing.mode == HYBRIDIZED for timing in self.timings):
            said.append(NOT_HYBRID)
        if all(timing.quartiles[1] < 1 for timing in (*best.values(), *converted)):
            return " ".join([*said, NOT_PAID])
        if converted and converted[0].quartiles[0] > max(1, best[INFERENCE].speedup):
            option = "fuse" if _is_fused(self.device, self.dtype) else "cast_optional_params"
            said.append(CONVERT.format(option=option, speed=_speed(converted[0], "", "")))
        elif INFERENCE in best and best[INFERENCE].quartiles[1] < 1:
            said.append(INFERENCE_NOT_PAID)
        for eager in blocks:
            times = eager.low_ms / best[eager.task].low_ms
            if times > _SLOWER:
                said.append(EAGER_IS_SLOW.format(task=eager.task, times=times))
                break
        return " ".join(said)

    def to_dict(self) -> Dict[str, Any]:
        """Return the measurements as plain values."""
        return asdict(self)

    def _tables(self) -> Iterable[Table]:
        rows = []
        for one in self.timings:
            ratios = (round(ratio, 2) for ratio in (one.speedup, *one.quartiles))
            rows.append((one.task, one.mode, one.float32_ms, one.low_ms, *ratios))
        quarters = "lower quartile", "upper quartile"
        yield "", ("", "", "float32 ms", f"{self.dtype} ms", "times as fast", *quarters), rows


def _is_fused(device: str, dtype: str) -> bool:
    """Return whether there are fused operators for the converted model."""
    return (device, dtype) == ("cpu", "bfloat16")


def _speed(timing: Timing, model: str, reference: str) -> str:
    """Return the speed against float32 in words, "too noisy to tell" where it can't be told."""
    does = f"{'trains' if timing.task == TRAINING else 'runs'} {model}".rstrip()
    low, high = timing.quartiles
    equal = is_as_fast(low, high)
    if equal is None:
        return f"{does} {low:.2f} to {high:.2f} times as fast{reference}, too noisy to tell"
    return f"{does} {'' if equal else f'{timing.speedup:.2g} times '}as fast{reference}"


@checked_call
def benchmark(
    net: Block,
    batch: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
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
    net : Block
        The float32 model. A deep copy runs. Parameters with deferred initialization get a shape,
        and the state of MXNet's random number generator, which can't be read, changes.
    batch : NDArray or tuple
        The arguments of one call; with a loss, the label is the last element. An iterable of
        batches, such as a DataLoader, gives its first batch.
    loss : callable, optional
        Called with the net's output and the label; by default the mean of the outputs.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16"; by default float16 where the batch is on a GPU, else bfloat16.
    budget : float or str, default "20s"
        Seconds, or a text such as "90s" or "5m". At least 5 rounds are timed, and at most 15.

    Returns
    -------
    Benchmark
        The times. Printing it gives a table and the sentence.

    Raises
    ------
    ArgumentError
        The model is no block, not in float32 or does not run on the batch.

    Holds a copy of the model, and the converted model.
    """
    if not isinstance(net, Block):
        raise ArgumentError(NOT_A_BLOCK.format(given=shown(net)))
    check_loss(loss)
    ends = time.monotonic() + seconds_of(budget)
    data = next(batches_of(batch, labeled=loss is not None))
    arrays = arrays_in(data.inputs)
    device = device_kind(arrays[0].context if arrays else current_context())
    policy = Policy.default(target_dtype or default_dtype(device), device)
    with autocast(enabled=False):
        _run_once(net, data)
        net = copied(net, data.inputs)
        pairs = _pairs(net, data, loss, policy)
        count = 0
        while count < _LEAST or (count < MOST_ROUNDS and time.monotonic() < ends):
            for pair in pairs:
                pair.run_round()
            count += 1
        notes: List[str] = []
        if isinstance(net, HybridBlock) and net._cached_graph:
            best = max(pair.low.speedup for pair in pairs)
            notes = channels_note(net._cached_graph[1], policy.target_dtype, best)
    timings = tuple(pair.timing() for pair in pairs)
    return Benchmark(policy.target_dtype, policy.device, count, timings, tuple(notes))


def _run_once(net: Block, data: Batch) -> None:
    """Run a block, which gives its parameters their shapes; raise where it fails, or is low."""
    check_float32(net)
    try:
        for array in arrays_in(net(*data.inputs)):
            array.wait_to_read()
    except Exception as error:  # the user's own code
        why = " ".join(str(error).split()).rstrip(".")
        raise ArgumentError(DOES_NOT_RUN.format(name=net.name, why=why)) from error


class _Pair:
    """A task in a mode: its runs in float32, and in low precision."""

    def __init__(
        self, task: str, mode: str, net: Block, plain: Callable[[], Any], low: Callable[[], Any]
    ) -> None:
        self.task, self.mode, self.low = task, mode, Timed(low)
        self._plain = Timed(plain)
        self._blocks = [block for block in blocks_in(net) if isinstance(block, HybridBlock)]
        self._switch_mode()
        # The first call makes the graph, the second one the memory.
        self._repeats = repeats_of(min(self._plain.mean_seconds() for _ in range(2)))
        self.low.mean_seconds(2)

    def _switch_mode(self) -> None:
        """Have all blocks run in this mode; their graphs are kept."""
        for block in self._blocks:
            block._active = self.mode != EAGER

    def run_round(self) -> None:
        """Time float32, then low precision."""
        self._switch_mode()
        next(rounds([self._plain, self.low], self._repeats))

    def timing(self) -> Timing:
        """Return the medians of all rounds."""
        times = self._plain.milliseconds, self.low.milliseconds, self.low.speedup
        return Timing(self.task, self.mode, *times, quartiles(self.low.ratios))


def _pairs(
    net: Block, data: Batch, loss: Optional[Callable[[Any, Any], Any]], policy: Policy
) -> List[_Pair]:
    """Return all tasks of a block in all modes that it runs in, warmed up."""
    blocks = [block for block in blocks_in(net) if isinstance(block, HybridBlock)]
    modes = [EAGER, HYBRIDIZED] if blocks else [EAGER]
    if isinstance(net, SymbolBlock):
        modes = [HYBRIDIZED]  # it always runs its graph
    for block in blocks:
        block._clear_cached_op()
    steps = {INFERENCE: [step_function(net, data.inputs, one) for one in (None, policy)]}
    trainers = _trainers(net, policy)
    if trainers:
        found = functools.partial(loss_of, loss or _mean, label=data.label)
        training = [
            step_function(net, data.inputs, one, found, trainer)
            for one, trainer in zip((None, policy), trainers)
        ]
        steps = {TRAINING: training, **steps}
    pairs = []
    for task, (plain, low) in steps.items():
        for mode in modes:
            try:
                pair = _Pair(task, mode, net, plain, low)
            except Exception as error:  # the user's own code runs in the trace
                if mode == modes[0]:
                    raise
                logger.debug("benchmark: %s does not run hybridized: %s", net.name, error)
                continue
            pairs.append(pair)
    if isinstance(net, HybridBlock) and pairs[-1].mode == HYBRIDIZED:
        pairs += _converted_pair(net, data, policy)
    return pairs


def _converted_pair(net: HybridBlock, data: Batch, policy: Policy) -> List[_Pair]:
    """Return inference by the converted model, warmed up; nothing where that does not run."""
    try:
        converted = convert_hybrid_block(
            net,
            policy=policy,
            cast_optional_params=True,
            example_inputs=data.inputs,
            fuse=_is_fused(policy.device, policy.target_dtype),
        )
        plain, low = (step_function(block, data.inputs, None) for block in (net, converted))
        return [_Pair(INFERENCE, CONVERTED, net, plain, low)]
    except (AmpError, MXNetError) as error:
        logger.debug("benchmark: %s does not run converted: %s", net.name, error)
        return []


def _trainers(net: Block, policy: Policy) -> List[Trainer]:
    """Return trainers for float32 and for a policy; none where no parameter gets a gradient.

    Their learning rate is 0, so that each step runs on the same values.
    """
    params = [p for p in net.collect_params().values() if p.grad_req != "null" and p._data]
    if not params:
        return []
    plain, low = (Trainer(params, "sgd", {"learning_rate": 0}, kvstore=None) for _ in range(2))
    with autocast(policy=policy):
        init_trainer(low, NoScaler())
    return [plain, low]


def _mean(output: Any, label: Any) -> List[Any]:  # noqa: ARG001
    """Return the means of a net's floating-point outputs."""
    return [array.mean() for array in arrays_in(output) if "float" in dtype_name(array.dtype)]
