"""Optimizer states of parameters in one precision, for parameters in another.

For float16 weights with `multi_precision=True`, MXNet's optimizers pair the states with float32
master weights: (master, states), or (states, master). Without it the states are float16 as the
weights are; those of float32 weights are float32. An optimizer fails on states of another form.
"""

import copy
import logging
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from ..framework.arrays import cast, map_arrays, plain_array
from ..framework.machine import dtype_name
from ..policy.active import suspended
from ..policy.decision import CASTABLE

__all__ = ["fit_to_parameters", "follow_weights", "saved_in_float32", "share_step_counts"]

logger = logging.getLogger("mxamp")

OTHER_NETWORK = (
    "the file holds states of %d parameters, and the trainer has %d: they are of another network"
)
OTHER_SHAPE = (
    "the file holds a state of shape {state} for parameter {name!r} of shape {weight}: its states "
    "are of another network. The trainer is as it was"
)

#: A weight that no state starts with.
_MARK = 7.0


class _State(NamedTuple):
    """One parameter's state: what the optimizer keeps, and the float32 master weight if any."""

    kept: Any
    master: Optional[NDArray]


class _Forms:
    """The two forms of an optimizer's state for weights of some shape."""

    def __init__(self, optimizer: Any, index: int, weight: NDArray) -> None:
        probe = copy.copy(optimizer)
        held = vars(optimizer).items()
        vars(probe).update({k: copy.copy(v) for k, v in held if isinstance(v, (dict, list, set))})
        probe.multi_precision = True
        mark = mx.nd.full((1,) * weight.ndim, _MARK)
        self._plain = _form(probe.create_state_multi_precision(index, mark))
        paired = probe.create_state_multi_precision(index, mark.astype("float16"))
        self._paired = _form(paired)
        #: The place of the master weight in a pair; None if the optimizer makes none.
        self.place = None
        if isinstance(paired, tuple) and len(paired) == 2:  # noqa: PLR2004
            for place, other in enumerate(paired[::-1]):
                if _is_mark(paired[place]) and _form(other) == self._plain:
                    self.place = place

    def split(self, state: Any) -> Optional[_State]:
        """Return the parts of a state; None if it is in neither form."""
        form = _form(state)
        if self.place is not None and form == self._paired:
            return _State(state[1 - self.place], state[self.place])
        return _State(state, None) if form == self._plain else None

    def pair(self, kept: Any, master: NDArray) -> Any:
        """Return a state with its master weight."""
        return (master, kept) if self.place == 0 else (kept, master)


def fit_to_parameters(
    trainer: Trainer, masters: Dict[int, NDArray]
) -> List[Tuple[NDArray, NDArray]]:
    """Convert a trainer's loaded states to the precision of its parameters.

    Returns pairs of a weight and its new master weight, for `follow_weights` before the next
    update: parameters may be loaded after the states.

    `masters` are master weights by index of the parameter, saved beside the states. A float32
    parameter takes the value of a master weight that rounds to its own. States in a form that
    the optimizer does not have stay as they are.

    Raises `ArgumentError` for states of other shapes than the parameters'.
    """
    added: List[Tuple[NDArray, NDArray]] = []

    held = {index for updater in _updaters(trainer) for index in updater.states}
    if any(index >= len(trainer._params) for index in held):
        logger.warning(OTHER_NETWORK, len(held), len(trainer._params))
    if type(trainer._optimizer).__module__.startswith("mxnet.optimizer"):
        _check_shapes(trainer)

    def fit_state(index: int, state: Any) -> Any:
        if index >= len(trainer._params):
            return state
        param = trainer._params[index]
        weight = param.list_data()[0]
        forms = _forms(trainer, index, weight)
        found = forms.split(state) if forms is not None else None
        if forms is None or found is None:
            return state
        master = found.master if found.master is not None else masters.get(index)
        # Each device updates its own.
        master = master if master is None else master.copy()
        dtype = dtype_name(weight.dtype)
        if dtype == "float16" and trainer._optimizer.multi_precision and forms.place is not None:
            master = cast(weight, "float32") if master is None else master
            if found.master is None:
                added.append((weight, master))
            return forms.pair(_cast_all(found.kept, "float32"), master)
        if dtype == "float32" and master is not None:
            _take_master(param, weight, master)
        return _cast_all(found.kept, dtype) if dtype in CASTABLE else found.kept

    _change_states(trainer, fit_state)
    return added


def _check_shapes(trainer: Trainer) -> None:
    """Raise `ArgumentError` unless each state fits the shape of its parameter.

    States of MXNet's optimizers have this shape, with some axes of size 1 for GroupAdaGrad.
    """
    for updater in _updaters(trainer):
        for index, param in enumerate(trainer._params):
            arrays: List[NDArray] = []
            map_arrays(updater.states.get(index), arrays.append, lambda other: other)
            for shape in (array.shape for array in arrays):
                pairs = zip(shape, param.shape)
                if len(shape) != len(param.shape) or any(n not in (1, size) for n, size in pairs):
                    raise ArgumentError(
                        OTHER_SHAPE.format(state=shape, name=param.name, weight=param.shape)
                    )


def follow_weights(masters: Sequence[Tuple[NDArray, NDArray]]) -> None:
    """Set master weights that round to other values than their weights to these weights.

    `masters` holds pairs of a weight and its master weight. A plain trainer that loads and saves a
    state file passes on the master weights in it, which its own steps have made stale.
    """
    with suspended():
        for weight, master in (map(plain_array, pair) for pair in masters):
            given = cast(weight.as_in_context(master.context), "float32")
            rounded = cast(cast(master, "float16"), "float32")
            master[:] = mx.nd.where(rounded == given, master, given)


@contextmanager
def saved_in_float32(trainer: Trainer) -> Iterator[Dict[int, NDArray]]:
    """Context in which a trainer's states have the form for float32 parameters.

    Yields the master weights that these states lack, by index of the parameter.
    """
    masters: Dict[int, NDArray] = {}
    kept = [dict(updater.states) for updater in _updaters(trainer)]

    def state_in_float32(index: int, state: Any) -> Any:
        forms = _forms(trainer, index, trainer._params[index].list_data()[0])
        found = forms.split(state) if forms is not None else None
        if found is None:
            return state
        if found.master is not None:
            masters[index] = found.master
        return _cast_all(found.kept, "float32")

    try:
        _change_states(trainer, state_in_float32)
        yield masters
    finally:
        for updater, states in zip(_updaters(trainer), kept):
            updater.states.update(states)


def share_step_counts(trainer: Trainer) -> None:
    """Give every device of a trainer the largest step count of each parameter.

    MXNet counts an optimizer's steps by device. States saved with other devices, or by a trainer
    that updates on its kvstore, lack the counts of some: Adam would start anew there, and the
    devices' weights would drift apart.
    """
    counts = trainer._optimizer._all_index_update_counts
    largest: Dict[Any, int] = {}
    for held in counts.values():
        largest.update({i: max(count, largest.get(i, 0)) for i, count in held.items()})
    for ctx in trainer._contexts:
        counts.setdefault(ctx.device_id, {}).update(largest)


def _updaters(trainer: Trainer) -> List[Any]:
    """Return the objects that hold a trainer's states: one a device, or the kvstore's."""
    if trainer._update_on_kvstore:
        updater = getattr(trainer._kvstore, "_updater", None)
        return [] if updater is None else [updater]
    return list(trainer._updaters or ())


def _change_states(trainer: Trainer, change: Callable[[int, Any], Any]) -> None:
    """Replace the state of each parameter by `change(index, state)`."""
    with suspended():
        for updater in _updaters(trainer):
            for index, state in updater.states.items():
                updater.states[index] = change(index, state)


def _forms(trainer: Trainer, index: int, weight: NDArray) -> Optional[_Forms]:
    """Return the forms of a parameter's state; None where the optimizer fails on a probe."""
    try:
        return _Forms(trainer._optimizer, index, weight)
    except Exception:  # an optimizer of the user's may need the shape or context of its weight
        return None


def _take_master(param: Parameter, weight: NDArray, master: NDArray) -> None:
    """Set a parameter to its master weight, unless it has another value since."""
    rounded = cast(cast(master, "float16"), "float32")
    if (rounded == weight.as_in_context(rounded.context)).min().asscalar():
        param.set_data(master)


def _form(state: Any) -> Any:
    """Return the nesting of a state, without its values."""
    if isinstance(state, (tuple, list)):
        return tuple(map(_form, state))
    return NDArray if isinstance(state, NDArray) else type(state)


def _is_mark(state: Any) -> bool:
    """Return whether a state is an array in which every element is `_MARK`."""
    return isinstance(state, NDArray) and bool((state == _MARK).min().asscalar())


def _cast_all(state: Any, dtype: str) -> Any:
    """Return a state with its half-precision and float32 arrays in a dtype."""
    if isinstance(state, (tuple, list)):
        return type(state)(_cast_all(one, dtype) for one in state)
    if isinstance(state, NDArray) and dtype_name(state.dtype) in CASTABLE - {dtype}:
        return cast(state, dtype)
    return state
