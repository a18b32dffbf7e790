"""Ways to run a model, timed in turns.

In each round every way runs once, float32 first, and the ratio to float32 in the same round
counts: a machine that slows down slows all of them.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from contextlib import nullcontext
from typing import Any, Callable, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, Trainer

from ...errors import ArgumentError
from ...framework.machine import dtype_name
from ...framework.wording import shortened, shown
from ...graph.ir import Graph
from ...policy.active import pop_region, push_policy
from ...policy.policy import Policy
from ...scaling.trainer import scale_loss
from ..debugging.measured import Batch, arrays_in, loss_of

BUDGET = "`budget` must be seconds above 0, or a text such as '90s', '5m' or '1h', not {given}"
NOT_FLOAT32 = "parameter {name!r} is {dtype}: give a float32 model, or convert it to float32 first"
ODD_CHANNELS = "bfloat16 kernels are slow for output channels that are no multiple of 16: {names}."

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d*\.?\d+(?:e[-+]?\d+)?)\s*([smh]?)\s*")
#: The least seconds of a turn: fast ways run several times in one.
_SHORTEST = 0.01
#: Rounds that are timed whatever the budget, and at most.
_LEAST, _MOST = 3, 15
#: The channels of a block of oneDNN's layouts, and the speed below which odd ones are named.
_BLOCK, _HELD_BACK = 16, 1.5


def seconds_of(budget: Any) -> float:
    """Return a `budget` argument, a number or a text such as "5m", as seconds.

    >>> seconds_of("90s"), seconds_of("5m"), seconds_of(30)
    (90.0, 300.0, 30.0)
    """
    found = _DURATION.fullmatch(str(budget))
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise ArgumentError(BUDGET.format(given=shown(budget)))
    return seconds


def check_float32(net: Block) -> None:
    """Raise `ArgumentError` if a parameter of a net is in another float dtype than float32."""
    for param in net.collect_params().values():
        dtype = dtype_name(param.dtype)
        if "float" in dtype and dtype != "float32":
            raise ArgumentError(NOT_FLOAT32.format(name=param.name, dtype=dtype))


class Timed:
    """A way to run a model, and the seconds of a run by turn."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.seconds: list[float] = []

    def mean_seconds(self, repeats: int = 1) -> float:
        """Run the model `repeats` times; return the mean seconds of a run."""
        began = time.perf_counter()
        for _ in range(repeats):
            self._step()
        return (time.perf_counter() - began) / repeats

    def measured(self, plain: Timed) -> tuple[float, float, tuple[float, float]]:
        """Return the median milliseconds, and the median and quartiles of the ratio to `plain`."""
        ratios = [other / own for own, other in zip(self.seconds, plain.seconds)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return statistics.median(self.seconds) * 1e3, middle, (round(low, 3), round(high, 3))


def time_in_turns(groups: Sequence[Sequence[Timed]], ends: float) -> None:
    """Time the ways of each group in turns, its first one being float32.

    There are at least 3 rounds, and at most 15; none begins after the monotonic time `ends`.
    """
    for way in (way for ways in groups for way in ways):
        way.mean_seconds(2)  # the first run makes the graph, the second one the memory
    repeats = [max(1, math.ceil(_SHORTEST / ways[0].mean_seconds())) for ways in groups]
    count = 0
    while count < _LEAST or (count < _MOST and time.monotonic() < ends):
        for ways, times in zip(groups, repeats):
            for way in ways:
                way.seconds.append(way.mean_seconds(times))
        count += 1


def channels_note(block: Block, dtype: str, speedup: float) -> list[str]:
    """Return a note that names convolutions with odd channels, if bfloat16 gains little."""
    graph = getattr(block, "_cached_graph", None)
    nodes = Graph.from_symbol(graph[1]).all_nodes if graph else ()
    convolutions = [node for node in nodes if node.operator == "Convolution"]
    names = [one.name for one in convolutions if int(one.attrs["num_filter"]) % _BLOCK]
    if not names or dtype != "bfloat16" or speedup >= _HELD_BACK:
        return []
    return [ODD_CHANNELS.format(names=shortened(names))]


def step_function(
    block: Block,
    batch: Batch,
    policy: Policy | None,
    loss: Callable[[Any, Any], Any] | None = None,
    trainer: Trainer | None = None,
) -> Callable[[], None]:
    """Return a function that runs a batch once under a policy, or in float32 with None.

    That is inference; with a `loss`, forward and backward pass; with a trainer, its update too,
    with the overflow check where there is a policy.
    """

    def run_step() -> None:
        push_policy(policy)
        try:
            if loss is None:
                with autograd.pause(train_mode=False):
                    block(*batch.inputs)
            else:
                with autograd.record():
                    losses = arrays_in(loss_of(loss, block(*batch.inputs), batch.label))
                checked = policy is not None and trainer is not None
                with scale_loss(losses, trainer) if checked else nullcontext(losses) as scaled:
                    autograd.backward(scaled)
                if trainer is not None:
                    trainer.step(1, ignore_stale_grad=True)
            mx.nd.waitall()
        finally:
            pop_region()

    return run_step
