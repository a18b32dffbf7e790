"""What the lines of a trace hold, as values."""

from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

__all__ = ["TraceRecord", "TraceStep", "add_line", "duration"]

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
