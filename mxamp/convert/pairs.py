"""Two files that belong together, replaced as one: a killed process leaves the old or the new.

Both are written to a folder beside their places first. The folder's change of name is what counts:
from then on they are moved to their places, by whoever looks for them next if need be.
"""

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator, Sequence

from ..framework.files import (
    checked_folder,
    place_of,
    remove_orphans,
    replaced_file,
    sync_to_disk,
    take_mode,
    temporary_beside,
    writing,
)

__all__ = ["finish_replacing", "replaced_files"]

_READY = ".mxamp-ready"


@contextmanager
def replaced_files(paths: Sequence[Path], check: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder to write files of the same names to; then they take the place of `paths`.

    Before that they are on the disk and `check` has read them back from the folder. Links stay
    links, and modes those of the old files. What processes that were killed have left is removed.
    Raises `WriteError`, and leaves `paths` as they were, where any of that fails.
    """
    for path in paths:
        checked_folder(path)
    first = paths[0]
    with writing(first):
        finish_replacing(paths)
        remove_orphans(first)
        folder = temporary_beside(first)
        try:
            folder.mkdir(exist_ok=True)
            yield folder
            for path in paths:
                take_mode(folder / path.name, place_of(path))
                sync_to_disk(folder / path.name)
            sync_to_disk(folder)
            check(folder)
            folder.replace(_ready(paths))
            sync_to_disk(first.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        finish_replacing(paths)


def finish_replacing(paths: Sequence[Path]) -> None:
    """Move files to their places that a killed process had ready and has not moved."""
    ready = _ready(paths)
    # Not Path.is_dir, which raises where a name is too long for a file: then there is none.
    if not os.path.isdir(ready):
        return
    # Two processes may find it at once: what one has moved is no concern of the other's.
    with suppress(FileNotFoundError):
        for made in sorted(ready.iterdir()):
            with suppress(FileNotFoundError):
                _move(made, place_of(ready.parent / made.name))
        sync_to_disk(ready.parent)
        ready.rmdir()


def _move(made: Path, place: Path) -> None:
    try:
        made.replace(place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # A link to another file system.
        with replaced_file(place, lambda _: None) as temporary:
            shutil.copyfile(made, temporary)
        made.unlink()


def _ready(paths: Sequence[Path]) -> Path:
    return paths[0].with_name(f".{paths[0].name}{_READY}")
