"""A trainer's state files, with the loss scaler in them.

MXNet pickles the optimizer into the file. The scaler's state is an attribute of the optimizer, made
of plain numbers and strings. So plain MXNet loads the file too, and a trainer that loads it before
`init_trainer` finds the state in its optimizer afterwards.

Like every pickle, a state file can run code when it is loaded: load only files that you trust.

For float16 weights with `multi_precision=True`, MXNet's optimizers pair the states with float32
master weights: (master, states), or (states, master). Without it the states are float16 as the
weights are, or float32 for a few optimizers; those of float32 weights are float32. An optimizer
fails on states of another form.

The form that an optimizer wants for a weight is that of a new state, and it is filled with the
arrays of the old one.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LARS, NAG, SGD

from ..errors import ArgumentError
from ..framework.arrays import cast, dtype_of, map_arrays, plain_array
from ..framework.files import write_file
from ..policy.active import suspended

#: They pair a state with its master weight, in this order. All others have the weight first.
_MASTER_IS_LAST = (SGD, NAG, LARS)
_ATTRIBUTE, _MASTERS = "_amp_state", "_amp_masters"

NO_STATES = "{path!r} holds no states of a trainer ({error!r}), or was cut off; nothing has changed"
OTHER_SHAPE = (
    "the file holds a state of shape {state} for parameter {name!r} of shape {weight}: it is of "
    "another network. Nothing has changed"
)


def save_states(state: Any, fname: str) -> None:
    """Write a trainer's states with its `State` to a file: the whole file or none.

    For trainers of `initialize`, the states are those of float32 parameters at every level, and the
    master weights are beside them.

    Raises `WriteError` if that fails.
    """
    trainer = state.trainer
    added: dict[str, Any] = {_ATTRIBUTE: state.state_dict()}
    updater = updaters_of(trainer)[0]  # MXNet saves the states of the first device
    held = updater.states
    try:
        if state.scaled_by == "initialize":
            updater.states, added[_MASTERS] = _converted(trainer, 0, held)
        vars(trainer._optimizer).update(added)
        content = updater.get_states(dump_optimizer=True)
    finally:
        updater.states = held
        for name in added:
            vars(trainer._optimizer).pop(name, None)
    write_file(fname, content)


def load_states(state: Any, fname: str) -> None:
    """Read a trainer's states, and its `State`; an error changes nothing.

    The states are converted to the precision of the trainer's parameters. For trainers of
    `initialize`, the trainer and not the file decides whether there are master weights.

    Load only files that you trust: MXNet unpickles them. Raises `ArgumentError` if the file holds
    no states of a trainer.
    """
    trainer = state.trainer
    optimizer, has_masters = trainer._optimizer, trainer._optimizer.multi_precision
    before = [(updater, dict(vars(updater))) for updater in updaters_of(trainer)]
    try:
        type(trainer).load_states(trainer, fname)
        if state.scaled_by == "initialize":
            trainer._optimizer.multi_precision = has_masters
        share_step_counts(trainer)
        masters = _fit(trainer, vars(trainer._optimizer).pop(_MASTERS, {}))
        resume(state)
        state.new_masters = masters
    except BaseException as error:
        trainer._optimizer = optimizer
        for updater, attributes in before:
            vars(updater).update(attributes)
        if isinstance(error, (OSError, ArgumentError)) or not isinstance(error, Exception):
            raise
        # Unpickling damaged states may raise anything.
        raise ArgumentError(NO_STATES.format(path=fname, error=error)) from error


def resume(state: Any) -> None:
    """Restore a trainer's `State` from the dictionary in its optimizer, and remove that, if any."""
    saved = vars(state.trainer._optimizer).pop(_ATTRIBUTE, None)
    if isinstance(saved, dict):
        state.load_state_dict(saved)


# ------------------------------------------------------------ states in another precision


def _fit(trainer: Trainer, masters: dict[int, NDArray]) -> list[tuple[NDArray, NDArray]]:
    """Convert a trainer's loaded states to the precision of its parameters.

    Returns pairs of a weight and its master weight, for `follow_weights` before the next update:
    parameters may be loaded after the states.

    `masters` are master weights by index of the parameter, saved beside the states. States in a
    form that the optimizer does not have stay as they are.

    Raises `ArgumentError` for states of other shapes than the parameters'.
    """
    pairs, params = [], trainer._params
    for device, updater in enumerate(updaters_of(trainer)):
        own = copy.deepcopy(masters)  # each device updates its own
        updater.states, found = _converted(trainer, device, updater.states, own)
        pairs += [(plain_array(params[i].list_data()[device]), found[i]) for i in found]
    return pairs


def follow_weights(pairs: Sequence[tuple[NDArray, NDArray]]) -> None:
    """Set master weights that round to other values than their weights to these weights.

    A plain trainer that loads and saves a state file passes on the master weights in it, which its
    own steps have made stale. A float32 weight has no master weight: it takes the values of the
    saved one where they round to its own.
    """
    with suspended(), autograd.pause():
        for weight, master in pairs:
            given = cast(weight.as_in_context(master.context), "float32")
            rounded = cast(cast(master, "float16"), "float32")
            follower = weight if dtype_of(weight) == "float32" else master
            follower[:] = mx.nd.where(rounded == given, master, given)


def share_step_counts(trainer: Trainer) -> None:
    """Give every device of a trainer the largest step count of each parameter.

    MXNet counts an optimizer's steps by device. States saved with other devices, or by a trainer
    that updates on its kvstore, lack the counts of some: Adam would start anew there, and the
    devices' weights would drift apart.
    """
    counts = trainer._optimizer._all_index_update_counts
    indices = {index for held in counts.values() for index in held}
    largest = {i: max(held.get(i, 0) for held in counts.values()) for i in indices}
    for ctx in trainer._contexts:
        counts.setdefault(ctx.device_id, {}).update(largest)


def updaters_of(trainer: Trainer) -> list[Any]:
    """Return the objects that hold a trainer's states: one a device, or the kvstore's.

    Makes the kvstore first if the trainer has none yet.
    """
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    on_kvstore = getattr(trainer._kvstore, "_updater", None) if trainer._update_on_kvstore else None
    return trainer._updaters if on_kvstore is None else [on_kvstore]


def _converted(
    trainer: Trainer, device: int, states: Any, saved: dict[int, NDArray] | None = None
) -> tuple[dict[int, Any], dict[int, NDArray]]:
    """Return states in the form for the weights of a device, and master weights, by index.

    `saved` are master weights that the states lack; without it, the form is that for float32.
    If the optimizer has another form for one state, all stay as they are.

    Raises `ArgumentError` if an optimizer of MXNet's holds states of other shapes than the weights.
    """
    optimizer, converted, found = trainer._optimizer, dict(states), {}
    is_last = isinstance(optimizer, _MASTER_IS_LAST)
    try:
        probe = copy.deepcopy(optimizer)  # a custom optimizer may count the states that it makes
        for index, param in enumerate(trainer._params):
            if index not in states:
                continue
            weight = plain_array(param.list_data()[device])
            wide = dtype_of(weight) == "float16" and (saved is None or optimizer.multi_precision)
            weight = cast(weight, "float32") if wide else weight
            with suspended():
                new = probe.create_state(index, weight)
            form, state, master = _form(new), states[index], (saved or {}).get(index)
            if _form(state) == ((form, NDArray) if is_last else (NDArray, form)):
                state, master = state if is_last else state[::-1]
            state = _filled(new, state, param)
            master = None if master is None else _filled(weight, master, param)
            if wide and saved is not None:
                master = weight if master is None else master
                state = (state, master) if is_last else (master, state)
            converted[index] = state
            if master is not None and dtype_of(weight) == "float32":
                found[index] = master
    except Exception as error:
        if isinstance(error, ArgumentError) and type(optimizer).__module__.startswith("mxnet."):
            raise
        return states, {}
    return converted, found


def _form(state: Any) -> Any:
    """Return the nesting of a state, with types in place of its values."""
    return map_arrays(state, lambda array: NDArray, type)


def _filled(new: Any, state: Any, param: Parameter) -> Any:
    """Return a state with its arrays cast to the dtypes of a new one; raise if it does not fit."""
    if _form(state) != _form(new):
        raise TypeError
    arrays: list[NDArray] = []
    map_arrays(new, arrays.append, type)

    def fill(one: NDArray) -> NDArray:
        like = arrays.pop(0)
        if one.shape != like.shape:
            shapes = {"state": one.shape, "weight": param.shape}
            raise ArgumentError(OTHER_SHAPE.format(name=param.name, **shapes))
        return cast(one, dtype_of(like))

    return map_arrays(state, fill, lambda other: other)
