"""A symbol and its parameters, replaced as one: never one of the old pair beside one of the new.

MXNet opens the two files by name, one after the other. So no way of replacing them in one step, be
it a swap of folders or a link, keeps a reader from the old symbol and the new parameters.
Three safeguards do what can be done:

- The new files are on the disk and read back, each beside its place, before anything changes. Then
  the name of a folder is changed, and two renames are left. If one of them fails, the old pair is
  put back. If the process is killed, the next read or write with mxamp finishes them.
- A reader with plain MXNet amid that gets an error, never numbers. Where another symbol is
  replaced, all parameters are renamed: either symbol asks for names that the other's parameters
  lack. A symbol that is the same fits the old parameters and the new.
- Writers take turns, by a lock on the folder. A process that is killed releases it.
"""

import hashlib
import json
import logging
import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import AbstractSet, Any, Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx

from ..errors import ArgumentError, WriteError
from ..framework.files import (
    NOT_THE_SAME,
    checked_folder,
    checksum,
    confirmed,
    locked,
    place_of,
    remove_orphans,
    sync_to_disk,
    take_mode,
    temporary_beside,
    writing,
)
from ..graph.ir import Graph

__all__ = ["finish_replacing", "pair_state", "renamed", "replaced_files", "set_apart"]

logger = logging.getLogger("mxamp")

_READY = ".mxamp-ready"

RENAMED = (
    "%s replaces another symbol: the names of its parameters begin with %s now, so that the old "
    "symbol can't be loaded with them"
)
ONE_FILE = (
    "{first!r} and {second!r} lead to one file, {place!r}: remove the link, or give another name"
)
MIXED = (
    "{first!r} and {second!r} are of different models now: moving the new files to their places "
    "failed ({why}), and so did putting the old ones back: write them again"
)


@contextmanager
def replaced_files(
    paths: Sequence[Path], check: Callable[[Path], None]
) -> Iterator[Tuple[Path, bool]]:
    """Yield a folder to write files of the same names to; then they take the place of `paths`.

    The second value is whether others that write there wait. Before the files are moved, they are
    on the disk and `check` has read them back from the folder. Links stay links, and modes those of
    the old files. What processes that were killed have left is removed. Raises `WriteError`, and
    leaves `paths` as they were, where any of that fails.
    """
    for path in paths:
        checked_folder(path)
    first, places = paths[0], [place_of(path) for path in paths]
    if len(set(places)) < len(places):
        given = {"first": str(paths[0]), "second": str(paths[1]), "place": str(places[0])}
        raise ArgumentError(ONE_FILE.format(**given))
    folder, home = temporary_beside(first), place_of(first.parent)
    aside = [temporary_beside(place, "old-") for place in places]
    staged = [temporary_beside(place) for place in places if place.parent != home]
    with writing(first), locked(first.parent) as is_locked:
        _finish(paths)
        for path in (first, *places):
            remove_orphans(path)
        try:
            folder.mkdir(exist_ok=True)
            yield folder, is_locked
            for path, place in zip(paths, places):
                take_mode(folder / path.name, place)
                sync_to_disk(folder / path.name)
            check(folder)
            for path, place in zip(paths, places):
                if place.parent != home:
                    _stage(folder / path.name, temporary_beside(place))
            sync_to_disk(folder)
            _switch(folder, paths, places, aside)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for temporary in (*aside, *staged):
                with suppress(OSError):
                    temporary.unlink()
        with confirmed(first):
            for parent in {first.parent, *(place.parent for place in places)}:
                sync_to_disk(parent)


def finish_replacing(paths: Sequence[Path]) -> None:
    """Move files to their places that a killed process had ready and has not moved."""
    # Not Path.is_dir, which raises where a name is too long for a file: then there is none.
    if os.path.isdir(_ready(paths)):
        with locked(paths[0].parent):
            _finish(paths)


def pair_state(paths: Sequence[Path]) -> Optional[Sequence[Any]]:
    """Return a value that is another one after files were replaced; None while they are."""
    if os.path.isdir(_ready(paths)):
        return None
    state: List[Any] = []
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            state.append((path, found.st_ino, found.st_size, found.st_mtime_ns))
    return state


def set_apart(folder: Path, files: Sequence[Path], is_locked: bool) -> str:
    """Rename the parameters in `folder` where the files to replace may hold another symbol.

    `files` are the symbol's and the parameters', and those in `folder` have their names. Returns
    what the parameters' names begin with now: "" where they keep their names. The same symbol gets
    the same names each time.
    """
    symbol, params = (folder / path.name for path in files)
    text, old = symbol.read_bytes(), files[0].read_bytes() if files[0].exists() else None
    # Without a lock another process may be writing another symbol just now.
    if old == text or (old is None and is_locked):
        return ""
    with mx.util.np_array(False):
        arrays = mx.nd.load(str(params))
        if not arrays:
            return ""
        start = f"amp{hashlib.sha256(text).hexdigest()[:8]}_"
        new = renamed(text.decode(), {key[4:] for key in arrays}, start).encode()
        symbol.write_bytes(new)
        mx.nd.save(str(params), {f"{k[:4]}{start}{k[4:]}": a for k, a in arrays.items()})
        mx.nd.waitall()
    if new != old:
        logger.info(RENAMED, files[0], start)
    return start


def renamed(symbol: str, names: AbstractSet[str], start: str) -> str:
    """Return a symbol's text with `start` in front of the names of these variables."""
    if not start:
        return symbol
    graph = Graph.from_json(json.loads(symbol, strict=False))
    nodes = [
        replace(node, name=start + node.name) if node.is_variable and node.name in names else node
        for node in graph.nodes
    ]
    return str(replace(graph, nodes=nodes).to_symbol().tojson(remove_amp_cast=False))


# ---------------------------------------------------------------------- moving files


def _stage(made: Path, beside: Path) -> None:
    """Bring a file to the folder of its place, where a link leads elsewhere; leave a link to it."""
    shutil.copy(made, beside)
    sync_to_disk(beside)
    if checksum(beside) != checksum(made):
        raise OSError(NOT_THE_SAME)
    made.unlink()
    made.symlink_to(beside)


def _switch(
    folder: Path, paths: Sequence[Path], places: Sequence[Path], aside: Sequence[Path]
) -> None:
    """Move both files of a folder to their places; where that fails put the old ones back."""
    ready = _ready(paths)
    old = [_kept(place, name) for place, name in zip(places, aside)]
    folder.replace(ready)
    try:
        sync_to_disk(ready.parent)
        # The symbol last: without it nobody reads the parameters.
        for path, place in reversed(list(zip(paths, places))):
            _move(ready / path.name, place)
    except BaseException as error:
        try:
            # First of all nobody is to finish what is taken back.
            ready.replace(folder)
            for place, kept in zip(places, old):
                _put_back(place, kept)
        except OSError:
            given = {"first": str(paths[0]), "second": str(paths[1]), "why": str(error)}
            raise WriteError(MIXED.format(**given)) from error
        raise
    with suppress(OSError):  # an empty folder, which the next write removes
        ready.rmdir()


def _kept(place: Path, name: Path) -> Optional[Path]:
    """Return another name for the file in a place, or a copy of it; None where there is none."""
    if not place.exists():
        return None
    try:
        os.link(place, name)
    except OSError:  # a file system without hard links, or a file of another user
        shutil.copy2(place, name)
    return name


def _put_back(place: Path, kept: Optional[Path]) -> None:
    if kept is None:
        place.unlink(missing_ok=True)
    else:
        kept.replace(place)


def _finish(paths: Sequence[Path]) -> None:
    ready = _ready(paths)
    # Without a lock two processes may find it at once: what one has moved is done.
    with suppress(FileNotFoundError):
        for made in sorted(ready.iterdir()):
            with suppress(FileNotFoundError):
                _move(made, place_of(ready.parent / made.name))
            made.unlink(missing_ok=True)
        sync_to_disk(ready.parent)
        ready.rmdir()


def _move(made: Path, place: Path) -> None:
    if made.is_symlink():
        place_of(made).replace(place)
        made.unlink()
    else:
        made.replace(place)


def _ready(paths: Sequence[Path]) -> Path:
    return paths[0].with_name(f".{paths[0].name}{_READY}")
