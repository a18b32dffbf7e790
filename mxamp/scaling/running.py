"""Registry of running backward passes by thread, for the custom operators inside them.

MXNet runs operators and functions written in Python in threads of its own. They belong to the pass
of the thread that recorded them or, where that thread runs none, to the only pass there is.
"""

from __future__ import annotations

import sys
import threading
from functools import cached_property
from types import FrameType
from typing import Callable, NamedTuple, Sequence, TypeVar

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp

from ..errors import StateError
from ..framework.arrays import as_list
from ..framework.interrupts import is_running
from .tape import names_behind

Result = TypeVar("Result")

SEVERAL_PASSES = (
    "an operator in Python was recorded in another thread than runs its backward pass, beside a "
    "pass with another loss scale: run backward in the thread that recorded the loss"
)


class BackwardPass:
    """A backward pass: its heads and their gradients, and the loss scale of its results."""

    def __init__(
        self, heads: Sequence[NDArray], head_grads: object = None, scale: float = 1.0
    ) -> None:
        self.heads, self.scale = heads, scale
        #: The gradients of the heads; None stands for ones.
        self.head_grads = None if head_grads is None else as_list(head_grads)
        self.frees = False  #: whether the pass frees the tape
        self.outer: BackwardPass | None = None  #: the pass whose operator in Python runs this one
        self.overflown: set[int] = set()  #: arrays, by `id`, whose gradients are not finite
        self.inner: set[str] = set()  #: names behind the heads of passes inside this one

    @cached_property
    def names(self) -> set[str]:
        """The names on autograd's tape of all inputs and variables that the heads depend on."""
        return names_behind(self.heads)


class Running(NamedTuple):
    """A backward pass that a thread runs, or a custom operator or Function inside it."""

    backward_pass: BackwardPass
    given_scale: float | None  #: of the gradients that the operator receives; None in a pass
    frame: FrameType

    @property
    def scale(self) -> float:
        """The loss scale of the gradients that this thread computes.

        Inside an operator in Python, it is that of the gradients that the operator receives.
        """
        return self.backward_pass.scale if self.given_scale is None else self.given_scale


_running: dict[int, Running] = {}  #: what threads run, by a thread's number


def run(this_pass: BackwardPass, compute: Callable[[], Result], to_end: bool = False) -> Result:
    """Call `compute`, registered as this thread's backward pass, and return its result.

    With `to_end` it waits until MXNet has computed the pass. It waits too if an operator in Python
    may run in the pass, in another thread and later: the operator has to find its pass.
    """
    # MXNet's own thread must not wait for MXNet.
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    waits = to_end or (has_python_operators() and not is_foreign)
    if waits:
        this_pass.names  # noqa: B018  # now, before the pass frees the tape

    def compute_all() -> Result:
        result = compute()
        if waits:
            mx.nd.waitall()
        return result

    return call_inside(this_pass, None, compute_all)


def call_inside(
    this_pass: BackwardPass, scale: float | None, function: Callable[..., Result], *args: object
) -> Result:
    """Call a function while this thread is recorded as running a backward pass.

    `scale` is that of the gradients that an operator in Python receives; None for the pass.
    """
    thread = threading.get_ident()
    outer = _running.get(thread)
    try:
        _running[thread] = Running(this_pass, scale, sys._getframe())
        return function(*args)
    finally:
        if outer is None:
            _running.pop(thread, None)
        else:
            _running[thread] = outer


def has_python_operators() -> bool:
    """Return whether an operator in Python (custom or `autograd.Function`) awaits its backward."""
    held = getattr(mx.operator._registry, "ref_holder", {})
    custom = any(isinstance(one, CustomOp) for one in list(held.values()))
    return custom or bool(autograd.Function._registry.ref_holder)


def _all_running() -> dict[int, Running]:
    """Return running backward passes by thread id, without passes that Ctrl-C interrupted."""
    return {t: one for t, one in list(_running.items()) if is_running(one.frame, t)}


def current() -> Running | None:
    """Return the backward pass or Python operator that the calling thread runs, or None."""
    return _all_running().get(threading.get_ident()) if _running else None


def is_any_running() -> bool:
    """Return whether any thread runs a backward pass."""
    return bool(_all_running())


def backward_pass_of(thread: int) -> BackwardPass:
    """Return the running backward pass to which an operator recorded in `thread` belongs.

    Returns a pass of scale 1 if no thread runs one. Raises `StateError` if the passes of several
    threads are possible, and their scales differ.
    """
    found = {t: running.backward_pass for t, running in _all_running().items()}
    if thread not in found and len({one.scale for one in found.values()}) > 1:
        raise StateError(SEVERAL_PASSES)
    return found.get(thread) or next(iter(found.values()), None) or BackwardPass(())
