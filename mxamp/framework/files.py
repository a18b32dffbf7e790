"""Files replaced whole: a killed process or a full disk leaves the old file or the new one."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

__all__ = ["remove_orphans", "replaced_file", "sync_to_disk", "temporary_beside"]

_MARK = ".mxamp-tmp-"


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield where to write; what was written takes the place of `path` in one step.

    An error leaves `path` as it was. What processes that were killed have left is removed.
    """
    remove_orphans(path)
    temporary = temporary_beside(path)
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


def temporary_beside(path: Path) -> Path:
    """Return the name of this process's temporary file, or folder, beside `path`."""
    return path.with_name(f".{path.name}{_MARK}{os.getpid()}")


def remove_orphans(path: Path) -> None:
    """Remove the temporary files and folders that killed processes have left beside `path`."""
    for orphan in path.parent.glob(f".{path.name}{_MARK}*"):
        owner = orphan.name.rpartition("-")[2]
        if not owner.isdigit() or _is_alive(int(owner)):
            continue
        if orphan.is_dir():
            shutil.rmtree(orphan, ignore_errors=True)
        else:
            orphan.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
