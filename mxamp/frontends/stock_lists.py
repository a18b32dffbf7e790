"""The operator lists of `mxnet.contrib.amp`, by its names, from mxamp's policies.

They hold canonical operator names, and go into `init` and `convert_*` as they are.
"""

from typing import Any, Dict, List, Optional, Tuple

from ..framework.operators import LOSS_OUTPUTS, registry
from ..policy.policy import Policy
from ..policy.targets import check_target

__all__ = [
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
]


def _policy(target_dtype: Any) -> Policy:
    return Policy.default(check_target(target_dtype))


def list_lp16_ops(target_dtype: Any) -> List[str]:
    """Return the operators that run in the target dtype.

    >>> "Convolution" in list_lp16_ops("bfloat16")
    True
    """
    return _policy(target_dtype).operators("low")


def list_fp32_ops(target_dtype: Any) -> List[str]:
    """Return the operators that run in float32."""
    return _policy(target_dtype).operators("fp32")


def list_lp16_fp32_ops(target_dtype: Any) -> List[str]:
    """Return the operators that follow their inputs, and those that are never cast."""
    policy = _policy(target_dtype)
    return sorted(_following(policy, "neutral") + policy.operators("untouched"))


def list_conditional_fp32_ops(target_dtype: Any) -> List[Tuple[str, str, List[str]]]:
    """Return (operator, attribute, values): float32 where the attribute has one of the values."""
    rules = _policy(target_dtype).rules.values()
    return sorted(
        (rule.operator, condition.attribute, list(condition.values))
        for rule in rules
        for condition in rule.conditions
        if condition.values
    )


def list_widest_type_cast(target_dtype: Any) -> List[str]:
    """Return the operators whose inputs are cast to the widest dtype among them."""
    return sorted(_following(_policy(target_dtype), "widest"))


def list_loss_output_functions(target_dtype: Any) -> List[str]:
    """Return the operators that ignore head gradients and start the backward pass themselves."""
    check_target(target_dtype)
    return list(LOSS_OUTPUTS)


def list_lp16_use_fp32_params(target_dtype: Any) -> Optional[Dict[str, List[bool]]]:
    """Return which inputs of an operator stay in float32 (True); None for float16, as in MXNet."""
    if check_target(target_dtype) == "float16":
        return None
    rules = [rule for rule in _policy(target_dtype).rules.values() if rule.keep_inputs]
    inputs = {rule.operator: registry()[rule.operator].inputs for rule in rules}
    return {
        rule.operator: [name in rule.keep_inputs for name in inputs[rule.operator]]
        for rule in rules
    }


def _following(policy: Policy, op_class: str) -> List[str]:
    """Return the operators of a class, also those that are float32 for numbers out of range only.

    Lists of `mxnet.contrib.amp` know conditions on values alone.
    """
    ranged = [
        rule.operator
        for rule in policy.rules.values()
        if rule.op_class == op_class
        and rule.conditions
        and not any(condition.values for condition in rule.conditions)
    ]
    return policy.operators(op_class) + ranged
