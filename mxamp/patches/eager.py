"""Eager calls: inputs are cast as the policy decides.

All of `mx.nd`, `mx.np` and `mx.npx`, the methods of arrays and Python's operators end in one
function, `_imperative_invoke`, looked up at call time in three modules. Replacing it there also
covers functions that user code imported before.
"""

import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mxnet import autograd, nd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.ndarray import _internal as mx_internal
from mxnet.ndarray import register as mx_register
from mxnet.ndarray.ndarray import NDArray

from ..framework import arrays as mx_arrays
from ..framework.arrays import KIND_NAMES, as_list, cast, dtype_code, kind_code, on_device
from ..framework.machine import DTYPE_CODES, default_device, dtype_name
from ..framework.operators import Operator, by_handle, handle_of
from ..framework.zero_gradients import copy_inputs_at, zero_gradient_inputs
from ..graph.gradients import needs_separate_bias, without_bias
from ..graph.ir import Node
from ..graph.speed.convolutions import image_convolution
from ..graph.speed.passes import COLORS, Call, Parts
from ..graph.speed.substitutions import match_call
from ..policy.active import current_policy, record_lowered
from ..policy.decision import CASTABLE, SPARSE_GRADIENT, Decision, decide
from ..policy.policy import Policy
from ..policy.rules import long_sum_reason
from ..scaling.loss_outputs import LOSS_OUTPUT_HANDLES, scalable_inputs
from .eager_graphs import DenseGraphs

__all__ = [
    "INVOKE_MODULES",
    "decision_for",
    "build_asnumpy",
    "build_invoke",
    "build_scope_enter",
    "build_scope_exit",
    "build_tensordot",
]

_BFLOAT16 = DTYPE_CODES["bfloat16"]
_DENSE, _ADD = handle_of("FullyConnected"), handle_of("elemwise_add")
_CONVOLUTION, _BROADCAST_ADD = handle_of("Convolution"), handle_of("broadcast_add")
_TENSORDOT = handle_of("_npi_tensordot")
#: The operator that `astype`, `copyto` and assignments to slices call.
_COPY_TO = handle_of("_copyto")

# The most decisions cached per operator: a scalar that changes with every call adds one each time.
_MANY_DECISIONS = 4096

# Operators whose attributes `num_group` or `mode` a decision reads.
_GROUPED = ("Convolution", "Deconvolution", "RNN")

#: The modules that look `_imperative_invoke` up.
INVOKE_MODULES = (mx_ctypes, mx_internal, mx_register)


def build_invoke(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_imperative_invoke` that casts its inputs as the policy decides."""
    zero = zero_gradient_inputs()

    def _imperative_invoke(
        handle: int,
        ndargs: List[NDArray],
        keys: Any,
        vals: Any,
        out: Any,
        is_np_op: bool,
        output_is_list: bool,
    ) -> Any:
        if handle in LOSS_OUTPUT_HANDLES and autograd.is_recording():
            # Even where mixed precision is off, since the backward pass is scaled all the same.
            ndargs = scalable_inputs(handle, ndargs, dict(zip(keys, vals)))
        policy = current_policy()
        if policy is None:
            return original(handle, ndargs, keys, vals, out, is_np_op, output_is_list)
        if handle == _DENSE and autograd.is_recording() and needs_separate_bias(ndargs):
            product, repeated = _product_and_bias(_imperative_invoke, ndargs, keys, vals, is_np_op)
            both = [product, repeated]
            return _imperative_invoke(_ADD, both, (), (), out, is_np_op, output_is_list)
        if handle == _COPY_TO and dtype_code(ndargs[0]) == _BFLOAT16:
            ndargs = [_cast_for_copy(out, ndargs[0])]
        decisions = _decisions_of(policy)
        if handle == _DENSE and out is None:
            output = decisions.dense_graphs.run(ndargs, keys, vals, is_np_op)
            if output is not None:
                return output
        operator = decisions[handle]
        decision = operator.decide(ndargs, keys, vals) if operator is not None and ndargs else None
        if decision is not None and handle in _EQUIVALENTS:
            build = _EQUIVALENTS[handle](decision, policy, ndargs, dict(zip(keys, vals)))
            if build is not None:
                result = build(_Calls(_imperative_invoke, ndargs, dict(zip(keys, vals)), is_np_op))
                return result if out is None else _write_out(result, out)
        reads = ndargs if decision is None else _cast_inputs(decision, ndargs)
        if handle in zero and autograd.is_recording():
            reads = copy_inputs_at(reads, zero[handle], is_np_op)
        if decision is None:
            return original(handle, reads, keys, vals, out, is_np_op, output_is_list)
        compute = original
        casts_weight = handle == _CONVOLUTION and reads[1] is not ndargs[1]
        if casts_weight and policy.device == "cpu" and not autograd.is_training():
            compute = functools.partial(_in_training_mode, original)
        outputs = compute(handle, reads, keys, vals, None, is_np_op, output_is_list)
        outputs = _round_outputs(decision, outputs, is_np_op)
        return outputs if out is None else _write_out(outputs, out)

    return _imperative_invoke


def _product_and_bias(
    invoke: Callable[..., Any], arrays: Sequence[NDArray], keys: Any, vals: Any, is_np_op: bool
) -> Tuple[NDArray, NDArray]:
    """Return a dense layer's product without the bias, and the bias in the product's shape.

    MXNet computes no gradient of the bias where the weight needs none.
    """
    *reads, bias = arrays
    attrs = without_bias(dict(zip(keys, vals)))
    product = invoke(_DENSE, reads, list(attrs), list(attrs.values()), None, is_np_op, False)
    # Repeat the bias by a product with ones: its gradient is a product too, several times as fast
    # as the sum that is the gradient of broadcasting.
    ones = cast(nd.ones((*product.shape[:-1], 1), ctx=bias.context), dtype_name(bias.dtype))
    attrs["flatten"] = "False"
    both = [ones, bias.reshape((-1, 1))]
    return product, invoke(_DENSE, both, list(attrs), list(attrs.values()), None, is_np_op, False)


class _Calls(Parts):
    """The operators of an equivalent, called at once instead of added to a graph."""

    def __init__(
        self,
        invoke: Callable[..., Any],
        arrays: Sequence[NDArray],
        attrs: Mapping[str, Any],
        is_np_op: bool,
    ) -> None:
        self.inputs, self.attrs = arrays, attrs
        self._invoke, self._is_np_op = invoke, is_np_op

    def add(
        self, op: str, suffix: str, *inputs: Any, keep: Optional[str] = None, **attrs: Any
    ) -> Any:
        """Call an operator; return its output."""
        handle, values = handle_of(op), [*attrs.values()]
        return self._invoke(handle, list(inputs), [*attrs], values, None, self._is_np_op, False)


_Build = Callable[[_Calls], Any]


def _equal_shapes_added(
    decision: Decision, _policy: Policy, arrays: Sequence[NDArray], _attrs: Mapping[str, Any]
) -> Optional[_Build]:
    """Return a call of `elemwise_add` for a bfloat16 `broadcast_add` of equal shapes; else None.

    It gives the same bits, without casts to float32 and back, in oneDNN's layouts.
    """
    shape = arrays[0].shape
    fits = (
        decision.through is not None
        and [kind_code(array) for array in arrays] == [_BFLOAT16] * 2
        and shape == arrays[1].shape
        and all(shape)
        and shape
    )
    return (lambda calls: calls.add("elemwise_add", "", *calls.inputs)) if fits else None


def _image_convolution(
    decision: Decision, policy: Policy, arrays: Sequence[NDArray], attrs: Mapping[str, Any]
) -> Optional[_Build]:
    """Return the calls of a bfloat16 convolution of color images, as in graphs; else None."""
    shapes = [array.shape for array in arrays]
    if decision.through is not None or shapes[1][1:2] != (COLORS,):
        return None
    node = Node("Convolution", "", {key: str(value) for key, value in attrs.items()})
    match = match_call(Call(node, policy, autograd.is_recording(), shapes))
    fits = match is not None and match[0] == "image_convolution"
    return (lambda calls: image_convolution(calls, ())[0]) if fits else None


#: The operators with faster equivalents in eager calls that mixed precision casts.
_EQUIVALENTS = {_BROADCAST_ADD: _equal_shapes_added, _CONVOLUTION: _image_convolution}


def _in_training_mode(original: Callable[..., Any], *args: Any) -> Any:
    """Call `original` in training mode, in which oneDNN leaves the layout of a weight alone.

    In inference oneDNN also writes the weight back in its own layout, for later calls. They never
    read this array, since each call casts the weight anew.
    """
    autograd.set_training(True)
    try:
        return original(*args)
    finally:
        autograd.set_training(False)


def _cast_for_copy(out: Any, array: NDArray) -> NDArray:
    """Return bfloat16 `array`, cast to float32 unless `out` is bfloat16 too.

    MXNet copies arrays in oneDNN's layouts only within one dtype.
    """
    return array if dtype_code(out) == _BFLOAT16 else cast(array, "float32")


def build_tensordot(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `tensordot` that casts its inputs as the policy decides."""

    def tensordot(a: NDArray, b: NDArray, axes: Any) -> NDArray:
        policy = current_policy()
        operator = _decisions_of(policy)[_TENSORDOT] if policy is not None else None
        decision = operator.decide([a, b], (), ()) if operator is not None else None
        if decision is None:
            return original(a, b, axes)
        return _round_outputs(decision, original(*_cast_inputs(decision, [a, b]), axes), True)

    return tensordot


def build_asnumpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `asnumpy` that returns float32 values for bfloat16 arrays."""

    @functools.wraps(original)
    def asnumpy(self: NDArray) -> Any:
        if current_policy() is not None and dtype_code(self) == _BFLOAT16:
            with autograd.pause():
                return original(cast(self, "float32"))
        return original(self)

    return asnumpy


def build_scope_enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `__enter__` of autograd's scopes that begins to keep the casts of leaves."""

    @functools.wraps(original)
    def __enter__(self: Any) -> Any:  # noqa: N807
        result = original(self)
        mx_arrays.leaf_casts.begin(self)
        return result

    return __enter__


def build_scope_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `__exit__` of autograd's scopes that frees the casts of leaves."""

    @functools.wraps(original)
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807
        mx_arrays.leaf_casts.end(self)
        return original(self, *error)

    return __exit__


# ---------------------------------------------------------------------- cached decisions


def decision_for(
    handle: int, arrays: Sequence[NDArray], keys: Any, vals: Any
) -> Optional[Decision]:
    """Return the decision for an eager call under the policy in force; None without a cast."""
    policy = current_policy()
    operator = _decisions_of(policy)[handle] if policy is not None and arrays else None
    return operator.decide(arrays, keys, vals) if operator is not None else None


def _decisions_of(policy: Policy) -> "_PolicyDecisions":
    """Return the decisions of a policy on eager calls, by operator handle."""
    made: Optional[_PolicyDecisions] = policy.caches.eager
    if made is None:
        made = policy.caches.eager = _PolicyDecisions(policy)
    return made


class _PolicyDecisions(Dict[int, Optional["_OperatorDecisions"]]):
    """The decisions of a policy by operator handle, made on demand; None if never cast."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.dense_graphs = DenseGraphs(policy)

    def __missing__(self, handle: int) -> "Optional[_OperatorDecisions]":
        operator = by_handle().get(handle)
        made = None
        if operator is not None and _may_cast(operator, self.policy):
            made = _OperatorDecisions(operator, self.policy)
        self[handle] = made
        return made


def _may_cast(operator: Operator, policy: Policy) -> bool:
    """Return whether a policy may cast inputs or outputs of an operator in eager calls."""
    rule = policy.rule(operator.name)
    if rule.op_class == "untouched":
        return False
    follows = rule.op_class in ("neutral", "widest") and not rule.conditions
    alone = len(operator.inputs) <= 1 and not operator.variadic
    return not (follows and rule.missing is None and alone)


class _OperatorDecisions:
    """The decisions on eager calls of one operator under one policy, cached by input dtypes."""

    def __init__(self, operator: Operator, policy: Policy) -> None:
        self._operator, self._policy = operator, policy
        self._decisions: Dict[Any, Optional[Decision]] = {}
        rule = self._rule = policy.rule(operator.name)
        # The rules by shape that eager calls follow.
        self._sums = rule.has_shape_rule("long_sums")
        self._trained = [one.reason for one in rule.by_shape if one.name == "cast_weight"]
        self._target = DTYPE_CODES[policy.target_dtype]
        # The attributes that a decision reads.
        named = [c.attribute for c in rule.conditions]
        named += ["transpose_a"] if self._sums else []
        named += [a for a in ("num_group", "mode") if operator.name in _GROUPED]
        named += ["kernel", "dilate"] if operator.name == "Deconvolution" else []
        named += [a for a in (SPARSE_GRADIENT,) if a in operator.attributes]
        named += ["subscripts"] if operator.name == "_npi_einsum" else []
        self._attributes = frozenset(named)
        # A custom operator's constructor reads all attributes.
        self._reads_all = operator.name == "Custom"
        # Without a GPU every array is on the policy's device.
        self._cpu_only = policy.device == default_device() == "cpu"

    def decide(self, arrays: Sequence[NDArray], keys: Any, vals: Any) -> Optional[Decision]:
        """Return the decision on a call with inputs `arrays`; None without a cast."""
        codes = tuple([kind_code(array) for array in arrays])
        attributes: Tuple[Tuple[str, str], ...] = ()
        if self._reads_all:
            attributes = tuple(zip(keys, map(str, vals)))
        elif self._attributes:
            attributes = tuple((k, str(v)) for k, v in zip(keys, vals) if k in self._attributes)
        kept = None
        if self._sums:
            kept = long_sum_reason(self._rule, dict(attributes), arrays[0].shape)
        elif self._trained and codes[1:2] != (self._target,) and autograd.is_recording():
            kept = self._trained[0]
        key = (codes, attributes, kept)
        try:
            decision = self._decisions[key]
        except KeyError:
            if len(self._decisions) >= _MANY_DECISIONS:
                self._decisions.clear()
            decision = self._decisions[key] = self._decide_anew(codes, dict(attributes), kept)
        if decision is None or self._cpu_only or on_device(arrays, self._policy.device):
            return decision
        return None

    def _decide_anew(
        self, codes: Sequence[int], attributes: Dict[str, str], kept: Optional[str]
    ) -> Optional[Decision]:
        """Return the decision for inputs with these dtype codes, uncached; None without a cast."""
        dtypes = [KIND_NAMES.get(code, "other") for code in codes]
        decision = decide(self._operator.name, attributes, dtypes, self._policy, kept=kept)
        record_lowered(self._operator.name, decision.precision)
        return decision if decision.changes else None


# ---------------------------------------------------------------------- applying a decision


def _cast_inputs(decision: Decision, arrays: Sequence[NDArray]) -> List[NDArray]:
    """Return `arrays` cast to the dtypes that an operator reads by `decision`."""
    inputs = list(arrays)
    for i, dtype in enumerate(decision.reads):
        if dtype is None:
            continue
        array = mx_arrays.copy(arrays[i]) if i in decision.guards else arrays[i]
        if decision.through is not None:
            array = cast(array, decision.through)
        inputs[i] = cast(array, dtype)
    return inputs


def _round_outputs(decision: Decision, outputs: Any, is_np_op: bool) -> Any:
    """Return an operator's outputs, rounded to the dtype that `decision` computes through."""
    if decision.through is None:
        return outputs
    if not isinstance(outputs, list):
        return _round_output(outputs, 0, decision, is_np_op)
    return [_round_output(array, i, decision, is_np_op) for i, array in enumerate(outputs)]


def _round_output(array: NDArray, position: int, decision: Decision, is_np_op: bool) -> NDArray:
    """Return output number `position` of an operator, rounded if `decision` says so."""
    if not decision.rounds(position, KIND_NAMES.get(dtype_code(array), "other")):
        return array
    return cast(array, str(decision.through), is_np_op)


def _write_out(outputs: Any, out: Any) -> Any:
    """Copy `outputs` to the arrays of `out`, cast to their dtypes; return `out`."""
    for result, target in zip(as_list(outputs), as_list(out)):
        dtype = dtype_name(target.dtype)
        castable = dtype in CASTABLE and dtype_name(result.dtype) in CASTABLE
        mx_arrays.cast_into(result, target, dtype, castable)
    return out
