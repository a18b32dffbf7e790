"""A trainer's state files, with the loss scaler in them.

MXNet pickles the optimizer into the file. The scaler's state is an attribute of the optimizer, made
of plain numbers and strings. So plain MXNet loads the file too, and a trainer that loads it before
`init_trainer` finds the state in its optimizer afterwards.

Like every pickle, a state file can run code when it is loaded: load only files that you trust.
"""

import os
import pickletools
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError
from ..framework.files import NOT_THE_SAME, checksum, replaced_file
from ..framework.wording import shown
from .optimizer_states import fit_to_parameters, saved_in_float32, share_step_counts, updaters_of
from .scaler import whole_number

_ATTRIBUTE, _MASTERS = "_amp_state", "_amp_masters"

NO_STATES = (
    "{path!r} holds no states of a trainer ({error!r}); the trainer is as it was. Was it written "
    "by trainer.save_states, and to its end?"
)
NO_STATE = "the state must come from state_dict, with scaler, steps and skips, not {given}"


def save_states(
    trainer: Trainer, path: str, state: Mapping[str, Any], by_level: bool = False
) -> None:
    """Write a trainer's states and the loss scaler's `state` to a file: the whole file or none.

    With `by_level`, for trainers of `initialize`, the states are those of float32 parameters at
    every level, and the master weights are beside them.

    Raises `WriteError` if that fails.
    """
    in_float32 = saved_in_float32(trainer) if by_level else nullcontext({})
    with in_float32 as masters, replaced_file(path, _check_complete) as temporary:
        added = {_ATTRIBUTE: dict(state), **({_MASTERS: masters} if by_level else {})}
        vars(trainer._optimizer).update(added)
        try:
            type(trainer).save_states(trainer, os.fspath(temporary))
        finally:
            for name in added:
                delattr(trainer._optimizer, name)


def _check_complete(path: Path) -> None:
    """Raise `OSError` unless a file holds one whole pickle: a pickle marks its own end."""
    checksum(path)  # from the disk, into memory
    with suppress(ValueError), open(path, "rb") as file:
        deque(pickletools.genops(file), maxlen=0)
        if not file.read(1):
            return
    raise OSError(NOT_THE_SAME)


def load_states(
    trainer: Trainer, path: str, resume: Callable[[Mapping[str, Any]], None], by_level: bool = False
) -> List[Tuple[NDArray, NDArray]]:
    """Load a trainer's states, and call `resume` with the loss scaler's; an error changes nothing.

    The states are converted to the precision of the trainer's parameters. With `by_level`, for
    trainers of `initialize`, the trainer and not the file decides whether there are master weights.

    Returns the pairs that `follow_weights` takes.

    Raises `ArgumentError` if the file holds no states of a trainer.
    """
    with _restored_on_error(trainer):
        has_masters = trainer._optimizer.multi_precision
        try:
            type(trainer).load_states(trainer, path)
        except OSError:
            raise
        except Exception as error:  # unpickling damaged states may raise anything
            raise ArgumentError(NO_STATES.format(path=path, error=error)) from error
        if by_level:
            trainer._optimizer.multi_precision = has_masters
        share_step_counts(trainer)
        masters = fit_to_parameters(trainer, vars(trainer._optimizer).pop(_MASTERS, {}))
        state = pop_scaler_state(trainer)
        if state is not None:
            resume(state)
        return masters


def pop_scaler_state(trainer: Trainer) -> Optional[Dict[str, Any]]:
    """Remove the loss scaler's state from a trainer's optimizer; return it, or None."""
    state = vars(trainer._optimizer).pop(_ATTRIBUTE, None)
    return state if isinstance(state, dict) else None


def parse_state(state: Any) -> Tuple[Any, int, int]:
    """Return `scaler`, `steps` and `skips` of a hook's state; raise unless it holds all three."""
    if not isinstance(state, Mapping) or not state.keys() >= {"scaler", "steps", "skips"}:
        raise ArgumentError(NO_STATE.format(given=shown(state)))
    steps, skips = (whole_number(name, state[name]) for name in ("steps", "skips"))
    return state["scaler"], steps, skips


@contextmanager
def _restored_on_error(trainer: Trainer) -> Iterator[None]:
    """Context in which an error restores the trainer's optimizer and its states."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    optimizer = trainer._optimizer
    before = [(updater, dict(vars(updater))) for updater in updaters_of(trainer)]
    try:
        yield
    except BaseException:
        trainer._optimizer = optimizer
        for updater, attributes in before:
            vars(updater).update(attributes)
        raise
