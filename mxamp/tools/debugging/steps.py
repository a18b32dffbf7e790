"""`on_step`: call a function with a report after each step of a trainer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Callable

from mxnet.gluon import Trainer

from ...errors import StateError
from ...scaling.trainer import StepReport, state_of


def on_step(trainer: Trainer, function: Callable[[StepReport], Any]) -> StepHook:
    """Call `function` with a `StepReport` for each step of a trainer, skipped ones too.

    ::

        amp.init_trainer(trainer, amp.NoScaler())
        reports = []
        with amp.debugging.on_step(trainer, reports.append):
            for data, label in batches:
                with autograd.record():
                    loss = loss_function(net(data), label)
                loss.backward()
                trainer.step(batch_size)
        print(reports[-1].stepped, reports[-1].loss_scale)

    A report is the same as `trainer.amp_last_step`, with `stepped`, `loss_scale`,
    `next_loss_scale` and `nonfinite`. mxamp calls `function` after the gradients are checked and
    before the weights change.

    Parameters
    ----------
    trainer : gluon.Trainer
        A trainer with mxamp's loss scaler. If you don't scale losses, call
        `init_trainer(trainer, NoScaler())` before.
    function : callable
        Called with one argument, the report.

    Returns
    -------
    StepHook
        Calls `function` until the end of a `with` statement, or until `hook.remove()`.

    Raises
    ------
    StateError
        The trainer has no loss scaler of mxamp.
    """
    if state_of(trainer) is None:
        raise StateError("this trainer makes no reports: call init_trainer(trainer) before")
    observers = vars(trainer).setdefault("_amp_observers", [])
    observers.append(function)
    hook = StepHook()
    hook.callback(observers.remove, function)
    return hook


class StepHook(ExitStack):
    """Handle of an `on_step` callback, which `remove()` or the end of `with` unregisters."""

    remove = ExitStack.close
