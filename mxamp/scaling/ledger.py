"""The ledger: a record of the loss scale by which each gradient is multiplied.

A backward pass changes the records of the parameters behind its heads alone, and leaves those of
other trainers and threads. While all gradients carry one scale, a pass looks at no gradient.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Iterable, Iterator, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..framework.interrupts import synchronized
from ..framework.patching import hold_during_forks
from .finite import multiply, nonfinite, square_sum
from .running import BackwardPass
from .statistics import RunningStatistics, running_statistics
from .tape import name_of

logger = logging.getLogger("mxamp")

MADE_LATE = "the gradient of %s is older than its trainer, and set to zero: make the trainer first"


#: Held while records are changed, never while MXNet computes or Python code of a script runs.
_lock = threading.RLock()
hold_during_forks(_lock)
_locked = synchronized(_lock)
_listed = _locked(list)


class Entry(NamedTuple):
    """A gradient that the ledger tracks: that of one parameter on one device."""

    param: Parameter
    data: NDArray
    gradient: NDArray

    @property
    def adds(self) -> bool:
        """Whether backward passes add to the gradient (`grad_req="add"`)."""
        return bool(self.param.grad_req == "add")


def entries_of(trainer: Trainer) -> list[Entry]:
    """Return each gradient of a trainer on each device, with its parameter (`Entry`)."""
    return [
        Entry(param, data, gradient)
        for param in trainer._params
        if param.grad_req != "null" and param._grad is not None
        for data, gradient in zip(param._data, param._grad)
    ]


def gradients_of(trainer: Trainer) -> list[NDArray]:
    """Return the gradient arrays of a trainer, on all devices."""
    return [one for param in trainer._params if param._grad is not None for one in param._grad]


def named(entries: Iterable[Entry], names: set[str]) -> list[Entry]:
    """Return the gradients whose parameters have one of these names on autograd's tape."""
    return [entry for entry in entries if name_of(entry.data) in names]


def fresh(trainer: Trainer) -> list[Entry]:
    """Return a trainer's gradients that a backward pass has written since its last update."""
    return [entry for entry in entries_of(trainer) if entry.data._fresh_grad]


@dataclass(frozen=True)
class GradientRecord:
    """The loss scale of a gradient, and whether it has overflowed or is summed over devices."""

    scale: float
    #: Whether it was found not finite, and no pass has replaced it since. The program may have made
    #: it finite, by clipping for example.
    overflown: bool = False
    #: Whether it is the sum over devices and workers, and no pass or step came since.
    summed: bool = False


class Ledger:
    """Record of the loss scale by which each gradient of each trainer is multiplied."""

    def __init__(self) -> None:
        self.trainers: WeakKeyDictionary[Trainer, RunningStatistics] = WeakKeyDictionary()
        self._scale = 1.0  #: the scale of all gradients that have no record
        #: By the gradient's handle: another `grad_req`, dtype or device makes another gradient.
        self._records: WeakValueDictionary[int, GradientRecord] = WeakValueDictionary()

    def add(self, trainer: Trainer) -> None:
        """Track a trainer's gradients, and set to zero those whose loss scale is unknown.

        It is unknown after a scaled backward pass that came before this call.
        """
        if trainer in self.trainers:
            return
        known = {param for other in self.known() for param in other._params}
        _locked(self.trainers.setdefault)(trainer, RunningStatistics())
        scales = {self._scale, *(record.scale for record in list(self._records.values()))}
        for entry in fresh(trainer) if scales != {1.0} else ():
            if entry.param not in known:
                logger.warning(MADE_LATE, entry.param.name)
                entry.param.zero_grad()
                entry.data._fresh_grad = False

    def known(self) -> list[Trainer]:
        """Return the trainers whose gradients the ledger tracks, as a copy for thread safety."""
        return _listed(self.trainers)

    def of(self, entry: Entry) -> GradientRecord:
        """Return the record of a gradient's loss scale, overflow, and sum over devices."""
        # Needs no lock: `_settle` changes `_scale` before it drops the records that it replaces.
        return self._records.get(entry.gradient.handle.value) or GradientRecord(self._scale)

    @_locked
    def note(self, entry: Entry, record: GradientRecord) -> None:
        """Set the record of a gradient's loss scale, overflow, and sum over devices."""
        handle = entry.gradient.handle
        handle._amp_record = self._records[handle.value] = record
        if record == GradientRecord(self._scale):
            del self._records[handle.value]

    def overflown_among(self, find: Callable[[], list[Entry]]) -> list[Entry]:
        """Return the overflowed gradients in the list that `find()` returns.

        `find` is not called if no gradient can have overflowed.
        """
        return [entry for entry in find() if self.of(entry).overflown] if self._records else []

    def is_summed(self, trainer: Trainer) -> bool:
        """Return whether a trainer's gradients are already summed over devices and workers."""
        return bool(self._records) and all(self.of(entry).summed for entry in entries_of(trainer))

    def note_sum(self, trainer: Trainer, summed: bool = True) -> None:
        """Record whether a trainer's gradients are summed over devices and workers."""
        for entry in entries_of(trainer) if summed or self._records else ():
            self.note(entry, replace(self.of(entry), summed=summed))

    def all_carry(self, scale: float) -> bool:
        """Return whether all gradients have this loss scale, and no overflow or sum is recorded."""
        return self._scale == scale and not self._records

    @contextmanager
    def recording(self, this_pass: BackwardPass, scale: float) -> Iterator[None]:
        """Return a context that records the loss scale of gradients that a backward pass writes.

        Gradients that the pass adds to are brought to this scale before it. If the pass raises, the
        records of gradients that it would have replaced stay what they were.
        """
        for trainer in self.known():
            self.trainers[trainer].before_pass(partial(running_statistics, trainer))
        changed = self._changed(this_pass, scale)
        adding = [entry for entry in changed if entry.adds]
        replaced = [(entry, self.of(entry)) for entry in changed if not entry.adds]
        for entry in adding:
            # After an overflow the program may have set the sum to zero.
            was_overflown = self.of(entry).overflown and square_sum([entry.gradient]) != 0
            self.note(entry, GradientRecord(self.of(entry).scale, was_overflown))
        self.rescale(adding, scale)
        for entry, _ in replaced:  # before the pass, since Ctrl-C may come right after it
            self.note(entry, GradientRecord(scale))
        try:
            yield
        except Exception:  # after KeyboardInterrupt the pass may have written them
            for entry, before in replaced:
                self.note(entry, before)
            raise
        if changed:
            self._settle(scale)

    def _changed(self, this_pass: BackwardPass, scale: float) -> list[Entry]:
        """Return the gradients whose record changes when a backward pass writes them at `scale`."""
        if self.all_carry(scale):
            return []
        unlike = [entry for entry in self._entries() if self.of(entry) != GradientRecord(scale)]
        found = named(unlike, this_pass.names) if unlike else []
        return [*{id(entry.data): entry for entry in found}.values()]  # trainers may share one

    def behind(self, names: set[str]) -> list[Entry]:
        """Return the tracked gradients of parameters with these names on autograd's tape."""
        return named(self._entries(), names) if names else []

    def _entries(self) -> list[Entry]:
        """Return the gradients of all trainers that the ledger tracks."""
        return [entry for trainer in self.known() for entry in entries_of(trainer)]

    @_locked
    def _settle(self, scale: float) -> None:
        """Set the loss scale that gradients without a record have, and drop equal records.

        Does nothing while a gradient without a record relies on the present default.
        """
        entries = self._entries()
        if all(entry.gradient.handle.value in self._records for entry in entries):
            self._scale = scale
            for entry in entries:
                self.note(entry, self.of(entry))

    def rescale(self, entries: Iterable[Entry], scale: float) -> None:
        """Multiply gradients in place so that their loss scale becomes `scale`."""
        for entry in entries:
            before = self.of(entry)
            if before.scale != scale:
                # Ctrl-C may come before both are done: no step must use the gradient then.
                self.note(entry, replace(before, overflown=True))
                multiply([entry.gradient], scale / before.scale)
                self.note(entry, replace(before, scale=scale))

    def largest_scale(self, arrays: Iterable[NDArray]) -> float:
        """Return the largest loss scale among unused gradients in `arrays`; 1 if there is none."""
        given = {id(array) for array in arrays}
        found = (e for e in self._entries() if id(e.gradient) in given and e.data._fresh_grad)
        return max((self.of(entry).scale for entry in found), default=1.0)

    def has_scaled(self, trainer: Trainer) -> bool:
        """Return whether a gradient written since a trainer's last update has a loss scale."""
        return not self.all_carry(1) and any(
            entry.data._fresh_grad and self.of(entry).scale != 1 for entry in entries_of(trainer)
        )

    def lowest_scale(self, trainer: Trainer) -> float:
        """Return the lowest loss scale of a trainer's new gradients; the default scale if none.

        New gradients were written by a backward pass since the last update.
        """
        if not self._records:
            return self._scale
        return min((self.of(entry).scale for entry in fresh(trainer)), default=self._scale)

    def equalize(self, trainer: Trainer) -> float:
        """Bring a trainer's gradients to one loss scale by multiplication; return that scale."""
        scale = self.lowest_scale(trainer)
        entries = entries_of(trainer) if self._records else []
        used = {entry.param for entry in entries if entry.data._fresh_grad or entry.adds}
        # MXNet adds a stale gradient to the fresh one of another device.
        self.rescale([entry for entry in entries if entry.param in used], scale)
        return scale

    def remove_scales(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by their loss scales, and record Inf and NaN in them."""
        entries = [e for e in entries_of(trainer) if e.data._fresh_grad or self.of(e).scale != 1]
        before = [self.of(entry) for entry in entries]
        for entry, record in zip(entries, before):
            self.note(entry, replace(record, overflown=True))  # see `rescale`
        self.rescale(entries, 1.0)
        bad = nonfinite([entry.gradient for entry in entries])
        for i, (entry, record) in enumerate(zip(entries, before)):
            overflown = record.overflown or (i in bad and entry.data._fresh_grad)
            self.note(entry, replace(record, scale=1.0, overflown=overflown))

    def end_step(self, trainer: Trainer) -> None:
        """Mark a trainer's gradients as neither overflowed nor summed, after its step."""
        for entry in entries_of(trainer) if self._records else ():
            self.note(entry, GradientRecord(self.of(entry).scale))

    def clear(self) -> None:
        """Divide all gradients by their loss scales, and stop tracking all trainers."""
        for trainer in self.known():
            self.remove_scales(trainer)
        self.__init__()  # type: ignore[misc]


#: Global: any backward pass may write any gradient.
ledger = Ledger()
