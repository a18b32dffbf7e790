"""A worker process of a parameter server: log lines for long waits, and an exit that never waits.

A worker that exits frees its kvstore, and MXNet waits there until all workers do the same. Workers
that wait for its gradients never exit, so neither would this one.
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

__all__ = ["LAUNCHED", "begin", "end", "prepare", "prepare_launched", "waiting"]

logger = logging.getLogger("mxamp")

#: Set by `mxamp launch` for its workers.
LAUNCHED = "MXAMP_LAUNCHED"

#: Seconds after which a worker logs what it waits for.
_PATIENCE = 60.0

#: Functions of a kvstore that return once all workers have called them.
_MEETINGS = ("init", "broadcast", "_barrier")

START = (
    "this worker waits for the scheduler, all servers and all workers to start, and for each "
    "worker to create its kvstore: one of them may have ended, or never does it"
)
ALONE = (
    "this worker created no distributed kvstore, so it shared nothing with the others: give "
    "kvstore='dist_sync' to gluon.Trainer or module.fit"
)
MEET = (
    "this worker waits for all workers to come to the same point (kvstore.%s): one of them may "
    "have ended, or trains with other parameters"
)


# ---------------------------------------------------------------------- long waits


def begin(message: str, *args: Any) -> Timer:
    """Return a timer that logs a warning after a minute, unless it is given to `end`."""
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


def prepare_launched() -> None:
    """Prepare a worker that `mxamp launch` has started: what importing mxamp does there."""
    if os.environ.get(LAUNCHED):
        prepare()


@functools.lru_cache(maxsize=1)
def prepare() -> None:
    """Prepare this process if it is a worker of a parameter server; do nothing elsewhere.

    An uncaught exception ends a worker in any case. `mxamp launch` sees how each worker ends and
    stops the servers after the last one, so its workers exit without waiting for each other.
    """
    if os.environ.get("DMLC_ROLE") != "worker":
        return
    worker = _Worker(launched=bool(os.environ.get(LAUNCHED)))
    sys.excepthook = worker.excepthook(sys.excepthook)
    for patch in worker.patches():
        patch.apply()
    if worker.launched:
        atexit.register(worker.free_stores)
        if os.environ.get("DMLC_NUM_WORKER", "1") != "1":
            atexit.register(worker.warn_alone)


class _Worker:
    def __init__(self, launched: bool) -> None:
        self.launched = launched
        self._has_asked = False  # for a distributed kvstore
        self._stores: weakref.WeakSet[Any] = weakref.WeakSet()

    def patches(self) -> List[Patch]:
        from mxnet import kvstore  # not above: the launcher imports no MXNet

        patches = [Patch(kvstore.KVStore, name, _build_patient) for name in _MEETINGS]
        patches.append(Patch(kvstore, "create", self._build_create))
        if self.launched:
            patches.append(Patch(kvstore.KVStore, "__init__", self._build_init))
        return patches

    def _build_create(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from .distributed import is_distributed

        @functools.wraps(original)
        def create(name: str = "local") -> Any:
            if not is_distributed(name):
                return original(name)
            self._has_asked = True
            with waiting(START):
                return original(name)

        return create

    def _build_init(self, original: Callable[..., None]) -> Callable[..., None]:
        from mxnet.base import _LIB, check_call

        @functools.wraps(original)
        def __init__(store: Any, handle: Any) -> None:  # noqa: N807
            original(store, handle)
            self._stores.add(store)
            check_call(_LIB.MXKVStoreSetBarrierBeforeExit(store.handle, ctypes.c_int(0)))

        return __init__

    def warn_alone(self) -> None:
        if not self._has_asked:
            logger.warning(ALONE)

    def free_stores(self) -> None:
        """Free the kvstores while Python runs: the threads of one that is left end the process."""
        from mxnet.base import _LIB, KVStoreHandle, check_call

        for store in list(self._stores):
            handle, store.handle = store.handle, KVStoreHandle()
            check_call(_LIB.MXKVStoreFree(handle))

    def excepthook(self, before: Callable[..., Any]) -> Callable[..., None]:
        """Return a hook that shows an uncaught exception and ends the process at once."""

        def show_and_exit(
            kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
        ) -> None:
            before(kind, error, traceback)
            if sys.flags.interactive or hasattr(sys, "ps1"):
                return
            for at_exit in (self.warn_alone, self.free_stores):  # which would wait for gradients
                atexit.unregister(at_exit)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

        return show_and_exit


def _build_patient(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patient(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(MEET, original.__name__.lstrip("_")):
            return original(self, *args, **kwargs)

    return patient
