"""The backward passes that run now, and the one that an operator in Python belongs to.

MXNet runs operators and functions written in Python in threads of its own. They belong to the pass
of the thread that recorded them or, where that thread runs none, to the only pass there is.
"""

from __future__ import annotations

import sys
import threading
from functools import cached_property
from types import FrameType
from typing import Any, Callable, Sequence

import mxnet as mx
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
    """A backward pass from `heads`, whose gradients are multiplied by `scale`.

    If it `unscales`, its caller divides the gradients by the scale afterwards.
    """

    def __init__(self, heads: Sequence[NDArray], scale: float = 1.0, unscales: bool = False):
        self.heads, self.scale, self.unscales = heads, scale, unscales
        self.overflown: set[int] = set()  #: arrays, by `id`, whose gradients are not finite

    @cached_property
    def names(self) -> set[str]:
        """The names of all marked arrays behind the heads; the pass may free their tape."""
        return names_behind(self.heads)


_passes: dict[int, tuple[Pass, FrameType]] = {}  #: by the thread that runs it in a function
_thread = threading.local()  #: `inside`: the same of the pass whose operator in Python runs


def run(one: Pass, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, which is the pass `one` of the calling thread."""
    thread = threading.get_ident()
    try:
        _passes[thread] = one, sys._getframe()
        result = compute()
        if _has_custom_operators():
            # MXNet calls Python later, in another thread: the operator has to find its pass.
            mx.nd.waitall()
        return result
    finally:
        _passes.pop(thread, None)


def _running() -> dict[int, Pass]:
    """Return the pass that each thread runs, without those that an interrupt has ended."""
    for thread, (_, frame) in list(_passes.items()):
        if not is_running(frame, thread):
            _passes.pop(thread, None)
    return {thread: one for thread, (one, _) in list(_passes.items())}


def _has_custom_operators() -> bool:
    """Return whether custom operators (`mx.operator.CustomOp`) exist."""
    held = getattr(mx.operator._registry, "ref_holder", {})
    return any(isinstance(one, CustomOp) for one in list(held.values()))


def is_any_running() -> bool:
    """Return whether a thread of the process runs a backward pass."""
    return bool(_running())


def is_nested() -> bool:
    """Return whether the caller is a function or operator in Python inside a backward pass."""
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return foreign or (bool(_passes) and threading.get_ident() in _running())


def pass_of(thread: int) -> Pass:
    """Return the pass of an operator in Python that this thread recorded; one of scale 1 if none.

    Raises `StateError` if it may be that of several threads, with different scales.
    """
    passes = _running()
    if thread not in passes and len({one.scale for one in passes.values()}) > 1:
        raise StateError(SEVERAL_PASSES)
    return passes.get(thread) or next(iter(passes.values()), None) or Pass(())


def call_inside(one: Pass, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call an operator in Python that is given the gradients of a pass without its scale."""
    outer = getattr(_thread, "inside", None)
    try:
        _thread.inside = one, sys._getframe()
        return function(*args, **named)
    finally:
        _thread.inside = outer


def enclosing() -> Pass | None:
    """Return the pass around a nested one, whose operator was given unscaled gradients, if any."""
    one, frame = getattr(_thread, "inside", None) or (None, None)
    return one if frame is not None and is_running(frame) else None


def scale_inside() -> float:
    """Return the scale of the pass around a nested one; 1 where that is not known."""
    outer = enclosing() or _running().get(threading.get_ident())
    return outer.scale if outer else 1.0
