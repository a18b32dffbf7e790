"""Exits of a parameter server's worker that wait for no other worker.

A worker that exits frees its kvstore, and MXNet then waits until all workers free theirs. Workers
that wait for its gradients never do, so without these patches no process would end.

`mxamp.init` prepares any worker. The start-up hook (mxamp/startup) prepares workers of
`mxamp launch` as soon as they import MXNet. The launcher imports this module, and no MXNet.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from typing import Any

from .patching import Original, Patch, wrapping

#: Set by `mxamp launch` for its workers.
LAUNCHED = "MXAMP_LAUNCHED"

#: The kvstores of a worker of `mxamp launch`.
_stores: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.lru_cache(maxsize=1)
def prepare_worker() -> None:
    """Make a parameter server's worker exit without the others; a no-op in other processes.

    An uncaught exception always ends the worker. Workers of `mxamp launch` never wait at exit: the
    launcher sees how each worker ends, and ends the servers after the last.
    """
    if os.environ.get("DMLC_ROLE") != "worker":
        return
    sys.excepthook = functools.partial(_show_and_exit, sys.excepthook)
    if os.environ.get(LAUNCHED):
        from mxnet.kvstore import KVStore

        Patch(KVStore, "__init__", wrapping(_init_without_barrier)).apply()
        atexit.register(_free_stores)


def _init_without_barrier(original: Original, store: Any, handle: Any) -> None:
    """Initialize a kvstore, and disable the barrier at which workers wait at exit."""
    from mxnet.base import _LIB, check_call

    original(store, handle)
    check_call(_LIB.MXKVStoreSetBarrierBeforeExit(handle, 0))
    _stores.add(store)


def _free_stores() -> None:
    """Free the kvstores before Python shuts down: after it, their threads abort the process."""
    for store in list(_stores):
        store.__del__()
        store.handle = None


def _show_and_exit(original: Original, kind: Any, error: Any, traceback: Any) -> None:
    """Call the original `sys.excepthook`, then end the process unless Python is interactive."""
    original(kind, error, traceback)
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return
    atexit.unregister(_free_stores)  # it would wait for gradients
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
