"""`on_step`: a function that gets the report of each step of a trainer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Callable

from mxnet.gluon import Trainer

from ...errors import ArgumentError, StateError
from ...framework.wording import shown
from ...scaling.trainer import State, StepReport

FOREIGN_SCALER = "this trainer's loss scaler is not mxamp's: use mxamp.init_trainer(trainer)"


def on_step(trainer: Trainer, function: Callable[[StepReport], Any]) -> StepHook:
    """Call `function` with the report of each step of a trainer, skipped steps included.

    ::

        reports = []
        with amp.debugging.on_step(trainer, reports.append):
            for data, label in batches:
                with autograd.record():
                    loss = loss_function(net(data), label)
                loss.backward()
                trainer.step(batch_size)
        print(reports[-1].stepped, reports[-1].loss_scale)

    The report is that of `trainer.amp_last_step`: `stepped`, `loss_scale`, `next_loss_scale` and
    `nonfinite`. The call comes after the gradients are checked and before the weights change. A
    trainer without loss scaling reports steps at scale 1, and none as skipped.

    Returns the hook, which calls `function` until the end of a `with` statement, or until
    `remove()`. Raises `StateError` for a trainer whose loss scaler is not mxamp's.
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"on_step takes a gluon.Trainer, not {shown(trainer)}")
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is not None and not isinstance(scaler, (State, _StepReporter)):
        raise StateError(FOREIGN_SCALER)
    functions = vars(trainer).setdefault("_amp_observers", [])
    functions.append(function)
    if scaler is None:
        trainer._amp_loss_scaler = _StepReporter(functions)
    hook = StepHook()
    hook.callback(_stop, trainer, function)
    return hook


class StepHook(ExitStack):
    """Calls a function after each step of a trainer, until `remove()`."""

    def remove(self) -> None:
        """Stop calling the function; a second call is a no-op."""
        self.close()


def _stop(trainer: Trainer, function: Callable[[StepReport], Any]) -> None:
    """Stop calling a function after steps of a trainer."""
    trainer._amp_observers.remove(function)
    if not trainer._amp_observers:
        del trainer._amp_observers
        if isinstance(trainer._amp_loss_scaler, _StepReporter):
            del trainer._amp_loss_scaler


class _StepReporter:
    """Stands in for the loss scaler of a trainer that has none, and reports its steps."""

    loss_scale = 1.0

    def __init__(self, functions: list[Callable[[StepReport], Any]]) -> None:
        self._functions = functions

    def has_overflow(self, params: Any) -> bool:
        """Report a step; return False, so that the trainer updates."""
        del params
        for function in tuple(self._functions):
            function(StepReport(True, 1.0, 1.0))
        return False
