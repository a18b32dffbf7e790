"""Taking the loss scale out of gradients in an update: by the optimizer, or before it."""

from typing import Any, Sequence

from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LBSGD

from ..framework.machine import dtype_name
from .finite import multiply

__all__ = ["take_out_scale"]

_HALF = ("float16", "bfloat16")


def take_out_scale(optimizer: Any, gradients: Sequence[NDArray], scale: float) -> None:
    """Let an optimizer update by gradients without the scale that they carry.

    MXNet's optimizers multiply gradients by `rescale_grad`, which costs nothing more. Others may
    not do so, or look at gradients before: theirs are divided here.
    """
    if scale == 1:
        return
    if _uses_rescaled_alone(optimizer, gradients):
        optimizer.rescale_grad /= scale
    else:
        multiply(gradients, 1.0 / scale)


def _uses_rescaled_alone(optimizer: Any, gradients: Sequence[NDArray]) -> bool:
    # LBSGD adds gradients up over steps, and takes its warm-up from their norm, as they come.
    if isinstance(optimizer, LBSGD):
        return False
    dtypes = {dtype_name(gradient.dtype) for gradient in gradients}
    # In float16 MXNet multiplies the learning rate by `rescale_grad` first, which may be 0 then.
    if "float16" in dtypes and not optimizer.multi_precision:
        return False
    if type(optimizer).__module__.startswith("mxnet.optimizer"):
        return True
    # Half precision would lose what the scale has kept.
    return not dtypes.isdisjoint(_HALF)
