"""The start of the command `mxamp`: whether and how it imports MXNet, and Ctrl-C meanwhile."""

import gc
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence

__all__ = [
    "INTERRUPTED",
    "STATUS",
    "exit_on_ctrl_c",
    "is_starting",
    "needs_mxnet",
    "outside_collector",
    "restore_ctrl_c",
    "without_mxnet",
]

INTERRUPTED = "interrupted"
STATUS = 130  #: shells' exit status for a program that Ctrl-C has ended

#: Commands that import no MXNet: a setting may make the import end the process, which `doctor`
#: reports.
_COMMANDS = ("doctor",)
_OPTIONS = ("-h", "--help", "--version")


def is_starting() -> bool:
    """Return whether this process may be the command, `mxamp` or `python -m mxamp`."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    # `python -m` sets the name "-m" while it looks for the package.
    return program == "-m" or Path(program).name == "mxamp"


def needs_mxnet(arguments: Sequence[str]) -> bool:
    """Return whether the command `mxamp` imports MXNet for these arguments."""
    return bool(arguments) and arguments[0] not in (*_COMMANDS, *_OPTIONS)


def without_mxnet() -> bool:
    """Return whether this process is the command `mxamp` with arguments that need no MXNet."""
    argv = getattr(sys, "argv", None) or [""]
    if needs_mxnet(argv[1:]) or not is_starting():
        return False
    if argv[0] == "-m":
        given = getattr(sys, "orig_argv", None)  # from Python 3.10 on
        # Without it, these may be the options of another package.
        if given is None:
            return argv[-1] != "-m" and argv[1] in _COMMANDS
        return bool(given[-len(argv)] == "mxamp")
    return True


@contextmanager
def outside_collector() -> Iterator[None]:
    """Context for imports whose objects the garbage collector never scans; only for the command.

    MXNet's modules are some 100,000 objects that live as long as the process. Scanning them takes a
    tenth of the import's time, and most of the time of each full collection later.
    """
    if not (is_starting() and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exit_on_ctrl_c() -> None:
    """Make Ctrl-C end the process with one line, until `restore_ctrl_c`; only for the command.

    C code and bare `except:` clauses in the imported modules would swallow an exception.
    """
    if is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore_ctrl_c() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, after `exit_on_ctrl_c`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_signal: Any) -> None:
    """Handle Ctrl-C: print one line, and end the process at once."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(STATUS)
