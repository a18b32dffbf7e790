"""`mxnet.contrib.amp`: its import lines and its operator lists, served by mxamp.

The lists hold canonical operator names, and `init` and `convert_*` take them as they are.
"""

import sys
from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple

from ..framework.contrib_amp import CONTRIB_AMP_MODULES, check_contrib_is_off
from ..framework.operators import LOSS_OUTPUTS, registry
from ..framework.patching import FrontEnd
from ..policy.active import is_enabled
from ..policy.policy import Policy
from ..policy.targets import check_target

__all__ = [
    "contrib_patches",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "patch_contrib",
]


class _StandIn(ModuleType):
    """A module of `mxnet.contrib.amp` whose functions are mxamp's."""

    def __getattribute__(self, name: str) -> Any:
        # GluonNLP reads it, to mask attention with numbers that half precision can hold.
        if name == "_amp_initialized":
            return is_enabled()
        # mxamp loads a public name when it is first used: look it up as late as possible.
        public = sys.modules[__name__.split(".", maxsplit=1)[0]]
        return getattr(public, name) if name in public.__all__ else super().__getattribute__(name)


class _ContribPatches(FrontEnd):
    """Replaces the functions of `mxnet.contrib.amp` and `mxnet.contrib.amp.amp` by mxamp's.

    The modules themselves stay, so every way of importing them works, and so do their lists.
    """

    def open(self) -> None:
        """Replace the functions."""
        check_contrib_is_off()
        super().open()
        for module in CONTRIB_AMP_MODULES:
            module.__class__ = _StandIn

    def close(self) -> None:
        """Restore the original functions."""
        super().close()
        for module in CONTRIB_AMP_MODULES:
            module.__class__ = ModuleType


#: One a process, like the modules that it patches.
contrib_patches = _ContribPatches()


def patch_contrib() -> None:
    """Replace the functions of `mxnet.contrib.amp` with mxamp's, until `shutdown`.

    ::

        import mxamp

        mxamp.patch_contrib()
        from mxnet.contrib import amp  # its functions are mxamp's

    The same holds for `mxnet.contrib.amp.amp`. Functions imported by name before this call stay
    MXNet's.
    """
    contrib_patches.open()


# ------------------------------------------------- the operator lists, under MXNet's names for them


def _default_policy(target_dtype: Any) -> Policy:
    return Policy.default(check_target(target_dtype))


def list_lp16_ops(target_dtype: Any) -> List[str]:
    """Return the operators that run in the target dtype.

    >>> "Convolution" in list_lp16_ops("bfloat16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _default_policy(target_dtype).operators("low")


def list_fp32_ops(target_dtype: Any) -> List[str]:
    """Return the operators that run in float32.

    >>> "softmax" in list_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _default_policy(target_dtype).operators("fp32")


def list_lp16_fp32_ops(target_dtype: Any) -> List[str]:
    """Return the operators that follow their inputs or are never cast.

    >>> "Flatten" in list_lp16_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    policy = _default_policy(target_dtype)
    return sorted(_operators_of_class(policy, "neutral") + policy.operators("untouched"))


def list_conditional_fp32_ops(target_dtype: Any) -> List[Tuple[str, str, List[str]]]:
    """Return (operator, attribute, values): float32 where the attribute has one of the values.

    >>> ("Activation", "act_type", ["softrelu"]) in list_conditional_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    rules = _default_policy(target_dtype).rules.values()
    return sorted(
        (rule.operator, condition.attribute, list(condition.values))
        for rule in rules
        for condition in rule.conditions
        if condition.values
    )


def list_widest_type_cast(target_dtype: Any) -> List[str]:
    """Return the operators whose inputs are cast to the widest dtype among them.

    >>> "Concat" in list_widest_type_cast("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return sorted(_operators_of_class(_default_policy(target_dtype), "widest"))


def list_loss_output_functions(target_dtype: Any) -> List[str]:
    """Return the operators that ignore head gradients and start the backward pass themselves.

    >>> "SoftmaxOutput" in list_loss_output_functions("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    check_target(target_dtype)
    return list(LOSS_OUTPUTS)


def list_lp16_use_fp32_params(target_dtype: Any) -> Optional[Dict[str, List[bool]]]:
    """Return which inputs of an operator stay in float32 (True); None for float16, as in MXNet.

    >>> list_lp16_use_fp32_params("bfloat16")["where"]
    [True, False, False]

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    if check_target(target_dtype) == "float16":
        return None
    rules = [rule for rule in _default_policy(target_dtype).rules.values() if rule.keep_inputs]
    inputs = {rule.operator: registry()[rule.operator].inputs for rule in rules}
    return {
        rule.operator: [name in rule.keep_inputs for name in inputs[rule.operator]]
        for rule in rules
    }


def _operators_of_class(policy: Policy, op_class: str) -> List[str]:
    """Return the operators of a class, including those with a condition on a range of numbers.

    The lists of `mxnet.contrib.amp` know conditions on single values only.
    """
    ranged = [
        rule.operator
        for rule in policy.rules.values()
        if rule.op_class == op_class
        and rule.conditions
        and not any(condition.values for condition in rule.conditions)
    ]
    return policy.operators(op_class) + ranged
