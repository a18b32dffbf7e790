"""MXNet's distributed kvstores: which ones they are, and how a worker of one ends."""

import atexit
import functools
import os
import sys
from types import TracebackType
from typing import Any, Optional, Type

__all__ = ["exit_on_error", "is_distributed"]


def is_distributed(kvstore: Any) -> bool:
    """Tell whether a kvstore, or one of this name, spans several processes."""
    return "dist" in str(getattr(kvstore, "type", kvstore))


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
