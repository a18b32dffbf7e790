"""Patches for eager calls: cast an operator's inputs to the dtypes that the policy requires.

All of `mx.nd`, `mx.np` and `mx.npx`, the methods of arrays and Python's operators end in one
function, `_imperative_invoke`, looked up at call time in three modules. Replacing it there also
covers functions that user code imported before.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import ExitStack
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet import _global_var, autograd, nd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.base import _LIB, NDArrayHandle, c_handle_array, check_call
from mxnet.ndarray import _internal as mx_internal
from mxnet.ndarray import register as mx_register
from mxnet.ndarray.ndarray import NDArray

from ..backends import Action, EagerOperator, Invoke, Site, Step, backend_of, shape_checks
from ..errors import ArgumentError
from ..framework import arrays as mx_arrays
from ..framework.arrays import all_float32, as_list, cast, dtype_code, kind_code, shape_of
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.operators import Operator, by_handle, handle_of, with_trait
from ..framework.patching import Original
from ..graph.gradients import separate_bias
from ..policy.active import current_policy, record_lowered, suspended
from ..policy.decision import CASTABLE, SPARSE_GRADIENT, Decision, decide
from ..policy.policy import PerPolicy, Policy
from ..policy.rules import Reason
from ..scaling.loss_outputs import LOSS_OUTPUT_HANDLES, scalable_inputs

#: The arrays that an operator writes; None to make them.
Out = Union[None, NDArray, Sequence[NDArray]]


class Arguments(NamedTuple):
    """The arguments of MXNet's `_imperative_invoke`, which runs every eager operator call."""

    handle: int
    arrays: Sequence[NDArray]
    keys: Sequence[str]
    vals: Sequence[Any]
    out: Any
    is_np_op: bool
    output_is_list: bool

    @property
    def attrs(self) -> dict[str, str]:
        """The attributes of the called operator by name, with values as text."""
        return dict(zip(self.keys, map(str, self.vals)))


_BFLOAT16, _FLOAT32 = DTYPE_CODES["bfloat16"], DTYPE_CODES["float32"]
_TENSORDOT = handle_of("_npi_tensordot")
#: The first is the operator that `astype`, `copyto` and assignments to slices call.
_COPY_TO, _CAST = handle_of("_copyto"), handle_of("Cast")

_c_int, _byref = ctypes.c_int, ctypes.byref
_Handles, _Kinds = ctypes.POINTER(NDArrayHandle), ctypes.POINTER(_c_int)
# The most entries of a cache: a scalar that changes with every call adds one each time.
MANY = 4096


RAW_BITS = "a list's values would be raw bits: write array(values).astype(amp.bfloat16)"

#: The modules that look `_imperative_invoke` up.
INVOKE_MODULES = (mx_ctypes, mx_internal, mx_register)


def build_invoke(original: Invoke) -> Invoke:
    """Return a replacement of `_imperative_invoke` that casts operators' inputs by policy."""
    original = _invoke if original is mx_arrays.invoke else original

    def _imperative_invoke(*arguments: Any) -> object:
        policy = current_policy()
        # Every microsecond counts: a small call takes ten.
        actions = _OFF if policy is None else _actions_of(policy)
        action = actions[arguments[0]]
        if action is None or not arguments[1]:
            return original(*arguments)
        return action(original, arguments)

    return _imperative_invoke


def _encode(*texts: str) -> object:
    """Return a C array of encoded strings."""
    encoded = (ctypes.c_char_p * len(texts))()
    encoded[:] = [text.encode() for text in texts]  # faster than to make it of them
    return encoded


#: Encoding attributes anew takes up to 5 microseconds of a call.
_encoded = functools.lru_cache(MANY)(_encode)


def _invoke(
    handle: int, arrays: Sequence[NDArray], keys: Any, vals: Any, out: Out, is_np: bool, many: bool
) -> object:
    """Call an operator as MXNet's `_imperative_invoke` does, but a fifth faster."""
    # A call with `out` is mostly an optimizer's, with other numbers each time.
    encode = _encoded if out is None else _encode
    texts = len(keys), _encoded(*keys), encode(*map(str, vals))
    call, operator = _LIB.MXImperativeInvokeEx, NDArrayHandle(handle)
    return call_library(call, operator, arrays, texts, is_np, many, out)


def call_library(
    call: Any, handle: Any, arrays: Sequence[NDArray], texts: Any, is_np: bool, many: bool, out: Out
) -> object:
    """Call a C function of MXNet that runs an operator or cached op; return its outputs."""
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
    """Cache of one policy's wrappers around eager operators, by operator handle.

    None stands for MXNet's own call. Without a policy, only the losses of output operators are
    scaled, since the backward pass is scaled all the same.
    """

    def __init__(self, policy: Policy | None) -> None:
        super().__init__()
        self.policy = policy

    def __missing__(self, handle: int) -> Action | None:
        action: Action | None = None
        operator = by_handle().get(handle)
        if operator is not None:
            eager: Any = None if self.policy is None else _EagerOperator(operator, self.policy)
            for step in reversed(_steps(operator, self.policy)):
                action = step(action or _plain, eager)
        self[handle] = action
        return action


#: The actions where mixed precision is off.
_OFF = _Actions(None)


_actions_of: PerPolicy[_Actions] = PerPolicy(_Actions)


def _plain(original: Invoke, arguments: Sequence[Any]) -> object:
    """Call MXNet's original function, without casts."""
    return original(*arguments)


def _steps(operator: Operator, policy: Policy | None) -> Sequence[Step]:
    """Return the wrappers around an eager operator under a policy, the outermost first."""
    loss = LOSS_OUTPUT_HANDLES.get(operator.handle)
    # Without a policy, custom operators scale their results themselves.
    scales = loss is not None and (policy is not None or loss not in with_trait("calls_python"))
    first: list[Step] = [scale_gradients] if scales else []
    if policy is None:
        return first
    if operator.zero_gradients:
        first.append(copy_inputs)
    if operator.handle in (_COPY_TO, _CAST):
        return [*first, copy_by_float32]
    backend = backend_of(policy.device).steps(operator.name)
    if not _may_cast(operator, policy):
        return [*first, *backend]
    return [*first, *STEPS.get(operator.name, ()), keep_float32, *backend, cast_inputs]


# ---------------------------------------------------------------------- steps


def scale_gradients(then: Action, _eager: EagerOperator) -> Action:
    """Wrap an eager loss operator such as SoftmaxOutput so that its gradients are scaled."""

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        if autograd.is_recording():
            call = Arguments(*arguments)
            scaled = scalable_inputs(call.handle, call.arrays, call.attrs)
            arguments = call._replace(arrays=scaled)
        return then(original, arguments)

    return action


def copy_inputs(then: Action, eager: EagerOperator) -> Action:
    """Wrap an eager operator to copy inputs whose gradient is always 0, so backward can't crash."""
    positions = eager.operator.zero_gradients

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        # Without them, autograd reads inputs of a cast after they are freed. A program that has
        # cast nothing needs no copies.
        if not (mx_arrays.cast_dtypes and autograd.is_recording()):
            return then(original, arguments)
        is_np_op = Arguments(*arguments).is_np_op

        def copied(handle: int, arrays: Sequence[NDArray], *rest: object) -> object:
            return original(handle, mx_arrays.copy_inputs_at(arrays, positions, is_np_op), *rest)

        return then(copied, arguments)

    return action


def copy_by_float32(then: Action, _eager: EagerOperator) -> Action:
    """Wrap an eager copy or `Cast` so that a bfloat16 array is cast to float32 first.

    MXNet copies oneDNN's layouts in one dtype, and the gradient of its `Cast` truncates.
    """

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        call = Arguments(*arguments)
        [array], out = call.arrays, call.out
        if dtype_code(array) == _BFLOAT16 and (out is None or dtype_code(out) != _BFLOAT16):
            arguments = call._replace(arrays=[cast(array, "float32", call.is_np_op)])
        return then(original, arguments)

    return action


def keep_float32(then: Action, eager: Any) -> Action:
    """Wrap an eager operator to skip casts if its inputs are float32 and the call stays in float32.

    The policy keeps a call in float32, or a rule about its shapes does.
    """

    def action(original: Invoke, arguments: Sequence[Any]) -> object:
        if all_float32(arguments[1]) and (eager.stays_float32 or eager.reason_by_shapes(arguments)):
            return original(*arguments)
        return then(original, arguments)

    return action


def cast_inputs(_then: Action, eager: Any) -> Action:
    """Wrap an eager operator so that its inputs are cast by the policy: the innermost wrapper."""
    return eager.cast  # type: ignore[no-any-return]


#: The first steps of single operators.
STEPS: Mapping[str, Sequence[Step]] = {"FullyConnected": (separate_bias,)}


# ---------------------------------------------------------------------- casts


def _may_cast(operator: Operator, policy: Policy) -> bool:
    """Return whether a policy may cast the inputs or outputs of an operator in eager calls."""
    rule = policy.rule(operator.name)
    follows = rule.op_class in ("neutral", "widest") and not rule.conditions
    alone = len(operator.inputs) <= 1 and not operator.variadic
    return rule.op_class != "untouched" and not (follows and rule.no_kernel is None and alone)


class _EagerOperator:
    """An operator in eager calls under one policy, with a cache of its cast decisions."""

    def __init__(self, operator: Operator, policy: Policy) -> None:
        self.operator, self.policy = operator, policy
        rule = self.rule = policy.rule(operator.name)
        self._decided = functools.lru_cache(MANY)(self._decide_uncached)
        self.stays_float32 = not rule.lowers  #: on float32 inputs
        checks = shape_checks()
        self._by_shape = any(checks[one.name].in_calls for one in rule.by_shape)
        self._reads_weight = any(checks[one.name].reads_weight for one in rule.by_shape)
        self._kept: dict[Any, Reason | None] = {}
        read = {*operator.decisive_attributes, *(c.attribute for c in rule.conditions)}
        self._attributes = read | ({SPARSE_GRADIENT} & {*operator.attributes})

    def cast(self, original: Invoke, arguments: Sequence[Any]) -> object:
        """Call the operator on inputs cast as the policy says, and round its outputs if needed."""
        call = Arguments(*arguments)
        decision = self._decide(call)
        if decision is None:
            return original(*arguments)
        outputs = original(*call._replace(arrays=_cast_all(decision, call.arrays), out=None))
        return self.write(_rounded(decision, outputs, call.is_np_op), call.out)

    def reason_by_shapes(self, arguments: Sequence[Any]) -> Reason | None:
        """Return the reason to keep a call of these shapes in float32, or None; cached."""
        if not (self._by_shape and arguments[1][1:]):
            return None  # without a weight MXNet raises an error of its own
        _, arrays, keys, vals, *_ = arguments
        recording, weight = autograd.is_recording(), arrays[1]
        # The numbers of units and channels are among the attributes.
        read = (dtype_code(weight), shape_of(weight)) if self._reads_weight else ()
        key = (shape_of(arrays[0]), recording, read, *keys, *vals)
        try:
            return self._kept[key]
        except TypeError:  # kernels may be lists
            return self.reason_by_shapes((None, arrays, keys, [*map(str, vals)]))
        except KeyError:
            if len(self._kept) >= MANY:
                self._kept.clear()
            self._kept[key] = self._reason(arrays, dict(zip(keys, map(str, vals))), recording)
            return self._kept[key]

    def _reason(
        self, arrays: Sequence[NDArray], attrs: dict[str, str], training: bool
    ) -> Reason | None:
        """Return the reason to keep a call of these shapes in float32, or None; not cached."""
        casts = training and mx_arrays.dtype_of(arrays[1]) != self.policy.target_dtype
        shapes, backend = [array.shape for array in arrays[:2]], backend_of(self.policy.device)
        site = Site(self.operator.name, attrs, shapes, training, casts_weight=casts, in_call=True)
        try:
            return backend.reason_by_shapes(self.rule, site)
        except (IndexError, ValueError):
            return None  # MXNet raises an error of its own

    def _decide(self, call: Arguments) -> Decision | None:
        """Return the cast decision for an eager call, or None if the call needs no casts."""
        arrays = call.arrays
        codes = tuple([kind_code(array) for array in arrays])
        attributes: tuple[tuple[str, str], ...] = ()
        if self.operator.name == "Custom":  # its constructor reads all attributes
            attributes = tuple(call.attrs.items())
        elif self._attributes:
            attributes = tuple(item for item in call.attrs.items() if item[0] in self._attributes)
        # On float32 alone, `keep_float32` has asked: no shape keeps the call there.
        kept = None if {*codes} == {_FLOAT32} else self.reason_by_shapes(call)
        # Rules that don't change results spare the cast of a float32 weight.
        if kept is not None and not kept.changes_results and codes[1] != _FLOAT32:
            kept = None
        decision = self._decided(codes, attributes, kept)
        changes = decision is not None and mx_arrays.on_device(arrays, self.policy.device)
        return decision if changes else None

    def _decide_uncached(
        self, codes: Sequence[int], attributes: Sequence[tuple[str, str]], kept: Reason | None
    ) -> Decision | None:
        """Return the cast decision for these dtype codes, uncached; None if nothing is cast."""
        dtypes = [mx_arrays.KIND_NAMES.get(code, "other") for code in codes]
        name, policy = self.operator.name, self.policy
        decision = decide(name, dict(attributes), dtypes, policy, kept_float32=kept)
        record_lowered(name, decision.precision)
        return decision if decision.changes else None

    def call(
        self, original: Invoke, op: str, inputs: Sequence[Any], attrs: Mapping[str, str], np: bool
    ) -> object:
        """Call another operator, named `op`, under the same policy."""
        handle = handle_of(op)
        action = _actions_of(self.policy)[handle] or _plain
        return action(original, (handle, inputs, [*attrs], [*attrs.values()], None, np, False))

    @staticmethod
    def write(outputs: object, out: object) -> object:
        """Cast `outputs` into the arrays `out`; without `out`, return `outputs` as they are."""
        if out is None:
            return outputs
        for result, target in zip(as_list(outputs), as_list(out)):
            dtype = dtype_name(target.dtype)
            castable = dtype in CASTABLE and dtype_name(result.dtype) in CASTABLE
            mx_arrays.cast_into(result, target, dtype, castable)
        return out


def _cast_all(decision: Decision, arrays: Sequence[NDArray]) -> list[NDArray]:
    """Return an operator's inputs, cast to the dtypes that a decision (`reads`) lists."""
    inputs = list(arrays)
    for i, dtype in enumerate(decision.reads):
        if dtype is not None:
            array = mx_arrays.copy(arrays[i]) if i in decision.copied else arrays[i]
            if decision.rounded_to is not None:
                array = cast(array, decision.rounded_to)
            inputs[i] = cast(array, dtype)
    return inputs


def _rounded(decision: Decision, outputs: object, is_np_op: bool) -> object:
    """Return an operator's outputs, rounded if it emulates a narrower dtype in float32."""
    if decision.rounded_to is None:
        return outputs
    rounded = list(as_list(outputs))
    for i, array in enumerate(rounded):
        if decision.rounds(i, mx_arrays.dtype_of(array)):
            rounded[i] = cast(array, decision.rounded_to, is_np_op)
    return rounded if isinstance(outputs, list) else rounded[0]


# ---------------------------------------------------------------------- other patches


def patched_setitem(original: Original, self: NDArray, key: object, value: Any) -> object:
    """Write values into an array; if it is in bfloat16, round the values to bfloat16.

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


def patched_tensordot(original: Original, a: NDArray, b: NDArray, axes: object) -> object:
    """Call `mx.np.tensordot` on inputs cast as the policy says."""
    actions = _OFF if (policy := current_policy()) is None else _actions_of(policy)

    def invoke(_handle: int, arrays: Sequence[NDArray], *_rest: object) -> object:
        return original(*arrays, axes)

    action = actions[_TENSORDOT] or _plain
    return action(invoke, (_TENSORDOT, [a, b], (), (), None, True, False))


def patched_asnumpy(original: Original, self: NDArray) -> object:
    """Return an array as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    if current_policy() is not None and dtype_code(self) == _BFLOAT16:
        with autograd.pause():
            return original(cast(self, "float32"))
    return original(self)


def patched_scope_enter(original: Original, scope: autograd._RecordingStateScope) -> object:
    """Enter an autograd scope; `record()` starts the cache of weights' casts."""
    if scope._enter_is_record and mx_arrays.cast_dtypes:
        mx_arrays.leaf_casts.begin(scope)
    return original(scope)


def build_scope_exit(original: Original) -> property:
    """Wrap an autograd scope's `__exit__` so that it frees the casts cached in `record()`.

    Python looks it up when the scope begins. Its steps then are Python's own, so that Ctrl-C in one
    of them can't leave autograd recording.
    """

    def exit_of(scope: object) -> object:
        stack = ExitStack()
        stack.push(functools.partial(original, scope))
        stack.callback(mx_arrays.leaf_casts.end, scope)
        return stack.__exit__

    return property(exit_of)
