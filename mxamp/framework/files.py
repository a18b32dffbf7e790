"""Atomic file replacement: a crash or a full disk leaves the old file or the new one."""

import fcntl
import os
import shutil
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Union

from ..errors import ArgumentError, WriteError
from .wording import shown

__all__ = [
    "NOT_THE_SAME",
    "check_file_path",
    "checked_path",
    "check_writable",
    "checksum",
    "wrap_sync_errors",
    "folder_lock",
    "resolve_links",
    "remove_orphans",
    "replaced_file",
    "sync_to_disk",
    "temporary_beside",
    "copy_mode",
    "write_file",
    "wrap_write_errors",
]

_MARK = ".mxamp-tmp-"
_BLOCK = 2**20

NO_PATH = "path must be the path of a file to write, not {given}"
NO_NAME = "the name of the file to write is empty: give one"
A_FOLDER = "{path!r} is a folder: give the name of a file"
NO_SUCH_NAME = "{path!r} can't be written ({why}): give another name"
NO_FOLDER = "there is no folder {path!r}: create it, or choose another path"
NOT_WRITTEN = "{path!r} can't be written ({why}); an existing file is unchanged"
NOT_CONFIRMED = (
    "{path!r} is replaced, but the disk has not confirmed it ({why}): after a crash the old file "
    "may be there again"
)
NOT_THE_SAME = "the content read back differs from the content written"


def write_file(path: Union[str, Path], content: bytes) -> None:
    """Replace a file by `content` atomically, after reading the content back.

    Raises `WriteError` on failure, and leaves `path` as it was.
    """

    def check_content(written: Path) -> None:
        if (written.stat().st_size, checksum(written)) != (len(content), zlib.crc32(content)):
            raise OSError(NOT_THE_SAME)

    with replaced_file(path, check_content) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced_file(path: Union[str, Path], check: Callable[[Path], None]) -> Iterator[Path]:
    """Context that yields a temporary path to write to, which then replaces `path` atomically.

    Before the replacement, the temporary file is synced to the disk and `check` reads it back. The
    target of a symbolic link is replaced, and the mode of the old file kept. Temporary files of
    killed processes are removed.
    Raises `WriteError` on failure, and leaves `path` as it was; raises `ArgumentError` if `path`
    can't be the name of a file.
    """
    check_file_path(path)
    place = resolve_links(Path(path))
    temporary = temporary_beside(place)
    with wrap_write_errors(path):
        remove_orphans(place)
        try:
            yield temporary
            copy_mode(temporary, place)
            sync_to_disk(temporary)
            check(temporary)
            os.replace(temporary, place)
        finally:
            if temporary.exists():
                temporary.unlink()
        with wrap_sync_errors(path):
            sync_to_disk(place.parent)


@contextmanager
def wrap_write_errors(path: Union[str, Path]) -> Iterator[None]:
    """Context that turns an `OSError` into a `WriteError` that says that `path` is unchanged."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise WriteError(NOT_WRITTEN.format(path=os.fspath(path), why=why)) from error


@contextmanager
def wrap_sync_errors(path: Union[str, Path]) -> Iterator[None]:
    """Context that turns an `OSError` into a `WriteError` that says that `path` is replaced."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise WriteError(NOT_CONFIRMED.format(path=os.fspath(path), why=why)) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Context with an exclusive lock on a folder, which waits for other threads and processes.

    Yields False if the file system can't lock folders, as on NFS. The lock ends with the process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            try:
                yield True
            finally:
                # Closing is not enough: a child forked meanwhile has the file open too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def checked_path(path: Any) -> Path:
    """Return `path` as a `Path`; raise `ArgumentError` unless it is a string or path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(NO_PATH.format(given=shown(path)))
    return Path(path)


def check_file_path(path: Union[str, Path]) -> None:
    """Raise `ArgumentError` if `path` can't be the name of a file in an existing folder."""
    checked_path(path)
    if not os.fspath(path):
        raise ArgumentError(NO_NAME)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # a new file, or one in a missing folder
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ArgumentError(NO_SUCH_NAME.format(path=os.fspath(path), why=why)) from None
    if os.path.isdir(path):
        raise ArgumentError(A_FOLDER.format(path=os.fspath(path)))
    folder = resolve_links(Path(path)).parent
    if not folder.is_dir():
        raise ArgumentError(NO_FOLDER.format(path=str(folder)))


def check_writable(path: Union[str, Path]) -> None:
    """Raise as `write_file(path, ...)` would if the folder is missing or read-only.

    Call it before a long computation, which would otherwise fail at its end.
    """
    check_file_path(path)
    temporary = temporary_beside(resolve_links(Path(path)))
    with wrap_write_errors(path):
        try:
            temporary.touch()
        finally:
            temporary.unlink(missing_ok=True)


def resolve_links(path: Path) -> Path:
    """Return a path with its symbolic links resolved."""
    return Path(os.path.realpath(path))


def copy_mode(written: Path, old: Path) -> None:
    """Give the file `written` the permissions of the file `old`, if that exists."""
    if old.exists():
        shutil.copymode(old, written)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read from the disk rather than the cache if possible."""
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = 0
        while True:
            block = file.read(_BLOCK)
            if not block:
                return found
            found = zlib.crc32(block, found)


def sync_to_disk(path: Path) -> None:
    """Sync a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path, kind: str = "") -> Path:
    """Return a path beside `path` for a temporary file or folder of the calling thread."""
    return path.with_name(f".{path.name}{_MARK}{kind}{threading.get_ident()}-{os.getpid()}")


def remove_orphans(path: Path) -> None:
    """Remove the temporary files and folders of killed processes beside `path`."""
    start = f".{path.name}{_MARK}"
    for orphan in path.parent.iterdir():
        owner = orphan.name.rpartition("-")[2]
        if not orphan.name.startswith(start) or not owner.isdigit() or _is_alive(int(owner)):
            continue
        if orphan.is_dir():
            shutil.rmtree(orphan, ignore_errors=True)
        else:
            orphan.unlink()


def _is_alive(process: int) -> bool:
    """Return whether a process with this id runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
