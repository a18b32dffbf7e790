"""The NDArray-level patch: casts the inputs of eager calls as the policy decides.

All of `mx.nd`, `mx.np` and `mx.npx`, the methods of arrays and Python's operators end in one
function, `_imperative_invoke`, looked up at call time in three modules. It is replaced there, so
names that user code imported long before are covered too.
"""

import ctypes
import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.base import _LIB
from mxnet.ndarray import _internal as mx_internal
from mxnet.ndarray import register as mx_register
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.ndarray.sparse import CSRNDArray, RowSparseNDArray

from . import heads
from .casting import CASTABLE, Decision, decide
from .machine import DTYPE_CODES, DTYPE_NAMES, default_device, dtype_name
from .operators import Operator, by_handle, resolve
from .patching import Patch
from .policy import Policy
from .seen import note

__all__ = ["cast", "dtypes_of", "on_device", "patches"]

Active = Callable[[], Optional[Policy]]

_SPARSE = -2
_NAMES: Mapping[int, str] = {**DTYPE_NAMES, _SPARSE: "sparse"}
_SPARSE_TYPES = frozenset({CSRNDArray, RowSparseNDArray})
_BFLOAT16 = DTYPE_CODES["bfloat16"]
_FLOAT32, _FLOAT64 = DTYPE_CODES["float32"], DTYPE_CODES["float64"]
_CPU_TYPES = frozenset({"cpu", "cpu_pinned", "cpu_shared"})

_INVOKE_MODULES = (mx_ctypes, mx_internal, mx_register)

# The one real invoke: what mxamp calls itself never comes back to the patch.
_invoke = mx_ctypes._imperative_invoke
_AMP_CAST = resolve("amp_cast").handle
_CAST = resolve("Cast").handle
_COPY = resolve("identity").handle


def patches(active: Active) -> List[Patch]:
    """Return the patches that make eager calls follow the policy that `active` returns."""
    tables: Dict[int, _Plans] = {}

    def plans(policy: Policy) -> _Plans:
        found = tables.get(id(policy))
        if found is None:
            found = tables[id(policy)] = _Plans(policy)
        return found

    def build_invoke(original: Callable[..., Any]) -> Callable[..., Any]:
        def _imperative_invoke(
            handle: int, ndargs: List[NDArray], keys: Any, vals: Any, out: Any,
            is_np_op: bool, output_is_list: bool,
        ) -> Any:  # fmt: skip
            policy = active()
            if policy is None:
                return original(handle, ndargs, keys, vals, out, is_np_op, output_is_list)
            plan = plans(policy)[handle]
            if handle in heads.HANDLES and _starts_backward(ndargs):
                ndargs = [heads.with_scalable_gradient(ndargs[0]), *ndargs[1:]]
            decision = plan.decide(ndargs, keys, vals) if plan is not None and ndargs else None
            if decision is None:
                return original(handle, ndargs, keys, vals, out, is_np_op, output_is_list)
            outputs = original(
                handle, _read(decision, ndargs), keys, vals, None, is_np_op, output_is_list
            )
            outputs = _round(decision, outputs, is_np_op)
            return outputs if out is None else _write_out(outputs, out)

        return _imperative_invoke

    def build_tensordot(original: Callable[..., Any]) -> Callable[..., Any]:
        handle = resolve("_npi_tensordot").handle

        def tensordot(a: NDArray, b: NDArray, axes: Any) -> NDArray:
            policy = active()
            plan = plans(policy)[handle] if policy is not None else None
            decision = plan.decide([a, b], (), ()) if plan is not None else None
            if decision is None:
                return original(a, b, axes)
            return _round(decision, original(*_read(decision, [a, b]), axes), True)

        return tensordot

    def build_asnumpy(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def asnumpy(self: NDArray) -> Any:
            # Plain MXNet gives bfloat16's raw bits; metrics and printing want the values.
            if active() is not None and _dtype_code(self) == _BFLOAT16:
                with autograd.pause():
                    return original(cast(self, "float32"))
            return original(self)

        return asnumpy

    return [
        *(Patch(m, "_imperative_invoke", build_invoke) for m in _INVOKE_MODULES),
        Patch(_api_internal, "tensordot", build_tensordot),  # the one that goes another way
        Patch(NDArray, "asnumpy", build_asnumpy),
    ]


def _starts_backward(arrays: Sequence[NDArray]) -> bool:
    return autograd.is_recording() and _NAMES.get(_kind_code(arrays[0])) in CASTABLE


# ---------------------------------------------------------------------- decisions, remembered


class _Plans(Dict[int, Optional["_Plan"]]):
    """A policy's plans by operator handle, made when first asked for; None where it never casts."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def __missing__(self, handle: int) -> "Optional[_Plan]":
        operator = by_handle().get(handle)
        casts = operator is not None and _may_cast(operator, self.policy)
        plan = self[handle] = _Plan(operator, self.policy) if operator and casts else None
        return plan


def _may_cast(operator: Operator, policy: Policy) -> bool:
    rule = policy.rule(operator.name)
    if rule.kind == "untouched":
        return False
    follows = rule.kind in ("neutral", "widest") and not rule.conditions and rule.missing is None
    alone = len(operator.inputs) <= 1 and not operator.variadic
    return not (follows and alone)


class _Plan:
    """The decisions for one operator under one policy, by the dtypes of its inputs."""

    __slots__ = ("_attributes", "_cpu_only", "_decisions", "_operator", "_policy")

    def __init__(self, operator: Operator, policy: Policy) -> None:
        self._operator, self._policy = operator, policy
        self._decisions: Dict[Any, Optional[Decision]] = {}
        # Attributes that a decision reads; others need not be looked at.
        named = [c.attribute for c in policy.rule(operator.name).conditions]
        named += [a for a in ("num_group", "mode") if operator.name in ("Convolution", "RNN")]
        named += ["op_type"] if operator.name == "Custom" else []
        self._attributes = frozenset(named)
        # Without a GPU in the machine every array is on the policy's device.
        self._cpu_only = policy.device == default_device() == "cpu"

    def decide(self, arrays: Sequence[NDArray], keys: Any, vals: Any) -> Optional[Decision]:
        """Return what to do with these inputs, None for nothing."""
        codes = tuple([_kind_code(array) for array in arrays])
        attributes: Tuple[Tuple[str, str], ...] = ()
        if self._attributes:
            attributes = tuple((k, str(v)) for k, v in zip(keys, vals) if k in self._attributes)
        key = (codes, attributes)
        try:
            decision = self._decisions[key]
        except KeyError:
            dtypes = [_NAMES.get(code, "other") for code in codes]
            found = decide(self._operator.name, dict(attributes), dtypes, self._policy)
            decision = self._decisions[key] = found if found.changes else None
            note(self._operator.name, found.precision)
        if decision is None or self._cpu_only or on_device(arrays, self._policy.device):
            return decision
        return None


def _dtype_code(array: NDArray) -> int:
    code = ctypes.c_int()
    _LIB.MXNDArrayGetDType(array.handle, ctypes.byref(code))
    return code.value


def _kind_code(array: NDArray) -> int:
    return _SPARSE if type(array) in _SPARSE_TYPES else _dtype_code(array)


def dtypes_of(arrays: Sequence[NDArray]) -> Tuple[str, ...]:
    """Return the kind of each array as `casting.decide` wants it: a dtype's name, or "sparse"."""
    return tuple([_NAMES.get(_kind_code(array), "other") for array in arrays])


def on_device(arrays: Sequence[NDArray], device: str) -> bool:
    """Tell whether all arrays are on the policy's kind of device ("cpu" or "gpu")."""
    wanted = _CPU_TYPES if device == "cpu" else frozenset({"gpu"})
    return all(array.context.device_type in wanted for array in arrays)


# ---------------------------------------------------------------------- decisions, applied


def _read(decision: Decision, arrays: Sequence[NDArray]) -> List[NDArray]:
    """Return the inputs as the operator is to read them."""
    inputs = list(arrays)
    for i, dtype in enumerate(decision.reads):
        if dtype is None:
            continue
        array = arrays[i]
        if i in decision.guards:
            array = _invoke(_COPY, [array], [], [], None, False, False)
        if decision.through is not None:
            array = cast(array, decision.through)
        inputs[i] = cast(array, dtype)
    return inputs


def _round(decision: Decision, outputs: Any, is_np_op: bool) -> Any:
    """Return the outputs, rounded to the dtype that the decision computes through."""
    if decision.through is None:
        return outputs
    if not isinstance(outputs, list):
        return _rounded(outputs, 0, decision, is_np_op)
    return [_rounded(array, i, decision, is_np_op) for i, array in enumerate(outputs)]


def _rounded(array: NDArray, position: int, decision: Decision, is_np_op: bool) -> NDArray:
    if not decision.rounds(position, _NAMES.get(_dtype_code(array), "other")):
        return array
    return cast(array, str(decision.through), is_np_op)


def _write_out(outputs: Any, out: Any) -> Any:
    """Write results to the arrays that `out=` gave, in those arrays' own dtypes."""
    results = outputs if isinstance(outputs, list) else [outputs]
    targets = out if isinstance(out, (list, tuple)) else [out]
    for result, target in zip(results, targets):
        dtype = dtype_name(target.dtype)
        castable = dtype in CASTABLE and dtype_name(result.dtype) in CASTABLE
        operator = _AMP_CAST if castable else _CAST
        _invoke(operator, [result], ["dtype"], [dtype], target, False, False)
    return out


def cast(array: NDArray, dtype: str, is_np_op: bool = False) -> NDArray:
    """Return `array` in another float dtype; itself where it is that already.

    The cast is recorded by autograd. Rounds to nearest even.
    """
    code = _dtype_code(array)
    if code == DTYPE_CODES[dtype]:
        return array
    operator = _AMP_CAST
    if _FLOAT64 in (code, DTYPE_CODES[dtype]):
        # amp_cast knows no float64, and Cast does not round to bfloat16: by way of float32.
        if _FLOAT32 not in (code, DTYPE_CODES[dtype]):
            return cast(cast(array, "float32", is_np_op), dtype, is_np_op)
        operator = _CAST
    if _BFLOAT16 in (code, DTYPE_CODES[dtype]):
        if _is_leaf(array):
            # amp_cast's gradient forgets grad_req="add" in bfloat16; the copy in between keeps it.
            array = _invoke(_COPY, [array], [], [], None, is_np_op, False)
        if mx.util.is_np_shape() and array.size <= 1:
            operator = _CAST  # oneDNN, which does amp_cast, knows no empty and no 0-d arrays
    return _invoke(operator, [array], ["dtype"], [dtype], None, is_np_op, False)


def _is_leaf(array: NDArray) -> bool:
    """Tell whether autograd would write a gradient of `array` now."""
    return autograd.is_recording() and array.grad is not None
