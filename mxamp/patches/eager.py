"""Eager calls: inputs are cast as the policy decides.

All of `mx.nd`, `mx.np` and `mx.npx`, the methods of arrays and Python's operators end in one
function, `_imperative_invoke`, looked up at call time in three modules. Replacing it there also
covers functions that user code imported before.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import ExitStack
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import _global_var, autograd, nd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.base import _LIB, NDArrayHandle, c_handle_array, check_call
from mxnet.ndarray import _internal as mx_internal
from mxnet.ndarray import register as mx_register
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from ..framework import arrays as mx_arrays
from ..framework.arrays import (
    KIND_NAMES,
    all_float32,
    as_list,
    cast,
    dtype_code,
    dtype_of,
    kind_code,
)
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.operators import WRITTEN_BY_USERS, Operator, by_handle, handle_of
from ..framework.patching import Original
from ..framework.zero_gradients import copy_inputs_at, zero_gradient_inputs
from ..graph.gradients import needs_separate_bias, without_bias
from ..graph.ir import Node
from ..graph.speed import passes
from ..graph.speed.convolutions import image_convolution
from ..graph.speed.shape_rules import IN_CALLS, reason_to_keep_call
from ..graph.speed.substitutions import match_call
from ..policy.active import current_policy, record_lowered, suspended
from ..policy.decision import CASTABLE, SPARSE_GRADIENT, Decision, decide
from ..policy.policy import Policy
from ..policy.rules import Reason, long_sum_reason
from ..scaling.loss_outputs import LOSS_OUTPUT_HANDLES, scalable_inputs

#: MXNet's `_imperative_invoke`, a function of the fields of `Call`.
Invoke = Callable[..., Any]


class Call(NamedTuple):
    """The arguments of an eager call."""

    handle: int
    arrays: Sequence[NDArray]
    keys: Sequence[str]
    vals: Sequence[Any]
    out: Any
    is_np_op: bool
    output_is_list: bool

    @property
    def attrs(self) -> dict[str, str]:
        """The operator's attributes as text."""
        return dict(zip(self.keys, map(str, self.vals)))


#: The fields of a `Call`, mostly as a plain tuple: a `Call` takes half a microsecond to make.
Arguments = Tuple[Any, ...]
#: What an eager call does in place of MXNet's own function, which is the first argument.
Action = Callable[[Invoke, Arguments], Any]

_BFLOAT16, _FLOAT32 = DTYPE_CODES["bfloat16"], DTYPE_CODES["float32"]
_ADD, _TENSORDOT = handle_of("elemwise_add"), handle_of("_npi_tensordot")
#: The first is the operator that `astype`, `copyto` and assignments to slices call.
_COPY_TO, _CAST = handle_of("_copyto"), handle_of("Cast")

_c_int, _byref = ctypes.c_int, ctypes.byref
_Handles, _Kinds = ctypes.POINTER(NDArrayHandle), ctypes.POINTER(_c_int)
# The most entries of a cache: a scalar that changes with every call adds one each time.
_MANY = 4096

#: Marks of handles: of views, and of float32 arrays that have a gradient.
_IS_VIEW, _IS_TRAINED = "is_view", "is_trained"
#: Operators with oneDNN kernels that fall back for some arrays, on kernels that read no views.
_NO_VIEWS = frozenset(
    map(handle_of, ("Concat", "Pooling", "Reshape", "Flatten", "expand_dims", "broadcast_add"))
)

# The attributes that decisions read, beside those of conditions.
_READ: Mapping[str, Sequence[str]] = {
    "Convolution": ["num_group"], "Deconvolution": ["num_group", "kernel", "dilate"],
    "RNN": ["mode"], "_npi_einsum": ["subscripts"],
}  # fmt: skip

RAW_BITS = "a list's values would be raw bits: write array(values).astype(amp.bfloat16)"

#: The modules that look `_imperative_invoke` up.
INVOKE_MODULES = (mx_ctypes, mx_internal, mx_register)


def build_invoke(original: Invoke) -> Invoke:
    """Return an `_imperative_invoke` that casts its inputs as the policy decides."""
    original = _invoke if original is mx_arrays.invoke else original

    def _imperative_invoke(*arguments: Any) -> Any:
        policy = current_policy()
        # Every microsecond counts: a small call takes ten.
        actions = _OFF if policy is None else policy.caches.eager or _actions_of(policy)
        action = actions[arguments[0]]
        if action is None or not arguments[1]:
            return original(*arguments)
        return action(original, arguments)

    return _imperative_invoke


def _encode(*texts: str) -> Any:
    """Return texts as C strings."""
    encoded = (ctypes.c_char_p * len(texts))()
    encoded[:] = [text.encode() for text in texts]  # faster than to make it of them
    return encoded


#: Encoding attributes anew takes up to 5 microseconds of a call.
_encoded = functools.lru_cache(_MANY)(_encode)


def _invoke(
    handle: int, arrays: Sequence[NDArray], keys: Any, vals: Any, out: Any, is_np: bool, many: bool
) -> Any:
    """Call an operator as MXNet's function does, in four fifths of the time."""
    # A call with `out` is mostly an optimizer's, with other numbers each time.
    encode = _encoded if out is None else _encode
    texts = len(keys), _encoded(*keys), encode(*map(str, vals))
    call, operator = _LIB.MXImperativeInvokeEx, NDArrayHandle(handle)
    return call_library(call, operator, arrays, texts, is_np, many, out)


def call_library(
    call: Any, handle: Any, arrays: Sequence[NDArray], texts: Any, is_np: bool, many: bool, out: Any
) -> Any:
    """Call a function of MXNet's library on arrays; return the outputs that it makes, or `out`."""
    size, count, memory, kinds = len(arrays), _c_int(), _Handles(), _Kinds()
    inputs = c_handle_array(arrays)
    if isinstance(out, NDArray):
        count, memory = _c_int(1), _Handles(out.handle)
    elif out is not None:
        count, memory = _c_int(len(out)), ctypes.cast(c_handle_array(out), _Handles)
    check_call(call(handle, size, inputs, _byref(count), _byref(memory), *texts, _byref(kinds)))
    if out is not None:
        return out
    make = _global_var._np_ndarray_cls if is_np else _global_var._ndarray_cls
    made = [make(NDArrayHandle(memory[i]), stype=kinds[i]) for i in range(count.value)]
    return made if many or len(made) != 1 else made[0]


# ---------------------------------------------------------------------- the table of actions


class _Actions(Dict[int, Optional[Action]]):
    """The actions of one policy on eager calls by operator handle, made on demand.

    None stands for MXNet's own call. Without a policy, only the losses of output operators are
    scaled, since the backward pass is scaled all the same.
    """

    def __init__(self, policy: Policy | None) -> None:
        super().__init__()
        self.policy = policy

    def __missing__(self, handle: int) -> Action | None:
        action: Action | None = None
        operator, policy = by_handle().get(handle), self.policy
        if policy is not None:
            if handle in (_COPY_TO, _CAST):
                action = _copy_to
            elif operator is not None and _may_cast(operator, policy):
                action = _KINDS.get(operator.name, _Casts)(operator, policy).run
            if handle in zero_gradient_inputs():
                action = _copying_inputs(action or _plain, zero_gradient_inputs()[handle])
            if handle in _NO_VIEWS:
                action = _reading_no_views(action or _plain)
        # Without a policy, custom operators scale their results themselves.
        by_user = LOSS_OUTPUT_HANDLES.get(handle) in WRITTEN_BY_USERS
        if handle in LOSS_OUTPUT_HANDLES and (policy is not None or not by_user):
            action = _scaling_losses(action or _plain)
        self[handle] = action
        return action


#: The actions where mixed precision is off.
_OFF = _Actions(None)


def _actions_of(policy: Policy) -> _Actions:
    """Return the actions of a policy on eager calls, by operator handle."""
    made: _Actions | None = policy.caches.eager
    if made is None:
        made = policy.caches.eager = _Actions(policy)
    return made


def _plain(original: Invoke, arguments: Arguments) -> Any:
    """Call MXNet's own function."""
    return original(*arguments)


def _scaling_losses(then: Action) -> Action:
    """Return an action that scales the losses of an output operator while autograd records."""

    def action(original: Invoke, arguments: Arguments) -> Any:
        call = Call(*arguments)
        if autograd.is_recording():
            call = call._replace(arrays=scalable_inputs(call.handle, call.arrays, call.attrs))
        return then(original, call)

    return action


def _copying_inputs(then: Action, positions: frozenset[int] | None) -> Action:
    """Return an action for an operator whose gradients at `positions` are zeros by definition."""

    def action(original: Invoke, arguments: Arguments) -> Any:
        # The crash is that of casts: programs that stay in float32 need no copies.
        if not (mx_arrays.cast_dtypes and autograd.is_recording()):
            return then(original, arguments)

        is_np_op = Call(*arguments).is_np_op

        def copied(handle: int, arrays: Sequence[NDArray], *rest: Any) -> Any:
            return original(handle, copy_inputs_at(arrays, positions, is_np_op), *rest)

        return then(copied, arguments)

    return action


def _reading_no_views(then: Action) -> Action:
    """Return an action for an operator that can't read views: it reads copies of them."""

    def action(original: Invoke, arguments: Arguments) -> Any:
        views = [hasattr(array.handle, _IS_VIEW) for array in arguments[1]]
        if any(views):
            call = Call(*arguments)
            copy = functools.partial(mx_arrays.copy, is_np_op=call.is_np_op)
            copies = [copy(a) if is_view else a for a, is_view in zip(call.arrays, views)]
            arguments = call._replace(arrays=copies)
        return then(original, arguments)

    return action


def _copy_to(original: Invoke, arguments: Arguments) -> Any:
    """Copy or cast an array, bfloat16 by way of float32.

    MXNet copies oneDNN's layouts in one dtype, and the gradient of its `Cast` truncates.
    """
    call = Call(*arguments)
    [array] = call.arrays
    if dtype_code(array) == _BFLOAT16 and (call.out is None or dtype_code(call.out) != _BFLOAT16):
        call = call._replace(arrays=[cast(array, "float32", call.is_np_op)])
    return original(*call)


# ---------------------------------------------------------------------- casting actions


def _may_cast(operator: Operator, policy: Policy) -> bool:
    """Return whether a policy may cast inputs or outputs of an operator in eager calls."""
    rule = policy.rule(operator.name)
    follows = rule.op_class in ("neutral", "widest") and not rule.conditions
    alone = len(operator.inputs) <= 1 and not operator.variadic
    return rule.op_class != "untouched" and not (follows and rule.missing is None and alone)


class _Casts:
    """The casts around eager calls of one operator under one policy, cached by input dtypes."""

    def __init__(self, operator: Operator, policy: Policy) -> None:
        self._operator, self._policy = operator, policy
        self._decided = functools.lru_cache(_MANY)(self._decide_anew)
        rule = self._rule = policy.rule(operator.name)
        #: Whether calls on float32 inputs are never cast.
        self._follows = not rule.lowers
        # The rules by shape that eager calls follow.
        self._sums = rule.has_shape_rule("long_sums")
        self._trained = [one.reason for one in rule.by_shape if one.name == "cast_weight"]
        self._target = DTYPE_CODES[policy.target_dtype]
        self._by_size = any(one.name in IN_CALLS for one in rule.by_shape)
        #: Why layers of certain shapes and attributes stay in float32, or None.
        self._kept: dict[Any, Reason | None] = {}
        read = {*_READ.get(operator.name, ()), *(c.attribute for c in rule.conditions)}
        read |= {"transpose_a"} if self._sums else set()
        self._attributes = read | ({SPARSE_GRADIENT} & {*operator.attributes})

    def decide(self, call: Call, kept: Reason | None = None) -> Decision | None:
        """Return the decision on a call; None without a cast.

        `kept` is why the size of the call keeps a float32 weight in float32.
        """
        arrays = call.arrays
        codes = tuple([kind_code(array) for array in arrays])
        attributes: tuple[tuple[str, str], ...] = ()
        if self._operator.name == "Custom":  # its constructor reads all attributes
            attributes = tuple(call.attrs.items())
        elif self._attributes:
            attributes = tuple(item for item in call.attrs.items() if item[0] in self._attributes)
        if self._sums:
            shapes = [array.shape for array in arrays]
            kept = long_sum_reason(self._rule, dict(attributes), shapes, autograd.is_recording())
        elif self._trained and codes[1:2] != (self._target,) and autograd.is_recording():
            kept = self._trained[0]
        elif codes[1:2] != (_FLOAT32,) and not (kept and kept.exact):
            kept = None
        decision = self._decided(codes, attributes, kept)
        changes = decision is not None and mx_arrays.on_device(arrays, self._policy.device)
        return decision if changes else None

    def _decide_anew(
        self, codes: Sequence[int], attributes: Sequence[tuple[str, str]], kept: Reason | None
    ) -> Decision | None:
        """Return the decision for inputs with these dtype codes, uncached; None without a cast."""
        dtypes = [KIND_NAMES.get(code, "other") for code in codes]
        decision = decide(self._operator.name, dict(attributes), dtypes, self._policy, kept=kept)
        record_lowered(self._operator.name, decision.precision)
        return decision if decision.changes else None

    def run(self, original: Invoke, arguments: Arguments) -> Any:
        """Call the operator on inputs that are cast as the policy decides."""
        if self._follows and all_float32(arguments[1]):
            return original(*arguments)
        return self.compute(original, Call(*arguments))

    def compute(self, original: Invoke, call: Call, kept: Reason | None = None) -> Any:
        """Call the operator with the casts of the policy's decision on `call`."""
        return _compute(self.decide(call, kept), original, call)


class _Additions(_Casts):
    """Calls of `broadcast_add`."""

    def compute(self, original: Invoke, call: Call, kept: Reason | None = None) -> Any:
        """Call `elemwise_add` in place of `broadcast_add` on two bfloat16 arrays of one shape.

        It gives the same bits, without casts to float32 and back, in oneDNN's layouts.
        """
        first, second = call.arrays
        alike = dtype_code(first) == dtype_code(second) == _BFLOAT16 and first.shape == second.shape
        decision = self.decide(call) if alike and first.size and first.ndim else None
        if decision is not None and decision.through is not None:
            added = original(*call._replace(handle=_ADD, keys=(), vals=(), out=None))
            return _written(added, call.out)
        return super().compute(original, call, kept)


class _Layers(_Casts):
    """Calls of layers, dense ones or convolutions: small calls stay in float32."""

    def run(self, original: Invoke, arguments: Arguments) -> Any:
        """Call the layer on inputs that are cast as the policy and its size decide."""
        recording, is_plain = autograd.is_recording(), True
        try:
            kept = self._reason_to_keep(recording, arguments) if self._by_size else None
            is_plain = kept is not None and self._is_plain(arguments[1], recording)
        except (IndexError, ValueError):
            pass  # MXNet raises an error of its own
        if is_plain:
            return original(*arguments)
        return self.compute(original, Call(*arguments), kept)

    def _is_plain(self, arrays: Sequence[NDArray], _recording: bool) -> bool:
        """Return whether MXNet's own call on these inputs needs no casts and no other parts."""
        return all_float32(arrays)

    def _reason_to_keep(self, recording: bool, arguments: Arguments) -> Reason | None:
        """Return why the size of a call keeps it in float32, or None; cached."""
        handle, arrays, keys, vals, *rest = arguments
        # The numbers of units and channels are among the attributes.
        key = (mx_arrays.shape_of(arrays[0]), recording, *keys, *vals)
        try:
            return self._kept[key]
        except TypeError:  # kernels may be lists
            texts = [*map(str, vals)]
            return self._reason_to_keep(recording, (handle, arrays, keys, texts, *rest))
        except KeyError:
            if len(self._kept) >= _MANY:
                self._kept.clear()
            attrs, shapes = Call(*arguments).attrs, [arrays[0].shape, arrays[1].shape]
            self._kept[key] = reason_to_keep_call(self._rule, attrs, shapes, recording)
            return self._kept[key]


class _Convolutions(_Layers):
    """Calls of `Convolution`."""

    def compute(self, original: Invoke, call: Call, kept: Reason | None = None) -> Any:
        """Call `Convolution`; of color images in the parts of graphs."""
        decision = self.decide(call, kept) if call.arrays[1:] else None
        if decision is not None:
            result = self._convolve_images(original, call) if decision.through is None else None
            if result is not None:
                return _written(result, call.out)
            casts_weight = decision.reads[1] is not None
            if casts_weight and self._policy.device == "cpu" and not autograd.is_training():
                original = functools.partial(_in_training_mode, original)
        return _compute(decision, original, call)

    def _convolve_images(self, original: Invoke, call: Call) -> Any | None:
        """Return the output of a bfloat16 convolution of color images; None for other calls."""
        shapes = [array.shape for array in call.arrays]
        if shapes[1][1:2] != (passes.COLORS,):
            return None
        node = Node("Convolution", "", call.attrs)
        match = match_call(passes.Call(node, self._policy, autograd.is_recording(), shapes))
        if match is None or match[0] != "image_convolution":
            return None
        return image_convolution(_Calls(self._policy, original, call), ())[0]


class _DenseLayers(_Layers):
    """Calls of `FullyConnected`."""

    def _is_plain(self, arrays: Sequence[NDArray], recording: bool) -> bool:
        """Return whether the inputs are of float32 and MXNet computes all their gradients."""
        data, weight, *bias = arrays
        # A gradient array stays: with one, the weight is not looked at again.
        if hasattr(weight.handle, _IS_TRAINED):
            return all_float32((data, *bias))
        is_plain = all_float32(arrays) and not (recording and needs_separate_bias(arrays))
        if is_plain and recording and mx_arrays.has_gradient(weight):
            setattr(weight.handle, _IS_TRAINED, True)
        return is_plain

    def compute(self, original: Invoke, call: Call, kept: Reason | None = None) -> Any:
        """Call `FullyConnected`; its bias gets a gradient even where its weight needs none.

        MXNet computes no gradient of the bias there.
        """
        if not (autograd.is_recording() and needs_separate_bias(call.arrays)):
            return super().compute(original, call, kept)
        calls, attrs = _Calls(self._policy, original, call), without_bias(call.attrs)
        *reads, bias = call.arrays
        product = calls.add("FullyConnected", "", *reads, **attrs)
        # Repeat the bias by a product with ones: its gradient is a product too, several times as
        # fast as the sum that is the gradient of broadcasting.
        ones = cast(nd.ones((*product.shape[:-1], 1), ctx=bias.context), dtype_name(bias.dtype))
        attrs["flatten"] = "False"
        repeated = calls.add("FullyConnected", "", ones, bias.reshape((-1, 1)), **attrs)
        return _written(calls.add("elemwise_add", "", product, repeated), call.out)


class _Calls(passes.Parts):
    """The parts of a call, called at once instead of added to a graph."""

    def __init__(self, policy: Policy, original: Invoke, whole: Call) -> None:
        self.inputs, self.attrs = whole.arrays, whole.attrs
        self._policy, self._original, self._is_np_op = policy, original, whole.is_np_op

    def add(self, op: str, suffix: str, *inputs: Any, keep: str | None = None, **attrs: str) -> Any:
        """Call an operator under the policy; return its output."""
        handle, names, values = handle_of(op), [*attrs], [*attrs.values()]
        action = _actions_of(self._policy)[handle] or _plain
        call = handle, inputs, names, values, None, self._is_np_op, False
        return action(self._original, call)


#: The calls that do more than cast, by operator; `_Casts` for others.
_KINDS: Mapping[str, type[_Casts]] = {
    "FullyConnected": _DenseLayers,
    "Convolution": _Convolutions,
    "broadcast_add": _Additions,
}


# ---------------------------------------------------------------------- applying a decision


def _compute(decision: Decision | None, original: Invoke, call: Call) -> Any:
    """Call an operator with the casts of a decision around it; None is a call without casts."""
    if decision is None:
        return original(*call)
    outputs = original(*call._replace(arrays=_cast_inputs(decision, call.arrays), out=None))
    return _written(_round_outputs(decision, outputs, call.is_np_op), call.out)


def _in_training_mode(original: Invoke, *call: Any) -> Any:
    """Call `original` in training mode, in which oneDNN leaves the layout of a weight alone.

    In inference oneDNN also writes the weight back in its own layout, for later calls. They never
    read this array, since each call casts the weight anew.
    """
    with autograd.train_mode():
        return original(*call)


def _cast_inputs(decision: Decision, arrays: Sequence[NDArray]) -> list[NDArray]:
    """Return `arrays` cast to the dtypes that an operator reads by `decision`."""
    inputs = list(arrays)
    for i, dtype in enumerate(decision.reads):
        if dtype is not None:
            array = mx_arrays.copy(arrays[i]) if i in decision.guards else arrays[i]
            if decision.through is not None:
                array = cast(array, decision.through)
            inputs[i] = cast(array, dtype)
    return inputs


def _round_outputs(decision: Decision, outputs: Any, is_np_op: bool) -> Any:
    """Return an operator's outputs, rounded to the dtype that `decision` computes through."""
    if decision.through is None:
        return outputs
    rounded = [
        cast(array, decision.through, is_np_op) if decision.rounds(i, dtype_of(array)) else array
        for i, array in enumerate(as_list(outputs))
    ]
    return rounded if isinstance(outputs, list) else rounded[0]


def _written(outputs: Any, out: Any) -> Any:
    """Return `outputs`, or `out` with them written to its arrays in their dtypes."""
    if out is None:
        return outputs
    for result, target in zip(as_list(outputs), as_list(out)):
        dtype = dtype_name(target.dtype)
        castable = dtype in CASTABLE and dtype_name(result.dtype) in CASTABLE
        mx_arrays.cast_into(result, target, dtype, castable)
    return out


# ---------------------------------------------------------------------- other patches


def build_view(original: Original) -> Original:
    """Return a method for views; it marks the handles of bfloat16: arrays take no attributes."""

    @functools.wraps(original)
    def method(self: NDArray, *args: Any, **keywords: Any) -> NDArray:
        view = original(self, *args, **keywords)
        if dtype_code(view) == _BFLOAT16 and current_policy() is not None:
            if not view.ndim:  # oneDNN's bfloat16 kernels fail on 0-d arrays
                return cast(view, "float32", isinstance(view, mx.np.ndarray))
            setattr(view.handle, _IS_VIEW, True)
        return view

    return method


def patched_setitem(original: Original, self: NDArray, key: Any, value: Any) -> Any:
    """Write values into an array; into one of bfloat16 in plain MXNet, rounded.

    MXNet would write NumPy's numbers as raw bits, and `mx.np` would take no numbers at all.
    """
    if dtype_code(self) != _BFLOAT16:
        return original(self, key, value)
    if not isinstance(value, NDArray):
        value = np.atleast_1d(value)
        if value.dtype.names:
            raise ArgumentError(RAW_BITS)
        array = mx.np.array if isinstance(self, mx.np.ndarray) else nd.array
        value = array(value, ctx=self.context, dtype="float32")
    value = cast(value.astype("float32"), "bfloat16", isinstance(value, mx.np.ndarray))
    with suspended():
        return original(self, key, value)


def patched_tensordot(original: Original, a: NDArray, b: NDArray, axes: Any) -> NDArray:
    """Cast the inputs of `tensordot` as the policy decides."""
    actions = _OFF if (policy := current_policy()) is None else _actions_of(policy)

    def invoke(_handle: int, arrays: Sequence[NDArray], *_rest: Any) -> NDArray:
        return original(*arrays, axes)

    action = actions[_TENSORDOT] or _plain
    return action(invoke, (_TENSORDOT, [a, b], (), (), None, True, False))


def patched_asnumpy(original: Original, self: NDArray) -> Any:
    """Return float32 values for bfloat16 arrays."""
    if current_policy() is not None and dtype_code(self) == _BFLOAT16:
        with autograd.pause():
            return original(cast(self, "float32"))
    return original(self)


def build_scope_enter(original: Original) -> Original:
    """Return the start of autograd's scopes, that of `record()` with shared casts of leaves."""

    def enter(scope: Any) -> Any:
        if scope._enter_is_record and mx_arrays.cast_dtypes:
            mx_arrays.leaf_casts.begin(scope)
        return original(scope)

    return enter


def build_scope_exit(original: Original) -> Any:
    """Return the end of autograd's scopes, as `build_scope_enter`.

    Python looks it up when the scope begins. Its steps then are Python's own, so that Ctrl-C in one
    of them can't leave autograd recording.
    """

    def exit_of(scope: Any) -> Any:
        stack = ExitStack()
        stack.push(functools.partial(original, scope))
        stack.callback(mx_arrays.leaf_casts.end, scope)
        return stack.__exit__

    return property(exit_of)
