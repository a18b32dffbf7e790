"""Two files that belong together, replaced as one: a killed process leaves the old or the new.

Both are written to a folder beside their places first. The folder's change of name is what counts:
from then on they are moved to their places, by whoever looks for them next if need be.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from ..framework.files import remove_orphans, sync_to_disk, temporary_beside

__all__ = ["finish_replacing", "replaced_files"]

_READY = ".mxamp-ready"


@contextmanager
def replaced_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder to write files of the same names to; then they take the place of `paths`.

    An error leaves `paths` as they were. What processes that were killed have left is removed.
    """
    finish_replacing(paths)
    first = paths[0]
    remove_orphans(first)
    folder = temporary_beside(first)
    folder.mkdir(exist_ok=True)
    try:
        yield folder
        for path in paths:
            sync_to_disk(folder / path.name)
        sync_to_disk(folder)
        folder.replace(_ready(paths))
        sync_to_disk(first.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish_replacing(paths)


def finish_replacing(paths: Sequence[Path]) -> None:
    """Move files to their places that a killed process had ready and has not moved."""
    ready = _ready(paths)
    if not ready.is_dir():
        return
    for made in sorted(ready.iterdir()):
        made.replace(ready.parent / made.name)
    sync_to_disk(ready.parent)
    ready.rmdir()


def _ready(paths: Sequence[Path]) -> Path:
    return paths[0].with_name(f".{paths[0].name}{_READY}")
