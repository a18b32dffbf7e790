"""Processes that an automatic run starts: training ones go on in mixed precision.

Workers of data loaders compute as without mxamp. A process that makes a trainer, or binds a module
for training, is no such worker: from then on it runs as its parent does.
"""

import functools
import multiprocessing
from typing import Any, Callable, Optional, Sequence

from mxnet.gluon import Trainer
from mxnet.module import Module

from ..framework.patching import FrontEnd, Patch
from ..policy.active import nearest_policy

__all__ = ["is_child", "waiting"]

Start = Callable[[], None]


class _Waiting(FrontEnd):
    """Starts mixed precision with the first trainer or module; until then nothing is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self._start: Optional[Start] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(owner, name, functools.partial(_build, owner, name))
            for owner, name in ((Trainer, "__init__"), (Module, "bind"))
        ]

    def begin(self, start: Start) -> None:
        """Call `start` once somebody trains."""
        self._start = start
        self.open()

    def end(self) -> None:
        """Start, unless the program has switched mixed precision on itself."""
        start, self._start = self._start, None
        self.close()
        if start is not None and nearest_policy() is None:
            start()


#: One a process, as the classes that it patches are.
waiting = _Waiting()


def is_child() -> bool:
    """Tell whether this process is one that `multiprocessing` has started."""
    # A process that is spawned has no parent yet while it imports the program's main module.
    preparing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return preparing or multiprocessing.parent_process() is not None


def _build(owner: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting.end()
        # Looked up now: `start` has patched it.
        return getattr(owner, name)(self, *args, **kwargs)

    return trains
