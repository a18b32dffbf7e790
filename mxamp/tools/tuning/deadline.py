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

__all__ = ["Deadline", "OutOfTimeError", "seconds_of"]

logger = logging.getLogger("mxamp")

BUDGET = (
    "`budget` must be a number of seconds above 0, or a text such as '90s', '5m' or '1h', not "
    "{given}"
)
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)\s*")


def seconds_of(budget: Any) -> float:
    """Return a `budget` argument, a number or a text such as "5m", as seconds.

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
    """The rest of the budget is too short for the next measurement."""


class Deadline:
    """A budget of seconds from now on; each phase ends at a share of it, or at Ctrl-C."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self.seconds = self._until = seconds
        self._phase = ""
        self._draw: Callable[[], None] = lambda: None
        self.stopped = False  #: by Ctrl-C
        self.complete = True  #: whether no phase was cut short

    @property
    def spent(self) -> float:
        """The seconds since the start."""
        return self._clock() - self._began

    @contextlib.contextmanager
    def phase(self, name: str, share: float = 1.0) -> Iterator[None]:
        """Context of a phase, which an `OutOfTimeError` ends silently, making `complete` False.

        The phase ends when `share` of the whole budget is spent, earlier phases included.
        """
        logger.debug("measuring: %s after %.1f s", name, self.spent)
        self._phase, self._until = name, self.seconds * share
        try:
            self._draw()
            yield
        except OutOfTimeError:
            self.complete = False

    def check(self, needed: float = 0.0, whole: bool = False) -> None:
        """Raise `OutOfTimeError` if fewer than `needed` seconds are left in the phase.

        With `whole`, only if fewer are left in the whole budget. Ctrl-C leaves none.
        """
        self._draw()
        if self.stopped or self.spent + needed > (self.seconds if whole else self._until):
            raise OutOfTimeError

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Context in which Ctrl-C ends the phases at their next `check`; a second one raises.

        An exception in the middle of a measurement could be lost, say in a destructor.
        """
        before = signal.getsignal(signal.SIGINT)
        in_main = threading.current_thread() is threading.main_thread()
        ours = in_main and before is signal.default_int_handler

        def stop_phases(_number: int, _frame: Any) -> None:
            self.stopped = True
            signal.signal(signal.SIGINT, before)

        if ours:
            signal.signal(signal.SIGINT, stop_phases)
        try:
            yield
        except KeyboardInterrupt:
            self.stopped, self.complete = True, False
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def watched(self, show: bool) -> Iterator[None]:
        """Context that draws a bar of the time left on standard error, if that is a terminal."""
        if not (show and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        name, left = TextColumn("{task.description:<24}"), TextColumn("{task.fields[left]}")
        stderr = Console(stderr=True)
        # Drawn between measurements only: a thread of its own would take its share of the cores.
        bar = Progress(name, BarColumn(), left, console=stderr, auto_refresh=False, transient=True)
        task = bar.add_task("", total=self.seconds, left="")

        def draw_bar() -> None:
            spent = min(self.spent, self.seconds)
            left = f"{self.seconds - spent:.0f} s left"
            bar.update(task, completed=spent, description=self._phase, left=left, refresh=True)

        self._draw = draw_bar
        with bar:
            yield
