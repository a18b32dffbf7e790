"""The ledger: a record of the loss scale that each gradient is multiplied by.

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

from ..framework.interrupts import holding
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
_locked = holding(_lock)
_listed = _locked(list)


class Entry(NamedTuple):
    """The gradient of one parameter on one device."""

    param: Parameter
    data: NDArray
    gradient: NDArray

    @property
    def adds(self) -> bool:
        """Whether backward passes add to the gradient (`grad_req="add"`)."""
        return bool(self.param.grad_req == "add")


def entries_of(trainer: Trainer) -> list[Entry]:
    """Return an `Entry` for each gradient of a trainer's parameters on all devices."""
    return [
        Entry(param, data, gradient)
        for param in trainer._params
        if param.grad_req != "null" and param._grad is not None
        for data, gradient in zip(param._data, param._grad)
    ]


def gradients_of(trainer: Trainer) -> list[NDArray]:
    """Return the gradient arrays of a trainer's parameters on all devices."""
    return [one for param in trainer._params if param._grad is not None for one in param._grad]


def named(entries: Iterable[Entry], names: set[str]) -> list[Entry]:
    """Return the gradients whose parameters have one of these names on autograd's tape."""
    return [entry for entry in entries if name_of(entry.data) in names]


def fresh(trainer: Trainer) -> list[Entry]:
    """Return the gradients that backward passes have written since a trainer's last update."""
    return [entry for entry in entries_of(trainer) if entry.data._fresh_grad]


@dataclass(frozen=True)
class Carried:
    """A gradient's loss scale, overflow flag and sum flag; kept alive by the gradient's handle."""

    scale: float
    #: Whether it was found not finite, and no pass has replaced it since. The program may have made
    #: it finite, by clipping for example.
    overflown: bool = False
    #: Whether it is the sum over devices and workers, and no pass or step came since.
    summed: bool = False


class Ledger:
    """The loss scale of each gradient of all registered trainers, stale gradients included."""

    def __init__(self) -> None:
        self.trainers: WeakKeyDictionary[Trainer, RunningStatistics] = WeakKeyDictionary()
        self._scale = 1.0  #: the scale of all gradients that have no note
        #: By the gradient's handle: another `grad_req`, dtype or device makes another gradient.
        self._notes: WeakValueDictionary[int, Carried] = WeakValueDictionary()

    def add(self, trainer: Trainer) -> None:
        """Register a trainer; its gradients from earlier scaled passes become zero and stale."""
        if trainer in self.trainers:
            return
        known = {param for other in self.known() for param in other._params}
        _locked(self.trainers.setdefault)(trainer, RunningStatistics())
        scales = {self._scale, *(carried.scale for carried in list(self._notes.values()))}
        for entry in fresh(trainer) if scales != {1.0} else ():
            if entry.param not in known:
                logger.warning(MADE_LATE, entry.param.name)
                entry.param.zero_grad()
                entry.data._fresh_grad = False

    def known(self) -> list[Trainer]:
        """Return a snapshot of the registered trainers: other threads may register more."""
        return _listed(self.trainers)

    def of(self, entry: Entry) -> Carried:
        """Return the loss scale of a gradient, with its overflow and sum flags."""
        # Needs no lock: `_settle` changes `_scale` before it drops the notes that it replaces.
        return self._notes.get(entry.gradient.handle.value) or Carried(self._scale)

    @_locked
    def note(self, entry: Entry, carried: Carried) -> None:
        """Record the loss scale of a gradient, with its overflow and sum flags."""
        handle = entry.gradient.handle
        handle._amp_carried = self._notes[handle.value] = carried
        if carried == Carried(self._scale):
            del self._notes[handle.value]

    def overflown_among(self, find: Callable[[], list[Entry]]) -> list[Entry]:
        """Return the gradients in the result of `find()` that are recorded as not finite."""
        return [entry for entry in find() if self.of(entry).overflown] if self._notes else []

    def is_summed(self, trainer: Trainer) -> bool:
        """Return whether a trainer's current gradients are summed over devices and workers."""
        return bool(self._notes) and all(self.of(entry).summed for entry in entries_of(trainer))

    def note_sum(self, trainer: Trainer, summed: bool = True) -> None:
        """Record whether a trainer's gradients are summed over devices and workers."""
        for entry in entries_of(trainer) if summed or self._notes else ():
            self.note(entry, replace(self.of(entry), summed=summed))

    def all_carry(self, scale: float) -> bool:
        """Return whether all gradients carry `scale`, with no overflow and no sum recorded."""
        return self._scale == scale and not self._notes

    @contextmanager
    def written(self, this_pass: BackwardPass, scale: float) -> Iterator[None]:
        """Return a context for a backward pass that records `scale` for the pass's gradients.

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
            self.note(entry, Carried(self.of(entry).scale, was_overflown))
        self.bring(adding, scale)
        for entry, _ in replaced:  # before the pass, since Ctrl-C may come right after it
            self.note(entry, Carried(scale))
        try:
            yield
        except Exception:  # after KeyboardInterrupt the pass may have written them
            for entry, before in replaced:
                self.note(entry, before)
            raise
        if changed:
            self._settle(scale)

    def _changed(self, this_pass: BackwardPass, scale: float) -> list[Entry]:
        """Return the gradients that a backward pass reaches and whose record it changes."""
        if self.all_carry(scale):
            return []
        unlike = [entry for entry in self._entries() if self.of(entry) != Carried(scale)]
        found = named(unlike, this_pass.names) if unlike else []
        return [*{id(entry.data): entry for entry in found}.values()]  # trainers may share one

    def behind(self, names: set[str]) -> list[Entry]:
        """Return the registered trainers' gradients of parameters with these tape names."""
        return named(self._entries(), names) if names else []

    def _entries(self) -> list[Entry]:
        """Return the gradients of all registered trainers."""
        return [entry for trainer in self.known() for entry in entries_of(trainer)]

    @_locked
    def _settle(self, scale: float) -> None:
        """If each gradient has its own record, make `scale` the default and drop equal records."""
        entries = self._entries()
        if all(entry.gradient.handle.value in self._notes for entry in entries):
            self._scale = scale
            for entry in entries:
                self.note(entry, self.of(entry))

    def bring(self, entries: Iterable[Entry], scale: float) -> None:
        """Multiply gradients in place so that each carries the loss scale `scale`."""
        for entry in entries:
            before = self.of(entry)
            if before.scale != scale:
                # Ctrl-C may come before both are done: no step must use the gradient then.
                self.note(entry, replace(before, overflown=True))
                multiply([entry.gradient], scale / before.scale)
                self.note(entry, replace(before, scale=scale))

    def scale_of(self, arrays: Iterable[NDArray]) -> float:
        """Return the largest loss scale of the fresh gradients in `arrays`; 1 if none is fresh."""
        given = {id(array) for array in arrays}
        found = (e for e in self._entries() if id(e.gradient) in given and e.data._fresh_grad)
        return max((self.of(entry).scale for entry in found), default=1.0)

    def carry_scale(self, trainer: Trainer) -> bool:
        """Return whether a fresh gradient of a trainer carries a scale other than 1."""
        return not self.all_carry(1) and any(
            entry.data._fresh_grad and self.of(entry).scale != 1 for entry in entries_of(trainer)
        )

    def carried(self, trainer: Trainer) -> float:
        """Return the scale of a trainer's fresh gradients, the smallest if they differ."""
        if not self._notes:
            return self._scale
        return min((self.of(entry).scale for entry in fresh(trainer)), default=self._scale)

    def equalize(self, trainer: Trainer) -> float:
        """Rescale a trainer's gradients so that fresh ones carry one scale; return this scale."""
        scale = self.carried(trainer)
        entries = entries_of(trainer) if self._notes else []
        used = {entry.param for entry in entries if entry.data._fresh_grad or entry.adds}
        # MXNet adds a stale gradient to the fresh one of another device.
        self.bring([entry for entry in entries if entry.param in used], scale)
        return scale

    def remove_scales(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by their scales; record fresh ones that are not finite."""
        entries = [e for e in entries_of(trainer) if e.data._fresh_grad or self.of(e).scale != 1]
        before = [self.of(entry) for entry in entries]
        for entry, carried in zip(entries, before):
            self.note(entry, replace(carried, overflown=True))  # see `bring`
        self.bring(entries, 1.0)
        bad = nonfinite([entry.gradient for entry in entries])
        for i, (entry, carried) in enumerate(zip(entries, before)):
            overflown = carried.overflown or (i in bad and entry.data._fresh_grad)
            self.note(entry, replace(carried, scale=1.0, overflown=overflown))

    def end_step(self, trainer: Trainer) -> None:
        """Clear the overflow and sum flags of a trainer's gradients after a step."""
        for entry in entries_of(trainer) if self._notes else ():
            self.note(entry, Carried(self.of(entry).scale))

    def clear(self) -> None:
        """Divide all gradients by their loss scales; forget all trainers and their records."""
        for trainer in self.known():
            self.remove_scales(trainer)
        self.__init__()  # type: ignore[misc]


#: Global: any backward pass may write any gradient.
ledger = Ledger()
