"""Gradient sums over devices and workers, and checks that all workers have equal settings.

An overflow needs no message. Gradients are summed over the workers before they are checked, and an
Inf or NaN of one worker is one in the sum of all. Settings are compared once, before the first
gradients are sent.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from .._version import __version__
from ..errors import StateError
from ..framework import distributed as transports
from ..framework.patching import Original
from ..policy.active import current_policy, suspended
from ..policy.rules import custom_classes
from .ledger import Entry, GradientRecord, entries_of, ledger

#: Keys of mxamp's exchanges, far from the keys of parameters, which count from 0. Each exchange
#: takes a new key, because a key can be initialized only once.
_keys = itertools.count(2**30)
#: The trainer of this process whose parameters are on the servers, which serve one trainer alone.
_on_servers: list[weakref.ref[Trainer]] = []

DIFFERENT = (
    "worker {} differs from worker 0 in mxamp's version, policy or loss scaler: start all workers "
    "alike. Worker {} has mxamp {}, {}, {}"
)
COMPRESSED = "the kvstore would compress Inf to a finite number: leave out compression_params"


def check_settings(kvstore: Any, scaler_state: Mapping[str, Any], key_type: type = int) -> None:
    """Raise in all workers unless all have the same mxamp version, policy and loss scaler.

    All workers have to call this before they send any gradient. A kvstore accepts no mixture of
    key types: `key_type` is the type of its other keys.
    """
    transports.end_worker_on_errors()
    policy = current_policy()
    # Missing kernels change no results: float32 and casts give the same values.
    rules = policy and (policy.target_dtype, policy.device, policy.changes, custom_classes())
    settings = repr((__version__, rules, sorted(scaler_state.items())))
    # One element per worker, in which the others send zeros.
    sums = np.zeros((kvstore.num_workers, 1), dtype="float32")
    sums[kvstore.rank] = zlib.crc32(settings.encode()) % 2**24  # exact in float32
    key = key_type(next(_keys))
    with suspended():
        array = mx.nd.array(sums)
        kvstore.init(key, array.zeros_like())
        kvstore.push(key, array)
        kvstore.pull(key, out=array)
        sums = array.asnumpy()
    for other in np.flatnonzero(sums != sums[0])[:1]:
        own = kvstore.rank, __version__, policy, dict(scaler_state)
        raise StateError(DIFFERENT.format(other, *own))


def check_kvstore(trainer: Trainer) -> None:
    """Raise if a kvstore compresses gradients, can't send a dtype, or serves another trainer."""
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


def wait_for_weights(trainer: Trainer, waited_for: int | None) -> int:
    """Wait, unless done before, until a distributed kvstore has a trainer's initial weights.

    Without that wait, MXNet's `dist_sync` kvstore may take the first gradients for the weights
    where parameters are not updated on it. Returns the number of parameters of a deferred shape,
    which are sent later: `waited_for` at the next call.
    """
    unsent = len(trainer._params_to_init)
    if waited_for != unsent and transports.is_distributed(trainer._kvstore):
        mx.nd.waitall()
    return unsent


def patched_init_params(original: Original, trainer: Trainer) -> None:
    """Wait for pending computation, then call `Trainer._init_params`, which sends the parameters.

    Under static_shape MXNet's engine does not know that the pass writes BatchNorm's running
    statistics: the kvstore would send their old values to all devices.
    """
    mx.nd.waitall()
    original(trainer)


def workers_of(trainer: Trainer) -> Any:
    """Return the kvstore that connects a trainer's workers; None for a single worker.

    Before the first step it is the kvstore that the script has given, which may be a name.
    """
    if transports.is_horovod_trainer(trainer):
        return transports.horovod_store(trainer)
    store = trainer._kvstore or trainer._kvstore_params["kvstore"]
    return store if transports.is_distributed(store) else None


def sum_gradients(trainer: Trainer, scale: float, has_workers: bool) -> None:
    """Sum a trainer's gradients, which carry the loss scale `scale`, over devices and workers.

    With several workers, a gradient that has overflowed is set to Inf before, as a script may
    have made it finite since by clipping. A stale one is set to 0: not computed since the last
    step, it holds that step's sum, which MXNet would add again.
    """
    stale: list[Entry] = []
    for entry in entries_of(trainer) if has_workers else ():
        if transports.is_horovod_trainer(trainer):
            transports.check_horovod_gradients(entry.param.name, entry.param.list_grad())
        if ledger.of(entry).overflown:
            fill([entry.gradient], np.inf)
        elif not entry.data._fresh_grad:
            fill([entry.gradient], 0)
            ledger.note(entry, GradientRecord(scale))
            stale.append(entry)
    type(trainer)._allreduce_grads(trainer)
    for entry in stale:
        # A sum other than 0 is of another worker. All workers must update with it.
        entry.data._fresh_grad = bool(entry.gradient.asnumpy().any())


def fill(gradients: Sequence[NDArray], value: float) -> None:
    """Set all elements of gradients to `value`; Inf makes every worker skip the step."""
    with suspended():
        for gradient in gradients:
            gradient[:] = value
