"""Worker processes that import MXNet once and fork for each task, so that a crash ends one task."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

FOLDER = Path(__file__).parent
#: No process may download: a missing proxy refuses at once.
_ENVIRONMENT = {
    "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
    "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip

Task = Callable[..., Dict[str, Any]]


def run_forked(task: Task, arguments: List[str], limit: float) -> Dict[str, Any]:
    """Return the result of a task run in a forked process, or a failure if that dies or hangs."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(task, arguments, send))
    process.start()
    send.close()
    try:
        if not receive.poll(limit):
            return {"failure": f"took over {limit:g} s"}
        return dict(receive.recv())
    except EOFError:
        process.join()
        return {"failure": f"the process died (status {process.exitcode})"}
    finally:
        process.kill()
        process.join()


def _send_result(task: Task, arguments: List[str], send: Any) -> None:
    """Run a task in this process and send its result, or its error."""
    # Standard output carries the answers: discard prints, and MXNet's own on a crash.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        send.send(task(*arguments))
    except Exception as error:
        send.send({"failure": first_line(error)})


def serve(task: Task) -> None:
    """For each line of standard input, run a task and print its result as JSON.

    A line is a JSON list of a limit in seconds and the task's arguments.
    """
    for line in sys.stdin:
        limit, *arguments = json.loads(line)
        print(json.dumps(run_forked(task, arguments, limit)), flush=True)


class Server:
    """A process that runs `serve`, started when it is needed; threads may share it."""

    def __init__(self, script: str) -> None:
        self._command = [sys.executable, *script.split()]
        self._process: Optional[subprocess.Popen[str]] = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.PIPE, env={**os.environ, **_ENVIRONMENT}, cwd=FOLDER,
            )  # fmt: skip

    def ask(self, limit: float, *arguments: str) -> Dict[str, Any]:
        """Run a task in the process; return its result or a failure."""
        with self._lock:
            self.start()
            process = self._process
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([limit, *arguments]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                said = process.stderr.read().strip().splitlines() if process.stderr else []
                return {"failure": f"the process could not start: {(said or [''])[-1]}"}
            return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message that is no line of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Traceback", "File ", "Stack trace"))]
    return f"{type(error).__name__}: {(said or [''])[0][:200]}"
