"""One process of a run: its output in whole lines with its name in front, and how it ended."""

import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO, Mapping, Optional, Sequence

from .guard import signal_group

__all__ = ["Process"]

_INTERRUPTED_BY_SIGNAL = 128  #: shells add the signal's number to it

# Lines of several processes must not mix.
_one_line = threading.Lock()


class Process:
    """A process that runs in a process group of its own, so that its children end with it."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        outputs = (
            (self._process.stdout, sys.stdout.buffer),
            (self._process.stderr, sys.stderr.buffer),
        )
        self._readers = [
            threading.Thread(target=_forward, args=(name, *output), daemon=True)
            for output in outputs
        ]
        for reader in self._readers:
            reader.start()

    @property
    def group(self) -> int:
        """The process group."""
        return self._process.pid

    def status(self) -> Optional[int]:
        """Return the exit status as a shell would, None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else _INTERRUPTED_BY_SIGNAL - code

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        signal_group(self.group, number)

    def finish(self) -> None:
        """End what is left of the group, and wait until all that it has printed is shown."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            # Not for ever: what has left the group may hold the pipe.
            reader.join(timeout=2)

    def ending(self) -> str:
        """Return in words how the process has ended."""
        code = self._process.returncode
        if code >= 0:
            return f"{self.name} has ended with status {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"


def _forward(name: str, source: BinaryIO, target: BinaryIO) -> None:
    prefix = f"[{name}] ".encode()
    for line in source:
        # Of a line that was written over, as progress bars do, what would stay on a terminal.
        text = line.rstrip(b"\r\n").rsplit(b"\r", maxsplit=1)[-1]
        with _one_line:
            try:
                target.write(prefix + text + b"\n")
                target.flush()
            except (BrokenPipeError, ValueError):  # nobody reads any more: let the process go on
                pass
