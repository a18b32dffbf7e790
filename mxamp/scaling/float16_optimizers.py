"""Updates of float16 weights: checks of the optimizer, and unscaling in float32.

With master weights every optimizer of MXNet works. `tests/scaling/test_float16_optimizers.py` holds
the tables to MXNet's registry.
"""

from functools import partial

import numpy as np
from mxnet import optimizer as mx_optimizer
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from ..framework.arrays import cast, map_arrays
from ..framework.machine import dtype_name
from ..framework.patching import Original
from .finite import LEAST_NORMAL

#: They divide by the root of a squared gradient plus epsilon. In float16 an epsilon of 1e-8 is 0,
#: and so is the square of a gradient below 2e-4.
_ADAPTIVE = (mx_optimizer.Adam, mx_optimizer.FTML, mx_optimizer.LAMB, mx_optimizer.Nadam)
#: Their operators do not take float32 states beside float16 weights.
_WITH_FLOAT32_STATES = (mx_optimizer.Ftrl, mx_optimizer.RMSProp)

FLOAT16_UPDATE = (
    "{} can't update float16 weights: {}. Keep float32 master weights, by "
    "initialize(net, trainer, opt_level='O2') or the optimizer's multi_precision=True"
)


def check_float16_update(trainer: Trainer, casts: bool = False) -> None:
    """Raise if a trainer's optimizer can't update the trainer's float16 weights.

    With `casts`, the trainer's parameters will be cast to float16.
    """
    optimizer = trainer._optimizer
    trained = (param for param in trainer._params if param.grad_req != "null")
    half = casts or any(dtype_name(param.dtype) == "float16" for param in trained)
    if not half or optimizer.multi_precision:
        return
    if isinstance(optimizer, _WITH_FLOAT32_STATES):
        why = "its states are float32"
    elif isinstance(optimizer, _ADAPTIVE) and optimizer.epsilon < LEAST_NORMAL:
        epsilon = optimizer.epsilon
        why = f"its epsilon={epsilon:g} is {np.float16(epsilon):g} in float16, write 1e-3"
    else:
        return
    raise ArgumentError(FLOAT16_UPDATE.format(type(optimizer).__name__, why))


def divide_updates(optimizer: mx_optimizer.Optimizer, scale: float) -> None:
    """Make an optimizer divide gradients by `scale` in float32 before updates.

    A scale of 1 undoes that.

    Divided in float16, gradients would lose the small values that the scale preserves.
    """
    own = vars(optimizer).get("update_multi_precision")
    if isinstance(own, partial) and own.func is _divided_update:
        del optimizer.update_multi_precision
    if scale != 1:
        original = optimizer.update_multi_precision
        optimizer.update_multi_precision = partial(_divided_update, original, scale)


def _divided_update(
    original: Original, scale: float, index: object, weight: object, gradient: object, state: object
) -> None:
    """Call `update_multi_precision` with float32 gradients, divided by the loss scale."""

    def divided(array: NDArray) -> NDArray:
        return cast(array, "float32") / scale

    original(index, weight, map_arrays(gradient, divided, lambda other: other), state)
