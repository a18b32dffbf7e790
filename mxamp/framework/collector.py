"""Python's garbage collector, paused while graphs are in the making, and in imports."""

import gc
import os
import threading
from contextlib import contextmanager
from typing import Iterator

__all__ = ["collector_paused"]

_lock = threading.Lock()
_pauses = 0  #: how many threads are in one that found the collector on


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, if it is on, until the last of the threads in such a pause leaves it.

    A graph is made of a hundred thousand small objects that live. Whenever their number has grown
    by a quarter, Python would look through all objects of the process, of which MXNet alone has as
    many (50 ms each time).
    """
    global _pauses  # noqa: PLW0603
    with _lock:
        counts = bool(_pauses) or gc.isenabled()
        _pauses += counts
        if counts:
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= counts
            if counts and not _pauses:
                gc.enable()


def _resume_in_child() -> None:
    """Switch the collector on in a process that was forked while another thread paused it."""
    global _lock, _pauses  # noqa: PLW0603
    _lock = threading.Lock()
    if _pauses:
        _pauses = 0
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
