"""Sums of gradients over devices and workers, and checks that all workers are in step.

An overflow needs no message. Gradients are summed over the workers before they are checked, and an
Inf or NaN of one worker is one in the sum of all. Settings are compared once, before the first
gradients are sent.
"""

import itertools
import math
import os
import weakref
import zlib
from typing import Any, List, Mapping, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from .._version import __version__
from ..errors import StateError
from ..framework.distributed import (
    PARAMETER_SERVER,
    check_horovod_gradients,
    horovod_store,
    is_distributed,
    is_horovod_trainer,
)
from ..framework.worker_process import prepare_worker
from ..policy.active import current_policy, suspended
from ..policy.policy import Policy
from .passes import Entry, Gradients
from .scaler import LossScaler

#: Checksums have this many bits: float32 holds them exactly.
_CHECKSUM = 2**24 - 1
#: Keys of mxamp's exchanges, far from the keys of parameters, which count from 0. Each exchange
#: takes a new key, because a key can be initialized only once.
_keys = itertools.count(2**30)

#: The fields of a `Rule` that change numerical results. Missing kernels do not: float32 and casts
#: give the same values.
_RESULT_FIELDS = (
    "op_class", "conditions", "keep_inputs", "follow_inputs", "keep_outputs", "by_op_type",
    "by_shape",
)  # fmt: skip

DIFFERENT = (
    "worker {other} differs from worker 0 in {what}: start all workers with the same script, "
    "arguments, mxamp and checkpoint. This is worker {rank}, with {own}"
)
COMPRESSED = (
    "the kvstore would compress Inf to a finite number, so no overflow would be found: leave out "
    "compression_params"
)
SECOND_TRAINER = (
    "another trainer of this process uses the parameter server already, and MXNet's trainers all "
    "call their parameters 0, 1, 2 and so on there: make one trainer for all parameters (lr_mult "
    "of a parameter gives it its own learning rate)"
)

#: The trainer of this process whose parameters are on the servers. Global: a process has one set.
_on_servers: List["weakref.ref[Trainer]"] = []


class Workers:
    """The workers that share a distributed kvstore, seen from one of them.

    `string_keys` says that the kvstore's other keys are names: it accepts no mixture.
    """

    def __init__(self, kvstore: Any, string_keys: bool = False) -> None:
        self._kvstore, self._string_keys = kvstore, string_keys
        self.rank, self.count = int(kvstore.rank), int(kvstore.num_workers)
        prepare_worker()

    def check_settings(self, scaler_state: Mapping[str, Any]) -> None:
        """Raise `StateError` in all workers if mxamp's version, the policy or the scaler differ.

        All workers have to call this before they send any gradient.
        """
        state, policy = dict(scaler_state), current_policy()
        values = {
            "mxamp version": __version__,
            "policy": _policy_checksum(policy),
            "loss scale": state.pop("loss_scale", None),
            "loss scaler": sorted(state.items(), key=str),
        }
        rows = self._gather([zlib.crc32(repr(v).encode()) for v in values.values()])
        shown = {**values, "policy": repr(policy), "loss scaler": state.get("kind")}
        own = ", ".join(f"{name} {value}" for name, value in shown.items())
        for other, row in enumerate(rows):
            what = " and ".join(name for name, a, b in zip(values, rows[0], row) if a != b)
            if what:
                raise StateError(DIFFERENT.format(other=other, what=what, rank=self.rank, own=own))

    def _gather(self, checksums: Sequence[int]) -> Any:
        """Send this worker's checksums; return those of all workers, one row per worker."""
        key: Any = next(_keys)
        key = f"mxamp{key}" if self._string_keys else key
        table = np.zeros((self.count, len(checksums)), dtype="float32")
        table[self.rank] = [checksum & _CHECKSUM for checksum in checksums]
        with suspended():
            array = mx.nd.array(table)
            self._kvstore.init(key, array.zeros_like())
            self._kvstore.push(key, array)
            self._kvstore.pull(key, out=array)
            return array.asnumpy()


def _policy_checksum(policy: Optional[Policy]) -> Optional[int]:
    """Return a checksum of the policy's settings that change numerical results; None without one.

    Equal policies have the same checksum in all processes.
    """
    if policy is None:
        return None
    if policy.caches.workers is None:
        rules = [
            (name, [getattr(rule, field) for field in _RESULT_FIELDS])
            for name, rule in sorted(policy.rules.items())
        ]
        layers, substitutions = policy.fp32_layers, sorted(policy.substitutions)
        whole = repr((policy.target_dtype, policy.device, layers, substitutions, rules))
        policy.caches.workers = zlib.crc32(whole.encode())
    return policy.caches.workers


def check_kvstore(trainer: Trainer) -> None:
    """Raise if a kvstore compresses gradients, can't send them, or serves another trainer."""
    if trainer._compression_params:
        raise StateError(COMPRESSED)
    if not is_distributed(trainer._kvstore_params["kvstore"]):
        return
    for param in trainer._params:
        PARAMETER_SERVER.check_dtype(f"the parameter {param.name!r}", param.dtype)
    if os.environ.get("DMLC_ROLE") == "worker":
        # The servers would take the second trainer's parameters for the first one's, and hang.
        if not _on_servers:
            _on_servers.append(weakref.ref(trainer))
        if _on_servers[0]() is not trainer:
            raise StateError(SECOND_TRAINER)


class Reduction:
    """Sums one trainer's gradients over devices and workers.

    `workers` is None in a run of one process, and where "auto" has chosen float32.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.workers: Optional[Workers] = None
        self._uninitialized: Optional[int] = None  #: number of parameters, at the last sum

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train the same parameters."""
        if is_horovod_trainer(self._trainer):
            return horovod_store(self._trainer) is not None
        return is_distributed(self._trainer._kvstore_params["kvstore"])

    def wait_for_weights(self) -> None:
        """Wait until a distributed kvstore holds the trainer's weights; a no-op on others.

        Without the wait, MXNet's `dist_sync` kvstore may take the first gradients for the weights
        where parameters are not updated on it.
        """
        trainer = self._trainer
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if not is_distributed(trainer._kvstore):
            return
        if trainer._params_to_init:
            trainer._init_params()
        # A parameter with a deferred shape is sent later.
        if self._uninitialized != len(trainer._params_to_init):
            mx.nd.waitall()
            self._uninitialized = len(trainer._params_to_init)

    def compare_workers(self, scaler: LossScaler) -> None:
        """Raise `StateError` in the first step if the workers' settings differ."""
        if self.workers is not None or not self.is_distributed:
            return
        trainer = self._trainer
        kvstore = horovod_store(trainer) if is_horovod_trainer(trainer) else trainer._kvstore
        workers = Workers(kvstore)
        workers.check_settings(scaler.state_dict())
        self.workers = workers

    def sum(self, gradients: Gradients) -> None:
        """Sum the trainer's gradients, after setting those that have overflowed to Inf.

        A script may have made such a gradient finite since, by clipping it element by element.
        """
        stale = self._reset_stale(gradients) if self.workers is not None else []
        type(self._trainer)._allreduce_grads(self._trainer)
        for entry in stale:
            # Computed by another worker, which updates with it: so does this worker.
            entry.data._fresh_grad = bool(entry.gradient.asnumpy().any())

    def _reset_stale(self, gradients: Gradients) -> List[Entry]:
        """Set overflown gradients to Inf and stale ones to 0; return the stale ones.

        A stale gradient, not computed since the last step, holds that step's sum. It is set to 0,
        because MXNet would add the old sum again.
        """
        entries = gradients.entries()
        if is_horovod_trainer(self._trainer):
            for entry in entries:
                check_horovod_gradients(entry.param.name, entry.param.list_grad())
        overflown = gradients.overflown
        fill_with_inf([entry.gradient for entry in entries if entry.key in overflown])
        stale = [e for e in entries if not e.is_fresh and e.key not in overflown]
        with suspended():
            for entry in stale:
                entry.gradient[:] = 0
        return stale


def fill_with_inf(gradients: Sequence[NDArray]) -> None:
    """Fill gradients with Inf, so that all workers skip the step after the sum."""
    with suspended():
        for gradient in gradients:
            gradient[:] = math.inf
