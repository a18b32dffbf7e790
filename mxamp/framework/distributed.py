"""Communication between workers: MXNet's distributed kvstores, and Horovod.

mxamp never imports Horovod: it uses the module that the program has imported, if any.
"""

import atexit
import functools
import os
import sys
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from .arrays import map_arrays
from .machine import dtype_name
from .wording import counted, one_of

UNSUPPORTED = (
    "{transport} sends arrays of {allowed}, but {name} is {dtype}: leave parameters in float32 "
    "(mixed precision casts them for computation), or cast the array to float32 before sending it"
)
SPARSE = (
    "Horovod sums only dense gradients, but the gradient of {name!r} is {stype}: make its layer "
    "with sparse_grad=False"
)
SEVERAL_DEVICES = (
    "Horovod sums the gradients of one device per process, but {name!r} is on {devices}: start "
    "one process per device, each with ctx=mx.gpu(hvd.local_rank())"
)


class Transport(NamedTuple):
    """A channel that sends arrays between workers, such as Horovod, and the dtypes it can send."""

    name: str
    dtypes: Tuple[str, ...]

    def check_dtype(self, name: str, dtype: object) -> None:
        """Raise `ArgumentError` if the transport can't send arrays of this dtype."""
        given = dtype_name(dtype)
        if given not in self.dtypes:
            allowed = one_of(self.dtypes)
            raise ArgumentError(
                UNSUPPORTED.format(transport=self.name, allowed=allowed, name=name, dtype=given)
            )

    def check_arrays(self, name: str, value: object) -> None:
        """Raise `ArgumentError` if the transport can't send an array, alone or in a container."""
        map_arrays(value, lambda array: self.check_dtype(name, array.dtype), lambda other: other)


#: Any other dtype crashes the servers, and the workers then wait forever.
PARAMETER_SERVER = Transport("the parameter server", ("float32", "float16", "float64"))
#: The dtypes that both MXNet and Horovod have.
HOROVOD = Transport("Horovod", ("float32", "float16", "float64", "int8", "uint8", "int32", "int64"))


def is_distributed(kvstore: object) -> bool:
    """Return whether a kvstore (object or type name) spans several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))


@functools.lru_cache(maxsize=1)
def end_worker_on_errors() -> None:
    """Make an uncaught exception end a parameter-server worker; a no-op in other processes.

    In plain MXNet the run hangs: the failing worker waits at exit until all workers free their
    kvstores, and these wait for its gradients.
    """
    if os.environ.get("DMLC_ROLE") == "worker":
        sys.excepthook = functools.partial(_show_and_exit, sys.excepthook)


def _show_and_exit(original: Any, kind: type, error: object, traceback: object) -> None:
    """Print an uncaught exception, then end the process unless it is interactive."""
    original(kind, error, traceback)
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)


# ---------------------------------------------------------------------- Horovod


def _is_horovod_instance(value: object, class_name: str) -> bool:
    """Return whether `value` is an instance of a class of horovod.mxnet, given the class's name."""
    kind = getattr(sys.modules.get("horovod.mxnet"), class_name, None)
    return kind is not None and isinstance(value, kind)


def is_horovod_trainer(trainer: object) -> bool:
    """Return whether a trainer is Horovod's DistributedTrainer, which sums gradients."""
    return _is_horovod_instance(trainer, "DistributedTrainer")


def is_horovod_optimizer(optimizer: object) -> bool:
    """Return whether an optimizer is Horovod's, which sums gradients in each update."""
    return _is_horovod_instance(optimizer, "DistributedOptimizer")


class HorovodStore:
    """A kvstore interface over Horovod, through which workers compare mxamp's settings."""

    def __init__(self, process_set: Any) -> None:
        self._process_set = process_set
        self.rank, self.num_workers = process_set.rank(), process_set.size()
        self._sum: Any = None

    def init(self, key: str, value: NDArray) -> None:
        """Do nothing: Horovod needs no keys declared in advance."""

    def push(self, key: str, value: NDArray) -> None:
        """Sum an array over all workers; the next `pull` returns the sum."""
        self._sum = sys.modules["horovod.mxnet"].allreduce(
            value, average=False, name=f"mxamp.{key}", process_set=self._process_set
        )

    def pull(self, key: str, out: NDArray) -> None:
        """Write the sum of the last `push` to `out`."""
        self._sum.copyto(out)


def horovod_store(owner: Any) -> Optional[HorovodStore]:
    """Return the kvstore of a Horovod trainer or optimizer; None if no other worker takes part."""
    process_set = owner._process_set
    if not process_set.included() or process_set.size() == 1:
        return None
    return HorovodStore(process_set)


def check_horovod_gradients(name: str, gradients: Sequence[NDArray]) -> None:
    """Raise `StateError` if Horovod can't sum the gradients of the parameter `name`."""
    if len(gradients) > 1:
        raise StateError(
            SEVERAL_DEVICES.format(name=name, devices=counted(len(gradients), "device"))
        )
    (gradient,) = gradients
    if gradient.stype != "default":
        # Horovod would write past the end of its memory.
        raise StateError(SPARSE.format(name=name, stype=gradient.stype))
    HOROVOD.check_arrays(f"the gradient of {name!r}", gradient)
