"""The workers of a distributed run: all with the same settings, and in step.

Whether a step overflowed needs no message of its own. Gradients are summed over the workers before
they are checked, and an Inf or NaN of one worker is one in the sum of all. Settings are compared
once, before the first gradients are sent; with `MXAMP_CHECK_WORKERS=1` states are after each step,
which costs a message a step.
"""

import itertools
import os
import zlib
from typing import Any, Dict, List, Mapping, Optional, Sequence

import mxnet as mx
import numpy as np

from .._version import __version__
from ..errors import StateError
from ..framework.worker_process import prepare, waiting
from ..policy.active import current_policy, suspended
from ..policy.policy import Policy

__all__ = ["GRADIENTS", "VARIABLE", "Workers"]

VARIABLE = "MXAMP_CHECK_WORKERS"

#: Of the numbers that are compared.
_BITS = 32
#: Far from the keys of parameters, which are counted from 0. One more for each exchange: a key is
#: initialized once.
_keys = itertools.count(2**30)

#: What results depend on of a `Rule`. Which kernels a machine lacks is not among it: the values are
#: the same without them.
_DECISIVE = (
    "op_class",
    "conditions",
    "keep_inputs",
    "follow_inputs",
    "keep_outputs",
    "by_op_type",
    "by_shape",
)

DIFFERENT = (
    "worker {other} differs from worker 0 in {what}: start all workers with the same script, "
    "arguments, mxamp and checkpoint. This is worker {rank}, with {own}"
)
OUT_OF_STEP = (
    "worker {other} is out of step with worker 0: they differ in {what}. This is worker "
    "{rank}, with {own}. Did a worker train on another number of batches, or change the scale?"
)
WAITING = (
    "worker %s waits for the other workers to begin training with mxamp: one of them may have "
    "ended, trains without mxamp, or in float32, as 'auto' chooses for each machine by itself"
)
GRADIENTS = (
    "worker %s waits for the gradients of the other workers: one of them may have ended, train on "
    "fewer batches, or with other parameters"
)


class Workers:
    """The workers that share a distributed kvstore, as one of them sees them.

    `string_keys` tells that the kvstore's other keys are names: it takes no mixture.
    """

    def __init__(self, kvstore: Any, string_keys: bool = False) -> None:
        self._kvstore, self._string_keys = kvstore, string_keys
        self.rank, self.count = int(kvstore.rank), int(kvstore.num_workers)
        self._step_key: Any = None
        self._checks_steps = os.environ.get(VARIABLE, "0") not in ("", "0")
        prepare()

    def check_settings(self, scaler_state: Mapping[str, Any]) -> None:
        """Raise `StateError`, in all workers, where one of them differs in what it trains with.

        `scaler_state` is the loss scaler's. To be called by all workers, before any gradient.
        """
        scale = scaler_state.get("loss_scale")
        others = {name: value for name, value in scaler_state.items() if name != "loss_scale"}
        values = {
            "mxamp version": __version__,
            "policy": _described(current_policy()),
            "loss scale": scale,
            "loss scaler": sorted(others.items(), key=str),
        }
        shown = {**values, "policy": repr(current_policy()), "loss scaler": others.get("kind")}
        with waiting(WAITING, self.rank):
            self._compare(DIFFERENT, self._new_key(len(values) * _BITS), values, shown)

    def check_step(self, values: Mapping[str, Any]) -> None:
        """Raise `StateError`, in all workers, where their states after a step differ.

        Does nothing unless the environment asks for it.
        """
        if not self._checks_steps:
            return
        if self._step_key is None:
            self._step_key = self._new_key((len(values) + 2) * _BITS)
        full = {**values, "mxamp version": __version__, "policy": _described(current_policy())}
        self._compare(OUT_OF_STEP, self._step_key, full, values)

    def _compare(
        self, message: str, key: Any, values: Mapping[str, Any], shown: Mapping[str, Any]
    ) -> None:
        numbers = [zlib.crc32(repr(value).encode()) for value in values.values()]
        counts = self._sum(key, _bits(numbers))
        if np.isin(counts, (0, self.count)).all():
            return
        rows = self._all_numbers(numbers)
        for other, row in enumerate(rows):
            what = [name for name, here, there in zip(values, rows[0], row) if here != there]
            if what:
                named = " and ".join(what)
                own = ", ".join(f"{name} {value}" for name, value in shown.items())
                raise StateError(message.format(other=other, what=named, rank=self.rank, own=own))

    def _new_key(self, *shape: int) -> Any:
        key: Any = next(_keys)
        key = f"mxamp{key}" if self._string_keys else key
        with suspended():
            self._kvstore.init(key, mx.nd.zeros(shape))
        return key

    def _sum(self, key: Any, own: Any) -> Any:
        """Return the sum of the NumPy arrays that the workers give."""
        with suspended():
            array = mx.nd.array(own)
            self._kvstore.push(key, array)
            self._kvstore.pull(key, out=array)
            return array.asnumpy()

    def _all_numbers(self, numbers: Sequence[int]) -> List[List[int]]:
        """Return the numbers of each worker; what is sent grows with the workers' number."""
        bits = _bits(numbers)
        table = np.zeros((self.count, len(bits)), dtype="float32")
        table[self.rank] = bits
        summed = self._sum(self._new_key(*table.shape), table)
        powers = 2 ** np.arange(_BITS, dtype="uint64")
        by_number = summed.reshape(self.count, len(numbers), _BITS).astype("uint64")
        found: List[List[int]] = (by_number * powers).sum(axis=-1).tolist()
        return found


def _bits(numbers: Sequence[int]) -> Any:
    """Return the bits of numbers as an array of float32, whose sums are exact."""
    bits = [number >> bit & 1 for number in numbers for bit in range(_BITS)]
    return np.array(bits, dtype="float32")


def _described(policy: Optional[Policy]) -> Optional[int]:
    """Return a number for what results depend on, the same in all processes."""
    if policy is None:
        return None
    cache: Dict[str, int] = policy.caches
    if "workers" not in cache:
        rules = [
            (name, [getattr(rule, field) for field in _DECISIVE])
            for name, rule in sorted(policy.rules.items())
        ]
        layers, substitutions = policy.fp32_layers, sorted(policy.substitutions)
        whole = repr((policy.target_dtype, policy.device, layers, substitutions, rules))
        cache["workers"] = zlib.crc32(whole.encode())
    return cache["workers"]
