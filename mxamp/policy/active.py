"""The policy in force: the process's policy, or that of the innermost region.

Regions are one stack for each execution context (`contextvars`): each thread and each asyncio task
has its own. The patches call `current_policy` at every operator call.

Where "auto" has chosen float32, `FLOAT32` takes the place of a policy: mixed precision is off, and
`autocast()` and loss scaling, which follow the dtype around them, stay off too.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Iterator

from .policy import FLOAT32, Choice, Policy

#: The mark of graph nodes in a region that turns mixed precision off, and in `autocast()`.
OFF, ON = "off", "on"


class Mark:
    """The mark that graph nodes get in an `autocast` region, and whether a node has got it."""

    __slots__ = ("has_nodes", "is_off", "text")

    def __init__(self, text: str, is_off: bool = False) -> None:
        self.text, self.is_off, self.has_nodes = text, is_off, False


class Region:
    """One region: the policy in force, the mark of graph nodes made in it, and the region around.

    Without a mark, nodes are in no region: their graph runs under the policy around its calls.
    """

    __slots__ = ("mark", "outer", "policy")

    def __init__(self, policy: Choice | None, mark: Mark | None, outer: Region | None) -> None:
        self.policy, self.mark, self.outer = policy, mark, outer


#: The innermost region; a global, as any context variable.
_innermost: ContextVar[Region | None] = ContextVar("mxamp_region", default=None)


class _Process:
    """The state of the whole process, which `init` and `shutdown` write."""

    policy: Choice | None = None

    def __init__(self) -> None:
        #: Operators that computed in a half precision, for the summary of an automatic run.
        self.lowered: set[str] = set()


#: A global, as are MXNet's functions that `init` patches.
process = _Process()


def current_policy() -> Policy | None:
    """Return the policy in force for the calling code, None where mixed precision is off.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.current_policy().target_dtype
    'bfloat16'
    >>> print(amp.current_policy())
    None
    """
    region = _innermost.get()
    return (process.policy if region is None else region.policy) or None


def is_enabled() -> bool:
    """Return whether mixed precision is on for the calling code.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.is_enabled()
    True
    >>> amp.is_enabled()
    False
    """
    return current_policy() is not None


def _regions() -> Iterator[Region]:
    """Yield the regions around the calling code, the innermost first."""
    region = _innermost.get()
    while region is not None:
        yield region
        region = region.outer


def nearest_policy() -> Choice | None:
    """Return the policy of the innermost region that has one, else the policy of `init`.

    `FLOAT32` if "auto" has chosen float32 there.
    """
    policies = (region.policy for region in _regions() if region.policy is not None)
    return next(policies, process.policy)


def chose_float32() -> bool:
    """Return whether "auto" has chosen float32 for the calling code."""
    return nearest_policy() is FLOAT32


def current_mark() -> Mark | None:
    """Return the mark of graph nodes made now, None for no mark."""
    region = _innermost.get()
    return None if region is None else region.mark


def push_policy(policy: Choice | None, mark: Mark | None = None) -> None:
    """Put `policy` in force for the calling thread or task; None turns casting off.

    Without a `mark`, nodes get the one of the region around.
    """
    outer = _innermost.get()
    if mark is None and outer is not None:
        mark = outer.mark
    _innermost.set(Region(policy, mark, outer))


def push_autocast(policy: Choice | None, mark: Mark) -> None:
    """Begin an `autocast` region; `autocast()` takes the mark of the region that it continues."""
    if mark.text == ON:
        for region in _regions():
            if region.mark is None:
                break
            if not region.mark.is_off:
                mark = region.mark
                break
    push_policy(policy, mark)


def push_tracing() -> None:
    """Begin a region in which nodes get no mark, under the policy in force."""
    outer = _innermost.get()
    policy = process.policy if outer is None else outer.policy
    _innermost.set(Region(policy, None, outer))


def pop_region() -> Region:
    """End the region of the calling thread or task that began last; return it."""
    region = next(_regions())
    _innermost.set(region.outer)
    return region


class suspended:
    """Context in which casting is off, for mxamp's own computations.

    Unlike `autocast(enabled=False)` it patches nothing, and takes microseconds less.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        push_policy(None)

    def __exit__(self, *_error: Any) -> None:
        pop_region()


def record_lowered(operator: str, dtype: str) -> None:
    """Add an operator to `process.lowered` if it computed in float16 or bfloat16."""
    if dtype in ("float16", "bfloat16"):
        process.lowered.add(operator)
