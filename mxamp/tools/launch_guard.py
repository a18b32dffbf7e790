"""The guard: a program that outlives a killed launcher, and ends its processes.

The guard reads process groups from standard input, one a line. If the input ends without the line
`DONE`, the launcher was killed.
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
    """The launcher's side of the guard."""

    def __init__(self) -> None:
        # Run by path, since importing the package imports MXNet.
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """End this process group if the launcher is killed."""
        self._tell(str(group))

    def close(self) -> None:
        """End the guard, after all processes have ended."""
        self._tell(DONE)
        self._process.communicate()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                pipe.write(f"{line}\n".encode())
                pipe.flush()


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> None:
    """Wait for the launcher's end, and kill the process groups unless it was regular."""
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
