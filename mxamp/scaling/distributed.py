"""Sums of gradients over devices and workers, and checks that all workers are in step.

An overflow needs no message. Gradients are summed over the workers before they are checked, and an
Inf or NaN of one worker is one in the sum of all. Settings are compared once, before the first
gradients are sent.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from operator import attrgetter
from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from .._version import __version__
from ..errors import StateError
from ..framework import distributed as transports
from ..policy.active import current_policy, suspended
from ..policy.policy import Policy
from .passes import Entry, Gradients
from .scaler import LossScaler

#: Checksums have this many bits: float32 holds them exactly.
_CHECKSUM = 2**24 - 1
#: Keys of mxamp's exchanges, far from the keys of parameters, which count from 0. Each exchange
#: takes a new key, because a key can be initialized only once.
_keys = itertools.count(2**30)
_RESULT_FIELDS = attrgetter(
    "op_class", "conditions", "keep_inputs", "follow_inputs", "keep_outputs", "by_op_type",
    "by_shape",
)  # fmt: skip
#: The trainer of this process whose parameters are on the servers. Global: a process has one set.
_on_servers: list[weakref.ref[Trainer]] = []

COMPRESSED = "the kvstore would compress Inf to a finite number: leave out compression_params"


def check_settings(kvstore: Any, scaler_state: Mapping[str, Any], key_type: type = int) -> None:
    """Raise `StateError` in all workers if mxamp's version, the policy or the scaler differ.

    All workers have to call this before they send any gradient. A kvstore accepts no mixture of
    key types: `key_type` is the type of its other keys.
    """
    transports.end_worker_on_errors()
    policy = current_policy()
    settings = {
        "mxamp version": __version__,
        "policy": None if policy is None else _results_of(policy),
        "loss scale": scaler_state.get("loss_scale"),
        "loss scaler": {k: v for k, v in sorted(scaler_state.items()) if k != "loss_scale"},
    }
    # One row per worker, in which the others send zeros.
    table = np.zeros((kvstore.num_workers, len(settings)), dtype="float32")
    table[kvstore.rank] = [zlib.crc32(repr(v).encode()) & _CHECKSUM for v in settings.values()]
    key = key_type(next(_keys))
    with suspended():
        array = mx.nd.array(table)
        kvstore.init(key, array.zeros_like())
        kvstore.push(key, array)
        kvstore.pull(key, out=array)
        rows = array.asnumpy()
    settings["policy"] = policy
    own = ", ".join(f"{name} {value}" for name, value in settings.items())
    for other, row in enumerate(rows):
        what = " and ".join(name for name, a, b in zip(settings, rows[0], row) if a != b)
        if what:
            raise StateError(
                f"worker {other} differs from worker 0 in {what}: start all workers with the same "
                f"script, arguments, mxamp and checkpoint. Worker {kvstore.rank} has {own}"
            )


def _results_of(policy: Policy) -> Any:
    """Return the settings of a policy that change numerical results, alike in all processes.

    Missing kernels do not change them: float32 and casts give the same values.
    """
    rules = [(name, _RESULT_FIELDS(rule)) for name, rule in sorted(policy.rules.items())]
    substitutions = sorted(policy.substitutions)
    return policy.target_dtype, policy.device, policy.fp32_layers, substitutions, rules


def check_kvstore(trainer: Trainer) -> None:
    """Raise if a kvstore compresses gradients, can't send them, or serves another trainer."""
    if trainer._compression_params:
        raise StateError(COMPRESSED)
    if not transports.is_distributed(trainer._kvstore_params["kvstore"]):
        return
    for param in trainer._params:
        transports.PARAMETER_SERVER.check_dtype(f"the parameter {param.name!r}", param.dtype)
    if os.environ.get("DMLC_ROLE") == "worker":
        # MXNet's trainers all call their parameters 0, 1, 2 and so on. The servers would take the
        # second trainer's parameters for the first one's, and hang.
        _on_servers[:] = _on_servers or [weakref.ref(trainer)]
        if _on_servers[0]() is not trainer:
            raise StateError(
                "another trainer of this process uses the parameter server already: make one "
                "trainer for all parameters (lr_mult gives a parameter its own learning rate)"
            )


class Reduction:
    """Sums one trainer's gradients over devices and workers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: The kvstore through which the workers have compared settings. None in a run of one
        #: process, and where "auto" has chosen float32.
        self.workers: Any = None
        self._uninitialized: int | None = None  #: number of parameters, at the last sum

    def wait_for_weights(self) -> None:
        """Wait until a distributed kvstore holds the trainer's weights; a no-op on others.

        Without the wait, MXNet's `dist_sync` kvstore may take the first gradients for the weights
        where parameters are not updated on it.
        """
        trainer = self._trainer
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if trainer._params_to_init:
            trainer._init_params()
        uninitialized = len(trainer._params_to_init)  # of a deferred shape, sent later
        if self._uninitialized != uninitialized and transports.is_distributed(trainer._kvstore):
            mx.nd.waitall()
            self._uninitialized = uninitialized

    def compare_workers(self, scaler: LossScaler) -> None:
        """Raise `StateError` in the first step if the workers' settings differ."""
        if self.workers is None:
            trainer = self._trainer
            store = trainer._kvstore if transports.is_distributed(trainer._kvstore) else None
            if transports.is_horovod_trainer(trainer):
                store = transports.horovod_store(trainer)
            if store is not None:
                check_settings(store, scaler.state_dict())
                self.workers = store

    def sum(self, gradients: Gradients) -> None:
        """Sum the trainer's gradients.

        With several workers, a gradient that has overflowed is set to Inf before, as a script may
        have made it finite since by clipping. A stale one is set to 0: not computed since the last
        step, it holds that step's sum, which MXNet would add again.
        """
        stale: list[Entry] = []
        if self.workers is not None:
            entries, overflown = gradients.entries(), gradients.is_overflown
            if transports.is_horovod_trainer(self._trainer):
                for entry in entries:
                    transports.check_horovod_gradients(entry.param.name, entry.param.list_grad())
            fill_with_inf([entry.gradient for entry in entries if overflown(entry)])
            stale = [e for e in entries if not e.is_fresh and not overflown(e)]
        with suspended():
            for entry in stale:
                entry.gradient[:] = 0
        type(self._trainer)._allreduce_grads(self._trainer)
        for entry in stale:
            # Computed by another worker, which updates with it: so does this worker.
            entry.data._fresh_grad = bool(entry.gradient.asnumpy().any())


def fill_with_inf(gradients: Sequence[NDArray]) -> None:
    """Fill gradients with Inf, so that all workers skip the step after the sum."""
    with suspended():
        for gradient in gradients:
            gradient[:] = np.inf
