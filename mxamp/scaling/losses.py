"""`scale_loss`: a loss times the scale of the trainers that step on its gradients."""

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, List, Sequence, Union

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from ..framework.arrays import map_arrays
from ..framework.machine import dtype_name
from ..framework.wording import shown
from .hook import TrainerHook
from .loss_outputs import scaled_heads
from .passes import ScaledLosses, passes
from .scaler import NoScaler
from .trainer import hook_of

__all__ = ["check_unscaled", "map_losses", "scale_loss", "scaled_loss"]

LOSS = "a loss must be an NDArray, or lists, tuples and dicts of NDArrays, not {given}"
SCALED_ALREADY = (
    "this loss has been scaled already: scale each loss once, and call backward on the scaled loss"
)
NO_TRAINERS = "scale_loss takes a gluon.Trainer or a list of them, not an empty list"


@contextmanager
def scale_loss(loss: Any, optimizer_or_trainer: Union[Trainer, Sequence[Trainer]]) -> Iterator[Any]:
    """Yield the loss times the trainer's loss scale, and mark the gradients as scaled.

    ::

        with autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(batch_size)

    Parameters
    ----------
    loss : NDArray, or lists, tuples and dicts of them
        The scaled loss has the same containers. A float16 loss is scaled to a float32 loss.
    optimizer_or_trainer : gluon.Trainer, or list of gluon.Trainer
        All trainers, after `init_trainer`, that step on gradients of this loss. The loss is scaled
        by the smallest of their scales. Each trainer checks its own gradients: it skips its step
        and lowers its scale if one of them overflows.

    Works inside `autograd.record()` and outside. Several losses may be scaled before one step, also
    in several threads: the scale changes only in steps. An error inside leaves the trainer
    unchanged. Scaling a loss twice raises `StateError`, and so does the step of a trainer that was
    not given here, on gradients of the scaled loss.
    """
    hooks = _hooks_of(optimizer_or_trainer)
    check_unscaled(loss)
    # A NoScaler scales by 1 because bfloat16 needs no scale; a larger one does no harm.
    scales = [hook.loss_scale for hook in hooks if not isinstance(hook.scaler, NoScaler)]
    scale = min(scales, default=hooks[0].loss_scale)
    given = _arrays(loss)
    values = [array.detach() for array in given]
    with autograd.record(train_mode=autograd.is_training()):
        losses = map_losses(loss, lambda array: scaled_loss(array, scale))
    made = ScaledLosses(scale, hooks)
    if scale != 1:
        made.given = {id(array): array for array in given}
        made.made = {id(array): array for array in _arrays(losses)}
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.scaling(scale, values))
        stack.enter_context(scaled_heads(scale))
        stack.enter_context(passes.inside(made))
        yield losses


def _hooks_of(trainers: Union[Trainer, Sequence[Trainer]]) -> Sequence[TrainerHook]:
    listed = trainers if isinstance(trainers, (list, tuple)) else [trainers]
    hooks = list(dict.fromkeys(hook_of(trainer) for trainer in listed))
    if not hooks:
        raise ArgumentError(NO_TRAINERS)
    for hook in hooks:
        hook.check_scaled_by("scale_loss", "init_trainer", "initialize")
    return hooks


def _arrays(loss: Any) -> List[NDArray]:
    arrays: List[NDArray] = []
    map_arrays(loss, arrays.append, _no_loss)
    return arrays


def check_unscaled(loss: Any) -> None:
    """Raise `StateError` if a loss, or one of several, is scaled already."""
    if passes.is_scaled(_arrays(loss)):
        raise StateError(SCALED_ALREADY)


def map_losses(loss: Any, function: Callable[[NDArray], NDArray]) -> Any:
    """Return `loss` with `function` applied to each array, in the same containers."""
    return map_arrays(loss, function, _no_loss)


def _no_loss(value: Any) -> Any:
    raise ArgumentError(LOSS.format(given=shown(value)))


def scaled_loss(loss: NDArray, scale: float) -> NDArray:
    """Return a loss times `scale`; a half-precision loss becomes float32."""
    if dtype_name(loss.dtype) not in ("float32", "float64"):
        loss = loss.astype("float32")  # 65504 is float16's largest number
    return loss * scale if scale != 1 else loss
