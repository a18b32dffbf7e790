"""Atomic file writes: after a crash or a full disk, each file is complete, old or new."""

import fcntl
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
#: Seconds: a temporary file that has not changed for so long is a killed process's.
_ORPHANED = 3600

NOT_THE_SAME = "the content read back differs from the content written"


def write_file(path: Union[str, Path], content: bytes) -> None:
    """Replace a file's content atomically, once the new content has been read back and verified.

    Raises `WriteError` on failure, and leaves `path` as it was.
    """

    def check_content(temporary: List[Path]) -> None:
        if checksum(temporary[0]) != zlib.crc32(content):
            raise OSError(NOT_THE_SAME)

    with replaced_files([path], check_content) as (temporary,):
        temporary.write_bytes(content)


@contextmanager
def replaced_files(
    paths: Sequence[Union[str, Path]], check: Callable[[List[Path]], None]
) -> Iterator[List[Path]]:
    """Return a context that yields temporary paths; files written there then replace `paths`.

    Before the replacement, the temporary files are synced to the disk and `check` reads them back.
    The targets of symbolic links are replaced, and the modes of the old files kept. Several old
    files are set aside first, `paths[0]` before the others, and the new `paths[0]` comes last: who
    opens that first finds the old files, none, or the new ones. After the `yield`, the folders are
    locked: of several processes that write the same files, one after the other replaces all.
    What killed processes have left is removed once the new files are complete.
    Raises `WriteError` on failure, and leaves `paths` as they were; raises `ArgumentError` if one
    can't be the name of a file.
    """
    for path in paths:
        check_file_path(path)
    places = [Path(os.path.realpath(path)) for path in paths]
    temporaries = [_temporary(place, _NEW) for place in places]
    with wrap_write_errors(paths[0]):
        try:
            yield temporaries
            with locked(*places) as folders:
                for temporary, place in zip(temporaries, places):
                    if place.exists():
                        shutil.copymode(place, temporary)
                    sync_to_disk(temporary)
                check(temporaries)
                _replace_all(temporaries, places)
                with suppress(OSError):  # the files are in place, and whole after a crash too
                    for folder in folders:
                        os.fsync(folder)
                    for place in places:
                        for old in leftovers(place):
                            old.unlink()
                        for temporary in leftovers(place, _NEW):
                            if temporary.stat().st_mtime < time.time() - _ORPHANED:
                                temporary.unlink()
        finally:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)


@contextmanager
def locked(*paths: Path) -> Iterator[List[int]]:
    """Return a context that holds exclusive locks on the parent folders of `paths`.

    Yields file descriptors of the folders. A folder that can't be locked, as in some network file
    systems, does not raise.
    """
    folders: List[int] = []
    try:
        with suppress(OSError):
            for folder in sorted({path.parent for path in paths}):
                folders.append(os.open(folder, os.O_RDONLY))
                fcntl.flock(folders[-1], fcntl.LOCK_EX)
        yield folders
    finally:
        for descriptor in folders:
            os.close(descriptor)


def _replace_all(temporaries: Sequence[Path], places: Sequence[Path]) -> None:
    """Move temporary files to their final places; on an error, restore the old files."""
    aside = [(one, _temporary(one, _OLD)) for one in places if len(places) > 1 and one.exists()]
    moves = [*aside, *reversed([*zip(temporaries, places)])]
    done: List[Tuple[Path, Path]] = []
    try:
        for source, target in moves:
            os.replace(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.replace(target, source)
        raise


def leftovers(path: Path, kind: str = _OLD) -> List[Path]:
    """Return temporary files of one `kind` (new or old) that killed processes left beside `path`.

    An old file may be the only copy. Within `locked(path)`, no file is one of a running process.
    """
    start = _beside(path, kind)
    return sorted(one for one in path.parent.iterdir() if one.name.startswith(start))


@contextmanager
def wrap_write_errors(path: Union[str, Path]) -> Iterator[None]:
    """Return a context that turns an `OSError` into a `WriteError` that names `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        why = f"({error.strerror or error}); an existing file is unchanged"
        raise WriteError(f"{os.fspath(path)!r} can't be written {why}") from error


def check_file_path(path: Union[str, Path]) -> None:
    """Raise unless `path` can name a file: it is no folder, and its parent folder exists."""
    place = Path(os.path.realpath(path))
    with wrap_write_errors(path):
        if place.is_dir():
            raise ArgumentError(f"{os.fspath(path)!r} is a folder: give the name of a file")
        if not place.parent.is_dir():
            raise ArgumentError(f"there is no folder {str(place.parent)!r}: create it")


def check_writable(path: Union[str, Path]) -> None:
    """Raise if a file can't be written at `path`: its folder is missing or read-only.

    Call it before a long computation, which would otherwise fail at its end.
    """
    check_file_path(path)
    temporary = _temporary(Path(os.path.realpath(path)), _NEW)
    with wrap_write_errors(path):
        temporary.touch()
        temporary.unlink()


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read from the disk and not from the page cache if possible."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = 0
        while block := file.read(2**20):
            found = zlib.crc32(block, found)
        return found


def sync_to_disk(path: Path) -> None:
    """Flush a file to the disk (fsync)."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _beside(path: Path, kind: str) -> str:
    """Return the prefix of the names of `path`'s temporary files of one `kind` (new or old)."""
    name = os.fsencode(path.name)
    # File systems allow 255 bytes, and the ids of the process and thread follow.
    short = path.name if len(name) <= 200 else f"{zlib.crc32(name):08x}"  # noqa: PLR2004
    return f".{short}{kind}"


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f"{_beside(path, kind)}{threading.get_ident()}-{os.getpid()}")
