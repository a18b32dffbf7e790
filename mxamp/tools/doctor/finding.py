"""A finding of `mxamp doctor`, as a value."""

from dataclasses import dataclass

__all__ = ["Finding", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A problem or a note: what was found, and what to do."""

    name: str
    level: str  #: "problem" or "note"
    what: str
    advice: str


def problem(name: str, what: str, advice: str) -> Finding:
    """Return something to change."""
    return Finding(name, "problem", what, advice)


def note(name: str, what: str, advice: str) -> Finding:
    """Return something to know, with which mxamp works."""
    return Finding(name, "note", what, advice)
