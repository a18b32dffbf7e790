"""Atomic file writes: a crash or a full disk leaves the old files whole, or the new ones."""

import os
import shutil
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator, List, Sequence, Tuple, Union

from ..errors import ArgumentError, WriteError

#: Beside a file, the names of a new and an old one end in these and in ids of thread and process.
_NEW, _OLD = ".mxamp-new-", ".mxamp-old-"
_BLOCK = 2**20
#: Seconds: a temporary file that has not changed for so long is a killed process's.
_ORPHANED = 3600

A_FOLDER = "{path!r} is a folder: give the name of a file"
NO_FOLDER = "there is no folder {path!r}: create it, or choose another path"
NOT_WRITTEN = "{path!r} can't be written ({why}); an existing file is unchanged"
NOT_THE_SAME = "the content read back differs from the content written"


def write_file(path: Union[str, Path], content: bytes) -> None:
    """Replace a file's content atomically, after reading the new content back to check it.

    Raises `WriteError` on failure, and leaves `path` as it was.
    """

    def check_content(written: List[Path]) -> None:
        size, checked = written[0].stat().st_size, checksum(written[0])
        if (size, checked) != (len(content), zlib.crc32(content)):
            raise OSError(NOT_THE_SAME)

    with replaced_files([path], check_content) as (temporary,):
        temporary.write_bytes(content)


@contextmanager
def replaced_files(
    paths: Sequence[Union[str, Path]], check: Callable[[List[Path]], None]
) -> Iterator[List[Path]]:
    """Context manager that yields temporary paths to write, whose files then replace `paths`.

    Before the replacement, the temporary files are synced to the disk and `check` reads them back.
    The targets of symbolic links are replaced, and the modes of the old files kept. Several old
    files are set aside first, `paths[0]` before the others, and the new `paths[0]` comes last: who
    opens that first finds the old files, none, or the new ones.
    What killed processes have left is removed once the new files are complete.
    Raises `WriteError` on failure, and leaves `paths` as they were; raises `ArgumentError` if one
    can't be the name of a file.
    """
    for path in paths:
        check_file_path(path)
    places = [Path(os.path.realpath(path)) for path in paths]
    written = [_beside(place, _NEW) for place in places]
    with wrap_write_errors(paths[0]):
        try:
            yield written
            for temporary, place in zip(written, places):
                if place.exists():
                    shutil.copymode(place, temporary)
                sync_to_disk(temporary)
            check(written)
            _replace_all(written, places)
        finally:
            for temporary in written:
                temporary.unlink(missing_ok=True)
    with suppress(OSError):  # the files are in place, and whole after a crash too
        for place in places:
            sync_to_disk(place.parent)
            for old in left_beside(place):
                old.unlink()
            for temporary in left_beside(place, _NEW):
                if temporary.stat().st_mtime < time.time() - _ORPHANED:
                    temporary.unlink()


def _replace_all(written: Sequence[Path], places: Sequence[Path]) -> None:
    """Move the `written` files to `places`, setting several old ones aside; undo on an error."""
    old = [place for place in places if place.exists()] if len(places) > 1 else []
    moves = [*((place, _beside(place, _OLD)) for place in old), *reversed([*zip(written, places)])]
    done: List[Tuple[Path, Path]] = []
    try:
        for source, target in moves:
            os.replace(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.replace(target, source)
        raise


def left_beside(path: Path, kind: str = _OLD) -> List[Path]:
    """Return, sorted, the old or new files that killed writes of `path` left in its folder.

    An old file may be the only copy.
    """
    start = f".{path.name}{kind}"
    return sorted(one for one in path.parent.iterdir() if one.name.startswith(start))


@contextmanager
def wrap_write_errors(path: Union[str, Path]) -> Iterator[None]:
    """Context manager that turns an `OSError` into a `WriteError` about `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise WriteError(NOT_WRITTEN.format(path=os.fspath(path), why=why)) from error


def check_file_path(path: Union[str, Path]) -> None:
    """Raise if `path` is a folder, or its parent folder does not exist."""
    place = Path(os.path.realpath(path))
    with wrap_write_errors(path):
        if place.is_dir():
            raise ArgumentError(A_FOLDER.format(path=os.fspath(path)))
        if not place.parent.is_dir():
            raise ArgumentError(NO_FOLDER.format(path=str(place.parent)))


def check_writable(path: Union[str, Path]) -> None:
    """Raise as `write_file(path, ...)` would if the folder is missing or read-only.

    Call it before a long computation, which would otherwise fail at its end.
    """
    check_file_path(path)
    temporary = _beside(Path(os.path.realpath(path)), _NEW)
    with wrap_write_errors(path):
        temporary.touch()
        temporary.unlink()


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read from the disk rather than the cache if possible."""
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = 0
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
        return found


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}{kind}{threading.get_ident()}-{os.getpid()}")
