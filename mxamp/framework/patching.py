"""Reversible monkey patches of MXNet's attributes.

A `Patch` replaces one attribute. A `PatchSet` applies several patches, all or none, and undoes them
in `close`. A `FrontEnd` is a patch set that `mxamp.shutdown()` closes.

Patches of one attribute stack, and can be undone in any order. A patch that is `on_top` stays above
all others, so that an observer sees calls as the program makes them. An attribute that other code
has replaced since is not restored.
"""

import functools
import logging
import os
import sys
import threading
from types import ModuleType
from typing import Any, Callable, Dict, List, Sequence, Tuple

from .interrupts import synchronized

logger = logging.getLogger("mxamp")

#: A function that a patch replaces.
Original = Callable[..., Any]


def hold_during_forks(lock: "threading.RLock") -> None:
    """Hold a lock during `os.fork`, so that no child process inherits it locked forever."""
    if hasattr(os, "register_at_fork"):
        release = lock.release
        os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)


#: Globals, as are the attributes of MXNet that patches replace. The patches of each attribute by
#: owner's id and name, bottom first; the open patch sets in opening order; and a lock, held during
#: each change, since two threads may patch the same attribute.
_stacks: Dict[Tuple[int, str], List["Patch"]] = {}
_open_sets: List["PatchSet"] = []
_lock = threading.RLock()
hold_during_forks(_lock)
locked = synchronized(_lock)


class Patch:
    """A monkey patch: the replacement of one attribute of a module or class, made by `build`.

    `build` takes the original and returns its replacement. It is called again, with another
    original, when a patch below this one comes or goes.
    """

    def __init__(
        self, owner: object, name: str, build: Callable[[Any], Any], on_top: bool = False
    ) -> None:
        self.owner, self.name, self.build, self.on_top = owner, name, build, on_top
        self.original: Any = None
        self.ours: Any = None

    def apply(self) -> None:
        """Install the patch, below patches of the same attribute that are marked `on_top`."""
        getattr(self.owner, self.name, None)  # a module's __getattr__ may load it lazily
        # vars(), not getattr(): a class may inherit the attribute, or hold it as a descriptor.
        current, stack = vars(self.owner)[self.name], _stacks.setdefault(self._key, [])
        above = [patch for patch in stack if patch.on_top and not self.on_top]
        if above and current is not stack[-1].ours:
            above = []
        self.original = above[0].original if above else current
        stack.insert(len(stack) - len(above), self)
        _restack([self, *above], self.original)

    def undo(self) -> None:
        """Undo the patch: restore the attribute, unless other code has replaced it meanwhile.

        Idempotent: an interrupted call can be made again.
        """
        stack = _stacks.get(self._key, [])
        if self in stack:
            above, current = stack[stack.index(self) + 1 :], vars(self.owner).get(self.name)
            if any(current is one for one in (stack[-1].ours, stack[-1].original, self.original)):
                setattr(self.owner, self.name, self.original)
                _restack(above, self.original)
            else:
                logger.warning("%s was patched by other code too; mxamp leaves it as it is", self)
            stack.remove(self)
        if not stack:
            _stacks.pop(self._key, None)

    @property
    def _key(self) -> Tuple[int, str]:
        """The key by which patches of one attribute are stacked: (owner's id, attribute name)."""
        return id(self.owner), self.name

    def __repr__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


def _restack(patches: Sequence[Patch], original: object) -> None:
    """Reinstall stacked patches of one attribute on top of its `original`, bottom first."""
    for patch in patches:
        patch.original, patch.ours = original, patch.build(original)
        setattr(patch.owner, patch.name, patch.ours)
        original = patch.ours


def wrapping(function: Callable[..., Any]) -> Callable[[Original], Original]:
    """Return a builder for `Patch`: the replacement calls `function(original, *args, **kwargs)`."""

    def build(original: Original) -> Original:
        @functools.wraps(original)
        def wrapper(*args: object, **kwargs: object) -> object:
            return function(original, *args, **kwargs)

        return wrapper

    return build


def original(owner: object, name: str) -> Any:
    """Return the unpatched attribute `name` of `owner`, for calls that bypass all patches."""
    stack = _stacks.get((id(owner), name))
    return stack[0].original if stack else vars(owner)[name]


def patches_of_function(owner: object, name: str, build: Callable[..., Any]) -> List[Patch]:
    """Return patches of a function: one for its owner, and one for each module that imported it."""
    first, current = original(owner, name), getattr(owner, name)
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    holding = [
        m
        for m in modules
        if m is not owner and (vars(m).get(name) is first or vars(m).get(name) is current)
    ]
    return [Patch(module, name, build) for module in (owner, *holding)]


class PatchSet:
    """A set of monkey patches that are installed and undone together.

    A subclass keeps its state in attributes and drops it in `close`.
    """

    def __init__(self, patches: Sequence[Patch] = ()) -> None:
        self._patches = tuple(patches)
        self._applied: List[Patch] = []
        self._is_whole = False

    def patches(self) -> Sequence[Patch]:
        """Return the monkey patches of this set, by default those passed to the constructor."""
        return self._patches

    @property
    def is_open(self) -> bool:
        """Whether the patches of this set are installed."""
        return self in _open_sets and self._is_whole

    @locked
    def open(self) -> None:
        """Install all patches of the set, or undo them if one fails; a no-op if already installed.

        Builds a set anew that Ctrl-C has left half installed.
        """
        if self.is_open:
            return
        try:
            self._undo()
            _open_sets.append(self)
            for patch in self.patches():
                self._applied.append(patch)
                patch.apply()
            self._is_whole = True
        except BaseException:
            self._undo()
            raise

    @locked
    def close(self) -> None:
        """Undo all patches of the set; a no-op if not installed."""
        self._undo()

    def _undo(self) -> None:
        """Undo the set's installed patches, last first; can be called again after an interrupt."""
        self._is_whole = False
        while self._applied:
            self._applied[-1].undo()
            self._applied.pop()
        if self in _open_sets:
            _open_sets.remove(self)


class FrontEnd(PatchSet):
    """A patch set that a public function such as `patch_contrib` opens and `shutdown` closes."""

    @staticmethod
    def close_all() -> None:
        """Undo the patches of all open `FrontEnd` sets, the last opened first.

        Without the lock: some wait for MXNet, whose operators in Python may wait for the lock.
        """
        for one in reversed([*_open_sets]):
            if isinstance(one, FrontEnd):
                one.close()
