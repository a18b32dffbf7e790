"""Checks that a decorator can wrap a function: its code has to run during the call."""

import inspect
from typing import Any

from ..errors import ArgumentError
from .wording import shown

__all__ = ["check_runs_at_once"]

RUNS_LATER = (
    "{given} is {kind}: its code runs after the call has returned, outside the decorator. Leave "
    "the decorator out, and write `with amp.autocast(...):` in the body, around code that neither "
    "yields nor awaits"
)
_KINDS = {
    "a generator function": inspect.isgeneratorfunction,
    "a coroutine function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
}


def check_runs_at_once(function: Any) -> None:
    """Raise for a function whose call returns before its code has run."""
    for kind, is_one in _KINDS.items():
        if is_one(function) or is_one(function.__call__):
            raise ArgumentError(RUNS_LATER.format(given=shown(function), kind=kind))
