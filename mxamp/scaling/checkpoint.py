"""A trainer's state files, with the loss scaler in them.

MXNet's file is a pickle. What mxamp adds comes after it: JSON, its length, and a mark. Unpickling
stops where the pickle ends, so that plain MXNet loads the file too, and a file without the mark is
one from before.
"""

import json
import os
import struct
from functools import wraps
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Union

from mxnet.gluon import Trainer

from ..errors import ArgumentError
from ..framework.patching import Patch

__all__ = ["SAVED_STATE", "append_state", "patches", "read_state"]

#: Where a trainer keeps the state it has loaded before `init_trainer`.
SAVED_STATE = "_amp_saved_state"


_MARK = b"\nmxamp1\n"
_LENGTH = struct.Struct("<Q")


def append_state(path: Union[str, Path], state: Mapping[str, Any]) -> None:
    """Add `state` to the end of a file that MXNet has just written."""
    data = json.dumps(state).encode()
    with open(path, "ab") as file:
        file.write(data + _LENGTH.pack(len(data)) + _MARK)
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Union[str, Path]) -> Optional[Dict[str, Any]]:
    """Return what `append_state` added, None for a file without it."""
    content = Path(path).read_bytes()
    if not content.endswith(_MARK):
        return None
    end = len(content) - len(_MARK) - _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(content, end)
        return dict(json.loads(content[end - length : end]))
    except (struct.error, ValueError) as error:
        raise ArgumentError(f"the loss scaler's state in {str(path)!r} is damaged") from error


def patches() -> List[Patch]:
    """Return the patch that makes trainers remember what they load before `init_trainer`."""
    return [Patch(Trainer, "load_states", _build_load_states)]


def _build_load_states(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_states(self: Trainer, fname: str) -> None:
        original(self, fname)
        setattr(self, SAVED_STATE, read_state(fname))

    return load_states
