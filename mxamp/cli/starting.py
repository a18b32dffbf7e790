"""The start of the command `mxamp`, two seconds of imports: what Ctrl-C does in them."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "INTERRUPTED",
    "STATUS",
    "WITHOUT_MXNET",
    "guard",
    "is_starting",
    "unguard",
    "without_mxnet",
]

INTERRUPTED = "interrupted"
#: The commands that import no MXNet: a setting may end the process that does, and `launch` starts
#: others, which import it.
WITHOUT_MXNET = ("doctor", "info", "launch")
STATUS = 130  #: what shells take for a program that Ctrl-C has ended


def is_starting() -> bool:
    """Tell whether this process is the command, `mxamp` or `python -m mxamp`."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    # What runs a package with -m has this for a name while it looks for the package.
    return program == "-m" or Path(program).name == "mxamp"


def without_mxnet() -> bool:
    """Tell whether this process is one of the commands in `WITHOUT_MXNET`, about to start."""
    argv = getattr(sys, "argv", None) or [""]
    if argv[1:2] and argv[1] in WITHOUT_MXNET and argv[0] == "-m":
        given = getattr(sys, "orig_argv", None)  # Python 3.10
        return given is None or given[-len(argv)] == "mxamp"
    return bool(argv[1:2]) and argv[1] in WITHOUT_MXNET and is_starting()


def guard() -> None:
    """Let Ctrl-C end the process with one line, until `unguard`.

    An exception would not do: code in C and `except:` clauses of what is imported swallow it.
    """
    if is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def unguard() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_signal: Any) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(STATUS)
