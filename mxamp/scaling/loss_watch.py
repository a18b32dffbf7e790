"""Backward passes that begin with losses which a script scales, or which it forgets to scale.

A warning where a script scales its loss, and then runs backward from the one it was given. Where it
is the scaled loss of a `GradScaler`, output operators get its scale too.
"""

import functools
import logging
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, FrozenSet, Iterator, List, Sequence

from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.patching import Patch
from .loss_outputs import scale_of, scaled_heads

__all__ = ["patches", "watched_losses"]

logger = logging.getLogger("mxamp")

UNSCALED = (
    "inside scale_loss, backward was called on the loss as it was given: its gradients are not "
    "scaled, and the step will divide them by the scale all the same. Call it on what "
    "`with amp.scale_loss(loss, trainer) as scaled` has yielded: autograd.backward(scaled)"
)

#: The losses that were given to the innermost `scale_loss` around the code, by `id`.
_given: ContextVar[FrozenSet[int]] = ContextVar("mxamp_given_losses", default=frozenset())


@contextmanager
def watched_losses(losses: Sequence[NDArray]) -> Iterator[None]:
    """Warn of backward passes from these losses inside."""
    before = _given.get()
    _given.set(frozenset(map(id, losses)))
    try:
        yield
    finally:
        _given.set(before)


def patches() -> List[Patch]:
    """Return the patches that look at the heads of backward passes."""
    return [
        Patch(autograd, "backward", _build_backward),
        Patch(NDArray, "backward", _build_method),
    ]


def _build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(heads: Any, *args: Any, **kwargs: Any) -> None:
        listed = [heads] if isinstance(heads, NDArray) else heads
        _look_at(listed)
        with scaled_heads(scale_of(listed)):
            original(heads, *args, **kwargs)

    return backward


def _build_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(self: NDArray, *args: Any, **kwargs: Any) -> None:
        _look_at([self])
        with scaled_heads(scale_of([self])):
            original(self, *args, **kwargs)

    return backward


def _look_at(heads: Any) -> None:
    given = _given.get()
    if given and any(id(head) in given for head in heads):
        logger.warning(UNSCALED)
