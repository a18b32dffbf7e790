"""Ways to run a model, timed in turns within a budget.

In each round every way runs once, float32 first, and the ratio to float32 in the same round
counts: a machine that slows down slows all of them.
"""

import math
import re
import statistics
import time
from contextlib import nullcontext
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, Trainer
from mxnet.symbol import Symbol

from ...errors import ArgumentError
from ...framework.machine import dtype_name
from ...framework.wording import counted, shortened, shown
from ...graph.ir import Graph
from ...policy.active import pop_region, push_policy
from ...policy.policy import Policy
from ...scaling.trainer import scale_loss
from ..debugging.measured import arrays_in

BUDGET = (
    "`budget` must be a number of seconds above 0, or a text such as '90s', '5m' or '1h', not "
    "{given}"
)
NOT_FLOAT32 = (
    "the model must be in float32, and parameter {name!r} is {dtype}: "
    "convert the model to float32 first, with convert_hybrid_block(net, 'float32') or "
    "mxamp convert --dtype float32"
)
ODD_CHANNELS = (
    "{layers} with a number of output channels that is no multiple of 16, for which bfloat16 "
    "kernels are slow: {names}."
)

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)\s*")
#: The least seconds of a turn: fast ways run several times in one.
_SHORTEST = 0.01
#: Ratios within this distance of 1 are "as fast"; a wider spread around 1 is noise.
_AS_FAST = 0.05
#: Rounds that are timed at most.
MOST_ROUNDS = 15
#: The channels of a block of oneDNN's layouts, and the speed below which odd ones are named.
_BLOCK, _HELD_BACK = 16, 1.5


def seconds_of(budget: Any) -> float:
    """Return a `budget` argument, a number or a text such as "5m", as seconds.

    >>> seconds_of("90s"), seconds_of("5m"), seconds_of(30)
    (90.0, 300.0, 30.0)
    """
    seconds = 0.0
    if isinstance(budget, str):
        found = _DURATION.fullmatch(budget)
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        seconds = float(budget)
    if not 0 < seconds < float("inf"):
        raise ArgumentError(BUDGET.format(given=shown(budget)))
    return seconds


def check_float32(block: Block) -> None:
    """Raise `ArgumentError` if a parameter of a block is in another float dtype than float32."""
    for param in block.collect_params().values():
        dtype = dtype_name(param.dtype)
        if "float" in dtype and dtype != "float32":
            raise ArgumentError(NOT_FLOAT32.format(name=param.name, dtype=dtype))


class Timed:
    """A way to run a model, and the seconds of its turns."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.seconds: List[float] = []  #: of one run, by turn
        self.ratios: List[float] = []  #: float32's seconds over these, of the same round

    def mean_seconds(self, repeats: int = 1) -> float:
        """Run the model `repeats` times; return the mean seconds of a run."""
        began = time.perf_counter()
        for _ in range(repeats):
            self._step()
        return (time.perf_counter() - began) / repeats

    @property
    def milliseconds(self) -> float:
        """The median milliseconds of a run."""
        return statistics.median(self.seconds) * 1e3

    @property
    def speedup(self) -> float:
        """The median ratio to float32; 0 before the first turn."""
        return statistics.median(self.ratios) if self.ratios else 0.0


def rounds(ways: Sequence[Timed], repeats: int) -> Iterator[float]:
    """Time all ways in rounds, float32 first; yield the seconds of each round after it."""
    for _ in range(MOST_ROUNDS):
        began = time.perf_counter()
        for way in ways:
            way.seconds.append(way.mean_seconds(repeats))
            way.ratios.append(ways[0].seconds[-1] / way.seconds[-1])
        yield time.perf_counter() - began


def repeats_of(seconds: float) -> int:
    """Return how often a turn repeats a run that takes so many seconds."""
    return max(1, math.ceil(_SHORTEST / seconds))


def quartiles(values: Sequence[float]) -> Tuple[float, float]:
    """Return the first and third quartile; of a single value, that value twice."""
    if len(values) < 2:  # noqa: PLR2004
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def is_as_fast(low: float, high: float) -> Optional[bool]:
    """Return whether ratios with these quartiles are 1, or None if they are too noisy to tell."""
    if not low <= 1 <= high:
        return False
    return True if max(1 - low, high - 1) <= _AS_FAST else None


def channels_note(symbol: Symbol, dtype: str, speedup: float) -> List[str]:
    """Return a note that names convolutions with odd channels, if bfloat16 gains little."""
    names = [
        node.name
        for node in Graph.from_symbol(symbol).all_nodes
        if node.operator == "Convolution" and int(node.attrs["num_filter"]) % _BLOCK
    ]
    if not names or dtype != "bfloat16" or speedup >= _HELD_BACK:
        return []
    return [ODD_CHANNELS.format(layers=counted(len(names), "layer"), names=shortened(names))]


def step_function(
    block: Block,
    inputs: Sequence[Any],
    policy: Optional[Policy],
    loss: Optional[Callable[[Any], Any]] = None,
    trainer: Optional[Trainer] = None,
) -> Callable[[], None]:
    """Return a function that runs a batch once under a policy, or in float32 with None.

    That is inference; with a `loss` of the output, forward and backward pass; with a trainer, its
    update too, with the overflow check where there is a policy.
    """

    def run_step() -> None:
        push_policy(policy)
        try:
            if loss is None:
                with autograd.pause(train_mode=False):
                    block(*inputs)
            else:
                with autograd.record():
                    losses = arrays_in(loss(block(*inputs)))
                checked = policy is not None and trainer is not None
                with scale_loss(losses, trainer) if checked else nullcontext(losses) as scaled:
                    autograd.backward(scaled)
                if trainer is not None:
                    trainer.step(1, ignore_stale_grad=True)
            mx.nd.waitall()
        finally:
            pop_region()

    return run_step
