"""The lines of a trace file: JSON objects, each written whole, so that a crash costs none.

The first line is a header, and so is one after each resume. The others are steps and records:

{"kind": "header", "schema": 1, "mxamp": "1.0.0", "machine": {...}, "trainers": [...], ...}
{"kind": "step", "step": 1, "loss": 0.69, "loss_scale": 65536.0, "stepped": true, ...}
{"kind": "operators", "step": 1, "data": {...}}
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ...errors import ArgumentError, StateError
from ...framework.files import writing
from ...framework.wording import shown

__all__ = [
    "LineFile",
    "SCHEMA",
    "TraceRecord",
    "TraceStep",
    "add_line",
    "checked_header",
    "checked_path",
    "decoded",
    "duration",
    "encoded",
    "is_header",
    "plain",
]

#: Goes up when a reader of today would misread what is written.
SCHEMA = 1
# So many seconds of lines are lost at most if the machine itself stops.
_SYNC_SECONDS = 5.0
#: So many levels of dicts and lists are written; far from what readers of JSON can't take.
_DEPTH = 100

IN_USE = (
    "{path!r} is being written by another trace: close that one, or give each process a file of "
    "its own, with {{rank}} in the path"
)
NO_TRACE = (
    "{path!r} is no trace of mxamp: its first line is no header. Give a file that "
    "amp.debugging.trace has written"
)
NOT_OVERWRITTEN = (
    "{path!r} is no trace of mxamp: its first line is no header. It is left as it is; give "
    "another path"
)
NEWER = (
    "{path!r} was written by a newer mxamp ({version}, schema {schema}; this one knows up to "
    "{known}): update mxamp"
)
TOO_DEEP = (
    f"a trace holds dicts and lists up to {_DEPTH} deep; these are deeper, or hold themselves"
)


class LineFile:
    """A file that lines are appended to: each in one call, and then safe from a crash.

    The file is created, or has to be a trace. One `LineFile` at a time writes to it.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ArgumentError(f"there is no folder {str(path.parent)!r} to write the trace to")
        if path.is_dir():
            raise ArgumentError(f"a trace is a file, and {str(path)!r} is a folder")
        if path.exists() and path.stat().st_size:
            _check_resumed(path)
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._descriptor: Optional[int] = descriptor
        try:
            self._lock(path)
            self._end_cut_line()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._synced = time.monotonic()

    def _lock(self, path: Path) -> None:
        try:
            import fcntl
        except ImportError:  # no locks here
            return
        try:
            fcntl.flock(self._file(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(IN_USE.format(path=str(path))) from None
        except OSError:  # a file system without locks
            return

    def _end_cut_line(self) -> None:
        """Keep what a killed process has left of its last line apart from the next one."""
        size = os.fstat(self._file()).st_size
        if size and os.pread(self._file(), 1, size - 1) != b"\n":
            os.write(self._file(), b"\n")

    def _file(self) -> int:
        if self._descriptor is None:
            raise StateError("this trace is closed")
        return self._descriptor

    def write(self, line: str) -> None:
        """Append a line."""
        left = memoryview(f"{line}\n".encode("ascii"))
        while left:
            left = left[os.write(self._file(), left) :]
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # a pipe, or a file system that can't
            os.fsync(self._file())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Wait until all lines are on the disk, and close the file."""
        if self._descriptor is not None:
            self._sync()
            os.close(self._descriptor)
            self._descriptor = None


def _check_resumed(path: Path) -> None:
    """Raise `ArgumentError` where the first line of a file is no header."""
    with path.open(encoding="utf-8", errors="replace") as file:
        # A file of something else may be one long line.
        checked_header(decoded(file.readline(2**24)), path, NOT_OVERWRITTEN)


def checked_header(found: Any, path: Path, refused: str = NO_TRACE) -> Dict[str, Any]:
    """Return a header that this version knows how to read."""
    if not is_header(found):
        raise ArgumentError(refused.format(path=str(path)))
    header: Dict[str, Any] = found
    if header["schema"] > SCHEMA:
        version = header.get("mxamp", "of an unknown version")
        raise ArgumentError(
            NEWER.format(path=str(path), version=version, schema=header["schema"], known=SCHEMA)
        )
    return header


def is_header(found: Any) -> bool:
    """Tell whether a line that was read is a header, of this version or of a newer one."""
    if not isinstance(found, dict) or found.get("kind") != "header":
        return False
    schema = found.get("schema")
    return isinstance(schema, int) and schema >= 1


def decoded(line: str) -> Any:
    """Return what a line of JSON holds; None where it can't be read."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def checked_path(path: Any, what: str = "a trace") -> str:
    """Return a path as text; raise `ArgumentError` where it is none."""
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(found, str):
        raise ArgumentError(f"the path of {what} must be a str or a Path, not {shown(path)}")
    return found


def encoded(line: Mapping[str, Any]) -> str:
    """Return a line as JSON; numbers that JSON does not know as "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(line, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(line), allow_nan=False)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON knows it: of dicts, lists, text and finite numbers.

    Takes dataclasses, what has `to_dict()`, and NumPy's numbers and arrays too. The value lies
    `depth` levels deep in another one.
    """
    if depth > _DEPTH:
        raise ArgumentError(TOO_DEEP)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, depth + 1) for entry in value]
    return plain(_taken_apart(value), depth + 1)


def _taken_apart(value: Any) -> Any:
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise ArgumentError(
        f"a trace holds dicts, lists, text, numbers and what has to_dict(), not {shown(value)}"
    )


#: No count is larger; JSON has integers that are no floats.
_LARGEST = 2**63


class TraceStep(NamedTuple):
    """One step of a trainer, as `trace` has written it; None for what was not known."""

    step: int
    trainer: int = 0  #: which of the trainers that were given
    time: Optional[float] = None  #: seconds since 1970
    loss: Optional[float] = None
    loss_finite: bool = True
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    stepped: bool = True  #: False where it was skipped
    nonfinite: Tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN
    seconds: Optional[float] = None  #: since the step before
    memory: Optional[int] = None  #: bytes
    gpu_memory: Optional[int] = None  #: bytes, of all GPUs of the trainer


class TraceRecord(NamedTuple):
    """Data of another kind, with the step that it was written after."""

    kind: str
    step: int
    data: Mapping[str, Any]


def add_line(entry: Mapping[str, Any], steps: List[TraceStep], records: List[TraceRecord]) -> bool:
    """Add a line to the steps or the records; tell whether it is one."""
    try:
        if entry["kind"] == "step":
            steps.append(_step_of(entry))
        elif entry["kind"] == "header":
            return False
        else:
            data = entry["data"]
            if not isinstance(data, dict):
                return False
            records.append(TraceRecord(str(entry["kind"]), _whole(entry.get("step", 0)), data))
    except (LookupError, TypeError, ValueError, OverflowError):
        return False
    return True


def _whole(value: Any) -> int:
    whole = int(value)
    if abs(whole) > _LARGEST:
        raise OverflowError(whole)
    return whole


def _step_of(entry: Mapping[str, Any]) -> TraceStep:
    def number(name: str) -> Optional[float]:
        # float() knows "NaN" and "Infinity", as the file has them.
        return None if entry.get(name) is None else float(entry[name])

    def count(name: str) -> Optional[int]:
        return None if entry.get(name) is None else _whole(entry[name])

    names = entry.get("nonfinite") or ()
    if not isinstance(names, (list, tuple)):
        raise TypeError(names)
    scale = float(entry["loss_scale"])
    return TraceStep(
        _whole(entry["step"]),
        _whole(entry.get("trainer", 0)),
        number("time"),
        number("loss"),
        bool(entry.get("loss_finite", True)),
        scale,
        float(entry.get("next_loss_scale", scale)),
        bool(entry["stepped"]),
        tuple(str(name) for name in names),
        number("seconds"),
        count("memory"),
        count("gpu_memory"),
    )


def duration(seconds: float) -> str:
    """Return seconds in a unit that fits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
