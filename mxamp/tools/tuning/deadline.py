"""The time budget of a search: deadline, Ctrl-C, progress bar."""

import contextlib
import logging
import re
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator

from ...errors import ArgumentError
from ...framework.wording import shown

__all__ = ["Deadline", "OutOfTimeError", "seconds_of", "stoppable", "watched"]

logger = logging.getLogger("mxamp")

BUDGET = (
    "`budget` must be a number of seconds above 0, or a text such as '90s', '5m' or '1h', not "
    "{given}"
)
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)\s*")


def seconds_of(budget: Any) -> float:
    """Return a budget in seconds.

    >>> seconds_of("90s"), seconds_of("5m"), seconds_of(30)
    (90.0, 300.0, 30.0)
    """
    seconds = 0.0
    if isinstance(budget, str):
        found = _DURATION.fullmatch(budget)
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        seconds = float(budget)
    if not 0 < seconds < float("inf"):
        raise ArgumentError(BUDGET.format(given=shown(budget)))
    return seconds


class OutOfTimeError(Exception):
    """The rest of the budget is not enough for the next step."""


class Deadline:
    """A running budget of seconds, and the current phase of the search."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self.seconds = seconds
        self._tell: Callable[[str, float], None] = lambda _phase, _spent: None
        self._phase = ""
        self.stopped = False  #: by Ctrl-C

    @property
    def spent(self) -> float:
        """The seconds since the start."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """The seconds that are left; negative after the deadline."""
        return self.seconds - self.spent

    def phase(self, name: str) -> None:
        """Begin a phase."""
        if name != self._phase:
            logger.debug("tune: %s, %.1f s left", name, self.left)
        self._phase = name
        self.tick()

    def tick(self) -> None:
        """Update the progress bar."""
        self._tell(self._phase, min(self.spent, self.seconds))

    def check(self, needed: float = 0.0, until: float = 1.0) -> None:
        """Raise `OutOfTimeError` where `needed` seconds don't fit into a share of the budget."""
        self.tick()
        if self.stopped or self.spent + needed > self.seconds * until:
            raise OutOfTimeError


@contextlib.contextmanager
def stoppable(deadline: Deadline) -> Iterator[None]:
    """Let Ctrl-C end the search between two measurements; a second one raises KeyboardInterrupt.

    An exception in the middle of a measurement could be lost, say in a destructor.
    """
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        deadline.stopped = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def watched(deadline: Deadline, show: bool) -> Iterator[None]:
    """Show a bar with the time left on standard error, if `show` and that is a terminal."""
    if not (show and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.fields[left]}")
    # Drawn between measurements only: a thread of its own would take its share of the cores.
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    task = bar.add_task("", total=deadline.seconds, left="")

    def tell(phase: str, spent: float) -> None:
        left = f"{max(deadline.seconds - spent, 0):.0f} s left"
        bar.update(task, completed=spent, description=phase, left=left, refresh=True)

    deadline._tell = tell
    try:
        with bar:
            yield
    finally:
        deadline._tell = lambda _phase, _spent: None
