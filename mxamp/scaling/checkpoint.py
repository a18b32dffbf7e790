"""State files of trainers: optimizer states together with the state of the loss scaler.

MXNet pickles the optimizer into the file. The scaler's state is an attribute of the optimizer, made
of plain numbers and strings. So plain MXNet loads the file too, and a trainer that loads it before
`init_trainer` finds the state in its optimizer afterwards.

Like every pickle, a state file can run code when it is loaded: load only files that you trust.

For a float16 weight with `multi_precision=True`, an optimizer of MXNet pairs its state with a
float32 master weight. Without it the state is float16 as the weight is, or float32 for a few
optimizers. The state of a float32 weight is float32. An optimizer fails on states of another form.

So a new state is made for each weight. A loaded state must have its form, and the arrays of the
loaded state are cast to its dtypes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import LARS, NAG, SGD, Optimizer

from ..errors import ArgumentError
from ..framework.arrays import cast, dtype_of, map_arrays, plain_array
from ..framework.files import write_file
from ..policy.active import suspended

if TYPE_CHECKING:
    from .trainer import State

#: The index of the master weight in its pair with a state, by the class that makes the pair (the
#: one that defines `create_state_multi_precision`). Other optimizers of MXNet inherit the method.
MASTER_PLACES: dict[type, int] = {Optimizer: 0, SGD: 1, NAG: 1, LARS: 1}
_ATTRIBUTE, _MASTERS = "_amp_state", "_amp_masters"

NO_STATES = "{path!r} holds no states of a trainer ({error!r}), or was cut off; nothing has changed"
OTHER_FORM = (
    "the file holds {found} as the state of parameter {name!r}, and {optimizer} keeps {wanted}: "
    "load it with the network, optimizer, arguments and level that saved it. Nothing has changed"
)


def save_states(state: State, fname: str) -> None:
    """Write a trainer's optimizer states and its loss scaling state to a file, atomically.

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
            with suspended():
                wide = {
                    i: cast(one, "float32") if dtype_of(one) == "float16" else one
                    for i, one in _weights(trainer, 0, held).items()
                }
                updater.states, added[_MASTERS] = _converted(trainer, held, wide)
        vars(trainer._optimizer).update(added)
        content = updater.get_states(dump_optimizer=True)
    finally:
        updater.states = held
        for name in added:
            vars(trainer._optimizer).pop(name, None)
    write_file(fname, content)


def load_states(state: State, fname: str) -> None:
    """Load a trainer's optimizer states and loss scaling state; on an error, change neither.

    The states are converted to the precision of the trainer's parameters. For trainers of
    `initialize`, the trainer and not the file decides whether there are master weights.

    Load only files that you trust: MXNet unpickles them. Raises `ArgumentError` if the file holds
    no states of a trainer, or states that do not fit its optimizer or its parameters.
    """
    trainer = state.trainer
    optimizer, has_masters = trainer._optimizer, trainer._optimizer.multi_precision
    before = [(updater, dict(vars(updater))) for updater in updaters_of(trainer)]
    try:
        type(trainer).load_states(trainer, fname)
        if state.scaled_by == "initialize":
            trainer._optimizer.multi_precision = has_masters
        share_step_counts(trainer)
        saved, pairs = vars(trainer._optimizer).pop(_MASTERS, {}), []
        with suspended():
            for device, updater in enumerate(updaters_of(trainer)):
                weights = _weights(trainer, device, updater.states)
                own = copy.deepcopy(saved)  # each device updates its own
                updater.states, masters = _converted(trainer, updater.states, weights, own)
                pairs += [(weights[i], master) for i, master in masters.items()]
        resume(state)
        state.loaded_masters = pairs
    except BaseException as error:
        trainer._optimizer = optimizer
        for updater, attributes in before:
            vars(updater).update(attributes)
        if isinstance(error, (OSError, ArgumentError)) or not isinstance(error, Exception):
            raise
        # Unpickling damaged states may raise anything.
        raise ArgumentError(NO_STATES.format(path=fname, error=error)) from error


def resume(state: State) -> None:
    """Restore the loss scaling state stored in a loaded optimizer, and delete it there."""
    saved = vars(state.trainer._optimizer).pop(_ATTRIBUTE, None)
    if isinstance(saved, dict):
        state.load_state_dict(saved)


# ------------------------------------------------------------ states in another precision


def refresh_masters(pairs: Sequence[tuple[NDArray, NDArray]]) -> None:
    """Copy float16 weights to stale float32 master weights, which no longer round to them.

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
    """Set each parameter's optimizer step count on all devices to the largest of them.

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
    """Return MXNet's `Updater` objects, which hold a trainer's optimizer states.

    There is one per device, or one on the kvstore. Makes the kvstore first if the trainer
    has none yet.
    """
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    on_kvstore = getattr(trainer._kvstore, "_updater", None) if trainer._update_on_kvstore else None
    return trainer._updaters if on_kvstore is None else [on_kvstore]


def master_place(optimizer: Optimizer) -> int | None:
    """Return the index of the master weight in an optimizer's (master weight, state) pairs.

    None for a user-defined optimizer with a `create_state_multi_precision` of its own.
    """
    makers = (k for k in type(optimizer).__mro__ if "create_state_multi_precision" in vars(k))
    return MASTER_PLACES.get(next(makers))


def _weights(trainer: Trainer, device: int, states: dict[int, Any]) -> dict[int, NDArray]:
    """Return a device's dense weights that have an optimizer state, by parameter index.

    A sparse parameter has all its rows on the kvstore alone.
    """
    return {
        index: plain_array(param.list_data()[device])
        for index, param in enumerate(trainer._params)
        if index in states and param._stype == "default"
    }


def _converted(
    trainer: Trainer,
    states: dict[int, Any],
    weights: dict[int, NDArray],
    saved: dict[int, NDArray] | None = None,
) -> tuple[dict[int, Any], dict[int, NDArray]]:
    """Return optimizer states converted to the dtypes of `weights`, and the master weights.

    `saved` are the master weights of a file that is loaded: a state in it whose form or shapes are
    not those of a new state raises `ArgumentError`. Without `saved`, for a file to write, such a
    state stays as it is: an argument of the optimizer was changed since, or a user-defined
    optimizer pairs states with master weights in a way of its own.
    """
    optimizer, place = trainer._optimizer, master_place(trainer._optimizer)
    probe = copy.deepcopy(optimizer)  # a custom optimizer may count the states that it makes
    make = probe.create_state_multi_precision if optimizer.multi_precision else probe.create_state
    converted, masters = dict(states), {}
    for index, weight in weights.items():
        new, like = make(index, weight), weight
        has_master = dtype_of(weight) == "float16" and optimizer.multi_precision
        if has_master and place is not None:
            new, like = new[1 - place], new[place]
        state, master = _split(states[index], new, like, place)
        if new is None and isinstance(state, NDArray):
            new = like  # the script has set momentum to 0, and MXNet ignores the state
        if saved is not None:
            master = saved.get(index) if master is None else master
            _check(trainer, index, state, new)
            _check(trainer, index, like if master is None else master, like)
        converted[index] = _filled(new, state)
        if has_master and place is not None:
            master = like if master is None else cast(master, "float32")
            converted[index] = _pair(converted[index], master, place)
        if master is not None and dtype_of(like) == "float32":
            masters[index] = master
    return converted, masters


def _split(state: Any, new: Any, like: NDArray, place: int | None) -> tuple[Any, NDArray | None]:
    """Return an optimizer state without its float32 master weight, and that weight or None.

    `new` is a new state alone, for the weight `like`.
    """
    if place is None or _form(state) != _form(_pair(new, like, place)):
        return state, None
    return state[1 - place], state[place]


def _pair(state: object, master: NDArray, place: int | None) -> tuple[Any, Any]:
    return (master, state) if place == 0 else (state, master)


def _form(state: object) -> object:
    """Return the structure of an optimizer state: nested tuples of array shapes and type names.

    A list, a dict or another object counts as one value: a user-defined optimizer may extend it.
    """
    if isinstance(state, tuple):
        return tuple(map(_form, state))
    return f"array{state.shape}" if isinstance(state, NDArray) else type(state).__name__


def _check(trainer: Trainer, index: int, state: object, new: object) -> None:
    """Raise unless a loaded optimizer state has the structure and shapes of a new state."""
    found, wanted = (str(_form(one)).replace("'", "") for one in (state, new))
    if found != wanted:
        name, optimizer = trainer._params[index].name, type(trainer._optimizer).__name__
        given = {"found": found, "wanted": wanted, "name": name, "optimizer": optimizer}
        raise ArgumentError(OTHER_FORM.format(**given))


def _filled(new: object, state: object) -> object:
    """Return a loaded optimizer state, with arrays cast to the dtypes of a new state.

    If an optimizer has extended the state, it is returned as it is.
    """
    shapes = [map_arrays(one, lambda array: array.shape, type) for one in (state, new)]
    if shapes[0] != shapes[1]:
        return state
    dtypes: list[str] = []
    map_arrays(new, lambda array: dtypes.append(dtype_of(array)), type)
    return map_arrays(state, lambda array: cast(array, dtypes.pop(0)), lambda other: other)
