"""The ways into mixed precision that patch more than a policy needs, each open or shut.

A door is a name and the patches that come with it. `shutdown` shuts them all.
"""

import threading
from typing import Callable, Dict, List, Sequence

from .patching import Patch
from .patching import apply as apply_patches
from .patching import undo as undo_patches

__all__ = ["on_shut", "open_door", "opened", "shut_doors"]

_lock = threading.RLock()
_open: Dict[str, List[Patch]] = {}
_on_shut: List[Callable[[], None]] = []


def open_door(name: str, patches: Sequence[Patch]) -> None:
    """Put a door's patches in place, all or none; does nothing where it is open."""
    with _lock:
        if name not in _open:
            apply_patches(patches)
            _open[name] = list(patches)


def opened(name: str) -> bool:
    """Tell whether a door is open."""
    return name in _open


def on_shut(function: Callable[[], None]) -> None:
    """Call `function` whenever the doors are shut: to forget what they remembered."""
    _on_shut.append(function)


def shut_doors() -> None:
    """Undo the patches of all doors, the last one first."""
    with _lock:
        for name in reversed(list(_open)):
            undo_patches(_open.pop(name))
        for function in _on_shut:
            function()
