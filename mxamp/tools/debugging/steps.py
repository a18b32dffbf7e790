"""Functions that are called after each of a trainer's steps."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ...errors import StateError
from ...scaling.state import State, StepReport

FOREIGN_SCALER = (
    "this trainer's loss scaler is a {kind} and not mxamp's, so its steps can't be observed: use "
    "mxamp.init_trainer(trainer), or mxamp.patch_contrib() for scripts of mxnet.contrib.amp"
)

#: Called with the report on a step and its unscaled losses, if known. The gradients, and so the
#: losses, are computed by then.
StepObserver = Callable[[StepReport, Sequence[NDArray]], None]


class _StepReporter:
    """Stands in for the loss scaler of a trainer that has none, and reports its steps."""

    loss_scale = 1.0

    def __init__(self, observers: list[StepObserver]) -> None:
        self._observers = observers

    def has_overflow(self, params: Any) -> bool:
        """Report a step to the observers; return False, so that the trainer updates."""
        del params
        for observer in tuple(self._observers):
            observer(StepReport(True, 1.0, 1.0), ())
        return False


def observe_steps(trainer: Trainer, observer: StepObserver) -> None:
    """Call `observer` after each of a trainer's steps, until `stop_observing`."""
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is not None and not isinstance(scaler, (State, _StepReporter)):
        raise StateError(FOREIGN_SCALER.format(kind=type(scaler).__module__))
    observers = vars(trainer).setdefault("_amp_observers", [])
    observers.append(observer)
    if scaler is None:
        trainer._amp_loss_scaler = _StepReporter(observers)


def stop_observing(trainer: Trainer, observer: StepObserver) -> None:
    """Remove an observer; after the last one, undo the changes to the trainer."""
    trainer._amp_observers.remove(observer)
    if not trainer._amp_observers:
        del trainer._amp_observers
        if isinstance(trainer._amp_loss_scaler, _StepReporter):
            del trainer._amp_loss_scaler
