"""Drop-in replacement for `mxnet.contrib.amp`: its functions and operator lists, from mxamp.

The lists hold canonical operator names, and `init` and `convert_*` take them as they are.
"""

import sys
from types import ModuleType
from typing import Dict, List, Optional, Tuple

from ..framework.contrib_amp import CONTRIB_AMP_MODULES, check_contrib_is_off
from ..framework.machine import Dtype
from ..framework.operators import registry, with_trait
from ..framework.patching import FrontEnd
from ..policy.active import is_enabled
from ..policy.policy import Policy
from ..policy.targets import check_target


class _ForwardingModule(ModuleType):
    """Class set on the modules of `mxnet.contrib.amp`: attribute lookups find mxamp's functions.

    Python lets a module change its class, for attributes that are computed when they are read. So
    scripts that hold the module already get mxamp's functions, those that contrib lacks included.
    """

    def __getattribute__(self, name: str) -> object:
        # GluonNLP reads it, to mask attention with numbers that half precision can hold.
        if name == "_amp_initialized":
            return is_enabled()
        # mxamp loads a public name when it is first used: look it up as late as possible.
        public = sys.modules[__name__.partition(".")[0]]
        return getattr(public, name) if name in public.__all__ else super().__getattribute__(name)


class _ContribPatches(FrontEnd):
    """The replacement of the functions of `mxnet.contrib.amp` by mxamp's, until `close`.

    The modules themselves stay, so every way of importing them works, and so do their lists.
    """

    def open(self) -> None:
        """Replace the functions of `mxnet.contrib.amp` with mxamp's."""
        check_contrib_is_off()
        super().open()
        for module in CONTRIB_AMP_MODULES:
            module.__class__ = _ForwardingModule

    def close(self) -> None:
        """Restore the original functions of `mxnet.contrib.amp`."""
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

    `patch_contrib` also replaces the functions of `mxnet.contrib.amp.amp`. Functions that a script
    has imported by name before the call stay MXNet's.
    """
    contrib_patches.open()


# ------------------------------------------------- the operator lists, under MXNet's names for them


def list_lp16_ops(target_dtype: Dtype) -> List[str]:
    """Return the operators that run in the target dtype, as `mxnet.contrib.amp` lists them.

    >>> "Convolution" in list_lp16_ops("bfloat16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _operators(target_dtype, "low")


def list_fp32_ops(target_dtype: Dtype) -> List[str]:
    """Return the operators that run in float32, as `mxnet.contrib.amp` lists them.

    >>> "softmax" in list_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _operators(target_dtype, "fp32")


def list_lp16_fp32_ops(target_dtype: Dtype) -> List[str]:
    """Return the operators that run in the dtype of their inputs, or that are never cast.

    >>> "Flatten" in list_lp16_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _operators(target_dtype, "neutral", "untouched")


def list_conditional_fp32_ops(target_dtype: Dtype) -> List[Tuple[str, str, List[str]]]:
    """Return the operators that run in float32 for certain values of an attribute.

    Each is a tuple (operator, attribute, values).

    >>> ("Activation", "act_type", ["softrelu"]) in list_conditional_fp32_ops("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return sorted(
        (rule.operator, condition.attribute, list(condition.values))
        for rule in Policy.default(target_dtype).rules.values()
        for condition in rule.conditions
        if condition.values
    )


def list_widest_type_cast(target_dtype: Dtype) -> List[str]:
    """Return the operators whose inputs are cast to the widest dtype among the inputs.

    >>> "Concat" in list_widest_type_cast("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    return _operators(target_dtype, "widest")


def list_loss_output_functions(target_dtype: Dtype) -> List[str]:
    """Return the operators that are losses, such as SoftmaxOutput: they ignore head gradients.

    >>> "SoftmaxOutput" in list_loss_output_functions("float16")
    True

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    check_target(target_dtype)
    return list(with_trait("loss_outputs"))


def list_lp16_use_fp32_params(target_dtype: Dtype) -> Optional[Dict[str, List[bool]]]:
    """Return, for each bfloat16 operator, which inputs stay in float32; None for float16.

    >>> list_lp16_use_fp32_params("bfloat16")["where"]
    [True, False, False]

    Parameters
    ----------
    target_dtype : str or dtype
        "float16" or "bfloat16".
    """
    if check_target(target_dtype) == "float16":
        return None
    return {
        rule.operator: [name in rule.keep_inputs for name in registry()[rule.operator].inputs]
        for rule in Policy.default(target_dtype).rules.values()
        if rule.keep_inputs
    }


def _operators(target_dtype: Dtype, *classes: str) -> List[str]:
    """Return operators of these precision classes, except those conditional on attribute values.

    The lists of `mxnet.contrib.amp` know conditions on single values only.
    """
    return sorted(
        rule.operator
        for rule in Policy.default(target_dtype).rules.values()
        if rule.op_class in classes and not any(one.values for one in rule.conditions)
    )
