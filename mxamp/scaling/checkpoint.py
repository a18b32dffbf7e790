"""A trainer's state files, with the loss scaler in them.

MXNet pickles the optimizer into the file. The scaler's state is an attribute of the optimizer, made
of plain numbers and strings. So plain MXNet loads the file too, and a trainer that loads it before
`init_trainer` finds the state in its optimizer afterwards.

Like every pickle, a state file can run code when it is loaded: load only files that you trust.
"""

import os
import pickletools
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

from mxnet.gluon import Trainer

from ..errors import ArgumentError
from ..framework.files import NOT_THE_SAME, checksum, replaced_file
from ..framework.wording import shown
from .scaler import count

__all__ = ["load_states", "save_states", "saved_state", "taken_state"]

_ATTRIBUTE = "_amp_state"

NO_STATES = (
    "{path!r} holds no states of a trainer ({why}); the trainer is as it was. Was it written by "
    "trainer.save_states, and to its end?"
)

NO_STATE = "the state must come from state_dict, with scaler, steps and skips, not {given}"


def save_states(trainer: Trainer, path: str, state: Mapping[str, Any]) -> None:
    """Write a trainer's states, with `state` of the loss scaler: the whole file or none.

    Raises `WriteError` if that fails.
    """
    optimizer = trainer._optimizer
    setattr(optimizer, _ATTRIBUTE, dict(state))
    try:
        with replaced_file(path, _read_back) as temporary:
            type(trainer).save_states(trainer, os.fspath(temporary))
    finally:
        delattr(optimizer, _ATTRIBUTE)


def _read_back(path: Path) -> None:
    """Raise if a written file is incomplete: a pickle marks its own end."""
    checksum(path)  # from the disk, into memory
    try:
        with open(path, "rb") as file:
            for _ in pickletools.genops(file):
                pass
            whole = not file.read(1)
    except ValueError:
        whole = False
    if not whole:
        raise OSError(NOT_THE_SAME)


def load_states(trainer: Trainer, path: str, resume: Callable[[Mapping[str, Any]], None]) -> None:
    """Read a trainer's states and `resume` from the scaler's; an error changes nothing.

    Raises `ArgumentError` if the file holds no states of a trainer.
    """
    with _restored_on_error(trainer):
        try:
            type(trainer).load_states(trainer, path)
        except OSError:
            raise
        except Exception as error:  # unpickling damaged states may raise anything
            why = f"{type(error).__name__}: {error}"
            raise ArgumentError(NO_STATES.format(path=path, why=why)) from error
        state = taken_state(trainer)
        if state is not None:
            resume(state)


def taken_state(trainer: Trainer) -> Optional[Dict[str, Any]]:
    """Remove the scaler's state from the trainer's optimizer and return it."""
    state = vars(trainer._optimizer).pop(_ATTRIBUTE, None)
    return state if isinstance(state, dict) else None


def saved_state(state: Any) -> Tuple[Any, int, int]:
    """Return the scaler's state and the counts; raise `ArgumentError` if there are none."""
    named = state if isinstance(state, Mapping) else {}
    if not named.keys() >= {"scaler", "steps", "skips"}:
        raise ArgumentError(NO_STATE.format(given=shown(state)))
    return state["scaler"], count("steps", state["steps"]), count("skips", state["skips"])


@contextmanager
def _restored_on_error(trainer: Trainer) -> Iterator[None]:
    """Restore optimizer and states if loading fails halfway."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    optimizer = trainer._optimizer
    before = [dict(vars(updater)) for updater in trainer._updaters or ()]
    try:
        yield
    except BaseException:
        trainer._optimizer = optimizer
        for updater, attributes in zip(trainer._updaters or (), before):
            vars(updater).update(attributes)
        raise
