"""The backward passes that run now, and the one that an operator in Python belongs to.

MXNet runs operators and functions written in Python in threads of its own. They belong to the pass
of the thread that recorded them or, where that thread runs none, to the only pass there is.
"""

from __future__ import annotations

import sys
import threading
from functools import cached_property
from types import FrameType
from typing import Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp

from ..errors import StateError
from ..framework.interrupts import is_running
from .tape import names_behind

SEVERAL_PASSES = (
    "an operator in Python was recorded in another thread than runs its backward pass, beside a "
    "pass with another loss scale: run backward in the thread that recorded the loss"
)


class Pass:
    """A backward pass from `heads`, whose gradients are multiplied by `scale`."""

    def __init__(self, heads: Sequence[NDArray], scale: float = 1.0, frees: bool = False) -> None:
        self.heads, self.scale, self.frees = heads, scale, frees  #: frees the tape
        self.overflown: set[int] = set()  #: arrays, by `id`, whose gradients are not finite
        self.inner: set[str] = set()  #: the names behind the heads of passes inside it

    @cached_property
    def names(self) -> set[str]:
        """The names of all marked arrays behind the heads; the pass may free their tape."""
        return names_behind(self.heads)


class Enclosing(NamedTuple):
    """The pass around an operator in Python that runs."""

    one: Pass
    is_unscaled: bool  #: the operator was given gradients without the scale
    frame: FrameType


_passes: dict[int, tuple[Pass, FrameType]] = {}  #: by the thread that runs it in a function
_thread = threading.local()  #: `enclosing`, in an operator in Python


def run(one: Pass, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, which is the pass `one` of the calling thread."""
    thread = threading.get_ident()
    waits = _has_python_operators() and not _is_foreign()
    if waits:
        one.names  # noqa: B018  # of a pass inside it too
    try:
        _passes[thread] = one, sys._getframe()
        result = compute()
        if waits:
            # MXNet calls Python later, in another thread: the operator has to find its pass.
            mx.nd.waitall()
        return result
    finally:
        _passes.pop(thread, None)


def _has_python_operators() -> bool:
    """Return whether custom operators or functions wait for a backward pass."""
    held = getattr(mx.operator._registry, "ref_holder", {})
    custom = any(isinstance(one, CustomOp) for one in list(held.values()))
    return custom or bool(autograd.Function._registry.ref_holder)


def _is_foreign() -> bool:
    """Return whether the calling thread may be MXNet's, which must not wait for MXNet."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _running() -> dict[int, Pass]:
    """Return the pass that each thread runs, without those that an interrupt has ended."""
    for thread, (_, frame) in list(_passes.items()):
        if not is_running(frame, thread):
            _passes.pop(thread, None)
    return {thread: one for thread, (one, _) in list(_passes.items())}


def own_pass() -> Pass | None:
    """Return the pass that the calling thread runs, if any."""
    return _running().get(threading.get_ident()) if _passes else None


def is_any_running() -> bool:
    """Return whether a thread of the process runs a backward pass."""
    return bool(_running())


def pass_of(thread: int) -> Pass:
    """Return the pass of an operator in Python that this thread recorded; one of scale 1 if none.

    Raises `StateError` if it may be that of several threads, with different scales.
    """
    passes = _running()
    if thread not in passes and len({one.scale for one in passes.values()}) > 1:
        raise StateError(SEVERAL_PASSES)
    return passes.get(thread) or next(iter(passes.values()), None) or Pass(())


def call_inside(
    one: Pass, is_unscaled: bool, function: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Call the `backward` of an operator in Python, which is a part of a pass."""
    outer = getattr(_thread, "enclosing", None)
    try:
        _thread.enclosing = Enclosing(one, is_unscaled, sys._getframe())
        return function(*args, **named)
    finally:
        _thread.enclosing = outer


def enclosing() -> Enclosing | None:
    """Return the pass around the calling operator in Python, if the caller is one."""
    found: Enclosing | None = getattr(_thread, "enclosing", None)
    return found if found is not None and is_running(found.frame) else None
