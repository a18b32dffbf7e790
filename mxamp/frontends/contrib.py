"""`mxnet.contrib.amp` itself, for scripts whose import lines can't be changed."""

import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from mxnet.contrib import amp as stock

from ..framework.operators import LOSS_OUTPUTS, registry
from ..framework.patching import FrontEnd, Patch
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
    """What the modules of `mxnet.contrib.amp` are while mxamp stands in for it."""

    @property
    def _amp_initialized(self) -> bool:
        # GluonNLP reads it, to mask attention with numbers that half precision can hold.
        return is_enabled()

    def __getattr__(self, name: str) -> Any:
        if name in _public_package().__all__:
            return getattr(_public_package(), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _ContribPatches(FrontEnd):
    """The functions in `mxnet.contrib.amp` and `mxnet.contrib.amp.amp`.

    The modules stay, so that every way of importing them, and their lists, are there.
    """

    _MODULES = (stock, stock.amp)

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        public = _public_package()
        return [
            Patch(module, name, _returning(getattr(public, name)))
            for module in self._MODULES
            for name in public.__all__
            if callable(vars(module).get(name))
        ]

    def open(self) -> None:
        """Put the patches in place."""
        super().open()
        for module in self._MODULES:
            module.__class__ = _StandIn

    def close(self) -> None:
        """Put the old functions back."""
        super().close()
        for module in self._MODULES:
            module.__class__ = ModuleType


#: One a process, as the modules that it patches are.
contrib_patches = _ContribPatches()


def patch_contrib() -> None:
    """Make `mxnet.contrib.amp` mean mxamp, until `shutdown`.

    ::

        import mxamp

        mxamp.patch_contrib()
        from mxnet.contrib import amp  # its functions are mxamp's

    So are those of `mxnet.contrib.amp.amp`. What has imported functions of the old one by name
    before keeps those.
    """
    contrib_patches.open()


def _public_package() -> ModuleType:
    # Whoever calls this has imported the package on top.
    return sys.modules[__name__.split(".", maxsplit=1)[0]]


def _returning(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


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
