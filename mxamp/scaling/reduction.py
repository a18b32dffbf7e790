"""The sum of a trainer's gradients over devices and workers, and what has to be right before it."""

import math
import os
import weakref
from typing import AbstractSet, Any, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.distributed import (
    PARAMETER_SERVER,
    check_gradients,
    is_distributed,
    is_horovod_trainer,
    store_of,
)
from ..framework.worker_process import begin, end
from ..policy.active import suspended
from .report import StepReport
from .scaler import Scaler
from .workers import GRADIENTS, Workers

__all__ = ["Gradients", "Reduction", "check_trainer", "fresh_gradients", "poison"]

COMPRESSED = (
    "MXNet's Trainer can't compress gradients on a distributed kvstore: leave out "
    "compression_params"
)
SECOND_TRAINER = (
    "another trainer of this process uses the parameter server already, and MXNet's trainers all "
    "call their parameters 0, 1, 2 and so on there: make one trainer for all parameters (lr_mult "
    "of a parameter gives it a learning rate of its own)"
)

Gradients = List[Tuple[Parameter, List[NDArray]]]

#: The trainer of this process whose parameters are on the servers.
_on_servers: List["weakref.ref[Trainer]"] = []


def check_trainer(trainer: Trainer) -> None:
    """Raise where a trainer can't train on its distributed kvstore in mixed precision."""
    if not is_distributed(trainer._kvstore_params["kvstore"]):
        return
    if trainer._compression_params:
        raise StateError(COMPRESSED)
    for param in trainer._params:
        PARAMETER_SERVER.check_dtype(f"the parameter {param.name!r}", param.dtype)
    _check_alone(trainer)


def _check_alone(trainer: Trainer) -> None:
    """Raise where the servers would take a trainer's parameters for another's, and hang."""
    if os.environ.get("DMLC_ROLE") != "worker":
        return
    if not _on_servers:
        _on_servers.append(weakref.ref(trainer))
    if _on_servers[0]() is not trainer:
        raise StateError(SECOND_TRAINER)


class Reduction:
    """The sums of one trainer's gradients.

    `workers` is None where it trains in this process alone, and where "auto" has chosen float32.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.workers: Optional[Workers] = None
        self._uninitialized: Optional[int] = None  # parameters, at the last sum
        self._wait: Any = None  # for the sum that is under way

    @property
    def is_distributed(self) -> bool:
        """Whether other processes train the same parameters."""
        if is_horovod_trainer(self._trainer):
            return store_of(self._trainer) is not None
        return is_distributed(self._trainer._kvstore_params["kvstore"])

    @property
    def is_compressed(self) -> bool:
        """Whether gradients are rounded to a few bits on their way.

        That makes finite numbers of Inf, and keeps the rest of it for all later steps.
        """
        return bool(self._trainer._compression_params and self._trainer._kvstore)

    @property
    def comes_from_others(self) -> bool:
        """Whether other workers alone have computed gradients since the last step."""
        return self.workers is not None and not fresh_gradients(self._trainer._params)

    def wait_for_weights(self) -> None:
        """Wait until a distributed kvstore has the trainer's weights, before gradients follow.

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
        # A parameter whose shape was not known at first is sent later.
        if self._uninitialized != len(trainer._params_to_init):
            mx.nd.waitall()
            self._uninitialized = len(trainer._params_to_init)

    def compare_workers(self, scaler: Scaler) -> None:
        """Raise, the first time, where the settings of the workers differ; those of Horovod too."""
        if self.workers is not None or not self.is_distributed:
            return
        trainer = self._trainer
        kvstore = store_of(trainer) if is_horovod_trainer(trainer) else trainer._kvstore
        workers = Workers(kvstore)
        workers.check_settings(scaler.state_dict())
        self.workers = workers

    def sum(self, overflown: AbstractSet[int]) -> None:
        """Sum the gradients, those that this worker knows to have overflowed as Inf.

        `overflown` are parameters' arrays by `id`. Their gradients may look finite by now: a
        script may have clipped them element by element.
        """
        stale = self._prepare(overflown) if self.workers is not None else []
        self.received()
        if self.workers is not None:
            self._wait = begin(GRADIENTS, self.workers.rank)
        type(self._trainer)._allreduce_grads(self._trainer)
        for data, gradient in stale:
            # Another worker has computed it, and updates with it: so does this one.
            data._fresh_grad = bool(gradient.asnumpy().any())

    def compare_step(self, step: int, gradients: str, report: StepReport) -> None:
        """Raise where another worker has decided otherwise on a step."""
        self.received()
        if self.workers is not None:
            decision = "update" if report.stepped else "skip"
            done = {"step": step, "decision": decision, "gradients": gradients}
            self.workers.check_step({**done, "loss scale": report.next_loss_scale})

    def received(self) -> None:
        """Take note that the sum is there: this worker waits for the others no more."""
        end(self._wait)

    def _prepare(self, overflown: AbstractSet[int]) -> List[Tuple[NDArray, NDArray]]:
        """Make gradients ready for the sum over workers.

        Returns the arrays and gradients that this worker has not computed since the last step.
        They hold that step's sum, which MXNet would add again.
        """
        by_horovod = is_horovod_trainer(self._trainer)
        stale = []
        for param in self._trainer._params:
            if param.grad_req == "null" or param._grad is None:
                continue
            if by_horovod:
                check_gradients(param.name, param.list_grad())
            for data, gradient in zip(param.list_data(), param.list_grad()):
                if id(data) in overflown:
                    poison([gradient])
                elif not data._fresh_grad:
                    stale.append((data, gradient))
        with suspended():
            for _, gradient in stale:
                gradient[:] = 0
        return stale

    def used(self, params: Sequence[Parameter]) -> Gradients:
        """Return the gradients that the update is going to use, in this worker or in another."""
        return fresh_gradients(params, stale=self.workers is not None)


def poison(gradients: Sequence[NDArray]) -> None:
    """Make gradients overflow in the sum over workers, so that all skip the step."""
    with suspended():
        for gradient in gradients:
            gradient[:] = math.inf


def fresh_gradients(params: Sequence[Parameter], stale: bool = False) -> Gradients:
    """Return the gradients, on all devices, that backward has written since the last step.

    With `stale` those that it has not written too.
    """
    found = []
    for param in params:
        if param.grad_req == "null" or param._grad is None:
            continue
        pairs = zip(param.list_data(), param.list_grad())
        gradients = [gradient for data, gradient in pairs if stale or data._fresh_grad]
        if gradients:
            found.append((param, gradients))
    return found
