"""Optimizers that cannot update float16 weights without float32 master weights.

In float16 an epsilon of 1e-8 is 0, and so is the square of a gradient below 2e-4: Adam, Nadam, FTML
and LAMB divide small gradients by 0 or nearly 0. RMSProp and Ftrl keep float32 states, which their
operators do not take beside float16 weights. With master weights every optimizer of MXNet works.
"""

import copy
import warnings
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.optimizer import SGLD, Updater

from ..errors import ArgumentError
from ..framework.distributed import is_horovod_optimizer
from ..framework.machine import dtype_name

FLOAT16_UPDATE = (
    "{optimizer} can't update float16 weights: {why}. Keep float32 master weights, by "
    "initialize(net, trainer, opt_level='O2') or the optimizer's multi_precision=True"
)

#: Gradients of a probe, of all sizes that loss scaling leaves in float16.
_GRADIENTS = (0.0, 2.0**-24, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0)


def check_float16_update(trainer: Trainer, casts: bool = False) -> None:
    """Raise `ArgumentError` if a trainer's optimizer fails on its float16 weights.

    With `casts`, the trainer's parameters will be cast to float16.

    A copy of the optimizer updates eight weights twice, under the policy in force: AdaGrad and
    AdaDelta work by its casts alone. Smaller updates than in float32 are float16's nature; one that
    is larger by more than the largest of float32 is not. No error is raised for an optimizer that
    fails in float32 too.
    """
    optimizer, context = trainer._optimizer, trainer._contexts[0]
    trained = (param for param in trainer._params if param.grad_req != "null")
    half = casts or any(dtype_name(param.dtype) == "float16" for param in trained)
    # SGLD would draw from MXNet's random generator, and Horovod's would wait for other workers.
    unsafe = isinstance(optimizer, SGLD) or is_horovod_optimizer(optimizer)
    if unsafe or not half or optimizer.multi_precision:
        return
    try:
        expected = _probed_update(optimizer, context, "float32")
    except Exception:  # a custom optimizer may need its own parameters
        return
    why, cause = "updates become NaN or far too large", None
    try:
        finite, update = np.isfinite(expected), _probed_update(optimizer, context, "float16")
        sizes = np.abs(expected[finite])
        if (np.abs(update[finite]) <= sizes + sizes.max(initial=0)).all():
            return
    except Exception as error:
        last_line = (str(error).strip() or repr(error)).split("\n")[-1]
        why, cause = f"it raises {last_line!r}", error
    for name, value in vars(optimizer).items():
        # Below the smallest normal number.
        if "eps" in name and isinstance(value, float) and 0 < value < 2.0**-14:
            why += f": its {name}={value:g} is {np.float16(value):g} in float16, write 1e-3"
    kind = type(optimizer).__name__
    raise ArgumentError(FLOAT16_UPDATE.format(optimizer=kind, why=why)) from cause


def _probed_update(optimizer: Any, context: Any, dtype: str) -> Any:
    """Return the change of eight weights of a dtype after two updates by a copy of an optimizer."""
    probe = copy.deepcopy(optimizer)
    vars(probe).update(lr=0.01, lr_scheduler=None, rescale_grad=1.0)
    updater, weight = Updater(probe), mx.nd.ones((len(_GRADIENTS), 1), context, dtype)
    with warnings.catch_warnings(), autograd.pause():
        warnings.simplefilter("ignore")  # MXNet warns of float16 states
        for _ in range(2):
            updater(-1, mx.nd.array(_GRADIENTS, context, dtype).reshape((-1, 1)), weight)
        return weight.asnumpy().astype("float32") - 1
