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

_SIGNAL_BASE = 128  #: the exit status after a signal is its number plus this, as in shells

#: Held while a line is written. Global, since all reader threads share the same two outputs.
_output_lock = threading.Lock()

#: A shell script that reads process groups from standard input, and kills them if it ends without
#: the line "done", as it does when the launcher is killed.
_GUARD = """
trap "" HUP INT TERM
while read -r group; do
    [ "$group" = done ] && exit
    set -- "$@" "-$group"
done
kill -s KILL -- "$@" 2>/dev/null
"""


class _Process:
    """A process group, whose output is copied line by line to this process's output."""

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
            threading.Thread(target=_copy_lines, args=(name, *pipes), daemon=True)
            for pipes in zip((process.stdout, process.stderr), outputs)
        ]
        for reader in self._readers:
            reader.start()

    def status(self) -> Optional[int]:
        """Return the exit status, 128 + n after signal n, or None while the process runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else _SIGNAL_BASE - code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def kill(self) -> None:
        """Kill the process group, and wait until its output is copied, for at most 4 seconds."""
        self.send_signal(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            # A process that has left the group may keep the pipe open.
            reader.join(timeout=2)

    def describe_end(self) -> str:
        """Return a text with the exit status of the ended process, or the signal that killed it."""
        code = self._process.returncode
        if code >= 0:
            return f"{self.name} has ended with status {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"


def _copy_lines(name: str, source: BinaryIO, target: BinaryIO) -> None:
    """Write each line of `source` to `target`, with [name] in front, until `source` ends."""
    for line in source:
        # Progress bars rewrite a line after \r: show its last version, as a terminal does.
        text = line.rstrip(b"\r\n").rsplit(b"\r", maxsplit=1)[-1]
        # A closed output loses lines, but does not end the process.
        with _output_lock, contextlib.suppress(BrokenPipeError, ValueError):
            target.write(b"[%s] %s\n" % (name.encode(), text))
            target.flush()


_HOST = "127.0.0.1"
#: MXNet's import runs the scheduler or server that DMLC_ROLE names; mxamp makes it importable.
_SERVE = "import sys; sys.tracebacklimit = 0; import mxamp"
_SERVER_COMMAND = [sys.executable, "-W", "ignore", "-c", _SERVE]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0  #: between a signal and SIGKILL


class ParameterServerRun:
    """A run of `command` in several workers, with a scheduler and servers, on this machine.

    `print_line` is called with messages for the user.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        servers: int,
        print_line: Callable[[str], None],
    ) -> None:
        self._command, self._print_line = list(command), print_line
        self._counts = {"server": servers, "worker": workers}
        self._signals: List[int] = []  #: received while the run lasts
        self._workers: List[_Process] = []
        self._servers: List[_Process] = []  #: the scheduler too

    def run(self) -> int:
        """Run all processes until the workers end or a process fails; return the exit status."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        record_signal: Any = lambda number, _: self._signals.append(number)  # noqa: E731
        handlers = {number: signal.signal(number, record_signal) for number in numbers}
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self._start_processes(guard)
            return self._wait()
        finally:
            for process in self._processes:
                process.kill()
            _write_to_guard(guard, "done")
            guard.communicate()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @property
    def _processes(self) -> List[_Process]:
        """All started processes, workers first: their failures are reported first."""
        return [*self._workers, *self._servers]

    def _start_processes(self, guard: "subprocess.Popen[str]") -> None:
        """Start the scheduler, the servers and the workers; `guard` runs `_GUARD`."""
        servers, workers = self._counts["server"], self._counts["worker"]
        port, *ports = _free_ports(1 + servers + workers)
        shared = self._shared_variables(port)
        self._start_process(
            guard, "scheduler", _SERVER_COMMAND, {**shared, "DMLC_ROLE": "scheduler"}
        )
        # The scheduler ranks the processes of a host by the port that they listen on.
        for rank, own in enumerate(ports[:servers]):
            variables = {**shared, "DMLC_ROLE": "server", "PORT": str(own)}
            self._start_process(guard, f"server {rank}", _SERVER_COMMAND, variables)
        for rank, own in enumerate(ports[servers:]):
            variables = {**shared, "DMLC_ROLE": "worker", "PORT": str(own), LAUNCHED: "1"}
            variables["DMLC_WORKER_ID"] = str(rank)
            self._start_process(guard, f"worker {rank}", self._command, variables)

    def _start_process(
        self,
        guard: "subprocess.Popen[str]",
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        """Start a process and add its group to the guard, unless a signal has arrived."""
        if not self._signals:
            process = _Process(name, command, variables)
            (self._workers if variables["DMLC_ROLE"] == "worker" else self._servers).append(process)
            _write_to_guard(guard, str(process.group))

    def _shared_variables(self, port: int) -> Dict[str, str]:
        """Return the environment variables of every process; the scheduler listens on `port`."""
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

    def _wait(self) -> int:
        """Wait until the workers succeed, a process fails or a signal arrives; return the status.

        After a failure or a signal, all processes are terminated.
        """
        while True:
            if self._signals:
                number = self._signals[0]
                self._print_line(f"{signal.Signals(number).name}: ending all processes")
                self._terminate(number)
                return _SIGNAL_BASE + number
            failed = next((p for p in self._processes if p.status()), None)
            if failed is not None:
                status = failed.status() or 1
                self._print_line(f"{failed.describe_end()}: ending the other processes")
                self._terminate(signal.SIGTERM)
                return status
            if all(process.status() == 0 for process in self._workers):
                # No worker stops the scheduler and the servers: `run` kills them.
                return 0
            time.sleep(_POLL_SECONDS)

    def _terminate(self, number: int) -> None:
        """Send `number` to the workers and SIGTERM to the others; wait up to `_GRACE_SECONDS`.

        SIGINT would make scheduler and servers print a traceback. A second signal ends the wait.
        """
        for process in self._processes:
            process.send_signal(number if process in self._workers else signal.SIGTERM)
        seen, limit = len(self._signals), time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < limit and len(self._signals) == seen:
            if all(process.status() is not None for process in self._processes):
                return
            time.sleep(_POLL_SECONDS)


def _write_to_guard(guard: "subprocess.Popen[str]", line: str) -> None:
    """Write a line, a process group or "done", to the input of the guard if it still runs."""
    with contextlib.suppress(BrokenPipeError):  # the guard was killed
        print(line, file=guard.stdin, flush=True)


def _free_ports(count: int) -> List[int]:
    """Return `count` free TCP ports, in ascending order."""
    with contextlib.ExitStack() as probes:
        ports = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((_HOST, 0))
            ports.append(probe.getsockname()[1])
        return sorted(ports)
