"""Runs on MXNet's parameter server: scheduler, servers and workers on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional, Sequence

from ..framework.worker_process import LAUNCHED
from .launch_guard import Guard, signal_group

__all__ = ["ParameterServerRun"]

_KILLED = 128  #: shells add the signal's number to it

#: Held while a line is printed, so that lines of several processes do not mix.
_one_line = threading.Lock()


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
        """Return the exit status as a shell does, or None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else _KILLED - code

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        signal_group(self.group, number)

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
    prefix = f"[{name}] ".encode()
    for line in source:
        # Progress bars rewrite a line after \r: show its last version, as a terminal does.
        text = line.rstrip(b"\r\n").rsplit(b"\r", maxsplit=1)[-1]
        with _one_line:
            try:
                target.write(prefix + text + b"\n")
                target.flush()
            except (BrokenPipeError, ValueError):  # no reader: the process goes on
                pass


_HOST = "127.0.0.1"
#: MXNet's import runs the scheduler or server that DMLC_ROLE names; mxamp makes it importable.
_SERVE = "import sys; sys.tracebacklimit = 0; import mxamp"
_POLL = 0.05

FAILED = "{ending}: ending the other processes"
STOPPED = "{name}: ending all processes"


class ParameterServerRun:
    """Starts scheduler, servers and workers, watches them, and ends them all.

    `say` is called with lines for the user. Once one process fails, the others get `grace` seconds
    to end before they are killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        servers: int,
        say: Callable[[str], None],
        grace: float = 5.0,
    ) -> None:
        self._command, self._say, self._grace = list(command), say, grace
        self._counts = {"server": servers, "worker": workers}
        self._signals: List[int] = []
        self._workers: List[_Process] = []
        self._others: List[_Process] = []

    def run(self) -> int:
        """Run until all workers have ended; return the status of the first that failed, or 0."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._take) for number in numbers}
        guard = Guard()
        try:
            self._start(guard)
            return self._watch()
        finally:
            for process in self._all():
                process.finish()
            guard.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _: Optional[FrameType]) -> None:
        self._signals.append(number)

    def _all(self) -> List[_Process]:
        return [*self._workers, *self._others]

    def _start(self, guard: Guard) -> None:
        ports = _free_ports(1 + sum(self._counts.values()))
        serve = [sys.executable, "-W", "ignore", "-c", _SERVE]
        shared = self._variables(ports.pop(0))
        for role, count, command, into in (
            ("scheduler", 1, serve, self._others),
            ("server", self._counts["server"], serve, self._others),
            ("worker", self._counts["worker"], self._command, self._workers),
        ):
            for rank in range(count):
                if self._signals:
                    return
                own = {} if role == "scheduler" else _ranked(role, rank, ports.pop(0))
                variables = {**shared, "DMLC_ROLE": role, **own}
                name = role if role == "scheduler" else f"{role} {rank}"
                into.append(_Process(name, command, variables))
                guard.add(into[-1].group)

    def _variables(self, port: int) -> Dict[str, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = max(cores // self._counts["worker"], 1)
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
                self._say(STOPPED.format(name=signal.Signals(number).name))
                self._end(number)
                return 128 + number
            failed = next((p for p in self._all() if p.status()), None)
            if failed is not None:
                status = failed.status() or 1
                self._say(FAILED.format(ending=failed.ending()))
                self._end(signal.SIGTERM)
                return status
            if all(process.status() == 0 for process in self._workers):
                # No worker stops the scheduler and the servers: `run` kills them.
                return 0
            time.sleep(_POLL)

    def _end(self, number: int) -> None:
        """Send the workers a signal and the other processes SIGTERM; wait for `grace` seconds.

        SIGINT would make scheduler and servers print a traceback.
        """
        for process in self._all():
            process.send(number if process in self._workers else signal.SIGTERM)
        told = len(self._signals)
        # A second Ctrl-C ends the wait.
        self._wait(lambda: len(self._signals) > told, self._grace)

    def _wait(self, enough: Callable[[], Any], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not enough():
            if all(process.status() is not None for process in self._all()):
                return
            time.sleep(_POLL)


def _ranked(role: str, rank: int, port: int) -> Dict[str, str]:
    """Return the variables that give a process its rank.

    The scheduler sorts the processes of a host by the port that they listen on, which is PORT.
    """
    variables = {"PORT": str(port)}
    own = {"DMLC_WORKER_ID": str(rank), LAUNCHED: "1"}
    return {**variables, **own} if role == "worker" else variables


def _free_ports(count: int) -> List[int]:
    """Return free ports, in ascending order."""
    with contextlib.ExitStack() as probes:
        found = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((_HOST, 0))
            found.append(probe.getsockname()[1])
        return sorted(found)
