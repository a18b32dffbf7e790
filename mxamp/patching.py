"""Replacing attributes of other people's modules, and putting them back.

A `Patch` is one attribute. It is undone only while the attribute is still ours, and a group of
patches is put on whole or not at all.
"""

import logging
from typing import Any, Callable, List, Sequence

__all__ = ["Patch", "apply", "undo"]

logger = logging.getLogger("mxamp")


class Patch:
    """One attribute of one owner, and the function that makes its replacement.

    `build` takes the original and returns what stands in for it.
    """

    def __init__(self, owner: Any, name: str, build: Callable[[Any], Any]) -> None:
        self.owner, self.name, self.build = owner, name, build
        self.original: Any = None
        self.ours: Any = None

    def apply(self) -> None:
        """Put the replacement in place."""
        # vars(), not getattr(): a class may inherit the attribute, or hold it as a descriptor.
        self.original = vars(self.owner)[self.name]
        self.ours = self.build(self.original)
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> None:
        """Put the original back, unless somebody else has replaced ours since."""
        if vars(self.owner).get(self.name) is self.ours:
            setattr(self.owner, self.name, self.original)
        else:
            logger.warning("%s was patched by others too; left as it is", self)

    def __repr__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


def apply(patches: Sequence[Patch]) -> None:
    """Apply all patches, or none: where one fails, those before it are undone."""
    done: List[Patch] = []
    try:
        for patch in patches:
            patch.apply()
            done.append(patch)
    except BaseException:
        undo(done)
        raise


def undo(patches: Sequence[Patch]) -> None:
    """Undo patches, the last one first."""
    for patch in reversed(patches):
        patch.undo()
