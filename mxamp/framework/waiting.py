"""Log lines of a worker that waits for others for long: they may never answer."""

import itertools
import logging
import threading
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, NamedTuple, Tuple

__all__ = ["begin", "end", "waiting"]

logger = logging.getLogger("mxamp")

#: After so many seconds a worker says what it waits for.
_PATIENCE = 60.0
_LOOKS = 10  #: in that time, of the thread that says it


class _Wait(NamedTuple):
    limit: float
    message: str
    args: Tuple[Any, ...]


class _Watcher:
    """The waits that have not been long so far, and a thread that looks at them."""

    def __init__(self) -> None:
        self.waits: Dict[int, _Wait] = {}
        self._numbers = itertools.count()
        self._thread = threading.Thread()
        self._lock = threading.Lock()

    def add(self, wait: _Wait) -> int:
        number = next(self._numbers)
        self.waits[number] = wait
        if not self._thread.is_alive():  # nor is it in a forked process
            self._start()
        return number

    def _start(self) -> None:
        with self._lock:
            if not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(_PATIENCE / _LOOKS)
            now = time.monotonic()
            long = [(number, wait) for number, wait in list(self.waits.items()) if wait.limit < now]
            for number, wait in long:
                logger.warning(wait.message, *wait.args)
                end(number)


_watcher = _Watcher()


def begin(message: str, *args: Any) -> int:
    """Log a message, once, where `end` is not called soon with the number that this returns."""
    return _watcher.add(_Wait(time.monotonic() + _PATIENCE, message, args))


def end(number: int) -> None:
    """End a wait; does nothing where it has ended."""
    _watcher.waits.pop(number, None)


@contextmanager
def waiting(message: str, *args: Any) -> Iterator[None]:
    """Log a message, once, where this lasts long."""
    number = begin(message, *args)
    try:
        yield
    finally:
        end(number)
