"""The user's own operators (`mx.operator.CustomOp`) in scaled backward passes.

An operator that never reads the gradient that comes to it sends back gradients without the loss
scale. So what it is given is watched, and where it has read none, what it returns is multiplied by
the scale. Where the scale never leaves the backward pass, it is given gradients without it, in
whatever way it computes with them; but float16 ones would lose what the scale has kept.

An operator made with `need_top_grad=False` has its scale from `loss_outputs`, in the graph.
"""

import functools
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp, CustomOpProp

from ..framework.machine import dtype_name
from ..framework.patching import Patch
from ..policy.active import current_policy, suspended
from .finite import multiply

__all__ = ["build_init", "calls_so_far", "in_unscaled_backward", "patch", "scaled"]

#: The scales of the backward passes that may run, and whether they stay inside, by region.
_scales: Dict[object, Tuple[float, bool]] = {}
_thread = threading.local()


class _Calls:
    """Counts backward passes of operators."""

    total = 0


_calls = _Calls()


@contextmanager
def scaled(scale: float, stays_inside: bool = False) -> Iterator[None]:
    """Run backward passes whose gradients carry `scale`; wait for them if operators are custom.

    `stays_inside` says that gradients leave the pass without it.
    """
    region = object()
    _scales[region] = scale, stays_inside
    try:
        yield
        if scale != 1 and _is_any_alive():
            mx.nd.waitall()  # MXNet calls Python later, in a thread of its own
    finally:
        del _scales[region]


def calls_so_far() -> int:
    """Return how many backward passes of custom operators have run with a scale."""
    return _calls.total


def in_unscaled_backward() -> bool:
    """Return whether the calling thread is in the backward of an operator given no scale."""
    return bool(getattr(_thread, "unscaled", False))


def patch() -> Patch:
    """Return the patch through which all custom operators are made."""
    return Patch(CustomOpProp, "__init__", build_init)


def build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `CustomOpProp.__init__` whose operators scale gradients that lack the scale."""

    @functools.wraps(original)
    def __init__(self: CustomOpProp, need_top_grad: bool = True) -> None:  # noqa: N807
        original(self, need_top_grad)
        self.create_operator = functools.partial(_create, self)

    return __init__


def _create(prop: CustomOpProp, *args: Any, **kwargs: Any) -> Any:
    op = type(prop).create_operator(prop, *args, **kwargs)
    scaled_in_graph = not prop.need_top_grad_ and current_policy() is not None
    known = isinstance(getattr(op, "backward", None), functools.partial)
    if isinstance(op, CustomOp) and not scaled_in_graph and not known:
        op.backward = functools.partial(_backward, op.backward)
    return op


def _backward(
    backward: Callable[..., None],
    req: Sequence[str],
    out_grad: List[NDArray],
    in_grad: List[NDArray],
    **others: Any,
) -> None:
    scale, stays_inside = next(reversed(list(_scales.values())), (1.0, False))
    if scale == 1:
        backward(req=req, out_grad=out_grad, in_grad=in_grad, **others)
        return
    _calls.total += 1
    unscales = stays_inside and all(dtype_name(g.dtype) != "float16" for g in out_grad)
    given = _HeadGradients(out_grad, 1 / scale if unscales else 1.0)
    # What an operator adds to carries the scale already.
    adding = [i for i, one in enumerate(req) if one == "add"]
    made = [in_grad[i].zeros_like() if i in adding else in_grad[i] for i in range(len(in_grad))]
    asked = ["write" if one == "add" else one for one in req]
    _thread.unscaled = unscales
    try:
        backward(req=asked, out_grad=given, in_grad=made, **others)
    finally:
        _thread.unscaled = False
    if unscales or not given.was_read:
        multiply([made[i] for i, one in enumerate(asked) if one != "null"], scale)
    with autograd.pause(), suspended():
        for i in adding:
            in_grad[i][:] = in_grad[i] + made[i]


class _HeadGradients(List[NDArray]):
    """The gradients that come to an operator: times `factor` once it takes one.

    The arrays themselves are MXNet's own, whose operators compare types.
    """

    def __init__(self, gradients: Sequence[NDArray], factor: float) -> None:
        super().__init__(gradients)
        self._factor = factor
        self.was_read = False

    def read(self) -> None:
        """Take note that the operator takes one."""
        if self._factor != 1 and not self.was_read:
            with autograd.pause(), suspended():
                super().__setitem__(slice(None), [g * self._factor for g in super().copy()])
        self.was_read = True


def _noted(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    @functools.wraps(method)
    def noted(self: _HeadGradients, *args: Any) -> Any:
        self.read()
        return method(self, *args)

    return noted


for _name in ("__getitem__", "__iter__", "__reversed__", "__add__", "__mul__", "copy", "pop"):
    setattr(_HeadGradients, _name, _noted(_name))


def _is_any_alive() -> bool:
    held = getattr(mx.operator._registry, "ref_holder", {})
    return any(issubclass(type(value), CustomOp) for value in list(held.values()))
