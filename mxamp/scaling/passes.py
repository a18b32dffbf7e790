"""Backward passes, and the loss scale that each gradient carries after them.

A scaled loss carries a mark: MXNet keeps the text of a scalar operand, so a multiplication by
"65536.0", zeros and a one computes the same bits, and autograd's graph shows the text. A backward
pass reads the marks of its heads, and records with which scale it writes gradients: while that is
the scale that all of them carry already, no array is looked at. Where it is another one, MXNet's
flag `_fresh_grad` of each parameter's array tells the gradients that the pass has written.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Iterable, Iterator, NamedTuple, Sequence
from weakref import WeakKeyDictionary

from mxnet import autograd, nd
from mxnet.base import _LIB, MXNetError, NDArrayHandle, c_handle_array, check_call
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _internal as np_internal
from mxnet.ndarray.sparse import _ndarray_cls
from mxnet.numpy import ndarray as np_ndarray

from ..errors import ArgumentError, StateError
from ..framework import patching
from ..framework.arrays import dtype_of, map_arrays
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..framework.wording import shown
from .finite import multiply, square_sum, unscale
from .loss_outputs import scaled_outputs
from .statistics import RunningStatistics, running_statistics

logger = logging.getLogger("mxamp")

NO_LOSS = "a loss must be an NDArray, or lists, tuples and dicts of NDArrays, not {}"
FOREIGN = "a loss was scaled for another trainer: call init_trainer or GradScaler.step for it too"
SEVERAL_SCALES = "losses were scaled apart, or not all: scale them together or run backward on each"
MADE_LATE = "the gradient of %s is older than its trainer, and set to zero: make the trainer first"

# ---------------------------------------------------------------------- the mark of a scaled loss

#: Behind the scale of a scaled loss: digits too small to change it, which no program writes.
_MARK = "00000000000000000001"


def _marked(loss: NDArray, scale: float) -> NDArray:
    """Return a loss times a scale, with a mark; a scale of 1 needs neither."""
    if scale == 1:
        return loss
    if not 2.0**-30 <= scale <= 2.0**60:  # MXNet reads 19 digits before the point and behind it
        raise StateError(f"a loss scale of {scale:g} is not between 2**-30 and 2**60")
    text = f"{scale:.30f}{_MARK}"
    if isinstance(loss, np_ndarray):
        return np_internal.multiply_scalar(loss, scalar=text)
    return nd._internal._mul_scalar(loss, scalar=text)


def _scale_in(scalar: str | None) -> float | None:
    """Return the scale in the text of a scalar operand; None if it holds no mark."""
    return float(scalar[: -len(_MARK)]) if scalar and scalar.endswith(_MARK) else None


def _scales_behind(head: NDArray, whole: bool = True) -> set[float]:
    """Return the scale of a scaled loss, in some 3 us, or those of the losses behind an array.

    Without `whole` the losses behind it are not looked for.
    """
    try:
        symbol = autograd.get_symbol(head)
    except MXNetError:
        return set()  # not the result of a recorded call
    own = _scale_in(symbol.attr("scalar"))
    if own is not None:
        return {own}
    text = symbol.tojson() if whole else ""
    if _MARK not in text:
        return set()
    graph = json.loads(text)
    found: set[float] = set()
    seen: set[int] = set()
    waiting = [head[0] for head in graph["heads"]]
    while waiting:
        index = waiting.pop()
        node = graph["nodes"][index]
        scale = _scale_in(node.get("attrs", {}).get("scalar"))
        if scale is not None:
            found.add(scale)
        elif node["op"] != "BlockGrad" and index not in seen:  # no gradient passes a BlockGrad
            waiting += [source[0] for source in node["inputs"]]
        seen.add(index)
    return found


def scale_losses(loss: Any, scale: float, others: bool) -> Any:
    """Return marked losses times a scale, in the same containers.

    Raises `StateError` if one is scaled already. With `others`, losses scaled since the last step
    may lie behind it: this reads its whole graph. A scale of 1 leaves losses as they are.
    """
    gradients.passes += not passes.is_open  # the loss's pass, which nothing sees
    if scale == 1 and not passes.is_open and isinstance(loss, NDArray):
        return loss
    arrays: list[NDArray] = []

    def scaled_in_float32(array: NDArray) -> NDArray:
        if _scales_behind(array, whole=others):
            raise StateError("this loss has been scaled already: scale each loss once")
        arrays.append(array)
        if scale != 1 and dtype_of(array) not in ("float32", "float64"):
            array = array.astype("float32")  # 65504 is float16's largest number
        return _marked(array, scale)

    with autograd.record(train_mode=autograd.is_training()):
        mapped = map_arrays(loss, scaled_in_float32, _raise_no_loss)
    if not arrays:
        _raise_no_loss(loss)
    if scale != 1:
        passes.open()
        passes.pending += len(arrays)
    return mapped


def _raise_no_loss(value: Any) -> Any:
    raise ArgumentError(NO_LOSS.format(shown(value)))


# ---------------------------------------------------------------------- the scales of gradients


class Entry(NamedTuple):
    """The gradient of one parameter on one device."""

    param: Parameter
    device: int  #: its position
    data: NDArray
    gradient: NDArray

    @property
    def is_fresh(self) -> bool:
        """Whether a backward pass has written the gradient since the last update."""
        return bool(self.data._fresh_grad)

    @property
    def adds(self) -> bool:
        """Whether backward passes add to the gradient."""
        return bool(self.param.grad_req == "add")


def entries_of(trainer: Trainer) -> list[Entry]:
    """Return the gradients of all parameters of a trainer on all devices."""
    return [
        Entry(param, device, data, gradient)
        for param in trainer._params
        if param.grad_req != "null" and param._grad is not None
        for device, (data, gradient) in enumerate(zip(param._data, param._grad))
    ]


def fresh(trainer: Trainer) -> list[Entry]:
    """Return the gradients that backward passes have written since a trainer's last update."""
    return [entry for entry in entries_of(trainer) if entry.data._fresh_grad]


@contextmanager
def without_flags(arrays: Iterable[NDArray]) -> Iterator[None]:
    """Context in which `_fresh_grad` marks just the arrays that it writes the gradients of.

    Afterwards the arrays that were marked before are marked again.
    """
    flagged = [array for array in arrays if array._fresh_grad]
    for array in flagged:
        array._fresh_grad = False
    try:
        yield
    finally:
        for array in flagged:
            array._fresh_grad = True


class Note(NamedTuple):
    """The scale of one gradient, and its overflow."""

    scale: float
    #: The gradient, if it was found not finite and not replaced since: a script may have hidden it.
    overflown: NDArray | None = None


class Gradients:
    """The loss scales that the gradients of all known trainers carry, stale ones included."""

    def __init__(self) -> None:
        self.trainers: WeakKeyDictionary[Trainer, RunningStatistics] = WeakKeyDictionary()
        self.scale = 1.0  #: of all gradients without a note
        self._notes: WeakKeyDictionary[Parameter, dict[int, Note]] = WeakKeyDictionary()
        self.any_scaled = False  #: a pass with a scale other than 1 was seen
        self.passes = 0  #: the number of passes so far
        #: The number of passes before a trainer's sum over devices, until its step.
        self.reduced_at: WeakKeyDictionary[Trainer, int] = WeakKeyDictionary()

    def add(self, trainer: Trainer) -> None:
        """Add a trainer; its gradients from earlier passes become zero and stale."""
        if trainer in self.trainers:
            return
        known = {param for other in list(self.trainers) for param in other._params}
        self.trainers[trainer] = RunningStatistics()
        for entry in fresh(trainer) if self.any_scaled else ():
            if entry.param not in known:
                logger.warning(MADE_LATE, entry.param.name)
                entry.param.zero_grad()
                entry.data._fresh_grad = False

    def note_of(self, entry: Entry) -> Note:
        """Return what is known of a gradient."""
        return self._notes.get(entry.param, {}).get(entry.device, Note(self.scale))

    def is_overflown(self, entry: Entry) -> bool:
        """Return whether a gradient was found not finite; another `grad_req` makes a new one."""
        return bool(self._notes) and self.note_of(entry).overflown is entry.gradient

    def note(self, entry: Entry, scale: float, overflown: NDArray | None = None) -> None:
        """Record the scale of a gradient, and whether it was found not finite."""
        held = self._notes.setdefault(entry.param, {})
        held[entry.device] = Note(scale, overflown)
        if scale == self.scale and overflown is None:
            del held[entry.device]
        if not held:
            del self._notes[entry.param]

    def all_carry(self, scale: float) -> bool:
        """Return whether no backward pass with `scale` changes this record."""
        return self.scale == scale and not self._notes

    @contextmanager
    def written(self, scale: float) -> Iterator[None]:
        """Context of a backward pass with a scale: record the gradients that it writes."""
        changed = [] if self.all_carry(scale) else list(self.trainers)
        found = {id(entry.data): entry for trainer in changed for entry in entries_of(trainer)}
        # Several trainers may have one parameter.
        entries = [one for one in found.values() if scale != self.scale or one.param in self._notes]
        for one in entries:
            # A program that handles an overflow itself begins a new sum.
            if one.adds and self.is_overflown(one) and not square_sum([one.gradient]):
                self.note(one, self.note_of(one).scale)
        with without_flags([entry.data for entry in entries]):
            adding = [one for one in entries if one.adds and self.note_of(one).scale != scale]
            with autograd.pause():
                kept = [(entry, entry.gradient.copy()) for entry in adding]
            for entry in adding:
                multiply([entry.gradient], scale / self.note_of(entry).scale)
            try:
                yield
            finally:
                with autograd.pause():
                    for entry, before in kept:
                        if not entry.is_fresh:
                            before.copyto(entry.gradient)
                self._record(entries, scale)

    def _record(self, entries: Sequence[Entry], scale: float) -> None:
        """Record the scale of the `entries` that a pass has written."""
        found = [(entry, self.note_of(entry), entry.is_fresh) for entry in entries]
        if any(is_written for _, _, is_written in found):
            self.scale = scale
            for entry, before, is_written in found:
                after = Note(scale, before.overflown if entry.adds else None)
                self.note(entry, *(after if is_written else before))

    def carry_scale(self, trainer: Trainer) -> bool:
        """Return whether a fresh gradient of a trainer carries a scale other than 1."""
        return not self.all_carry(1) and any(self.note_of(e).scale != 1 for e in fresh(trainer))

    def carried(self, trainer: Trainer) -> float:
        """Return the scale of a trainer's fresh gradients: the smallest, if they have several."""
        if not self._notes:
            return self.scale
        return min((self.note_of(entry).scale for entry in fresh(trainer)), default=self.scale)

    def equalize(self, trainer: Trainer) -> float:
        """Multiply gradients so that all fresh ones of a trainer carry one scale; return it."""
        scale = self.carried(trainer)
        entries = entries_of(trainer) if self._notes else []
        used = {entry.param for entry in entries if entry.is_fresh or entry.adds}
        for entry in entries:
            other, overflown = self.note_of(entry)
            # MXNet sums the stale gradient of another device too.
            if other != scale and entry.param in used:
                multiply([entry.gradient], scale / other)
                self.note(entry, scale, overflown)
        return scale

    def unscale(self, trainer: Trainer) -> None:
        """Divide a trainer's gradients by their scales; note which fresh ones are not finite."""
        found = [(entry, self.note_of(entry)) for entry in entries_of(trainer)]
        found = [(entry, note) for entry, note in found if entry.is_fresh or note.scale != 1]
        self.scale = 1.0 if len(self.trainers) == 1 else self.scale  # needs fewer notes
        for scale in {note.scale for _, note in found}:
            group = [(entry, note) for entry, note in found if note.scale == scale]
            bad = unscale([entry.gradient for entry, _ in group], scale)
            for i, (entry, note) in enumerate(group):
                is_bad = i in bad and entry.is_fresh
                self.note(entry, 1.0, entry.gradient if is_bad else note.overflown)

    def end_step(self, trainer: Trainer) -> None:
        """Record that a trainer's gradients have been used."""
        for entry in entries_of(trainer) if self._notes else ():
            self.note(entry, self.note_of(entry).scale)


#: One per process, as MXNet's gradients are.
gradients = Gradients()


# ---------------------------------------------------------------------- the one patch of backward


class _Passes(FrontEnd):
    """Patches of backward passes and steps, which record the scale of each trainer's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = 0  #: the number of scaled losses whose backward pass may still come
        #: The front end whose scale never leaves the backward pass, if it is on.
        self.automatic: Any = None
        #: Held by passes and steps of several trainers while they read and set flags.
        self._pass_lock = threading.RLock()
        self._thread = threading.local()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(_LIB, "MXAutogradBackwardEx", wrapping(self._patched_backward)),
            Patch(_LIB, "MXAutogradBackward", wrapping(self._patched_backward)),
            *patching.patches_of_function(autograd, "grad", wrapping(self._patched_grad)),
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            Patch(Trainer, "allreduce_grads", wrapping(_patched_allreduce)),
            *(Patch(Trainer, name, wrapping(self._patched_step)) for name in ("step", "update")),
        ]

    def open(self) -> None:
        """Patch backward passes and trainers, and find the existing trainers in memory."""
        if not self.is_open:
            for one in gc.get_objects():
                if issubclass(type(one), Trainer):
                    gradients.add(one)
        super().open()

    def close(self) -> None:
        """Undo the patches, unless a scaled loss or gradients of one may still be used."""
        trainers = list(gradients.trainers)
        if not self.pending and not any(map(gradients.carry_scale, trainers)):
            super().close()
            for trainer in trainers:
                gradients.unscale(trainer)  # stale gradients: nothing sees the passes that follow
            gradients.scale, gradients.any_scaled = 1.0, False

    @property
    def is_nested(self) -> bool:
        """Whether the caller runs inside a backward pass, in a function or operator in Python.

        MXNet calls it in the thread of the pass or in a thread of MXNet, unknown to Python.
        """
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return foreign or getattr(self._thread, "runs", False)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Context in which backward passes of this thread are MXNet's own, or nested."""
        self._thread.runs = True
        try:
            yield
        finally:
            self._thread.runs = False

    @contextmanager
    def _running(self, heads: Sequence[NDArray]) -> Iterator[float]:
        """Context of a backward pass: yield its scale, and set that of output operators.

        Raises `StateError` if the pass would mix several scales.
        """
        behind = [_scales_behind(head) for head in heads]
        scales = set().union(*behind)
        if len(scales) > 1 or (scales and not all(behind)):
            raise StateError(SEVERAL_SCALES)
        scale = scales.pop() if scales else 1.0
        is_alone = len(gradients.trainers) == 1 and self.automatic is None
        lock = nullcontext() if is_alone and gradients.all_carry(scale) else self._pass_lock
        # The scale of output operators is the process's.
        with self.unseen(), lock, scaled_outputs(scale):
            yield scale

    @contextmanager
    def _recorded(self, scale: float) -> Iterator[None]:
        """Context of a pass that writes gradients: record its scale."""
        gradients.passes += 1
        gradients.any_scaled |= scale != 1
        for trainer, statistics in list(gradients.trainers.items()):
            statistics.before_pass(partial(running_statistics, trainer))
        with gradients.written(scale):
            yield

    def _patched_backward(
        self, original: Original, count: int, heads: Any, head_grads: Any, *others: Any
    ) -> int:
        """Run a pass by MXNet's C API, and record for each trainer the scale of its gradients.

        `backward` of autograd and of arrays, and `autograd.grad` end here, also where a script
        holds one of them from before the patches.
        """
        arrays, given = _arrays(heads), _arrays(head_grads) if head_grads else None
        is_grad = isinstance(others[0], int) and others[0] > 0  # the number of its variables
        automatic = None if is_grad else self.automatic

        def compute(gradients: Any) -> None:
            handles = head_grads if gradients is given else c_handle_array(gradients)
            check_call(original(count, heads, handles, *others))

        if self.is_nested:
            if automatic is None:
                compute(given)
            else:
                automatic.run_nested(compute, arrays, given)
            return 0
        with self._running(arrays) as scale:
            recorded = nullcontext() if is_grad else self._recorded(scale)
            if automatic is None:
                with recorded:
                    compute(given)
            else:
                automatic.run(compute, arrays, given, recorded)
        if scale != 1 and others[2:] and not others[2].value:  # unless it retains the graph
            self.pending = max(self.pending - len(arrays), 0)
        return 0

    def _patched_grad(
        self, original: Original, heads: Any, variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `autograd.grad`; gradients of a scaled loss carry its scale."""
        head_grads, *others = args or [kwargs.pop("head_grads", None)]

        def compute(gradients: Any) -> Any:
            return original(heads, variables, gradients, *others, **kwargs)

        if self.automatic is None:
            return compute(head_grads)
        heads = [heads] if isinstance(heads, NDArray) else heads
        nested = self.is_nested
        with nullcontext() if nested else self._running(heads):
            return self.automatic.run_grad(compute, heads, head_grads, nested)

    def _patched_init(self, original: Original, trainer: Trainer, *args: Any, **named: Any) -> None:
        """Initialize a trainer, and add it to the known trainers."""
        original(trainer, *args, **named)
        gradients.add(trainer)

    def _patched_step(self, original: Original, trainer: Trainer, *args: Any, **named: Any) -> None:
        """Call `Trainer.step`; raise if gradients are scaled and nothing will unscale them."""
        gradients.add(trainer)  # a copied trainer has run no constructor
        state = getattr(trainer, "_amp_loss_scaler", None)  # a `State`, or one of MXNet's
        if not hasattr(state, "mark_scaled") and gradients.carry_scale(trainer):
            raise StateError(FOREIGN)
        with self._pass_lock if len(gradients.trainers) > 1 else nullcontext():
            original(trainer, *args, **named)


def _patched_allreduce(original: Original, trainer: Trainer) -> None:
    """Sum gradients over devices; a GradScaler that meets the trainer later does not sum again."""
    original(trainer)
    gradients.reduced_at[trainer] = gradients.passes


def _arrays(handles: Any) -> list[NDArray | None]:
    """Return arrays of MXNet's C API; to autograd each is the same as the caller's."""
    found: list[NDArray | None] = []
    for one in handles:
        copied = NDArrayHandle()
        if one:
            check_call(_LIB.MXShallowCopyNDArray(NDArrayHandle(one), ctypes.byref(copied)))
        found.append(_ndarray_cls(copied) if one else None)
    return found


#: One per process, like the functions that it patches.
passes = _Passes()
patching.hold_during_forks(passes._pass_lock)
