"""Modules on a distributed kvstore: the same weights in all workers, and steps in step."""

from typing import Any, Mapping

import mxnet as mx
from mxnet.module import Module

from ..errors import StateError
from ..framework.kvstores import check_dtypes, is_distributed
from ..scaling.shared_scale import SharedScale
from ..scaling.workers import Workers

__all__ = ["check_before", "check_step", "share_weights"]

COMPRESSED = (
    "gradient compression makes finite numbers of Inf and NaN, so workers can't see that another "
    "has overflowed: leave compression_params out, or train in float32"
)

#: An attribute of a kvstore, as the modules of several buckets share one. Held anywhere else, it
#: would keep the kvstore alive until MXNet is gone, and the process would abort.
_WORKERS = "_amp_workers"


def check_before(module: Module, kvstore: Any) -> None:
    """Raise where a module can't train in mixed precision on this kvstore."""
    if not is_distributed(kvstore):
        return
    if module._compression_params:
        raise StateError(COMPRESSED)
    group = module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        check_dtypes(f"the parameter {name!r}", arrays)


def share_weights(module: Module, shared: SharedScale) -> None:
    """Give a module the weights of worker 0, and compare the workers' settings.

    MXNet shares them by itself only where parameters are updated on the kvstore.
    """
    kvstore, group = module._kvstore, module._exec_group
    if not is_distributed(kvstore):
        return
    for name, arrays in zip(group.param_names, group.param_arrays):
        kvstore.pull(name, out=arrays)
    mx.nd.waitall()
    module._params_dirty = True
    workers = Workers(kvstore, string_keys=True)
    workers.check_settings(shared.scaler.state_dict())
    setattr(kvstore, _WORKERS, workers)


def check_step(module: Module, values: Mapping[str, Any]) -> None:
    """Compare the workers after a step, if the environment asks for it."""
    workers = getattr(module._kvstore, _WORKERS, None)
    if workers is not None:
        workers.check_step(values)
