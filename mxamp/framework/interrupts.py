"""Cleanup that runs even if Ctrl-C interrupts it.

Python may raise KeyboardInterrupt before a `finally` or an `__exit__` of ours does anything.
"""

import sys
import threading
from contextlib import ContextDecorator, ExitStack
from types import FrameType
from typing import Any, Callable, Optional


def ending(function: Callable[..., Any], *args: object) -> ExitStack:
    """Return a context that runs a cleanup on exit, even if Ctrl-C interrupts it.

    The cleanup must be idempotent: it runs twice, since Ctrl-C may break off one of the runs.
    """
    stack = ExitStack()
    for _ in range(2):
        stack.callback(function, *args)
    return stack


def synchronized(lock: "threading.RLock") -> ContextDecorator:
    """Return a decorator that holds `lock` during each call, and releases it even after Ctrl-C."""
    held = {"__enter__": lock.__enter__, "__exit__": lock.__exit__}
    decorator: ContextDecorator = type("Holding", (ContextDecorator,), held)()
    return decorator


def is_running(frame: FrameType, thread: Optional[int] = None) -> bool:
    """Return whether `frame` is still on the stack of a thread, by default the current thread.

    If not, whatever the function began, and an interrupt kept it from ending, is over.
    """
    own = thread in (None, threading.get_ident())
    one = sys._getframe(1) if own else sys._current_frames().get(thread)  # type: ignore[arg-type]
    while one is not None and one is not frame:
        one = one.f_back
    return one is frame
