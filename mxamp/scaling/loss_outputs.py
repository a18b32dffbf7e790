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

from __future__ import annotations

import atexit
import threading
from collections import UserList
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp, CustomOpProp

from ..framework import operators
from ..framework.arrays import cast, dtypes_of, plain_array
from ..framework.machine import dtype_name
from ..framework.patching import Original, hold_during_forks, wrapping
from ..policy.active import current_policy, suspended
from ..policy.decision import CASTABLE
from .finite import multiply

#: Names of the operators whose eager calls may need a scalable input, by handle.
LOSS_OUTPUT_HANDLES = {
    operators.handle_of(name): name
    for name in (*operators.BACKWARD_STARTERS, *operators.WRITTEN_BY_USERS)
}

#: The scale by context. Recorded graphs hold these arrays, so each is made once per process.
_scales: dict[Any, NDArray] = {}
atexit.register(_scales.clear)  # before MXNet's library is unloaded
_lock = threading.Lock()
hold_during_forks(_lock)
#: Scale and `unscaled_outside` of each `scaled_custom_ops` that runs, outermost first. Global, as
#: MXNet runs custom operators' backward passes in threads of its own.
_contexts: dict[object, tuple[float, bool]] = {}
_thread = threading.local()  #: `unscaled`: it runs such a backward pass on unscaled gradients


def scalable_inputs(
    handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]
) -> list[NDArray]:
    """Return an operator's inputs; where it starts backward, their gradients will be scaled.

    `handle` is one of `LOSS_OUTPUT_HANDLES`.
    """
    name = LOSS_OUTPUT_HANDLES[handle]
    if not operators.starts_backward(name, attributes):
        return list(arrays)
    by_user = name in operators.WRITTEN_BY_USERS
    count = len(arrays) - operators.auxiliary_states(attributes) if by_user else 1
    return [
        _with_scalable_gradient(array) if i < count and kind in CASTABLE else array
        for i, (array, kind) in enumerate(zip(arrays, dtypes_of(arrays)))
    ]


def _with_scalable_gradient(data: NDArray) -> NDArray:
    """Return an array with the values of `data`, whose gradient `scaled_outputs` multiplies."""
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
    """Return the array of one element that holds the loss scale for output operators on `ctx`."""
    with _lock, autograd.pause():
        if ctx not in _scales:
            _scales[ctx] = mx.nd.ones((1,), ctx=ctx)
        return _scales[ctx]


@contextmanager
def scaled_outputs(scale: float, unscaled_outside: bool = False) -> Iterator[None]:
    """Context in which the gradients of output and custom operators are multiplied by `scale`.

    With `unscaled_outside` the caller unscales gradients after the backward pass. At its end the
    context waits for the pass if custom operators (`mx.operator.CustomOp`) are in use.
    """
    if scale == 1:
        yield
        return
    try:
        _set_scale_arrays(scale)
        with scaled_custom_ops(scale, unscaled_outside):
            yield
    finally:
        _set_scale_arrays(1)


def _set_scale_arrays(scale: float) -> None:
    """Set the scale in the array of each device, which graphs multiply gradients by."""
    with _lock, autograd.pause():
        for array in _scales.values():
            array[:] = scale


@contextmanager
def scaled_custom_ops(scale: float, unscaled_outside: bool = False) -> Iterator[None]:
    """Context in which the gradients of custom operators are multiplied by `scale`.

    As `scaled_outputs`, for graphs that scale the gradients of output operators themselves.
    """
    key = object()
    _contexts[key] = scale, unscaled_outside
    try:
        yield
        held = getattr(mx.operator._registry, "ref_holder", {})
        if scale != 1 and any(isinstance(one, CustomOp) for one in list(held.values())):
            mx.nd.waitall()  # MXNet calls Python later, in another thread
    finally:
        del _contexts[key]


def in_unscaled_backward() -> bool:
    """Return whether this thread runs a custom operator's backward on unscaled gradients."""
    return bool(getattr(_thread, "unscaled", False))


def _custom_op_init(original: Original, prop: CustomOpProp, need_top_grad: bool = True) -> None:
    """Replace `CustomOpProp.__init__`: its operators scale their gradients."""
    original(prop, need_top_grad)
    prop.create_operator = partial(_create_operator, prop)


build_custom_op_init = wrapping(_custom_op_init)


def _create_operator(prop: CustomOpProp, *args: Any, **kwargs: Any) -> Any:
    """Return `prop`'s operator, with `_scaled_backward` if no identity scales its gradients."""
    op = type(prop).create_operator(prop, *args, **kwargs)
    scaled_in_graph = not prop.need_top_grad_ and current_policy() is not None
    known = isinstance(getattr(op, "backward", None), partial)
    if isinstance(op, CustomOp) and not scaled_in_graph and not known:
        op.backward = partial(_scaled_backward, op.backward)
    return op


def _scaled_backward(
    backward: Original, req: Any, out_grad: list[NDArray], in_grad: list[NDArray], **others: Any
) -> None:
    """Call a custom operator's `backward`; scale its results if it ignores the scaled gradients."""
    scale, unscaled_outside = [(1.0, False), *_contexts.values()][-1]
    if scale == 1:
        backward(req=req, out_grad=out_grad, in_grad=in_grad, **others)
        return
    unscales = unscaled_outside and all(dtype_name(g.dtype) != "float16" for g in out_grad)
    gradients = _OutGradients(out_grad, 1 / scale if unscales else 1.0)
    # A gradient that the operator adds to carries the scale already.
    results = [g.zeros_like() if one == "add" else g for g, one in zip(in_grad, req)]
    reqs = ["write" if one == "add" else one for one in req]
    _thread.unscaled = unscales
    try:
        backward(req=reqs, out_grad=gradients, in_grad=results, **others)
    finally:
        _thread.unscaled = False
    if unscales or not gradients.was_read:
        multiply([result for result, one in zip(results, req) if one != "null"], scale)
    with autograd.pause(), suspended():
        for gradient, result, one in zip(in_grad, results, req):
            if one == "add":
                gradient[:] += result


class _OutGradients(UserList):  # type: ignore[type-arg]  # Python 3.8 has no UserList[NDArray]
    """A custom operator's `out_grad`, multiplied by `factor` when an element is first read.

    `UserList` reads its elements from `data`. The list is a subclass, not the arrays: MXNet's
    operators compare the arrays' types.
    """

    def __init__(self, gradients: Sequence[NDArray], factor: float = 1.0) -> None:
        self._gradients, self._factor, self.was_read = gradients, factor, False

    def __len__(self) -> int:
        return len(self._gradients)

    @property  # type: ignore[override]
    def data(self) -> Any:
        """The gradients, times the factor."""
        if self._factor != 1 and not self.was_read:
            with autograd.pause(), suspended():
                self._gradients = [gradient * self._factor for gradient in self._gradients]
        self.was_read = True
        return self._gradients
