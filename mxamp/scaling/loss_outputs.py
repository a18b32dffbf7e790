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
    "LOSS_OUTPUT_HANDLES",
    "count_scaled_backwards",
    "build_custom_op_init",
    "in_unscaled_backward",
    "scalable_inputs",
    "scale_array",
    "scaled_custom_ops",
    "scaled_outputs",
]

#: Names of the operators whose eager calls may need a scalable input, by handle.
LOSS_OUTPUT_HANDLES = {handle_of(name): name for name in (*BACKWARD_STARTERS, *WRITTEN_BY_USERS)}

#: The scale by context. Recorded graphs hold these arrays, so each is made once per process.
_scales: Dict[Any, NDArray] = {}
atexit.register(_scales.clear)  # before MXNet's library is unloaded
_lock = threading.Lock()
hold_during_forks(_lock)


class _CustomBackwards:
    """State of the custom operators' backward passes, which MXNet runs in its own threads."""

    def __init__(self) -> None:
        #: Scale and `unscaled_outside` of each `scaled_custom_ops` that runs, outermost first.
        self.contexts: Dict[object, Tuple[float, bool]] = {}
        self.count = 0  #: how many have run with a scale
        self.thread = threading.local()  #: `unscaled`: it runs one on unscaled gradients


#: One per process, like MXNet's threads.
_backwards = _CustomBackwards()


def scalable_inputs(
    handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]
) -> List[NDArray]:
    """Return an operator's inputs; where it starts backward, their gradients will be scaled.

    `handle` is one of `LOSS_OUTPUT_HANDLES`.
    """
    name = LOSS_OUTPUT_HANDLES[handle]
    if not starts_backward(name, attributes):
        return list(arrays)
    count = len(arrays) - auxiliary_states(attributes) if name in WRITTEN_BY_USERS else 1
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
    if not _scales:
        return
    with _lock, autograd.pause():
        for array in _scales.values():
            array[:] = scale


@contextmanager
def scaled_custom_ops(scale: float, unscaled_outside: bool = False) -> Iterator[None]:
    """Context in which the gradients of custom operators are multiplied by `scale`.

    As `scaled_outputs`, for graphs that scale the gradients of output operators themselves.
    """
    key = object()
    _backwards.contexts[key] = scale, unscaled_outside
    try:
        yield
        if scale != 1 and _is_any_custom_op_alive():
            mx.nd.waitall()  # MXNet calls Python later, in another thread
    finally:
        del _backwards.contexts[key]


def _is_any_custom_op_alive() -> bool:
    held = getattr(mx.operator._registry, "ref_holder", {})
    return any(issubclass(type(value), CustomOp) for value in list(held.values()))


def count_scaled_backwards() -> int:
    """Return how many backward passes of custom operators have run with a scale."""
    return _backwards.count


def in_unscaled_backward() -> bool:
    """Return whether this thread runs a custom operator's backward on unscaled gradients."""
    return bool(getattr(_backwards.thread, "unscaled", False))


def build_custom_op_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `CustomOpProp.__init__` whose operators scale their gradients."""

    @functools.wraps(original)
    def __init__(self: CustomOpProp, need_top_grad: bool = True) -> None:  # noqa: N807
        original(self, need_top_grad)
        self.create_operator = functools.partial(_create_operator, self)

    return __init__


def _create_operator(prop: CustomOpProp, *args: Any, **kwargs: Any) -> Any:
    """Return `prop`'s operator, with `_scaled_backward` if no identity scales its gradients."""
    op = type(prop).create_operator(prop, *args, **kwargs)
    scaled_in_graph = not prop.need_top_grad_ and current_policy() is not None
    known = isinstance(getattr(op, "backward", None), functools.partial)
    if isinstance(op, CustomOp) and not scaled_in_graph and not known:
        op.backward = functools.partial(_scaled_backward, op.backward)
    return op


def _scaled_backward(
    backward: Callable[..., None],
    req: Sequence[str],
    out_grad: List[NDArray],
    in_grad: List[NDArray],
    **others: Any,
) -> None:
    """Call a custom operator's `backward`; scale its results if it ignores the scaled gradients."""
    contexts = list(_backwards.contexts.values())
    scale, unscaled_outside = contexts[-1] if contexts else (1.0, False)
    if scale == 1:
        backward(req=req, out_grad=out_grad, in_grad=in_grad, **others)
        return
    _backwards.count += 1
    unscales = unscaled_outside and all(dtype_name(g.dtype) != "float16" for g in out_grad)
    gradients = _OutGradients(out_grad, 1 / scale if unscales else 1.0)
    # A gradient that the operator adds to carries the scale already.
    adding = [i for i, one in enumerate(req) if one == "add"]
    results = [in_grad[i].zeros_like() if i in adding else in_grad[i] for i in range(len(in_grad))]
    reqs = ["write" if one == "add" else one for one in req]
    _backwards.thread.unscaled = unscales
    try:
        backward(req=reqs, out_grad=gradients, in_grad=results, **others)
    finally:
        _backwards.thread.unscaled = False
    if unscales or not gradients.was_read:
        multiply([results[i] for i, one in enumerate(reqs) if one != "null"], scale)
    with autograd.pause(), suspended():
        for i in adding:
            in_grad[i][:] = in_grad[i] + results[i]


class _OutGradients(List[NDArray]):
    """A custom operator's `out_grad`, multiplied by `factor` when an element is first read.

    The list is a subclass, not the arrays: MXNet's operators compare the arrays' types.
    """

    def __init__(self, gradients: Sequence[NDArray], factor: float) -> None:
        super().__init__(gradients)
        self._factor = factor
        self.was_read = False

    def mark_read(self) -> None:
        """Set `was_read`; at the first call, multiply the gradients by the factor."""
        if self._factor != 1 and not self.was_read:
            with autograd.pause(), suspended():
                super().__setitem__(slice(None), [g * self._factor for g in super().copy()])
        self.was_read = True


def _with_mark(name: str) -> Callable[..., Any]:
    """Return the method `name` of `list`, for `_OutGradients`: it calls `mark_read` first."""
    method = getattr(list, name)

    @functools.wraps(method)
    def read(self: _OutGradients, *args: Any) -> Any:
        self.mark_read()
        return method(self, *args)

    return read


for _name in ("__getitem__", "__iter__", "__reversed__", "__add__", "__mul__", "copy", "pop"):
    setattr(_OutGradients, _name, _with_mark(_name))
