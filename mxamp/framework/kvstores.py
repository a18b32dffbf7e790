"""MXNet's parameter server as a worker sees it: what may travel, and how a worker leaves."""

import atexit
import functools
import os
import sys
from types import TracebackType
from typing import Any, Iterator, Optional, Type

from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from .machine import dtype_name
from .wording import one_of

__all__ = ["check_dtype", "check_dtypes", "exit_on_error", "is_distributed"]

#: Any other dtype ends the servers: the workers would wait for them for ever.
_TRAVELLING = ("float32", "float16", "float64")

NOT_TRAVELLING = (
    "the parameter server takes arrays of {allowed}, and {name} is {dtype}: leave parameters in "
    "float32 (mixed precision casts them where it computes with them), or cast what you push to "
    "float32"
)


def is_distributed(kvstore: Any) -> bool:
    """Tell whether a kvstore, or one of this name, spans several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))


def check_dtype(name: str, dtype: Any) -> None:
    """Raise `ArgumentError` where the parameter server would end at an array of this dtype."""
    given = dtype_name(dtype)
    if given not in _TRAVELLING:
        allowed = one_of(_TRAVELLING)
        raise ArgumentError(NOT_TRAVELLING.format(allowed=allowed, name=name, dtype=given))


def check_dtypes(name: str, value: Any) -> None:
    """Do that for arrays in lists."""
    for array in _arrays(value):
        check_dtype(name, array.dtype)


def _arrays(value: Any) -> Iterator[NDArray]:
    if isinstance(value, NDArray):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _arrays(one)


@functools.lru_cache(maxsize=1)
def exit_on_error() -> None:
    """Let an uncaught exception end a worker of a parameter server; does nothing in others.

    Python's own exit would free the kvstore, and MXNet waits there until all workers do: those
    wait for this one's gradients, and nobody would ever end.
    """
    if os.environ.get("DMLC_ROLE") != "worker":
        return
    before = sys.excepthook

    def show_and_exit(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        before(kind, error, traceback)
        if sys.flags.interactive or hasattr(sys, "ps1"):
            return
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = show_and_exit
