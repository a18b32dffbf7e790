"""Patches for a parameter server's worker: log long waits, and exit without the other workers.

A worker that exits frees its kvstore, and MXNet then waits until all workers free theirs. Workers
that wait for its gradients never do, so without these patches no process would end.

`mxamp.init` patches any worker. The start-up hook (mxamp/startup) patches workers of `mxamp launch`
as soon as they import MXNet.
"""

import atexit
import ctypes
import functools
import logging
import os
import sys
import weakref
from contextlib import contextmanager
from threading import Timer
from types import TracebackType
from typing import Any, Callable, Iterator, List, Optional, Type

from .patching import Patch

__all__ = ["LAUNCHED", "begin", "end", "prepare", "waiting"]

logger = logging.getLogger("mxamp")

#: Set by `mxamp launch` for its workers.
LAUNCHED = "MXAMP_LAUNCHED"

#: Seconds after which a worker logs what it waits for.
_PATIENCE = 60.0

#: Methods of a kvstore that return once all workers have called them.
_MEETINGS = ("init", "broadcast", "_barrier")

START = (
    "this worker waits for the scheduler, all servers and all workers to start, and for each "
    "worker to create its kvstore: one of them may have ended, or may never create one"
)
ALONE = (
    "this worker created no distributed kvstore, so it exchanged no gradients with other workers: "
    "give kvstore='dist_sync' to gluon.Trainer or module.fit"
)
MEET = (
    "this worker waits for all workers to call kvstore.%s(): one of them may have ended, or may "
    "have other parameters"
)


# ---------------------------------------------------------------------- long waits


def begin(message: str, *args: Any) -> Timer:
    """Start a timer that logs a warning after a minute, unless `end` stops it."""
    timer = Timer(_PATIENCE, logger.warning, (message, *args))
    timer.daemon = True
    timer.start()
    return timer


def end(wait: Optional[Timer]) -> None:
    """Stop a timer of `begin`; do nothing for None."""
    if wait is not None:
        wait.cancel()


@contextmanager
def waiting(message: str, *args: Any) -> Iterator[None]:
    """Log a warning, once, if the body takes longer than a minute."""
    timer = begin(message, *args)
    try:
        yield
    finally:
        end(timer)


# ---------------------------------------------------------------------- the process


class _Shared:
    """The distributed kvstores of this worker."""

    kvstore = False  #: whether the worker has called `kvstore.create` for one
    stores: "weakref.WeakSet[Any]" = weakref.WeakSet()


@functools.lru_cache(maxsize=1)
def prepare() -> None:
    """Patch kvstores and exits in a parameter server's worker; a no-op in other processes.

    An uncaught exception always ends the worker. Workers of `mxamp launch` never wait at exit: the
    launcher sees how each worker ends, and ends the servers after the last.
    """
    if os.environ.get("DMLC_ROLE") != "worker":
        return
    launched = bool(os.environ.get(LAUNCHED))
    sys.excepthook = _show_and_exit(sys.excepthook)
    for patch in _patches(launched):
        patch.apply()
    if launched:
        atexit.register(_free_stores)
        if os.environ.get("DMLC_NUM_WORKER", "1") != "1":
            atexit.register(_warn_alone)


def _warn_alone() -> None:
    if not _Shared.kvstore:
        logger.warning(ALONE)


def _free_stores() -> None:
    """Free the kvstores before Python shuts down, when their threads would abort the process."""
    from mxnet.base import _LIB, KVStoreHandle, check_call

    for store in list(_Shared.stores):
        handle, store.handle = store.handle, KVStoreHandle()
        check_call(_LIB.MXKVStoreFree(handle))


def _patches(launched: bool) -> List[Patch]:
    # Imported here, since the launcher imports no MXNet.
    from mxnet import kvstore

    patches = [Patch(kvstore.KVStore, name, _patient) for name in _MEETINGS]
    patches.append(Patch(kvstore, "create", _patient_start))
    if launched:
        patches.append(Patch(kvstore.KVStore, "__init__", _without_barrier))
    return patches


def _patient_start(original: Callable[..., Any]) -> Callable[..., Any]:
    from .distributed import is_distributed  # imports MXNet, which the launcher must not

    @functools.wraps(original)
    def create(name: str = "local") -> Any:
        if not is_distributed(name):
            return original(name)
        _Shared.kvstore = True
        with waiting(START):
            return original(name)

    return create


def _patient(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patient(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(MEET, original.__name__.lstrip("_")):
            return original(self, *args, **kwargs)

    return patient


def _without_barrier(original: Callable[..., None]) -> Callable[..., None]:
    from mxnet.base import _LIB, check_call

    @functools.wraps(original)
    def __init__(self: Any, handle: Any) -> None:  # noqa: N807
        original(self, handle)
        _Shared.stores.add(self)
        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self.handle, ctypes.c_int(0)))

    return __init__


def _show_and_exit(before: Callable[..., Any]) -> Callable[..., None]:
    def show_and_exit(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        before(kind, error, traceback)
        if sys.flags.interactive or hasattr(sys, "ps1"):
            return
        for at_exit in (_warn_alone, _free_stores):  # which would wait for gradients
            atexit.unregister(at_exit)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return show_and_exit
