"""Ends the processes of a launcher that was killed: a program of its own, which outlives it.

Its standard input holds the process groups, a line each. The end of the input without the line
`DONE` says that the launcher is gone.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import List

__all__ = ["Guard", "signal_group"]

DONE = "done"


class Guard:
    """The guard, as the launcher sees it."""

    def __init__(self) -> None:
        # By path: importing the package would import MXNet.
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """End this process group too, should the launcher be killed."""
        self._tell(str(group))

    def close(self) -> None:
        """End the guard: all processes have ended."""
        self._tell(DONE)
        self._process.communicate()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # where somebody has killed the guard
                pipe.write(f"{line}\n".encode())
                pipe.flush()


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, which may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: List[int] = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        groups.append(int(line))
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
