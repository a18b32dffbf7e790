"""Paddle's and TensorFlow's API: `decorate` an optimizer, which then scales the losses."""

import copy
from typing import Union

from mxnet.optimizer import Optimizer

from ..errors import ArgumentError, StateError, unknown
from ..framework.distributed import is_horovod_optimizer
from ..framework.keywords import checked_call
from ..framework.wording import shown
from ..policy.active import chose_float32
from ..policy.targets import check_bool
from ..scaling.scaler import LossScaler, NoScaler, SharedScale, StaticLossScaler, scale_of
from .backward import backward_patches
from .module_api import DecoratedName, module_patches

WRAPPED = (
    "decorate the optimizer first, and let Horovod's trainer take the result: "
    "hvd.DistributedTrainer(params, mxamp.decorate(optimizer))"
)

#: Attributes that change in place: a copy needs its own.
_COPIED = {"_index_update_count", "_all_index_update_counts", "lr_mult", "wd_mult", "idx2name"}


@checked_call
def decorate(
    optimizer: Union[str, Optimizer],
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool = True,
) -> Union[str, Optimizer]:
    """Return an optimizer that scales the losses of any module or trainer that uses it.

    ::

        amp.init("float16")
        module.fit(iterator, optimizer=amp.decorate("sgd"), num_epoch=10)

        trainer = gluon.Trainer(net.collect_params(), amp.decorate(mx.optimizer.Adam()))
        with autograd.record():
            loss = loss_function(net(data), label)
        loss.backward()  # scales inside: gradients come out as in float32
        trainer.step(batch_size)  # skipped after an overflow

    In `Module`, `BucketingModule` and `fit`, the operators `SoftmaxOutput`, the regression outputs,
    `SVMOutput` and `MakeLoss` apply the loss scale in the graph: call `decorate` before you bind
    the module (`fit` binds the module). With `gluon.Trainer`, `backward` scales the head gradients.

    Parameters
    ----------
    optimizer : str or Optimizer
        An optimizer, of which the result is a copy, or a name, for which the result is a name too.
    init_loss_scaling : float, default 2**16
        The first loss scale. A dynamic loss scale has to be from 1 to 2**24.
    incr_every_n_steps : int, default 2000
        The loss scale grows after this many steps in a row without an overflow.
    decr_every_n_nan_or_inf : int, default 1
        The number n: the n-th overflow since the loss scale last grew lowers the loss scale, and so
        does each later overflow.
    incr_ratio : float, default 2
        The factor by which the loss scale grows.
    decr_ratio : float, default 0.5
        The factor by which an overflow lowers the loss scale.
    use_dynamic_loss_scaling : bool, default True
        False keeps the first loss scale. Steps that overflow are still skipped.

    If `init("auto")` has chosen float32, the loss scale is 1, and no step is skipped. The result's
    attribute `scaling` has the numbers of `steps` and `skips` and the current `loss_scale`.

    Raises
    ------
    ArgumentError
        The name is unknown, the object is not an optimizer, or a number is out of range.
    StateError
        The optimizer is decorated already.
    """
    if scale_of(optimizer) is not None:
        raise StateError("this optimizer is decorated already: its losses would be scaled twice")
    if is_horovod_optimizer(optimizer):
        raise ArgumentError(WRAPPED)
    scaler: LossScaler = StaticLossScaler(init_loss_scaling)
    if check_bool("use_dynamic_loss_scaling", use_dynamic_loss_scaling):
        growth = (incr_ratio, decr_ratio, incr_every_n_steps)
        scaler = LossScaler(init_loss_scaling, *growth, hysteresis=decr_every_n_nan_or_inf)
    if chose_float32():
        scaler = NoScaler()
    decorated = _copied(optimizer)
    shared = SharedScale(scaler, "decorate")
    vars(decorated).update(_amp_scaling=shared, scaling=shared)
    backward_patches.open()
    module_patches.open()
    return decorated


def _copied(optimizer: object) -> Union[DecoratedName, Optimizer]:
    """Return a copy of an optimizer or of its name, ready to have a loss scale attached."""
    if isinstance(optimizer, str):
        if optimizer.lower() not in Optimizer.opt_registry:
            raise unknown("optimizer", optimizer, Optimizer.opt_registry)
        return DecoratedName(optimizer)
    if not isinstance(optimizer, Optimizer):
        given = f"decorate takes an Optimizer or its name, not {shown(optimizer)}"
        raise ArgumentError(f"{given}; for a trainer there is init_trainer, for a net initialize")
    result = copy.copy(optimizer)
    held = vars(result)
    held.update(copy.deepcopy({name: held[name] for name in _COPIED & held.keys()}))
    return result
