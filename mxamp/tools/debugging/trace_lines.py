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
    "decode_line",
    "duration_text",
    "encode_line",
    "is_header",
    "parse_entry",
    "path_text",
    "to_jsonable",
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
    """One step of a trainer, as `trace` has written it; None for unknown values.

    ::

        for step in amp.debugging.read_trace("trace.jsonl").steps:
            print(step.step, step.loss, step.loss_scale, "" if step.stepped else step.nonfinite)

    Parameters
    ----------
    step : int
        The number of the step, from 1.
    trainer : int
        The trainer's place in the list that `trace` was given.
    time : float, optional
        Seconds since 1970.
    loss : float, optional
        The loss of the step.
    loss_finite : bool
        False if the loss is Inf or NaN.
    loss_scale : float
        The loss scale of the step.
    next_loss_scale : float
        The loss scale of the next step.
    stepped : bool
        False for a skipped step.
    nonfinite : tuple of str
        The parameters whose gradients held Inf or NaN.
    seconds : float, optional
        The time since the step before.
    memory : int, optional
        The bytes that the process uses.
    gpu_memory : int, optional
        The bytes in use on all GPUs of the trainer.
    """

    step: int
    trainer: int = 0
    time: Optional[float] = None
    loss: Optional[float] = None
    loss_finite: bool = True
    loss_scale: float = 1.0
    next_loss_scale: float = 1.0
    stepped: bool = True
    nonfinite: Tuple[str, ...] = ()
    seconds: Optional[float] = None
    memory: Optional[int] = None
    gpu_memory: Optional[int] = None


class TraceRecord(NamedTuple):
    """Data written by `Trace.record`, and the number of the step before it.

    ::

        with amp.debugging.trace(trainer, "plans.jsonl") as trace:
            trace.record("plan", amp.explain(net, "bfloat16"))
        [record] = amp.debugging.read_trace("plans.jsonl").of_kind("plan")
        print(record.step, record.data["target_dtype"])

    Parameters
    ----------
    kind : str
        The kind that `Trace.record` was given.
    step : int
        The number of the step before.
    data : dict
        The data.
    """

    kind: str
    step: int
    data: Mapping[str, Any]


class LineFile:
    """A trace file to append lines to, locked against other writers."""

    def __init__(self, path: Path) -> None:
        check_file_path(path)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", errors="replace") as file:
                # Another program's file may be one long line.
                first = decode_line(file.readline(2**24))
            checked_header(first, path, "It is left as it is; give another path")
        with wrap_write_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._synced_at = time.monotonic()
        try:
            self._lock(path)
            self._end_last_line()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self, path: Path) -> None:
        """Lock the open file; raise `StateError` if another trace has locked it."""
        # Some file systems have no locks.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StateError(IN_USE.format(path=str(path))) from None

    def _end_last_line(self) -> None:
        """Append a newline after a line that a killed process has half written."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, line: str) -> None:
        """Append a line, and sync the file to disk every `_SYNC_SECONDS`."""
        left = memoryview(f"{line}\n".encode("ascii"))
        while left:
            left = left[os.write(self._descriptor, left) :]
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self._sync_to_disk()

    def _sync_to_disk(self) -> None:
        """Wait until the lines written so far are on the disk, if the file can be synced."""
        with contextlib.suppress(OSError):  # a pipe can't be synced
            os.fsync(self._descriptor)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync the file to disk, and close it."""
        self._sync_to_disk()
        os.close(self._descriptor)


def path_text(path: Any, what: str = "a trace") -> str:
    """Return a path as text; raise `ArgumentError` if it is no path of `what`."""
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(found, str):
        raise ArgumentError(f"the path of {what} must be a str or a Path, not {shown(path)}")
    return found


# ---------------------------------------------------------------------- reading


def decode_line(line: str) -> Any:
    """Return the value that a line of JSON stands for; None for an unreadable line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_header(found: Any) -> bool:
    """Return whether a decoded line is a trace's header, of this or a newer schema."""
    if not isinstance(found, dict) or found.get("kind") != "header":
        return False
    schema = found.get("schema")
    return isinstance(schema, int) and schema >= 1


def checked_header(found: Any, path: Path, advice: str) -> Dict[str, Any]:
    """Return a decoded first line of `path`; raise `ArgumentError` if it is no readable header."""
    if not is_header(found):
        raise ArgumentError(NO_TRACE.format(path=str(path), advice=advice))
    header: Dict[str, Any] = found
    if header["schema"] > SCHEMA:
        version = header.get("mxamp", "of an unknown version")
        raise ArgumentError(NEWER.format(path=str(path), version=version, schema=header["schema"]))
    return header


def parse_entry(entry: Any) -> Union[TraceStep, TraceRecord, None]:
    """Return a decoded line as a step or a record; None if it is neither."""
    try:
        if entry["kind"] == "step":
            values = {name: read(entry[name]) for name, read in _FIELDS.items() if name in entry}
            return TraceStep(**{"next_loss_scale": values["loss_scale"], **values})
        if entry["kind"] != "header" and isinstance(entry["data"], dict):
            step = _read_integer(entry.get("step", 0))
            return TraceRecord(str(entry["kind"]), step, entry["data"])
    except (LookupError, TypeError, ValueError, OverflowError):
        pass
    return None


def _read_integer(value: Any) -> int:
    """Return a number of JSON as an integer; raise if it is none, or too large to be a count."""
    whole = int(value)
    if abs(whole) > _LARGEST:
        raise OverflowError(whole)
    return whole


def _read_names(value: Any) -> Tuple[str, ...]:
    """Return a list of JSON as a tuple of text; raise `TypeError` if it is no list."""
    if not isinstance(value, list):
        raise TypeError(value)
    return tuple(map(str, value))


def _read_optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that reads a value by `read`, and None as None."""
    return lambda value: None if value is None else read(value)


#: How the fields of a step are read. `float` knows "NaN" and "Infinity".
_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "step": _read_integer,
    "trainer": _read_integer,
    "time": _read_optional(float),
    "loss": _read_optional(float),
    "loss_finite": bool,
    "loss_scale": float,
    "next_loss_scale": float,
    "stepped": bool,
    "nonfinite": _read_names,
    "seconds": _read_optional(float),
    "memory": _read_optional(_read_integer),
    "gpu_memory": _read_optional(_read_integer),
}


def duration_text(seconds: float) -> str:
    """Return seconds as text in s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ---------------------------------------------------------------------- writing


def encode_line(line: Mapping[str, Any]) -> str:
    """Return a trace's line as JSON, with "NaN", "Infinity" and "-Infinity" as text."""
    try:
        return json.dumps(line, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(to_jsonable(line), allow_nan=False)


def to_jsonable(value: Any, depth: int = 0) -> Any:
    """Return a value as dicts, lists, text and finite numbers; `depth` counts the levels above it.

    Takes dataclasses, objects with `to_dict()`, and NumPy's numbers and arrays too.
    """
    if depth > _DEPTH:
        raise ArgumentError(TOO_DEEP)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(entry, depth + 1) for entry in value]
    return to_jsonable(_to_builtin(value), depth + 1)


def _to_builtin(value: Any) -> Any:
    """Return one object as a dict, list or number, its parts unconverted; raise if unknown."""
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise ArgumentError(
        f"a trace holds dicts, lists, text, numbers and objects with to_dict(), not {shown(value)}"
    )
