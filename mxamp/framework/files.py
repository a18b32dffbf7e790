"""Files replaced whole: a killed process or a full disk leaves the old file or the new one."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

__all__ = ["is_alive", "replaced_file", "sync_to_disk"]

_MARK = ".mxamp-tmp-"


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield where to write; what was written takes the place of `path` in one step.

    An error leaves `path` as it was. What processes that were killed have left is removed.
    """
    _remove_orphans(path)
    temporary = path.with_name(f".{path.name}{_MARK}{os.getpid()}")
    try:
        yield temporary
        sync_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        if temporary.exists():
            temporary.unlink()
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_orphans(path: Path) -> None:
    for orphan in path.parent.glob(f".{path.name}{_MARK}*"):
        owner = orphan.name.rpartition("-")[2]
        if owner.isdigit() and not is_alive(int(owner)):
            orphan.unlink()


def is_alive(process: int) -> bool:
    """Tell whether a process runs, by its number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
