"""Wrappers of eager operator calls on CPUs; they run before the operator's inputs are cast.

Each step takes the action that follows it, and the operator that it is made for, and returns an
action: a function of MXNet's own `_imperative_invoke` and the arguments of a call.
"""

from __future__ import annotations

import functools
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ...framework import arrays as mx_arrays
from ...framework.arrays import cast, dtype_code, dtypes_of, on_device, shape_of
from ...framework.machine import DTYPE_CODES
from ...framework.operators import handle_of
from ...framework.patching import Original
from ...graph.ir import Node
from ...policy.active import current_policy
from .. import Action, EagerOperator, Invoke, Step
from ..passes import Call, Parts, Tensor
from .convolutions import image_convolution
from .layouts import COLORS
from .substitutions import PASSES

_BFLOAT16, _FLOAT32 = DTYPE_CODES["bfloat16"], DTYPE_CODES["float32"]
_ADD = handle_of("elemwise_add")

#: The mark of views' handles.
_IS_VIEW = "is_view"
#: The methods that return views.
VIEWS = (
    (NDArray, ("_at", "_slice", "reshape", "detach", "as_np_ndarray")),
    (mx.np.ndarray, ("reshape_view", "detach", "as_nd_ndarray")),
)


def build_view(original: Original) -> Original:
    """Wrap an array method so that bfloat16 views it returns are marked: oneDNN misreads them."""

    @functools.wraps(original)
    def method(self: NDArray, *args: object, **keywords: object) -> NDArray:
        view: NDArray = original(self, *args, **keywords)
        if dtype_code(view) == _BFLOAT16 and current_policy() is not None:
            if not view.ndim:  # oneDNN's bfloat16 kernels fail on 0-d arrays
                return cast(view, "float32", isinstance(view, mx.np.ndarray))
            setattr(view.handle, _IS_VIEW, True)
        return view

    return method


def copy_views(then: Action, _eager: EagerOperator) -> Action:
    """Wrap an eager operator to copy inputs that are bfloat16 views, which oneDNN misreads."""

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        views = [hasattr(array.handle, _IS_VIEW) for array in arguments[1]]
        if any(views):
            handle, arrays, keys, vals, out, is_np_op, many = arguments
            copy = functools.partial(mx_arrays.copy, is_np_op=is_np_op)
            copies = [copy(a) if is_view else a for a, is_view in zip(arrays, views)]
            arguments = handle, copies, keys, vals, out, is_np_op, many
        return then(original, arguments)

    return action


def add_in_place_of_broadcast(then: Action, eager: EagerOperator) -> Action:
    """Wrap eager `broadcast_add` to call `elemwise_add` on bfloat16 arrays of equal shapes.

    It gives the same bits, without casts to float32 and back, in oneDNN's layouts.
    """
    if eager.rule.no_kernel is None or eager.rule.op_class == "fp32":
        return then

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        _, arrays, _, _, out, *rest = arguments
        fits = [*map(dtype_code, arrays)] == [_BFLOAT16, _BFLOAT16] and on_device(arrays, "cpu")
        first, second = arrays[0], arrays[-1]
        if not (fits and first.shape == second.shape and first.size and first.ndim):
            return then(original, arguments)
        return eager.write(original(_ADD, arrays, (), (), None, *rest), out)

    return action if eager.policy.target_dtype == "bfloat16" else then


class _Calls(Parts):
    """Builder of a faster equivalent in eager mode: `add` runs an operator, without a graph."""

    def __init__(self, eager: EagerOperator, original: Invoke, arguments: Sequence[Any]) -> None:
        _, self.inputs, keys, vals, _, self._is_np_op, _ = arguments
        self.attrs = dict(zip(keys, map(str, vals)))
        self._eager, self._original = eager, original

    def add(self, op: str, suffix: str, *inputs: Tensor, keep: str = "", **attrs: str) -> Tensor:
        """Run an operator of the faster equivalent at once; return its output."""
        return self._eager.call(self._original, op, inputs, attrs, self._is_np_op)


def add_fourth_channel(then: Action, eager: EagerOperator) -> Action:
    """Wrap eager convolutions to add a zero channel to color images, for a faster kernel."""

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        _, arrays, _, _, out, *_ = arguments
        if not arrays[1:] or shape_of(arrays[1])[1:2] != (COLORS,):
            return then(original, arguments)
        calls, shapes = _Calls(eager, original, arguments), [array.shape for array in arrays]
        training, dtypes = autograd.is_recording(), {*dtypes_of(arrays)}
        call = Call(Node("Convolution", "", dict(calls.attrs)), eager.policy, training, shapes)
        match = PASSES.match(call) if "float32" in dtypes <= {"float32", "bfloat16"} else None
        fits = match is not None and match[0] == "image_convolution" and on_device(arrays, "cpu")
        if not fits:
            return then(original, arguments)
        return eager.write(image_convolution(calls, ())[0], out)

    return action


def keep_layout(then: Action, eager: EagerOperator) -> Action:
    """Wrap eager convolutions so that oneDNN does not change the layout of a cast weight.

    In inference oneDNN also writes the weight back in its own layout, for later calls. They never
    read this array, since each call casts the weight anew.
    """
    if not eager.rule.lowers:
        return then

    def trained(original: Invoke, *arguments: object) -> object:
        with autograd.train_mode():
            return original(*arguments)

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        casts = len(arguments[1]) > 1 and dtype_code(arguments[1][1]) == _FLOAT32
        if casts and not autograd.is_training():
            original = functools.partial(trained, original)
        return then(original, arguments)

    return action


#: The steps before the cast, by operator.
STEPS: Mapping[str, Sequence[Step]] = {
    "Convolution": (add_fourth_channel, keep_layout),
    "broadcast_add": (copy_views, add_in_place_of_broadcast),
    **dict.fromkeys(("Concat", "Pooling", "Reshape", "Flatten", "expand_dims"), (copy_views,)),
}
