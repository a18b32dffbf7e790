"""Horovod as a worker sees it: its trainers and optimizers, the other workers, and what it sums.

Horovod is looked at only where the program has imported it.
"""

import sys
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Tuple

from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from .machine import dtype_name
from .wording import counted, one_of

__all__ = [
    "HOROVOD",
    "HorovodStore",
    "PARAMETER_SERVER",
    "Transport",
    "check_gradients",
    "is_distributed",
    "is_horovod_optimizer",
    "is_horovod_trainer",
    "store_of",
]

UNSUPPORTED = (
    "{transport} takes arrays of {allowed}, and {name} is {dtype}: leave parameters in float32 "
    "(mixed precision casts them where it computes with them), or cast what you send to float32"
)


class Transport(NamedTuple):
    """A way between workers."""

    name: str
    dtypes: Tuple[str, ...]

    def check_dtype(self, name: str, dtype: Any) -> None:
        """Raise `ArgumentError` where arrays of this dtype can't be sent."""
        given = dtype_name(dtype)
        if given not in self.dtypes:
            allowed = one_of(self.dtypes)
            raise ArgumentError(
                UNSUPPORTED.format(transport=self.name, allowed=allowed, name=name, dtype=given)
            )

    def check_arrays(self, name: str, value: Any) -> None:
        """Do that for an array, or all arrays in lists; other values are let pass."""
        for array in _arrays(value):
            self.check_dtype(name, array.dtype)


def _arrays(value: Any) -> Iterator[NDArray]:
    if isinstance(value, NDArray):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _arrays(one)


#: Any other dtype ends the servers: the workers would wait for them for ever.
PARAMETER_SERVER = Transport("the parameter server", ("float32", "float16", "float64"))
#: The dtypes that both MXNet and Horovod have.
HOROVOD = Transport("Horovod", ("float32", "float16", "float64", "int8", "uint8", "int32", "int64"))

SPARSE = (
    "Horovod sums dense gradients, and that of {name!r} is {stype}: make its layer with "
    "sparse_grad=False"
)
SEVERAL_DEVICES = (
    "Horovod sums the gradients of one device a process, and {name!r} is on {devices}: start "
    "a process a device, each with ctx=mx.gpu(hvd.local_rank())"
)


def _loaded(name: str) -> Any:
    """Return an attribute of `horovod.mxnet`, None where the program has not imported it."""
    return getattr(sys.modules.get("horovod.mxnet"), name, None)


def is_horovod_trainer(trainer: Any) -> bool:
    """Tell whether Horovod sums the gradients of a trainer."""
    kind = _loaded("DistributedTrainer")
    return kind is not None and isinstance(trainer, kind)


def is_horovod_optimizer(optimizer: Any) -> bool:
    """Tell whether this is an optimizer that has Horovod sum the gradients in each update."""
    kind = _loaded("DistributedOptimizer")
    return kind is not None and isinstance(optimizer, kind)


class HorovodStore:
    """The part of a kvstore's interface that workers compare each other with, on Horovod."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        self.rank, self.num_workers = process_set.rank(), process_set.size()
        self._sum: Any = None

    def init(self, key: Any, value: NDArray) -> None:
        """Do nothing: Horovod's names come and go."""

    def push(self, key: Any, value: NDArray) -> None:
        """Sum an array over the workers."""
        self._sum = sys.modules["horovod.mxnet"].allreduce(
            value, average=False, name=f"mxamp.{key}", process_set=self._process_set
        )

    def pull(self, key: Any, out: NDArray) -> None:
        """Give the sum that was pushed last."""
        self._sum.copyto(out)


def store_of(owner: Any) -> Optional[HorovodStore]:
    """Return the workers of a trainer or optimizer of Horovod; None where it trains alone."""
    process_set = owner._process_set
    if not process_set.included() or process_set.size() == 1:
        return None
    return HorovodStore(process_set)


def check_gradients(name: str, gradients: Sequence[NDArray]) -> None:
    """Raise where Horovod can't sum a parameter's gradients, or would leave some of them out."""
    if len(gradients) > 1:
        raise StateError(
            SEVERAL_DEVICES.format(name=name, devices=counted(len(gradients), "device"))
        )
    (gradient,) = gradients
    if gradient.stype != "default":
        # Horovod would write past the end of its memory.
        raise StateError(SPARSE.format(name=name, stype=gradient.stype))
    HOROVOD.check_arrays(f"the gradient of {name!r}", gradient)


def is_distributed(kvstore: Any) -> bool:
    """Tell whether a kvstore, or one of this name, spans several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))
