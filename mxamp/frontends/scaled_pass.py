"""One backward pass whose heads are scaled, and whose gradients come out unscaled.

So a script that knows of no loss scale sees the gradients that float32 would give: it may clip,
log or use them as it likes. The pass over the gradients that takes the scale out also finds those
that are not finite (one read and one write at the speed of memory).
"""

from typing import AbstractSet, Any, Callable, List, NamedTuple, Optional, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..policy.active import suspended
from ..scaling.finite import multiply, unscale
from .python_functions import RunningPass
from .variables import Variable

__all__ = ["Heads", "PassResult", "inner_pass", "lower_scales", "scaled_pass"]

#: Runs the backward pass: called with the scale, and whether to keep the graph.
Compute = Callable[[float, bool], None]


class Heads:
    """The heads of a backward pass, and the gradients that they were given."""

    def __init__(self, heads: Any, head_grads: Any) -> None:
        self.heads: List[NDArray] = [heads] if isinstance(heads, NDArray) else list(heads)
        given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
        self.gradients = list(given) if given is not None else [None] * len(self.heads)

    def losses(self) -> List[NDArray]:
        """Return the heads that were given no gradient: the losses, without their graphs."""
        return [head.detach() for head, grad in zip(self.heads, self.gradients) if grad is None]

    def scaled_gradients(self, scale: float) -> List[Optional[NDArray]]:
        """Return the heads' gradients times the scale."""
        if scale == 1:
            return self.gradients
        return [_scaled(head, grad, scale) for head, grad in zip(self.heads, self.gradients)]


def _scaled(head: NDArray, gradient: Optional[NDArray], scale: float) -> NDArray:
    with autograd.pause(), suspended():
        if gradient is not None:
            return gradient * scale
        numpy = isinstance(head, mx.np.ndarray)
        return (mx.np if numpy else mx.nd).ones_like(head) * scale


class PassResult(NamedTuple):
    """The scale that was used; by `id` of arrays, which gradients it replaced, which overflowed."""

    scale: float
    replaced: AbstractSet[int]
    overflown: AbstractSet[int]


def scaled_pass(
    compute: Compute,
    scale: float,
    variables: Sequence[Variable],
    owned: AbstractSet[int],
    statistics: Sequence[NDArray],
    running: RunningPass,
) -> PassResult:
    """Run a backward pass, take the scale out of what it has written, and find what overflowed.

    A gradient of an array that is not `owned`, by trainers that skip a step, must not overflow
    where float32's would not: then the pass is run again with lower scales, down to 1. For that
    the graph is kept; what gradients are added to, and the `statistics` that BatchNorm updates in
    its backward pass, are copied first.
    """
    fresh = [v for v in variables if v.array._fresh_grad]
    _set_fresh(fresh, False)
    adding = [v.gradient for v in variables if v.adds]
    others = any(id(v.array) not in owned for v in variables)
    changed = [*adding, *statistics] if others else []
    backups = [array.copy() for array in changed]
    scales = iter(lower_scales(scale))
    try:
        while True:
            # What is added to has to carry the same scale as what is added.
            multiply(adding, scale)
            running.begin(scale)
            try:
                compute(scale, others)
                # Functions in Python may run a backward pass of their own: until that is done.
                mx.nd.waitall()
            except BaseException:
                multiply(adding, 1 / scale)
                raise
            written = [v for v in variables if v.array._fresh_grad]
            inside = running.written_inside
            scaled = [v for v in written if id(v.array) not in inside]
            overflown = _unscale(scaled, variables, scale) | running.overflown_inside
            if scale <= 1 or overflown <= owned:
                # What a pass adds to still holds what has overflowed in an earlier one.
                replaced = {id(v.array) for v in written if not v.adds}
                return PassResult(scale, replaced, overflown)
            scale = next(scales)
            _restore(changed, backups)
            _set_fresh(written, False)
    finally:
        running.end()
        _set_fresh(fresh, True)


def inner_pass(compute: Compute, variables: Sequence[Variable], running: RunningPass) -> None:
    """Run a backward pass inside another: a function in Python has been given unscaled gradients.

    What it writes is unscaled at once. What it adds to carries the scale of the pass around it.
    """
    fresh = [v for v in variables if v.array._fresh_grad]
    _set_fresh(fresh, False)
    try:
        compute(running.scale, False)
        written = [v for v in variables if v.array._fresh_grad and not v.adds]
        positions = unscale([v.gradient for v in written], running.scale)
        running.written_inside.update(id(v.array) for v in written)
        running.overflown_inside.update(id(written[i].array) for i in positions)
    finally:
        _set_fresh(fresh, True)


def lower_scales(scale: float) -> List[float]:
    """Return the scales to try where one has overflowed: each far lower, the last one 1."""
    return [max(scale / 2**4, 1.0), max(scale / 2**8, 1.0), 1.0]


def _unscale(
    written: Sequence[Variable], variables: Sequence[Variable], scale: float
) -> AbstractSet[int]:
    """Take the scale out of gradients; return the variables whose gradients are not finite."""
    unread = [v for v in variables if v.adds and not v.array._fresh_grad]
    multiply([v.gradient for v in unread], 1 / scale)
    positions = unscale([v.gradient for v in written], scale)
    return {id(written[i].array) for i in positions}


def _restore(gradients: Sequence[NDArray], backups: List[NDArray]) -> None:
    for gradient, backup in zip(gradients, backups):
        backup.copyto(gradient)


def _set_fresh(variables: Sequence[Variable], fresh: bool) -> None:
    for variable in variables:
        variable.array._fresh_grad = fresh
