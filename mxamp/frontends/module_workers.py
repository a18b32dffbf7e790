"""Modules of several workers: the same weights and settings in all, and steps in step."""

from contextlib import contextmanager
from typing import Any, Iterator, Mapping
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.module import Module

from ..errors import StateError
from ..framework.distributed import (
    PARAMETER_SERVER,
    check_gradients,
    is_distributed,
    is_horovod_optimizer,
    store_of,
)
from ..framework.worker_process import waiting
from ..scaling.distributed import GRADIENTS, Workers, poison
from ..scaling.shared_scale import SharedScale

__all__ = ["check_before", "check_step", "patient", "summed_by_horovod", "synchronize"]

COMPRESSED = (
    "gradient compression makes finite numbers of Inf and NaN, so workers can't see that another "
    "has overflowed: leave compression_params out, or train in float32"
)

#: An attribute of a kvstore, as the modules of several buckets share one. Held anywhere else, it
#: would keep the kvstore alive until MXNet is gone, and the process would abort.
_WORKERS = "_amp_workers"
#: By the optimizers of Horovod that modules have.
_by_optimizer: "WeakKeyDictionary[Any, Workers]" = WeakKeyDictionary()


def check_before(module: Module, kvstore: Any) -> None:
    """Raise where a module can't train in mixed precision on this kvstore."""
    if not is_distributed(kvstore):
        return
    if module._compression_params:
        raise StateError(COMPRESSED)
    group = module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        PARAMETER_SERVER.check_arrays(f"the parameter {name!r}", arrays)


def synchronize(module: Module, shared: SharedScale) -> None:
    """Give a module the weights of worker 0, and compare the workers' settings.

    MXNet shares them by itself only where parameters are updated on the kvstore. With Horovod the
    program does, by `broadcast_parameters`.
    """
    kvstore, group, optimizer = module._kvstore, module._exec_group, module._optimizer
    if is_horovod_optimizer(optimizer):
        store = store_of(optimizer)
        if store is not None and optimizer not in _by_optimizer:
            _by_optimizer[optimizer] = Workers(store)
            _by_optimizer[optimizer].check_settings(shared.scaler.state_dict())
        return
    if not is_distributed(kvstore):
        return
    for name, arrays in zip(group.param_names, group.param_arrays):
        kvstore.pull(name, out=arrays)
    mx.nd.waitall()
    module._params_dirty = True
    workers = Workers(kvstore, string_keys=True)
    workers.check_settings(shared.scaler.state_dict())
    setattr(kvstore, _WORKERS, workers)


@contextmanager
def patient(module: Module) -> Iterator[None]:
    """Say what this worker waits for, if the sum of a module's gradients lasts long."""
    workers = getattr(module._kvstore, _WORKERS, None)
    if workers is None:  # Horovod says so itself
        yield
        return
    with waiting(GRADIENTS, workers.rank):
        yield


@contextmanager
def summed_by_horovod(module: Module, overflown: bool) -> Iterator[None]:
    """Sum a module's gradients now, and not in the updates of its Horovod optimizer.

    An update that one worker skips, the others would wait for. `overflown` tells that this
    worker's gradients are known to have overflowed: all are to know. Does nothing with optimizers
    that are not Horovod's.
    """
    optimizer = module._optimizer
    if not is_horovod_optimizer(optimizer):
        yield
        return
    group = module._exec_group
    listed = [
        (name, gradients)
        for name, gradients in zip(group.param_names, group.grad_arrays)
        if gradients[0] is not None
    ]
    if optimizer in _by_optimizer:
        for name, gradients in listed:
            check_gradients(name, gradients)
            if overflown:
                poison(gradients)
        arrays = [gradients[0] for _, gradients in listed]
        optimizer._do_allreduce(list(range(len(arrays))), arrays)
    optimizer._do_allreduce = _do_nothing
    try:
        yield
    finally:
        del optimizer._do_allreduce


def _do_nothing(*_: Any) -> None:
    """Stand for a sum that has been done."""


def check_step(module: Module, values: Mapping[str, Any]) -> None:
    """Compare the workers after a step, if the environment asks for it."""
    workers = getattr(module._kvstore, _WORKERS, None) or _by_optimizer.get(module._optimizer)
    if workers is not None:
        workers.check_step(values)
