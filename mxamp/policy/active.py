"""The current policy of a thread or task: set by the innermost `autocast`, else by `init`.

Regions are one stack for each execution context (`contextvars`): each thread and each asyncio task
has its own. The patches call `current_policy` at every operator call.

Where "auto" has chosen plain float32, `PLAIN_FLOAT32` takes the place of a policy: mixed precision
is off, and `autocast()` and loss scaling, which follow the dtype around them, stay off too.
"""

from __future__ import annotations

import sys
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile
from types import FrameType
from typing import Any, Callable, Iterator

from ..framework.interrupts import is_running
from .policy import Policy, PolicyChoice

#: The mark of graph nodes in a region that turns mixed precision off, and in `autocast()`.
OFF, ON = "off", "on"


@dataclass(eq=False)
class Region:
    """An active `autocast`, or running code for which mxamp itself has set the policy.

    Regions are nested in `outer`. Without a mark, nodes are in no region: their graph runs under
    the policy around its calls. A region of a `frame` ends with it.
    """

    policy: PolicyChoice | None
    mark: str | None
    outer: Region | None
    frame: FrameType | None = None
    close: Callable[[], Any] | None = None  #: ends the innermost `autocast` region


#: The innermost region; a global, as any context variable.
_innermost: ContextVar[Region | None] = ContextVar("mxamp_region", default=None)


def _current() -> Region | None:
    """Return the innermost active region, from `autocast` or mxamp itself; None outside of any.

    A region that Ctrl-C left before its exit ran is dropped first.
    """
    region = _innermost.get()
    while region is not None and region.frame is not None and not is_running(region.frame):
        region = region.outer
        _innermost.set(region)
    return region


@dataclass(eq=False)
class _Process:
    """The process's state of mixed precision, such as the policy that `init` set."""

    policy: PolicyChoice | None = None
    has_marked_nodes: bool = False  #: graphs with regions that cast may exist
    #: Operators that computed in a half precision, for the summary of an automatic run.
    lowered: set[str] = field(default_factory=set)


#: A global, as are MXNet's functions that `init` patches.
process = _Process()


def current_policy() -> Policy | None:
    """Return the policy that applies to the calling code; None if mixed precision is off.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.current_policy().target_dtype
    'bfloat16'
    >>> print(amp.current_policy())
    None
    """
    region = _innermost.get()
    if region is not None and region.frame is not None:
        region = _current()
    return (process.policy if region is None else region.policy) or None


def is_enabled() -> bool:
    """Return whether mixed precision is on for the calling code; False under a float32 policy.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.is_enabled()
    True
    >>> amp.is_enabled()
    False
    """
    policy = current_policy()
    return policy is not None and policy.target_dtype != "float32"


def _regions() -> Iterator[Region]:
    """Yield the active regions that enclose the calling code, innermost first."""
    region = _current()
    while region is not None:
        yield region
        region = region.outer


def nearest_policy() -> PolicyChoice | None:
    """Return the policy of the innermost `autocast` that is not disabled, else that of `init`.

    `PLAIN_FLOAT32` if "auto" has chosen float32 there.
    """
    policies = (region.policy for region in _regions() if region.policy is not None)
    return next(policies, process.policy)


def chose_float32() -> bool:
    """Return whether float32 is the chosen dtype, so that losses need no scaling."""
    policy = nearest_policy()
    return policy is not None and policy.target_dtype == "float32"


def current_mark() -> str | None:
    """Return the text that a new graph node stores to name its `autocast` region, or None."""
    return next((region.mark for region in _regions()), None)


class in_force:
    """Context manager that sets the current policy of a thread or task; None turns casts off.

    Graph nodes that are created inside get no mark.
    """

    __slots__ = ("_policy",)

    def __init__(self, policy: PolicyChoice | None) -> None:
        self._policy = policy

    def __enter__(self) -> None:
        outer = _current()
        close = None if outer is None else outer.close
        _innermost.set(Region(self._policy, None, outer, sys._getframe(1), close))

    def __exit__(self, *_error: object) -> None:
        region = _innermost.get()
        _innermost.set(region and region.outer)


def suspended() -> in_force:
    """Return a context that turns casts off, for computations that mxamp itself makes.

    Unlike `autocast(enabled=False)` it patches nothing, and takes microseconds less.
    """
    return in_force(None)


def is_suspended() -> bool:
    """Return whether the calling code runs inside `suspended`, where nothing is cast."""
    region = _current()
    return region is not None and region.frame is not None and region.policy is None


def autocast_region(policy: PolicyChoice | None, mark: str) -> Region:
    """Return a new region for an `autocast`, nested in the current region."""
    if mark == ON:
        marks = takewhile(bool, (region.mark for region in _regions()))
        mark = next((one for one in marks if one and one != OFF), ON)
    return Region(policy, mark, _current())


def begin(region: Region) -> None:
    """Enter an `autocast` region: make it the current one."""
    _innermost.set(region)


def end(region: Region) -> None:
    """Leave an `autocast` region and all regions inside it; do nothing if it was left before."""
    if region in _regions():
        _innermost.set(region.outer)


class Regional(closing):  # type: ignore[type-arg]  # Python 3.8 has no closing[Any]
    """Base class of `autocast`: a `contextlib.closing` of the region that is innermost at exit."""

    thing = property(_innermost.get)


def record_lowered(operator: str, dtype: str) -> None:
    """Record an operator for the summary at exit, if it computed in 16 bits."""
    if dtype in ("float16", "bfloat16"):
        process.lowered.add(operator)
