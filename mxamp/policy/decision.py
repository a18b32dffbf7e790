"""Cast decisions: to which dtype each input of an operator call is cast, and why.

`decide` is a pure function of names and dtypes. Eager calls, graphs about to run and saved graphs
all call it, so that they agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

from ..backends import DecidedCall, Emulation, backend_of
from ..framework.operators import auxiliary_states, registry
from .policy import Policy
from .rules import UNLISTED, Reason, Rule
from .values import is_true

#: The only dtypes that are cast: integers, booleans and float64 never are.
CASTABLE = frozenset({"float16", "bfloat16", "float32"})

_WIDE = frozenset({"float32", "float64"})

# A call with an input of one of these kinds is never lowered: amp_cast supports neither.
_FOREIGN = frozenset({"float64", "sparse"})

DIAGONAL = "MXNet writes its gradient only on the diagonal: beside it, a cast would read garbage"
SPARSE = "the gradient of a cast weight would not be row_sparse"

#: The attribute by which an operator gives its weight a row_sparse gradient.
SPARSE_GRADIENT = "sparse_grad"


@dataclass(frozen=True)
class Decision:
    """The casts of one operator call's inputs and outputs, and the reason for them.

    `reads[i]` is the dtype that input i is cast to, None for no cast. An operator with a dtype
    `rounded_to` is emulated: it computes in a wider dtype on rounded values. Inputs are cast to
    `rounded_to` and then to `reads`, and outputs to `rounded_to`. `copied` are the inputs to copy
    before their cast, as the backend's `inputs_to_copy` says.
    """

    reads: tuple[str | None, ...]
    reason: str
    precision: str = "as is"  #: the dtype of the computation, for reports
    rounded_to: str | None = None
    keep_outputs: tuple[int, ...] = ()
    copied: frozenset[int] = frozenset()

    def rounds(self, output: int, dtype: str) -> bool:
        """Return whether an emulated operator must round this output to the dtype it emulates."""
        return self.rounded_to is not None and output not in self.keep_outputs and dtype in _WIDE

    @property
    def changes(self) -> bool:
        """Whether the operator call needs any cast."""
        return self.rounded_to is not None or any(dtype is not None for dtype in self.reads)


MIXED = "its inputs are {dtypes}: the widest dtype is kept"
OTHER_HALF = "a {target} policy doesn't know MXNet's bfloat16 kernels, and some crash the process"


def decide(
    operator: str,
    attributes: Mapping[str, str],
    dtypes: Sequence[str],
    policy: Policy,
    layer: str | None = None,
    kept_float32: Reason | None = None,
) -> Decision:
    """Return the casts that a policy requires for an operator call with inputs of these dtypes.

    Parameters
    ----------
    operator : str
        The canonical name.
    attributes : mapping of str to str
        The attributes that are set, as MXNet writes them.
    dtypes : sequence of str
        The dtype's name of each input, or "sparse" for sparse storage.
    layer : str, optional
        The graph node's name, for the policy's `fp32_layers`.
    kept_float32 : Reason, optional
        Why shapes or neighbors keep this call in float32, or leave it no kernel in the target
        dtype.

    Example
    -------
    >>> policy = Policy.default("float16", "gpu")
    >>> decide("FullyConnected", {}, ["float32", "float16", "float32"], policy).reads
    ('float16', None, 'float16')
    """
    rule, backend = policy.rules.get(operator, UNLISTED), backend_of(policy.device)
    call = DecidedCall(rule, attributes, dtypes, policy.target_dtype)
    why, no_kernel = backend.reason_by_attributes(call), rule.no_kernel
    if kept_float32 is not None and kept_float32.is_missing_kernel:
        no_kernel = kept_float32.text
    elif kept_float32 is not None:
        why = why or kept_float32.text
    op_class, reason = _class_and_reason(rule, attributes, policy, layer, why)
    untouched = (None,) * len(dtypes)
    if op_class == "untouched":
        is_float32 = policy.target_dtype == "float32" and {*dtypes} == {"float32"}
        return Decision(untouched, reason, "float32" if is_float32 else "as is")

    floats, leading = _float_inputs(rule, attributes, dtypes)
    if not leading:
        return Decision(untouched, "no floating-point input to cast")
    if _takes_diagonal(attributes) and set(floats.values()) == {"float32"}:
        return Decision(untouched, DIAGONAL, "float32")
    target = policy.target_dtype
    dtype, reason = _compute_dtype(op_class, reason, leading, set(dtypes), target, rule.given)
    emulation = backend.emulation(call, dtype)
    if dtype == target and no_kernel is not None:
        emulation = Emulation(rule.computed_in, no_kernel)
    reads = _reads(floats, len(dtypes), dtype, emulation)
    copied = backend.inputs_to_copy(call, dtype, reads)
    if emulation is None:
        return Decision(reads, reason, dtype, copied=copied)
    reason = f"{reason}; but here in {emulation.dtype} on {dtype} values: {emulation.reason}"
    return Decision(reads, reason, dtype, dtype, rule.keep_outputs, copied)


def _reads(
    floats: Mapping[int, str], count: int, dtype: str, emulation: Emulation | None
) -> tuple[str | None, ...]:
    """Return the dtype to which each input of an operator is cast; None for no cast."""
    wanted = dtype if emulation is None else emulation.dtype
    cast = {i for i, found in floats.items() if emulation is not None or found != dtype}
    return tuple(wanted if i in cast else None for i in range(count))


def _class_and_reason(
    rule: Rule, attributes: Mapping[str, str], policy: Policy, layer: str | None, kept: str | None
) -> tuple[str, str]:
    """Return the precision class of an operator call ("low", "fp32", ...), and why."""
    sparse = is_true(attributes.get(SPARSE_GRADIENT, "False"))
    if sparse or rule.op_class == "untouched":
        return "untouched", SPARSE if sparse else rule.reason
    if layer is not None and policy.keeps_layer(layer):
        kept = f"layer {layer!r} is kept in float32 by name"
    if rule.by_op_type and auxiliary_states(attributes):
        kept = "its auxiliary states are in float32, and MXNet gives an operator one dtype"
    if kept is not None:
        return "fp32", kept
    for op_type, op_class in rule.by_op_type:
        if attributes.get("op_type") == op_type:
            return op_class, f"the registered custom operator {op_type!r} is in class {op_class}"
    for condition in rule.conditions:
        if condition.holds(attributes):
            value = attributes.get(condition.attribute, condition.default)
            return "fp32", f"{condition.attribute}={value}: {condition.reason or rule.reason}"
    if rule.conditions:
        return rule.op_class, _watched_values(rule, attributes)
    return rule.op_class, rule.reason


def _watched_values(rule: Rule, attributes: Mapping[str, str]) -> str:
    """Return the attributes that a rule's conditions read, as text such as "axis=1"."""
    values = {one.attribute: attributes.get(one.attribute, one.default) for one in rule.conditions}
    known = (f"{name}={value}" for name, value in values.items() if value not in (None, "None"))
    return ", ".join(known) or f"with this {', '.join(values)}"


def _compute_dtype(
    op_class: str, reason: str, leading: set[str], dtypes: set[str], target: str, given: bool
) -> tuple[str, str]:
    """Return the dtype in which an operator of a precision class computes, and why.

    `leading` are the dtypes of the inputs that decide, `dtypes` those of all inputs. `given` says
    that the user gave the class.
    """
    if dtypes & _FOREIGN:
        return "float32", "an operator with a float64 or sparse input is not lowered"
    if op_class == "low" and not leading <= {target, "float32"}:
        return "float32", f"an input has a half precision other than {target}"
    if op_class in ("low", "fp32"):
        return target if op_class == "low" else "float32", reason
    if len(leading) > 1:
        dtype, follows = "float32", MIXED.format(dtypes=" and ".join(sorted(leading)))
    else:
        [dtype] = leading
        follows = f"follows its {dtype} inputs"
    if dtype == "bfloat16" != target:
        return "float32", OTHER_HALF.format(target=target)
    if given:
        return dtype, f"{reason}: {follows}"
    return dtype, follows if dtype == "float32" else f"{follows}: {reason}"


def _float_inputs(
    rule: Rule, attributes: Mapping[str, str], dtypes: Sequence[str]
) -> tuple[dict[int, str], set[str]]:
    """Return the castable inputs' dtypes by position, and the dtypes that decide the compute dtype.

    Statistics, indices and mutable inputs are never cast; `follow_inputs` decide nothing.
    """
    floats = {i: dtype for i, dtype in enumerate(dtypes) if dtype in CASTABLE}
    operator = registry().get(rule.operator)
    if operator is None:
        return floats, set(floats.values())
    fixed = {*operator.positions(rule.keep_inputs, attributes), *operator.mutable_inputs}
    if operator.name == "Custom":
        fixed = {*range(len(dtypes) - auxiliary_states(attributes), len(dtypes))}
    following = operator.positions(rule.follow_inputs, attributes)
    floats = {i: dtype for i, dtype in floats.items() if i not in fixed}
    return floats, {dtype for i, dtype in floats.items() if i not in following}


def _takes_diagonal(attributes: Mapping[str, str]) -> bool:
    """Return whether an einsum's attributes repeat a letter within one operand, as in "ii->i"."""
    operands = str(attributes.get("subscripts", "")).partition("->")[0].split(",")
    named = [[letter for letter in operand if letter.isalpha()] for operand in operands]
    return any(len(letters) != len(set(letters)) for letters in named)
