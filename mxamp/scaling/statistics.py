"""Rollback of BatchNorm's running statistics after a step that overflowed.

In float16 an activation that overflows makes them Inf or NaN, and no later batch makes them finite
again. A skipped step puts back those of a recent finite step.
"""

from __future__ import annotations

import logging
from typing import Callable, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import copy, plain_array
from ..framework.wording import shortened
from .finite import nonfinite

logger = logging.getLogger("mxamp")

RESTORED = "the skipped step left Inf or NaN in running statistics; earlier ones are back: %s"
#: Running statistics are saved again after so many finite steps. For ResNet-50 the copies take one
#: or two milliseconds, while a GPU has nothing to do. They are averages over batches.
_STEPS = 10
#: Ends of running statistics' names, by which nets that were read from files are searched: there
#: the parameters are not marked as not differentiable.
_NAMES = ("_mean", "_var")

#: A function that returns running statistics, each with the name of its parameter.
Find = Callable[[], Sequence[Tuple[str, NDArray]]]


class RunningStatistics:
    """Snapshot of BatchNorm's running statistics, from a recent step without overflow."""

    def __init__(self) -> None:
        self._saved: list[NDArray] | None = None
        self._age = 0  #: of `_saved`, in finite steps
        self._backward_passes = 0  #: since the last step
        self._has_logged = False

    def before_pass(self, find: Find) -> None:
        """Count a backward pass; take a snapshot before the first one updates the statistics."""
        self._backward_passes += 1
        if self._saved is None:
            self._save(find())

    def _save(self, found: Sequence[Tuple[str, NDArray]]) -> None:
        with autograd.pause():
            self._saved, self._age = [copy(array) for _, array in found], 0

    def after_step(self, finite: bool, find: Find) -> None:
        """Restore Inf or NaN statistics from the snapshot; take a new one every 10 finite steps."""
        self._age += finite
        # After several passes the program may have left out the step of one that overflowed.
        is_good = finite and self._backward_passes <= 1
        self._backward_passes = 0
        if self._saved == [] or (is_good and self._age < _STEPS):
            return
        found, saved = find(), self._saved or []
        bad = [] if is_good or len(found) != len(saved) else nonfinite([one for _, one in found])
        for i in bad:
            saved[i].copyto(plain_array(found[i][1]))
        if bad and not self._has_logged:
            names = (f"{found[i][0]} on {found[i][1].context}" for i in bad)
            logger.warning(RESTORED, shortened(sorted(names)))
            self._has_logged = True
        if finite and self._age >= _STEPS:
            self._save(found)


def running_statistics(trainer: Trainer) -> list[tuple[str, NDArray]]:
    """Return the BatchNorm running statistics among a trainer's parameters, by name."""
    return [
        (param.name, data)
        for param in trainer._params
        if param._data is not None and (not param._differentiable or param.name.endswith(_NAMES))
        if param.grad_req == "null"
        for data in param._data
    ]
