"""The lines of a trace file: JSON objects, each written whole, so that a crash costs none.

The first line is a header, and so is the first line after each resume. All other lines are steps
of a trainer, or records of another kind:

{"kind": "header", "schema": 1, "mxamp": "1.0.0", "machine": {...}, "trainers": [...], ...}
{"kind": "step", "step": 1, "loss": 0.69, "loss_scale": 65536.0, "stepped": true, ...}
{"kind": "operators", "step": 1, "data": {...}}
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, Union

import numpy as np

from ...errors import ArgumentError, StateError
from ...framework.files import check_file_path, wrap_write_errors
from ...framework.wording import shown

__all__ = [
    "SCHEMA",
    "LineFile",
    "TraceRecord",
    "TraceStep",
    "checked_header",
    "checked_path",
    "decoded",
    "duration",
    "encoded",
    "is_header",
    "plain",
    "step_or_record",
]

#: Goes up when a reader of today would misread what is written.
SCHEMA = 1
#: At most so many seconds of lines are lost if the machine itself stops.
_SYNC_SECONDS = 5.0
#: Levels of dicts and lists that are written; readers of JSON take far more.
_DEPTH = 100
#: JSON has integers that are no floats; no count is larger.
_LARGEST = 2**63

IN_USE = (
    "{path!r} is being written by another trace: close that trace, or give each process its own "
    "file, with {{rank}} in the path"
)
NO_TRACE = "{path!r} is no trace of mxamp: its first line is no header. {advice}"
NEWER = (
    "{path!r} was written by a newer mxamp ({version}, schema {schema}; this one knows up to "
    f"{SCHEMA}): update mxamp"
)
TOO_DEEP = (
    f"a trace holds dicts and lists up to {_DEPTH} deep; these are deeper, or hold themselves"
)


class TraceStep(NamedTuple):
    """One step of a trainer, as `trace` has written it; None for unknown values."""

    step: int
    trainer: int = 0  #: the trainer's place in the list that `trace` was given
    time: Optional[float] = None  #: seconds since 1970
    loss: Optional[float] = None
    loss_finite: bool = True
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    stepped: bool = True  #: False for a skipped step
    nonfinite: Tuple[str, ...] = ()  #: parameters whose gradients held Inf or NaN
    seconds: Optional[float] = None  #: since the step before
    memory: Optional[int] = None  #: bytes
    gpu_memory: Optional[int] = None  #: bytes, of all GPUs of the trainer


class TraceRecord(NamedTuple):
    """Data of another kind, and the step that it was written after."""

    kind: str
    step: int
    data: Mapping[str, Any]


class LineFile:
    """A trace file that lines are appended to, by one `LineFile` at a time."""

    def __init__(self, path: Path) -> None:
        check_file_path(path)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", errors="replace") as file:
                # Another program's file may be one long line.
                first = decoded(file.readline(2**24))
            checked_header(first, path, "It is left as it is; give another path")
        with wrap_write_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._synced = time.monotonic()
        try:
            self._lock(path)
            self._end_last_line()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self, path: Path) -> None:
        # Some file systems have no locks.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StateError(IN_USE.format(path=str(path))) from None

    def _end_last_line(self) -> None:
        """Terminate a line that a killed process has half written."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, line: str) -> None:
        """Append a line."""
        left = memoryview(f"{line}\n".encode("ascii"))
        while left:
            left = left[os.write(self._descriptor, left) :]
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # a pipe can't be synced
            os.fsync(self._descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Wait until all lines are on the disk, and close the file."""
        self._sync()
        os.close(self._descriptor)


def checked_path(path: Any, what: str = "a trace") -> str:
    """Return a path as text; raise `ArgumentError` for anything else."""
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(found, str):
        raise ArgumentError(f"the path of {what} must be a str or a Path, not {shown(path)}")
    return found


# ---------------------------------------------------------------------- reading


def decoded(line: str) -> Any:
    """Return the value in a line of JSON; None for an unreadable line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_header(found: Any) -> bool:
    """Return whether a decoded line is a header, of this version or of a newer one."""
    if not isinstance(found, dict) or found.get("kind") != "header":
        return False
    schema = found.get("schema")
    return isinstance(schema, int) and schema >= 1


def checked_header(found: Any, path: Path, advice: str) -> Dict[str, Any]:
    """Return a decoded header; raise `ArgumentError` if this version can't read it."""
    if not is_header(found):
        raise ArgumentError(NO_TRACE.format(path=str(path), advice=advice))
    header: Dict[str, Any] = found
    if header["schema"] > SCHEMA:
        version = header.get("mxamp", "of an unknown version")
        raise ArgumentError(NEWER.format(path=str(path), version=version, schema=header["schema"]))
    return header


def step_or_record(entry: Any) -> Union[TraceStep, TraceRecord, None]:
    """Return a decoded line as a step or a record; None if it is neither."""
    try:
        if entry["kind"] == "step":
            values = {name: read(entry[name]) for name, read in _FIELDS.items() if name in entry}
            return TraceStep(**{"next_loss_scale": values["loss_scale"], **values})
        if entry["kind"] != "header" and isinstance(entry["data"], dict):
            return TraceRecord(str(entry["kind"]), _whole(entry.get("step", 0)), entry["data"])
    except (LookupError, TypeError, ValueError, OverflowError):
        pass
    return None


def _whole(value: Any) -> int:
    whole = int(value)
    if abs(whole) > _LARGEST:
        raise OverflowError(whole)
    return whole


def _names(value: Any) -> Tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(map(str, value))


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


#: How the fields of a step are read. `float` knows "NaN" and "Infinity".
_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "step": _whole,
    "trainer": _whole,
    "time": _optional(float),
    "loss": _optional(float),
    "loss_finite": bool,
    "loss_scale": float,
    "next_loss_scale": float,
    "stepped": bool,
    "nonfinite": _names,
    "seconds": _optional(float),
    "memory": _optional(_whole),
    "gpu_memory": _optional(_whole),
}


def duration(seconds: float) -> str:
    """Return seconds as text in s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ---------------------------------------------------------------------- writing


def encoded(line: Mapping[str, Any]) -> str:
    """Return a line as JSON; numbers that JSON lacks as "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(line, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(line), allow_nan=False)


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value `depth` levels deep as dicts, lists, text and finite numbers.

    Takes dataclasses, objects with `to_dict()`, and NumPy's numbers and arrays too.
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
    return plain(_as_builtin(value), depth + 1)


def _as_builtin(value: Any) -> Any:
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise ArgumentError(
        f"a trace holds dicts, lists, text, numbers and objects with to_dict(), not {shown(value)}"
    )
