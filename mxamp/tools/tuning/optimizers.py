"""Whether mxamp's optimizer steps are faster than MXNet's here: timed on a model's parameters."""

import time
from typing import Any, Dict, List

import mxnet as mx

from ...framework.arrays import plain_array
from ...patches.autocast import autocast
from ...policy.active import enter_region, leave_region
from ...policy.policy import Policy
from ..debugging.isolated import trained_arrays
from .deadline import Deadline
from .subject import Subject

__all__ = ["step_speedups"]

_ROUNDS = 3
_OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}}


def step_speedups(subject: Subject, policy: Policy, deadline: Deadline) -> Dict[str, float]:
    """Return how many times as fast as MXNet's each optimizer step of a policy's is here.

    The steps change copies of the model's parameters. The two compute the same, bit for bit.
    """
    found = {}
    arrays = list(trained_arrays(subject.block).values())
    for name in sorted(_OPTIMIZERS.keys() & policy.substitutions.keys()):
        deadline.check()
        with autocast(enabled=False):
            steps = [_Steps(name, arrays) for _ in range(2)]
            times: List[List[float]] = [[], []]
            for number in range(_ROUNDS + 1):
                for seconds, step, one in zip(times, steps, (None, policy)):
                    taken = step.take(one)
                    # The first step makes the optimizer's state.
                    if number:
                        seconds.append(taken)
        found[name] = min(times[0]) / min(times[1])
    return found


class _Steps:
    def __init__(self, name: str, arrays: List[Any]) -> None:
        optimizer = mx.optimizer.create(name, learning_rate=1e-6, **_OPTIMIZERS[name])
        self._updater = mx.optimizer.get_updater(optimizer)
        self._weights = [plain_array(array).copy() for array in arrays]
        self._gradients = [array.zeros_like() for array in self._weights]

    def take(self, policy: "Policy | None") -> float:
        numbers = list(range(len(self._weights)))
        mx.nd.waitall()
        began = time.perf_counter()
        enter_region(policy)
        try:
            self._updater(numbers, self._gradients, self._weights)
        finally:
            leave_region()
        mx.nd.waitall()
        return time.perf_counter() - began
