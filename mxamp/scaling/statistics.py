"""Restoring BatchNorm's running statistics after a step that overflowed.

In float16 an activation that overflows makes them Inf or NaN, and no later batch makes them finite
again. A skipped step puts back those of a recent finite step.
"""

from __future__ import annotations

import logging
import operator
from functools import partial
from typing import Any, Callable, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import plain_array
from ..framework.wording import shortened
from ..policy.active import suspended
from .finite import layout_of, nonfinite

logger = logging.getLogger("mxamp")

RESTORED = "the skipped step left Inf or NaN in running statistics; earlier ones are back: %s"
#: Running statistics are saved again after so many finite steps. For ResNet-50 this takes as long
#: as a tenth of `Trainer.step`, while a GPU has nothing to do. They are averages over batches.
_STEPS = 10
#: The most arrays that one call of multi_sgd_update takes.
_CHUNK = 60
#: Ends of running statistics' names, by which nets that were read from files are searched: there
#: the parameters are not marked as not differentiable.
_NAMES = ("_mean", "_var")

#: A function that returns running statistics, each with the name of its parameter.
Find = Callable[[], Sequence[Tuple[str, NDArray]]]


class RunningStatistics:
    """Copies of a trainer's or module's BatchNorm statistics from a recent finite step."""

    def __init__(self) -> None:
        self._held: list[NDArray] = []
        self._saved: list[NDArray] | None = None  #: copies of `_held`
        self._copies: list[Callable[[], Any]] = []  #: calls that copy `_held` to `_saved`
        self._has_logged = False
        self._backward_passes = 0  #: since the last step
        self._age = 0  #: of `_saved`, in finite steps

    def before_pass(self, find: Find) -> None:
        """Save BatchNorm's statistics before the first backward pass, which updates them."""
        self._backward_passes += 1
        if self._saved is None:
            self._save([array for _, array in find()])

    def _save(self, held: list[NDArray]) -> None:
        self._age = 0
        with autograd.pause(), suspended():
            same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
            if same and self._saved is not None:
                for copy in self._copies:
                    copy()
            else:
                self._held, self._saved = held, [array.copy() for array in held]
                self._copies = _copies(held, self._saved)

    def after_step(self, finite: bool, find: Find) -> None:
        """Restore BatchNorm statistics that are not finite; save them every tenth step."""
        self._age += finite
        # After several passes the program may have left out the step of one that overflowed.
        is_good = finite and self._backward_passes <= 1
        self._backward_passes = 0
        if self._saved == [] or (is_good and self._age < _STEPS):
            return
        found = find()
        held, saved = [array for _, array in found], self._saved or ()
        bad = [] if is_good or len(held) != len(saved) else nonfinite(held)
        for i in bad:
            saved[i].copyto(held[i])
        if bad and not self._has_logged:
            names = (f"{found[i][0]} on {held[i].context}" for i in bad)
            logger.warning(RESTORED, shortened(sorted(names)))
            self._has_logged = True
        if finite and self._age >= _STEPS:
            self._save(held)


def _copies(sources: Sequence[NDArray], targets: Sequence[NDArray]) -> list[Callable[[], Any]]:
    """Return calls that copy many arrays each: SGD updates with a learning rate of 0."""
    groups: dict[Any, list[tuple[NDArray, NDArray]]] = {}
    for source, target in zip(map(plain_array, sources), map(plain_array, targets)):
        groups.setdefault(layout_of(source), []).append((source, target))
    calls: list[Callable[[], Any]] = []
    for group in groups.values():
        for k in range(0, len(group), _CHUNK):
            weights, out = zip(*group[k : k + _CHUNK])
            both, zeros = [one for one in weights for _ in range(2)], (0,) * len(weights)
            options = {"lrs": zeros, "wds": zeros, "num_weights": len(weights), "out": [*out]}
            calls.append(partial(mx.nd.multi_sgd_update, *both, **options))
    return calls


def running_statistics(trainer: Trainer) -> list[tuple[str, NDArray]]:
    """Return the running statistics of BatchNorm among a trainer's parameters, on all devices."""
    return [
        (param.name, data)
        for param in trainer._params
        if param._data is not None and (not param._differentiable or param.name.endswith(_NAMES))
        if param.grad_req == "null"
        for data in param._data
    ]
