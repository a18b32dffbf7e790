"""Loss scaling of operators that ignore head gradients, such as SoftmaxOutput or Custom.

`SoftmaxOutput` and other output operators start the backward pass themselves: they ignore the
gradient of the scaled loss. Their input passes through an identity whose gradient is multiplied by
the scale:

    BlockGrad(x) - scale * (BlockGrad(sign(x)) - sign(x))

with a sign whose gradient is 1 (`_contrib_sign_ste`). The difference is exactly 0 for every x,
including Inf, NaN and -0, so no value changes. The scale is an array of each recorded operator, and
a backward pass sets those behind its heads.

A user's `mx.operator.CustomOp` may ignore its incoming gradient too. Made with
`need_top_grad=False` it gets the identity above. Any other, and any `autograd.Function`, is given
gradients without the scale, and its results are multiplied by the scale. A custom operator's
float16 gradients stay scaled, because they would lose the small values that the scale preserves. It
is watched while it runs: if it has not read them, its results are multiplied.
"""

from __future__ import annotations

import atexit
import threading
from collections import UserList
from functools import partial, wraps
from typing import Any, Iterable, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.operator import CustomOp, CustomOpProp

from ..framework import operators
from ..framework.arrays import as_list, cast, dtypes_of, plain_array
from ..framework.machine import dtype_name
from ..framework.patching import Original
from ..policy.active import current_policy, suspended
from ..policy.decision import CASTABLE
from .finite import multiply
from .running import BackwardPass, backward_pass_of, call_inside
from .tape import marked, name_of

#: Names of the operators whose eager calls may need a scalable input, by handle.
LOSS_OUTPUT_HANDLES = {
    operators.handle_of(name): name
    for trait in ("starts_backward", "calls_python")
    for name in operators.with_trait(trait)
}
#: The most arrays that are kept for backward passes that may never come.
_LIMIT = 4096
#: The scales of recorded output operators, by name, until a pass frees their tape.
_recorded: dict[str, NDArray] = {}
atexit.register(_recorded.clear)  # before MXNet's library is unloaded


def scalable_inputs(
    handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]
) -> list[NDArray]:
    """Wrap the inputs of a loss operator such as SoftmaxOutput, to scale its gradients.

    `handle` is one of `LOSS_OUTPUT_HANDLES`.
    """
    name = LOSS_OUTPUT_HANDLES[handle]
    if not operators.starts_backward(name, attributes):
        return list(arrays)
    by_user = name in operators.with_trait("calls_python")
    count = len(arrays) - operators.auxiliary_states(attributes) if by_user else 1
    return [
        _with_scalable_gradient(array) if i < count and kind in CASTABLE else array
        for i, (array, kind) in enumerate(zip(arrays, dtypes_of(arrays)))
    ]


def _with_scalable_gradient(data: NDArray) -> NDArray:
    """Return an array equal to `data`, whose gradient is multiplied by the loss scale."""
    classic = plain_array(data)
    with suspended():
        scale = scale_array(data.context).reshape((1,) * max(data.ndim, 1))
        sign = mx.nd.contrib.sign_ste(classic)
        # float16 can't hold the scale.
        zero = cast(mx.nd.BlockGrad(sign) - sign, "float32")
        scaled = cast(mx.nd.broadcast_mul(zero, scale), dtype_name(data.dtype))
        result = mx.nd.BlockGrad(classic) - scaled
    return result.as_np_ndarray() if isinstance(data, mx.np.ndarray) else result


def scale_array(ctx: mx.Context) -> NDArray:
    """Return a one-element array by which a loss operator multiplies its gradients.

    A backward pass writes its loss scale to the array (`set_scales`).
    """
    with autograd.pause(), suspended():
        array = mx.nd.ones((1,), ctx=ctx)
    if autograd.is_recording():
        array = marked(array)
        _recorded[name_of(array)] = array
        if len(_recorded) > _LIMIT:
            _recorded.pop(next(iter(list(_recorded))), None)
    return array


def set_scales(this_pass: BackwardPass) -> None:
    """Write a backward pass's loss scale to the loss operators that the pass reaches."""
    for name in _recorded.keys() & this_pass.names if _recorded else ():
        with autograd.pause(), suspended():
            _recorded[name][:] = this_pass.scale


def forget(names: Iterable[str]) -> None:
    """Drop the scale arrays of loss operators whose tape autograd has freed."""
    for name in names if _recorded else ():
        _recorded.pop(name, None)


def patched_prop_init(original: Original, prop: CustomOpProp, need_top_grad: bool = True) -> None:
    """Initialize a `CustomOpProp` so that its operators apply the loss scale to gradients."""
    original(prop, need_top_grad)
    scale_operators(prop)


def scale_operators(prop: CustomOpProp) -> None:
    """Make operators that a `CustomOpProp` creates apply the loss scale to gradients."""
    prop.create_operator = partial(_create_operator, prop)


def _create_operator(prop: CustomOpProp, *args: object, **kwargs: object) -> CustomOp:
    """Create a custom operator whose gradients are multiplied by the loss scale.

    Its `backward` is wrapped, unless the operator's inputs are (`scalable_inputs`).
    """
    op = type(prop).create_operator(prop, *args, **kwargs)
    scaled_in_graph = not prop.need_top_grad_ and current_policy() is not None
    is_wrapped = isinstance(getattr(op, "backward", None), partial)
    if isinstance(op, CustomOp) and not scaled_in_graph and not is_wrapped:
        op.backward = partial(_scaled_backward, op.backward, threading.get_ident())
    return op


def _scaled_backward(
    backward: Original,
    thread: int,
    req: Sequence[str],
    out_grad: list[NDArray],
    in_grad: list[NDArray],
    **others: object,
) -> None:
    """Call a custom operator's `backward` so that its results carry the loss scale.

    `thread` has recorded the operator.
    """
    this_pass = backward_pass_of(thread)
    backward = partial(backward, **others)
    if this_pass.scale == 1:
        call_inside(this_pass, 1.0, partial(backward, req=req, out_grad=out_grad, in_grad=in_grad))
        return
    # float16 gradients stay scaled: without the scale, small ones would be lost.
    given = this_pass.scale if any(dtype_name(g.dtype) == "float16" for g in out_grad) else 1.0
    gradients = _OutGradients(out_grad, given / this_pass.scale)
    # A gradient that the operator adds to carries the scale already.
    results = [g.zeros_like() if kind == "add" else g for g, kind in zip(in_grad, req)]
    reqs = ["write" if kind == "add" else kind for kind in req]
    call_inside(this_pass, given, partial(backward, req=reqs, out_grad=gradients, in_grad=results))
    if given == 1 or not gradients.was_read:
        multiply([result for result, kind in zip(results, req) if kind != "null"], this_pass.scale)
    with autograd.pause(), suspended():
        for gradient, result, kind in zip(in_grad, results, req):
            if kind == "add":
                gradient[:] += result


def patched_function_call(
    original: Original, function: autograd.Function, *inputs: NDArray
) -> object:
    """Call an `autograd.Function` so that its backward gets unscaled gradients."""
    backward, thread = function.backward, threading.get_ident()

    @wraps(backward)
    def unscaled_backward(*gradients: NDArray | None) -> list[NDArray | None]:
        this_pass = backward_pass_of(thread)
        unscaled = [_times_in_float32(each, 1 / this_pass.scale) for each in gradients]
        results = as_list(call_inside(this_pass, 1.0, backward, *unscaled))
        return [_times_in_float32(result, this_pass.scale) for result in results]

    function.backward = unscaled_backward
    return original(function, *inputs)


def _times_in_float32(gradient: NDArray | None, factor: float) -> NDArray | None:
    """Return a gradient times a factor in float32, as float16 would lose small values."""
    if gradient is None or factor == 1:
        return gradient
    with autograd.pause(), suspended():
        wide = cast(gradient, "float32") if dtype_name(gradient.dtype) in CASTABLE else gradient
        return wide * factor


class _OutGradients(UserList):  # type: ignore[type-arg]  # Python 3.8 has no UserList[NDArray]
    """A custom operator's `out_grad`; its arrays are multiplied by `factor` on first access.

    No earlier: operators with `need_top_grad=False` are given arrays without memory. `UserList`
    reads its elements from `data`. The list is a subclass, not the arrays: MXNet's operators
    compare the arrays' types.
    """

    def __init__(self, gradients: Sequence[NDArray | None], factor: float = 1.0) -> None:
        self._gradients, self._factor, self.was_read = gradients, factor, False

    def __len__(self) -> int:
        return len(self._gradients)

    @property  # type: ignore[override]
    def data(self) -> Sequence[NDArray | None]:
        """The arrays of the list, multiplied by `factor` on first access."""
        if not self.was_read:
            self._gradients = [_times_in_float32(one, self._factor) for one in self._gradients]
        self.was_read = True
        return self._gradients
