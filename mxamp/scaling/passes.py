"""Backward passes, and the loss scale that each gradient carries after them.

A scaled loss carries a mark: MXNet keeps the text of a scalar operand, so a multiplication by
"65536.0", twenty zeros and the numbers of the scalers computes the same bits, and autograd's graph
shows the text. A backward pass reads the marks of its heads. It then tells the `Gradients` of each
trainer with which scale it writes them: while that is the scale which they carry already, no array
is looked at. Where it is another one, MXNet's flag `_fresh_grad` of each parameter's array tells
the gradients that the pass has written.
"""

from __future__ import annotations

import gc
import json
import logging
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
from mxnet import autograd, nd
from mxnet.base import MXNetError
from mxnet.gluon import Constant, Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _internal as np_internal
from mxnet.numpy import ndarray as np_ndarray

from ..errors import StateError
from ..framework.patching import (
    FrontEnd,
    Original,
    Patch,
    hold_during_forks,
    patches_of_function,
    wrapping,
)
from .finite import multiply, unscale
from .loss_outputs import scaled_outputs
from .statistics import RunningStatistics

logger = logging.getLogger("mxamp")

FOREIGN = (
    "the gradients of this trainer come from a loss that was scaled, by {scale:g}, for another "
    "trainer: after init_trainer for each, scale the loss for both, "
    "`with mxamp.scale_loss(loss, [trainer, other]) as scaled`; with a GradScaler call "
    "scaler.step(trainer, batch_size)"
)
SEVERAL_SCALES = (
    "this backward pass starts from losses that were scaled apart, or not all scaled: scale them "
    "together, `with mxamp.scale_loss([one, other], [trainer, ...]) as scaled`, or call backward "
    "for each"
)

MADE_LATE = (
    "the gradient of %s is older than its trainer, and backward passes had several loss scales: it "
    "counts as stale. Make the trainer before the backward pass"
)

# ---------------------------------------------------------------------- the mark of a scaled loss

#: Between a scale and the numbers of its scalers: digits too small to change the scale, which no
#: program writes. Each number has a 1 before it and eight digits.
_ZEROS = "0" * 20
_DIGITS = 9
#: MXNet reads scalars from 19 digits before the point, and as many behind it.
_SMALLEST, _LARGEST = 2.0**-30, 2.0**60


class Mark(NamedTuple):
    """The scale of a scaled loss, and the numbers of the scalers that it was scaled for."""

    scale: float = 1.0
    owners: frozenset[int] = frozenset()


def marked(loss: NDArray, scale: float, owners: Iterable[int]) -> NDArray:
    """Return a loss times a scale, with a mark; a scale of 1 needs neither."""
    if scale == 1:
        return loss
    if not _SMALLEST <= scale <= _LARGEST:
        raise StateError(f"a loss scale of {scale:g} is not between 2**-30 and 2**60")
    text = _text(scale, tuple(owners))
    if isinstance(loss, np_ndarray):
        return np_internal.multiply_scalar(loss, scalar=text)
    return nd._internal._mul_scalar(loss, scalar=text)


@lru_cache(maxsize=64)
def _text(scale: float, owners: tuple[int, ...]) -> str:
    """Return a scale with its mark, as MXNet reads and keeps it."""
    numbers = "".join(f"1{number:08d}" for number in owners)
    return f"{np.format_float_positional(scale, trim='0')}{_ZEROS}{numbers}"


@lru_cache(maxsize=64)
def _parsed(scalar: str | None) -> Mark | None:
    """Return the mark in the text of a scalar operand; None if it holds none."""
    text, zeros, digits = (scalar or "").rpartition(_ZEROS)
    if not zeros or not digits:
        return None
    numbers = (digits[i + 1 : i + _DIGITS] for i in range(0, len(digits), _DIGITS))
    return Mark(float(text), frozenset(map(int, numbers)))


def mark_of(head: NDArray) -> Mark | None:
    """Return the mark of a scaled loss; None for any other array. Takes some 3 us."""
    try:
        return _parsed(autograd.get_symbol(head).attr("scalar"))
    except MXNetError:
        return None  # not the result of a recorded call


def marks_behind(head: NDArray) -> set[Mark]:
    """Return the marks of a head: its own, or those of the scaled losses that it is made from."""
    own = mark_of(head)
    if own is not None:
        return {own}
    try:
        text = autograd.get_symbol(head).tojson()
    except MXNetError:
        return set()
    if _ZEROS not in text:
        return set()
    graph = json.loads(text)
    found: set[Mark] = set()
    seen: set[int] = set()
    waiting = [head[0] for head in graph["heads"]]
    while waiting:
        index = waiting.pop()
        node = graph["nodes"][index]
        mark = _parsed(node.get("attrs", {}).get("scalar"))
        if mark is not None:
            found.add(mark)
        elif node["op"] != "BlockGrad" and index not in seen:  # no gradient passes a BlockGrad
            waiting += [source[0] for source in node["inputs"]]
        seen.add(index)
    return found


# ---------------------------------------------------------------------- the gradients of a trainer


class Entry(NamedTuple):
    """The gradient of one parameter on one device."""

    key: tuple[int, int]  #: the positions of the parameter and of the device
    param: Parameter
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


@contextmanager
def without_flags(arrays: Iterable[NDArray]) -> Iterator[None]:
    """Context in which `_fresh_grad` marks just the arrays that it writes the gradients of.

    Afterwards the arrays that were marked before are marked again.
    """
    fresh = [array for array in arrays if array._fresh_grad]
    for array in fresh:
        array._fresh_grad = False
    try:
        yield
    finally:
        for array in fresh:
            array._fresh_grad = True


class Gradients:
    """The loss scales that the gradients of one trainer carry, stale ones included."""

    def __init__(self, trainer: Trainer, carried: float) -> None:
        self.trainer, self.carried = trainer, carried
        self.exceptions: dict[tuple[int, int], float] = {}  #: other scales than `carried`
        #: Gradients found not finite, and not replaced since: a script may have hidden it.
        self.overflown: dict[tuple[int, int], NDArray] = {}
        #: The scalers of the losses that gradients come from, by number; none since the last step.
        self.owners: frozenset[int] = frozenset()
        self.is_known = False  #: a pass was seen since the last step
        self.statistics = RunningStatistics()

    def running_statistics(self) -> dict[str, NDArray]:
        """Return the running statistics of BatchNorm among the parameters, on all devices.

        MXNet does not tell them from other parameters without a gradient; vectors are small.
        """
        return {
            f"{param.name} on {data.context}": data
            for param in self.trainer._params
            if param.grad_req == "null" and param._data is not None
            if not isinstance(param, Constant) and len(param.shape) == 1
            for data in param.list_data()
        }

    def entries(self, keys: Iterable[Any] | None = None) -> list[Entry]:
        """Return the gradients of all parameters on all devices, or those of some `keys`."""
        wanted = None if keys is None else set(keys)
        return [
            Entry((i, k), param, data, gradient)
            for i, param in enumerate(self.trainer._params)
            if param.grad_req != "null" and param._grad is not None
            for k, (data, gradient) in enumerate(zip(param._data, param._grad))
            if wanted is None or (i, k) in wanted
        ]

    def fresh(self) -> list[Entry]:
        """Return the gradients that backward passes have written since the last update."""
        return [entry for entry in self.entries() if entry.is_fresh]

    def scale_of(self, entry: Entry) -> float:
        """Return the scale that a gradient carries."""
        return self.exceptions.get(entry.key, self.carried)

    def is_overflown(self, entry: Entry) -> bool:
        """Return whether a gradient was found not finite; another `grad_req` makes a new one."""
        return self.overflown.get(entry.key) is entry.gradient

    def carry_all(self, scale: float) -> bool:
        """Return whether no backward pass with `scale` changes this record."""
        return self.carried == scale and not self.exceptions and not self.overflown

    @contextmanager
    def written(self, scale: float, prepared: set[int]) -> Iterator[None]:
        """Context of a backward pass with a scale, which may write these gradients.

        `prepared` are arrays, by `id`, that trainers with the same parameters have prepared.
        """
        known = self.carried == scale
        entries = self.entries({*self.exceptions, *self.overflown} if known else None)
        with without_flags([entry.data for entry in entries]):
            adding = [one for one in entries if one.adds and id(one.data) not in prepared]
            kept = [(entry, self._prepared(entry, scale)) for entry in adding]
            prepared.update(id(entry.data) for entry in adding)
            try:
                yield
            finally:
                for entry, before in kept:
                    if before is not None and not entry.is_fresh:
                        with autograd.pause():
                            before.copyto(entry.gradient)
                self._record(entries, scale)

    def _prepared(self, entry: Entry, scale: float) -> NDArray | None:
        """Bring a gradient that the pass may add to to its scale; return a copy from before."""
        factor, before = scale / self.scale_of(entry), None
        if factor != 1:
            with autograd.pause():
                before = entry.gradient.copy()
            multiply([entry.gradient], factor)
        return before

    def _record(self, entries: Sequence[Entry], scale: float) -> None:
        """Record the scale of the `entries` that a pass has written."""
        written = {entry.key for entry in entries if entry.is_fresh}
        if written:
            for key in (one.key for one in entries if one.key in written and not one.adds):
                self.overflown.pop(key, None)
            others = {one.key: self.scale_of(one) for one in entries if one.key not in written}
            self.carried = scale
            self.exceptions = {key: other for key, other in others.items() if other != scale}

    def assume(self, scale: float) -> None:
        """Take fresh gradients for those of a loss with `scale` if no pass was seen since the step.

        The pass was then made by a function that the program has looked up before the patches.
        """
        if not self.is_known:
            self._record(self.entries(), scale)

    def equalize(self) -> float:
        """Multiply gradients so that all fresh ones carry one scale; return it."""
        for entry in self.entries(self.exceptions) if self.exceptions else ():
            if entry.is_fresh or entry.adds:
                multiply([entry.gradient], self.carried / self.exceptions.pop(entry.key))
        return self.carried

    def unscale(self) -> None:
        """Divide all gradients by their scales, and record which fresh ones are not finite."""
        entries = [one for one in self.entries() if one.is_fresh or self.scale_of(one) != 1]
        for scale in {self.scale_of(entry) for entry in entries}:
            group = [entry for entry in entries if self.scale_of(entry) == scale]
            bad = [group[i] for i in unscale([entry.gradient for entry in group], scale)]
            self.overflown.update((one.key, one.gradient) for one in bad if one.is_fresh)
        self.carried, self.exceptions, self.owners = 1.0, {}, frozenset()
        self.tell_others(entries)

    def tell_others(self, entries: Sequence[Entry]) -> None:
        """Record in trainers with the same parameters that these gradients are unscaled."""
        unscaled = {id(entry.data) for entry in entries}
        others = [gradients_of(trainer) for trainer in passes.trainers]
        for other in others if len(others) > 1 else ():
            shared = [one for one in other.entries() if id(one.data) in unscaled]
            if other is not self and other.carried != 1:
                other.exceptions.update((one.key, 1.0) for one in shared)

    def end_step(self) -> None:
        """Record that the gradients have been used."""
        self.overflown, self.owners, self.is_known = {}, frozenset(), False

    def check_unscaled(self) -> None:
        """Raise `StateError` if a fresh gradient carries a scale, which nothing will take out."""
        if self.carried == 1 and not self.exceptions:
            return
        scales = {self.scale_of(entry) for entry in self.fresh()} - {1.0}
        if scales:
            raise StateError(FOREIGN.format(scale=max(scales)))


def gradients_of(trainer: Trainer) -> Gradients:
    """Return the record of a trainer's gradients, which its attribute `_amp_gradients` holds."""
    found: Gradients | None = vars(trainer).get("_amp_gradients")
    if found is None:
        found = trainer._amp_gradients = Gradients(trainer, 1.0)
        fresh = found.fresh()
        if fresh and passes.scales - {1.0}:
            _take_earlier_passes(found, fresh)
    return found


def _take_earlier_passes(new: Gradients, fresh: Sequence[Entry]) -> None:
    """Record the scales of gradients from before their trainer was made.

    Another trainer of the parameters knows them, or all passes so far had one scale. Else the
    gradients count as stale: a step raises.
    """
    others = (gradients_of(other) for other in passes.trainers if other is not new.trainer)
    known = {id(e.data): other.scale_of(e) for other in others for e in other.entries()}
    if len(passes.scales) == 1:
        known = {**dict.fromkeys((id(e.data) for e in fresh), *passes.scales), **known}
    for entry in fresh:
        scale = known.get(id(entry.data))
        if scale is None:
            logger.warning(MADE_LATE, entry.param.name)
            entry.data._fresh_grad = False
        elif scale != 1:
            new.exceptions[entry.key] = scale


# ---------------------------------------------------------------------- the one patch of backward


class _Passes(FrontEnd):
    """Patches of backward passes and steps, which record the scale of each trainer's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self.scales: set[float] = set()  #: of all passes so far
        #: The front end whose scale never leaves the backward pass, if it is on.
        self.automatic: Any = None
        #: Held by passes and steps of several trainers while they read and set flags.
        self._pass_lock = threading.RLock()
        self._thread = threading.local()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            *patches_of_function(autograd, "backward", wrapping(self._patched_backward)),
            *patches_of_function(autograd, "grad", wrapping(self._patched_grad)),
            Patch(NDArray, "backward", wrapping(_patched_array_backward)),
            Patch(Trainer, "__init__", wrapping(self._patched_init)),
            Patch(Trainer, "step", wrapping(self._patched_step)),
            Patch(Trainer, "update", wrapping(self._patched_step)),
        ]

    def open(self) -> None:
        """Patch backward passes and trainers, and find the existing trainers in memory."""
        if not self.is_open:
            self.trainers.update(one for one in gc.get_objects() if issubclass(type(one), Trainer))
        super().open()

    def close(self) -> None:
        """Undo the patches. No pass is seen from then on: no gradient carries a scale any more."""
        super().close()
        for trainer in list(self.trainers):
            hook = getattr(trainer, "_amp_loss_scaler", None)
            getattr(hook, "leave_passes", gradients_of(trainer).unscale)()
        self.trainers.clear()
        self.scales.clear()

    @property
    def is_nested(self) -> bool:
        """Whether the caller runs inside a backward pass, in a function or operator in Python.

        MXNet calls it in the thread of the pass or in a thread of MXNet, unknown to Python.
        """
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return foreign or getattr(self._thread, "runs", False)

    def _mark_of_heads(self, heads: Sequence[NDArray]) -> Mark:
        """Return the mark of a pass; raise `StateError` if it would mix several scales."""
        behind = [marks_behind(head) for head in heads]
        marks = set().union(*behind)
        if len({mark.scale for mark in marks}) > 1 or (marks and not all(behind)):
            raise StateError(SEVERAL_SCALES)
        if not marks:
            return Mark()
        owners = frozenset().union(*(mark.owners for mark in marks))
        return Mark(marks.pop().scale, owners)

    @contextmanager
    def _running(self, heads: Sequence[NDArray]) -> Iterator[Mark]:
        """Context of a backward pass: yield its mark, and set the scale of output operators."""
        mark = self._mark_of_heads(heads)
        self._thread.runs = True
        try:
            # The scale of output operators is the process's.
            lock = self._pass_lock if len(self.trainers) > 1 else nullcontext()
            with lock, scaled_outputs(mark.scale):
                yield mark
        finally:
            self._thread.runs = False

    @contextmanager
    def _recorded(self, mark: Mark) -> Iterator[None]:
        """Context of a pass that writes gradients: record its scale for each trainer."""
        records = [gradients_of(trainer) for trainer in list(self.trainers)]
        self.scales.add(mark.scale)
        for record in records:
            record.statistics.before_pass(record.running_statistics)
            record.owners |= mark.owners
            record.is_known = True
        if len(records) == 1 and self.automatic is None and records[0].carry_all(mark.scale):
            yield
            return
        prepared: set[int] = set()
        with self._pass_lock, ExitStack() as stack:
            for record in records:
                if not record.carry_all(mark.scale):
                    stack.enter_context(record.written(mark.scale, prepared))
            yield

    def _patched_backward(
        self,
        original: Original,
        heads: Any,
        head_grads: Any = None,
        retain_graph: bool = False,
        train_mode: bool = True,
    ) -> None:
        """Run a backward pass, and record for each trainer the scale of its gradients."""

        def compute(gradients: Any) -> None:
            original(heads, gradients, retain_graph, train_mode)

        heads = [heads] if isinstance(heads, NDArray) else heads
        if self.is_nested:
            if self.automatic is None:
                compute(head_grads)
            else:
                self.automatic.run_nested(compute, heads, head_grads)
            return
        with self._running(heads) as mark:
            if self.automatic is None:
                with self._recorded(mark):
                    compute(head_grads)
            else:
                self.automatic.run(compute, heads, head_grads, self._recorded(mark))

    def _patched_grad(
        self,
        original: Original,
        heads: Any,
        variables: Any,
        head_grads: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        train_mode: bool = True,
    ) -> Any:
        """Run `autograd.grad`; gradients of a scaled loss carry its scale."""

        def compute(gradients: Any) -> Any:
            return original(heads, variables, gradients, retain_graph, create_graph, train_mode)

        heads = [heads] if isinstance(heads, NDArray) else heads
        nested = self.is_nested
        with nullcontext() if nested else self._running(heads):
            if self.automatic is None:
                return compute(head_grads)
            return self.automatic.run_grad(compute, heads, head_grads, nested)

    def _patched_init(
        self, original: Original, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> None:
        """Initialize a trainer, and add it to the known trainers."""
        original(trainer, *args, **kwargs)
        self.trainers.add(trainer)
        gradients_of(trainer)

    def _patched_step(
        self, original: Original, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> None:
        """Call `Trainer.step`; raise if gradients are scaled and nothing will unscale them."""
        self.trainers.add(trainer)  # a copied trainer has run no constructor
        if not hasattr(getattr(trainer, "_amp_loss_scaler", None), "stage"):
            gradients_of(trainer).check_unscaled()
        with self._pass_lock if len(self.trainers) > 1 else nullcontext():
            original(trainer, *args, **kwargs)


def _patched_array_backward(
    original: Original,
    array: NDArray,
    out_grad: Any = None,
    retain_graph: bool = False,
    train_mode: bool = True,
) -> None:
    """Run `NDArray.backward` through the patched `autograd.backward`, looked up at each call."""
    del original
    autograd.backward([array], [out_grad], retain_graph, train_mode)


#: One per process, like the functions that it patches.
passes = _Passes()
hold_during_forks(passes._pass_lock)
