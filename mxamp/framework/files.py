"""Atomic file replacement: a crash or a full disk leaves the old files, none, or the new ones."""

import logging
import os
import shutil
import threading
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence, Union

from ..errors import ArgumentError, WriteError
from .wording import shown

logger = logging.getLogger("mxamp")

#: Beside a file, the name of a new one ends in this and in the ids of its thread and process.
_NEW = ".mxamp-new-"
_OLD = ".mxamp-old"
_BLOCK = 2**20

NO_PATH = "path must be the path of a file to write, not {given}"
NO_NAME = "the name of the file to write is empty: give one"
A_FOLDER = "{path!r} is a folder: give the name of a file"
NO_SUCH_NAME = "{path!r} can't be written ({why}): give another name"
NO_FOLDER = "there is no folder {path!r}: create it, or choose another path"
ONE_FILE = "{paths} lead to one file: remove the link, or give another name"
NOT_WRITTEN = "{path!r} can't be written ({why}); an existing file is unchanged"
NOT_CONFIRMED = (
    "{path!r} is replaced, but the disk has not confirmed it ({why}): after a crash the old file "
    "may be there again"
)
NOT_THE_SAME = "the content read back differs from the content written"
PUT_BACK = "%s: a process was killed while it replaced the file; the old file is back"


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

    See `replaced_files`.
    """
    with replaced_files([path], lambda written: check(*written)) as (temporary,):
        yield temporary


@contextmanager
def replaced_files(
    paths: Sequence[Union[str, Path]], check: Callable[[List[Path]], None]
) -> Iterator[List[Path]]:
    """Context that yields temporary paths to write to, which then replace `paths`.

    Before the replacement, the temporary files are synced to the disk and `check` reads them back.
    The targets of symbolic links are replaced, and the modes of the old files kept. Several old
    files are set aside first, `paths[0]` before the others, and the new `paths[0]` comes last: who
    opens that first finds the old files, none, or the new ones.
    What a killed process has set aside is put back, and its temporary files are removed.
    Raises `WriteError` on failure, and leaves `paths` as they were; raises `ArgumentError` if one
    can't be the name of a file.
    """
    for path in paths:
        check_file_path(path)
    places = [Path(os.path.realpath(path)) for path in paths]
    written = [_temporary_beside(place) for place in places]
    if len(set(places)) < len(places):
        raise ArgumentError(ONE_FILE.format(paths=shown([os.fspath(path) for path in paths])))
    with wrap_write_errors(paths[0]):
        _recover(places)
        try:
            yield written
            for temporary, place in zip(written, places):
                if place.exists():
                    shutil.copymode(place, temporary)
                sync_to_disk(temporary)
            check(written)
            if len(places) == 1:
                os.replace(written[0], places[0])
            else:
                _replace_all(written, places)
        finally:
            for temporary in written:
                temporary.unlink(missing_ok=True)
    with wrap_write_errors(paths[0], NOT_CONFIRMED):
        for folder in {place.parent for place in places}:
            sync_to_disk(folder)


def _replace_all(written: Sequence[Path], places: Sequence[Path]) -> None:
    """Move the `written` files to their places, or put the old ones back."""
    try:
        for place in places:
            if place.exists():
                os.replace(place, _aside(place, places))
        for temporary, place in reversed([*zip(written, places)]):
            os.replace(temporary, place)
    except BaseException:
        for temporary, place in zip(written, places):
            if not temporary.exists():
                place.unlink()
        _put_back(places)
        raise
    with suppress(OSError):  # the next write removes them
        _remove_old(places)


def _put_back(places: Sequence[Path]) -> None:
    """Move the files that were set aside to their places, the first one last."""
    for place in reversed(places):
        if _aside(place, places).exists():
            os.replace(_aside(place, places), place)


def _remove_old(places: Sequence[Path]) -> None:
    for place in places:
        _aside(place, places).unlink(missing_ok=True)


def _recover(places: Sequence[Path]) -> None:
    """Put back or remove what killed processes have left beside `places`."""
    for place in places:
        for orphan in place.parent.iterdir():
            start, _, owner = orphan.name.rpartition("-")
            is_new = start.startswith(f".{place.name}{_NEW}")
            if is_new and owner.isdigit() and not _is_alive(int(owner)):
                orphan.unlink(missing_ok=True)
    if places[0].exists():  # it came last: the new files are complete
        _remove_old(places)
    elif any(_aside(place, places).exists() for place in places):
        _put_back(places)
        logger.warning(PUT_BACK, places[0])


def _aside(path: Path, places: Sequence[Path]) -> Path:
    """Return the name of the old file at `path` while it and the rest of `places` are replaced."""
    return path.with_name(f".{path.name}{_OLD}-{places[-1].name}")


def left_beside(path: Path) -> List[Path]:
    """Return what killed writes of `path` have left that may be the only copy, sorted."""
    start = f".{path.name}.mxamp-"
    left = (one for one in path.parent.iterdir() if one.name.startswith(start))
    return sorted(one for one in left if _NEW not in one.name)


@contextmanager
def wrap_write_errors(path: Union[str, Path], message: str = NOT_WRITTEN) -> Iterator[None]:
    """Context that turns an `OSError` into a `WriteError` about `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise WriteError(message.format(path=os.fspath(path), why=why)) from error


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
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise ArgumentError(NO_FOLDER.format(path=str(folder)))


def check_writable(path: Union[str, Path]) -> None:
    """Raise as `write_file(path, ...)` would if the folder is missing or read-only.

    Call it before a long computation, which would otherwise fail at its end.
    """
    check_file_path(path)
    temporary = _temporary_beside(Path(os.path.realpath(path)))
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
    """Sync a file, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_NEW}{threading.get_ident()}-{os.getpid()}")


def _is_alive(process: int) -> bool:
    """Return whether a process with this id runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
