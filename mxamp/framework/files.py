"""Files replaced whole: a killed process or a full disk leaves the old file or the new one."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

__all__ = ["replaced_file"]

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
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        if temporary.exists():
            temporary.unlink()
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_orphans(path: Path) -> None:
    for orphan in path.parent.glob(f".{path.name}{_MARK}*"):
        owner = orphan.name.rpartition("-")[2]
        if owner.isdigit() and not _is_alive(int(owner)):
            orphan.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
