"""Ways to run a model, timed in turns.

In each round every way runs once, float32 first, and the ratio to float32 in the same round
counts: a machine that slows down slows all of them.
"""

import math
import statistics
import time
from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, Trainer

from ...policy.active import pop_region, push_policy
from ...policy.policy import Policy
from ...scaling.trainer import scale_loss
from ..debugging.isolated import arrays_in

__all__ = ["Timed", "is_as_fast", "quartiles", "repeats_of", "run_round", "step_function"]

#: The least seconds of a turn: fast ways run several times in one.
_SHORTEST = 0.01
#: Ratios within this distance of 1 are "as fast"; a wider spread around 1 is noise.
_AS_FAST = 0.05


class Timed:
    """A way to run a model, and the seconds of its turns."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self.seconds: List[float] = []  #: of one run, by turn
        self.ratios: List[float] = []  #: float32's seconds over these, of the same round

    def mean_seconds(self, repeats: int = 1) -> float:
        """Run the model `repeats` times; return the mean seconds of a run."""
        began = time.perf_counter()
        for _ in range(repeats):
            self._step()
        return (time.perf_counter() - began) / repeats

    def add_turn(self, seconds: float, plain_seconds: float) -> None:
        """Record the seconds of a run, and those of float32 in the same round."""
        self.seconds.append(seconds)
        self.ratios.append(plain_seconds / seconds)

    @property
    def milliseconds(self) -> float:
        """The median milliseconds of a run."""
        return statistics.median(self.seconds) * 1e3

    @property
    def speedup(self) -> float:
        """The median ratio to float32; 0 before the first turn."""
        return statistics.median(self.ratios) if self.ratios else 0.0


def run_round(plain: Timed, others: Sequence[Timed], repeats: int) -> None:
    """Time float32, then each of the other ways."""
    plain_seconds = plain.mean_seconds(repeats)
    plain.add_turn(plain_seconds, plain_seconds)
    for other in others:
        other.add_turn(other.mean_seconds(repeats), plain_seconds)


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
