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

__all__ = ["LAUNCHED", "start_wait_timer", "cancel_wait_timer", "prepare_worker", "log_long_wait"]

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


def start_wait_timer(message: str, *args: Any) -> Timer:
    """Return a started timer that logs a warning after a minute unless it is canceled."""
    timer = Timer(_PATIENCE, logger.warning, (message, *args))
    timer.daemon = True
    timer.start()
    return timer


def cancel_wait_timer(timer: Optional[Timer]) -> None:
    """Cancel a timer of `start_wait_timer`; do nothing for None."""
    if timer is not None:
        timer.cancel()


@contextmanager
def log_long_wait(message: str, *args: Any) -> Iterator[None]:
    """Context that logs a warning if its body takes longer than a minute."""
    timer = start_wait_timer(message, *args)
    try:
        yield
    finally:
        cancel_wait_timer(timer)


# ---------------------------------------------------------------------- the process


@functools.lru_cache(maxsize=1)
def prepare_worker() -> None:
    """Make a parameter server's worker log long waits and exit alone; a no-op in other processes.

    An uncaught exception always ends the worker. Workers of `mxamp launch` never wait at exit: the
    launcher sees how each worker ends, and ends the servers after the last.
    """
    if os.environ.get("DMLC_ROLE") == "worker":
        _Worker().prepare(launched=bool(os.environ.get(LAUNCHED)))


class _Worker:
    """The distributed kvstores of a parameter server's worker, and the patches that record them."""

    def __init__(self) -> None:
        self.has_kvstore = False  #: whether the worker has called `kvstore.create` for one
        self.stores: "weakref.WeakSet[Any]" = weakref.WeakSet()

    def prepare(self, launched: bool) -> None:
        """Patch kvstores and `sys.excepthook`; `launched`: `mxamp launch` started the worker."""
        sys.excepthook = self.build_excepthook(sys.excepthook)
        for patch in self.patches(launched):
            patch.apply()
        if launched:
            atexit.register(self.free_stores)
            if os.environ.get("DMLC_NUM_WORKER", "1") != "1":
                atexit.register(self.warn_if_alone)

    def patches(self, launched: bool) -> List[Patch]:
        """Return the patches of `mxnet.kvstore`, for a worker of `mxamp launch` or any other."""
        # Imported here, since the launcher imports no MXNet.
        from mxnet import kvstore

        patches = [Patch(kvstore.KVStore, name, _log_wait) for name in _MEETINGS]
        patches.append(Patch(kvstore, "create", self.build_create))
        if launched:
            patches.append(Patch(kvstore.KVStore, "__init__", self.build_init))
        return patches

    def warn_if_alone(self) -> None:
        """Log a warning if the worker has created no distributed kvstore."""
        if not self.has_kvstore:
            logger.warning(ALONE)

    def free_stores(self) -> None:
        """Free the kvstores before Python shuts down: after it, their threads abort the process."""
        from mxnet.base import _LIB, KVStoreHandle, check_call

        for store in list(self.stores):
            handle, store.handle = store.handle, KVStoreHandle()
            check_call(_LIB.MXKVStoreFree(handle))

    def build_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `kvstore.create` that logs a long wait for the other processes."""
        from .distributed import is_distributed  # imports MXNet, which the launcher must not

        @functools.wraps(original)
        def create(name: str = "local") -> Any:
            if not is_distributed(name):
                return original(name)
            self.has_kvstore = True
            with log_long_wait(START):
                return original(name)

        return create

    def build_init(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a `KVStore.__init__` that disables the barrier at which workers wait at exit."""
        from mxnet.base import _LIB, check_call

        @functools.wraps(original)
        def __init__(store: Any, handle: Any) -> None:  # noqa: N807
            original(store, handle)
            self.stores.add(store)
            check_call(_LIB.MXKVStoreSetBarrierBeforeExit(store.handle, ctypes.c_int(0)))

        return __init__

    def build_excepthook(self, original: Callable[..., Any]) -> Callable[..., None]:
        """Return a `sys.excepthook` that calls the original, then ends the process at once."""

        def show_and_exit(
            kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
        ) -> None:
            original(kind, error, traceback)
            if sys.flags.interactive or hasattr(sys, "ps1"):
                return
            for at_exit in (self.warn_if_alone, self.free_stores):  # which would wait for gradients
                atexit.unregister(at_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

        return show_and_exit


def _log_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kvstore's method that logs a long wait for the other workers."""

    @functools.wraps(original)
    def method(store: Any, *args: Any, **kwargs: Any) -> Any:
        with log_long_wait(MEET, original.__name__.lstrip("_")):
            return original(store, *args, **kwargs)

    return method
