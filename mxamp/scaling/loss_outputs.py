"""Operators that send back gradients without the loss scale, and how they get it.

`SoftmaxOutput` and other output operators start the backward pass themselves: they ignore the
gradient of the scaled loss. Their input passes through an identity whose gradient is multiplied by
the scale:

    BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x))

with a sign whose gradient is 1 (`_contrib_sign_ste`). The difference is exactly 0 for every x,
including Inf, NaN and -0, so no value changes. The scale is an array that holds 1 outside
`scale_loss`; MXNet's engine orders the backward pass between the two writes to it.

A user's `mx.operator.CustomOp` may ignore its incoming gradient too. Made with
`need_top_grad=False` it gets the identity above. Any other is watched while it runs: if it has not
read the incoming gradient, its results are multiplied by the scale. Where the scale never leaves
the backward pass, the operator is given unscaled gradients, whatever it computes from them. float16
gradients stay scaled, because they would lose the small values that the scale preserves.
"""

import atexit
import functools
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp, CustomOpProp

from ..framework.arrays import cast, dtypes_of, plain_array
from ..framework.locks import hold_during_forks
from ..framework.machine import dtype_name
from ..framework.operators import (
    BACKWARD_STARTERS,
    WRITTEN_BY_USERS,
    auxiliary_states,
    handle_of,
    starts_backward,
)
from ..policy.active import current_policy, suspended
from ..policy.decision import CASTABLE
from .finite import multiply

__all__ = [
    "HANDLES",
    "calls_so_far",
    "build_init",
    "in_unscaled_backward",
    "scalable_inputs",
    "scale_array",
    "scaled_custom_ops",
    "scaled_heads",
]

#: Names of the operators whose eager calls may need a scalable input, by handle.
HANDLES = {handle_of(name): name for name in (*BACKWARD_STARTERS, *WRITTEN_BY_USERS)}

#: The scale by context. Recorded graphs hold these arrays, so each is made once per process.
_scales: Dict[Any, NDArray] = {}
atexit.register(_scales.clear)  # before MXNet's library is unloaded
_lock = threading.Lock()
hold_during_forks(_lock)

#: The scale of each region that may run backward passes, and whether it stays inside them.
_regions: Dict[object, Tuple[float, bool]] = {}
_thread = threading.local()


#: How many backward passes of custom operators have run with a scale.
_counts = {"calls": 0}


def scalable_inputs(
    handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]
) -> List[NDArray]:
    """Return the inputs of a recorded call to one of `HANDLES`, with scalable gradients."""
    name = HANDLES[handle]
    if not starts_backward(name, attributes):
        return list(arrays)
    count = len(arrays) - auxiliary_states(attributes) if name in WRITTEN_BY_USERS else 1
    return [
        _with_scalable_gradient(array) if i < count and kind in CASTABLE else array
        for i, (array, kind) in enumerate(zip(arrays, dtypes_of(arrays)))
    ]


def _with_scalable_gradient(data: NDArray) -> NDArray:
    """Return an array with the values of `data` whose gradient `scaled_heads` multiplies."""
    classic = plain_array(data)
    with suspended():
        scale = scale_array(data.context).reshape((1,) * max(data.ndim, 1))
        sign = mx.nd.contrib.sign_ste(classic)
        # float16 can't hold the scale.
        zero = cast(mx.nd.BlockGrad(sign) - sign, "float32")
        scaled = cast(mx.nd.broadcast_mul(zero, scale), dtype_name(data.dtype))
        result = mx.nd.BlockGrad(classic) - scaled
    return result.as_np_ndarray() if isinstance(data, mx.np.ndarray) else result


def scale_array(ctx: Any) -> NDArray:
    """Return the array that holds the scale of a context's output operators."""
    with _lock, autograd.pause():
        if ctx not in _scales:
            _scales[ctx] = mx.nd.ones((1,), ctx=ctx)
        return _scales[ctx]


@contextmanager
def scaled_heads(scale: float, stays_inside: bool = False) -> Iterator[None]:
    """Multiply gradients that output and custom operators start by `scale`, inside the region.

    `stays_inside` says that gradients leave the backward pass without the scale. Waits for the
    passes if custom operators (`mx.operator.CustomOp`) are in use.
    """
    if scale == 1:
        yield
        return
    try:
        _set(scale)
        with scaled_custom_ops(scale, stays_inside):
            yield
    finally:
        _set(1)


def _set(value: float) -> None:
    with _lock, autograd.pause():
        for array in _scales.values():
            array[:] = value


@contextmanager
def scaled_custom_ops(scale: float, stays_inside: bool = False) -> Iterator[None]:
    """Run backward passes whose gradients carry `scale`; wait for them if operators are custom.

    `stays_inside` says that gradients leave the pass without the scale.
    """
    region = object()
    _regions[region] = scale, stays_inside
    try:
        yield
        if scale != 1 and _is_any_custom_op_alive():
            mx.nd.waitall()  # MXNet calls Python later, in another thread
    finally:
        del _regions[region]


def _is_any_custom_op_alive() -> bool:
    held = getattr(mx.operator._registry, "ref_holder", {})
    return any(issubclass(type(value), CustomOp) for value in list(held.values()))


def calls_so_far() -> int:
    """Return how many backward passes of custom operators have run with a scale."""
    return _counts["calls"]


def in_unscaled_backward() -> bool:
    """Return whether this thread runs a custom operator's backward on unscaled gradients."""
    return bool(getattr(_thread, "unscaled", False))


def build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `CustomOpProp.__init__` that watches the backward pass of the operator."""

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
    scale, stays_inside = next(reversed(list(_regions.values())), (1.0, False))
    if scale == 1:
        backward(req=req, out_grad=out_grad, in_grad=in_grad, **others)
        return
    _counts["calls"] += 1
    unscales = stays_inside and all(dtype_name(g.dtype) != "float16" for g in out_grad)
    given = _HeadGradients(out_grad, 1 / scale if unscales else 1.0)
    # A gradient that the operator adds to carries the scale already.
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
    """The incoming gradients of an operator, multiplied by `factor` at the first read.

    The list is a subclass, not the arrays: MXNet's operators compare the arrays' types.
    """

    def __init__(self, gradients: Sequence[NDArray], factor: float) -> None:
        super().__init__(gradients)
        self._factor = factor
        self.was_read = False

    def read(self) -> None:
        """Record that the operator reads a gradient."""
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
