"""Who is told of a trainer's steps: nobody, as a rule; tools that watch a training run.

`TrainerHook` tells of the steps that it has checked. A trainer without loss scaling is given a
`PlainSteps` while somebody observes it.
"""

import weakref
from typing import Any, Callable, List, MutableMapping, Sequence

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from .asking import ask_before_updates, ask_no_more
from .report import StepReport

__all__ = ["StepObserver", "observe_steps", "stop_observing", "tell_observers"]

#: Called with the report on a step and the losses that it was computed from, before they were
#: scaled; none where nothing is known of them. Gradients, and so the losses, are there by then.
StepObserver = Callable[[StepReport, Sequence[NDArray]], None]

_observers: MutableMapping[Trainer, List[StepObserver]] = weakref.WeakKeyDictionary()

FOREIGN_SCALER = (
    "this trainer's loss scaler is a {kind} and not mxamp's, so its steps can't be observed: use "
    "mxamp.init_trainer(trainer), or mxamp.patch_contrib() for scripts of mxnet.contrib.amp"
)


class PlainSteps:
    """A trainer's loss scaler where it has none: MXNet asks it too before each update."""

    loss_scale = 1.0

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def has_overflow(self, params: Sequence[Any]) -> bool:
        """Tell of a step; it is done."""
        del params
        tell_observers(self._trainer, StepReport(True, 1.0, 1.0), ())
        return False


def observe_steps(trainer: Trainer, observer: StepObserver) -> None:
    """Tell `observer` of a trainer's steps, until `stop_observing`."""
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is not None and not hasattr(scaler, "publish") and not isinstance(scaler, PlainSteps):
        raise StateError(FOREIGN_SCALER.format(kind=type(scaler).__module__))
    if scaler is None:
        trainer._amp_loss_scaler = PlainSteps(trainer)
        ask_before_updates(trainer)
    _observers.setdefault(trainer, []).append(observer)


def stop_observing(trainer: Trainer, observer: StepObserver) -> None:
    """Tell `observer` no more; a trainer that nobody observes is as it was."""
    _observers[trainer].remove(observer)
    if _observers[trainer]:
        return
    del _observers[trainer]
    if isinstance(getattr(trainer, "_amp_loss_scaler", None), PlainSteps):
        del trainer._amp_loss_scaler
        ask_no_more(trainer)


def tell_observers(trainer: Trainer, report: StepReport, losses: Sequence[NDArray]) -> None:
    """Tell those who observe a trainer what became of a step."""
    for observer in tuple(_observers.get(trainer, ())):
        observer(report, losses)
