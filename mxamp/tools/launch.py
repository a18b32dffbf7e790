"""Runs on MXNet's parameter server: scheduler, servers and workers on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional, Sequence

from ..framework.machine import processors
from ..framework.worker_process import LAUNCHED

__all__ = ["ParameterServerRun"]

_KILLED = 128  #: shells add the signal's number to it

#: Held while a line is printed, so that lines of several processes do not mix.
_one_line = threading.Lock()

#: Outlives a killed launcher, and kills the process groups that it has read from standard input.
_GUARD = """
trap "" HUP INT TERM
while read -r group; do
    [ "$group" = done ] && exit
    set -- "$@" "-$group"
done
kill -s KILL -- "$@" 2>/dev/null
"""


class _Process:
    """A process whose output is shown by line; its process group ends with it."""

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
        self.group = self._process.pid
        process, outputs = self._process, (sys.stdout.buffer, sys.stderr.buffer)
        self._readers = [
            threading.Thread(target=_forward, args=(name, *pipes), daemon=True)
            for pipes in zip((process.stdout, process.stderr), outputs)
        ]
        for reader in self._readers:
            reader.start()

    def status(self) -> Optional[int]:
        """Return the exit status as a shell does, or None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else _KILLED - code

    def send(self, number: int) -> None:
        """Send a signal to the process and its children, if there are any."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def finish(self) -> None:
        """Kill the group, and wait until its output is shown."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            # A process that has left the group may keep the pipe open.
            reader.join(timeout=2)

    def ending(self) -> str:
        """Return a sentence about how the process ended."""
        code = self._process.returncode
        if code >= 0:
            return f"{self.name} has ended with status {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"


def _forward(name: str, source: BinaryIO, target: BinaryIO) -> None:
    for line in source:
        # Progress bars rewrite a line after \r: show its last version, as a terminal does.
        text = line.rstrip(b"\r\n").rsplit(b"\r", maxsplit=1)[-1]
        # Without a reader the process goes on.
        with _one_line, contextlib.suppress(BrokenPipeError, ValueError):
            target.write(b"[%s] %s\n" % (name.encode(), text))
            target.flush()


_HOST = "127.0.0.1"
#: MXNet's import runs the scheduler or server that DMLC_ROLE names; mxamp makes it importable.
_SERVE = [sys.executable, "-W", "ignore", "-c", "import sys; sys.tracebacklimit = 0; import mxamp"]
_POLL = 0.05
_GRACE = 5.0  #: seconds that processes get to end before they are killed


class ParameterServerRun:
    """Starts scheduler, servers and workers, watches them, and ends them all.

    `say` is called with lines for the user.
    """

    def __init__(
        self, command: Sequence[str], workers: int, servers: int, say: Callable[[str], None]
    ) -> None:
        self._command, self._say = list(command), say
        self._counts = {"server": servers, "worker": workers}
        self._signals: List[int] = []
        self._workers: List[_Process] = []
        self._others: List[_Process] = []

    def run(self) -> int:
        """Run until all workers have ended; return the status of the first that failed, or 0."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        take: Any = lambda number, _: self._signals.append(number)  # noqa: E731
        before = {number: signal.signal(number, take) for number in numbers}
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self._start(guard)
            return self._watch()
        finally:
            for process in self._all():
                process.finish()
            _tell(guard, "done")
            guard.communicate()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _all(self) -> List[_Process]:
        return [*self._workers, *self._others]

    def _start(self, guard: "subprocess.Popen[str]") -> None:
        servers, workers = self._counts["server"], self._counts["worker"]
        port, *ports = _free_ports(1 + servers + workers)
        shared = self._variables(port)
        self._add(guard, "scheduler", _SERVE, {**shared, "DMLC_ROLE": "scheduler"})
        # The scheduler sorts the processes of a host by the port that they listen on: their rank.
        for rank, own in enumerate(ports[:servers]):
            variables = {**shared, "DMLC_ROLE": "server", "PORT": str(own)}
            self._add(guard, f"server {rank}", _SERVE, variables)
        for rank, own in enumerate(ports[servers:]):
            variables = {**shared, "DMLC_ROLE": "worker", "PORT": str(own), LAUNCHED: "1"}
            variables["DMLC_WORKER_ID"] = str(rank)
            self._add(guard, f"worker {rank}", self._command, variables)

    def _add(
        self,
        guard: "subprocess.Popen[str]",
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        if not self._signals:
            process = _Process(name, command, variables)
            (self._workers if variables["DMLC_ROLE"] == "worker" else self._others).append(process)
            _tell(guard, str(process.group))

    def _variables(self, port: int) -> Dict[str, str]:
        threads = max(processors() // self._counts["worker"], 1)
        return {
            "DMLC_PS_ROOT_URI": _HOST,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": str(self._counts["server"]),
            "DMLC_NUM_WORKER": str(self._counts["worker"]),
            "DMLC_NODE_HOST": _HOST,
            "DMLC_INTERFACE": "lo",
            # Lines are shown when they are printed, not when a buffer is full.
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
            # The workers share the cores: one thread per core in each would slow all of them.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }

    def _watch(self) -> int:
        while True:
            if self._signals:
                number = self._signals[0]
                self._say(f"{signal.Signals(number).name}: ending all processes")
                self._end(number)
                return _KILLED + number
            failed = next((p for p in self._all() if p.status()), None)
            if failed is not None:
                status = failed.status() or 1
                self._say(f"{failed.ending()}: ending the other processes")
                self._end(signal.SIGTERM)
                return status
            if all(process.status() == 0 for process in self._workers):
                # No worker stops the scheduler and the servers: `run` kills them.
                return 0
            time.sleep(_POLL)

    def _end(self, number: int) -> None:
        """Send the workers a signal and the other processes SIGTERM; wait for them.

        SIGINT would make scheduler and servers print a traceback. A second signal ends the wait.
        """
        for process in self._all():
            process.send(number if process in self._workers else signal.SIGTERM)
        told, limit = len(self._signals), time.monotonic() + _GRACE
        while time.monotonic() < limit and len(self._signals) == told:
            if all(process.status() is not None for process in self._all()):
                return
            time.sleep(_POLL)


def _tell(guard: "subprocess.Popen[str]", line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the guard was killed
        print(line, file=guard.stdin, flush=True)


def _free_ports(count: int) -> List[int]:
    """Return free ports, in ascending order."""
    with contextlib.ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((_HOST, 0))
            found.append(probe.getsockname()[1])
        return sorted(found)
