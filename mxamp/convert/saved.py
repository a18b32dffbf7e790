"""Saved models, `PREFIX-symbol.json` and `PREFIX-NNNN.params`: read, and replaced as a pair.

MXNet opens the two files by name, one after the other, so no single step replaces both for a
reader: not a swap of folders, and not a link. Three safeguards keep a reader from the symbol of one
model and the parameters of another:

- The new files are on disk and read back before anything changes. A rename of their folder then
  marks them as complete, and two renames are left. If one fails, the old pair is put back. If the
  process is killed, the next read or write with mxamp finishes them.
- In between, plain MXNet gets an error, never numbers. Where another symbol is replaced, all
  parameters are renamed, so that either symbol asks for names that the other's parameters lack.
- Writers and mxamp's readers take turns, by a lock on the folder that a killed process releases.
"""

import hashlib
import json
import logging
import operator
import os
import re
import shutil
import struct
import zlib
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, WriteError, unknown
from ..framework.files import (
    NOT_THE_SAME,
    check_file_path,
    checksum,
    copy_mode,
    folder_lock,
    remove_orphans,
    resolve_links,
    sync_to_disk,
    temporary_beside,
    wrap_sync_errors,
    wrap_write_errors,
)
from ..framework.machine import dtype_name
from ..framework.wording import shortened, shown
from ..graph.ir import Graph
from .outputs import Model, error_reason

__all__ = [
    "IS_THERE",
    "epochs_of",
    "files_to_write",
    "load_model",
    "model_files",
    "replaced_files",
    "saved_semantics",
    "write_model",
]

logger = logging.getLogger("mxamp")

Prefix = Union[str, "os.PathLike[str]"]
Files = Tuple[Path, Path]

_SYMBOL = "-symbol.json"
_READY = ".mxamp-ready"

# The start of a parameter file: its magic, a reserved number, how many arrays, and the magic of the
# first array (NDArray::Load in MXNet's ndarray.cc).
_FIRST_ARRAY = struct.Struct("<QQQI")
_NUMPY_ARRAY = 0xF993FACA

_MODEL_FILE = re.compile(r"(.+?)(-symbol\.json|-(\d{4})\.params|\.onnx|\.json|\.params)$")
# The names that Gluon and Symbol give to the parameters of a node, after the node's name.
_PARAM_SUFFIX = re.compile(r"_(weight|bias|gamma|beta|parameters|\w+_(mean|var|weight|bias))$")

NO_EPOCH = "epoch must be a whole number, that in the name of the parameter file, not {given}"
EMPTY = "the prefix of the model is empty: give what comes before -symbol.json"
NO_PREFIX = (
    "{path!r} is the name of a file: give the prefix, which is what comes before -symbol.json "
    "({prefix!r}{epoch})"
)
ONNX_FILE = (
    "{path!r} is an ONNX file, and mxamp reads models that MXNet has saved: give the prefix of the "
    "files that block.export writes, PREFIX-symbol.json and PREFIX-0000.params"
)
A_FILE = (
    "`out` must be the prefix of the files to write, not the name of one: {prefix!r}, not {out!r}"
)
NO_LAST_PART = "`out` must end in a name for the files to write, such as {example!r}, not {out!r}"
NOT_A_FILE = "{path!r} is {what}, and not a file"
NO_FILE = "there is no file {path!r}{hint}"
IS_THERE = "{path!r} is there already: give another `out`, or overwrite it with `force=True`"
NOT_READ = "{path!r} and its parameters can't be read: {why}"
NO_SYMBOL = "{path!r} can't be read as a symbol: {why}"
NOT_REGISTERED = (
    "{path!r} uses the custom operator {name!r}, which is not registered: import the module that "
    "registers it first (--import MODULE)"
)
NO_PARAMS = "{path!r} can't be read as parameters: {why}"
CUT_OFF = "it was cut off, or is another kind of file ({why})"
NO_NAMES = (
    "its arrays have no names that start with arg: or aux:; write it with block.export or "
    "save_checkpoint"
)
OTHER_PARAMS = (
    "the parameters in {params!r} are not those of {symbol!r}: {missing} missing{names}, "
    "and {more} that the symbol does not have{others}"
)
RENAMED = (
    "%s replaces another symbol: the names of its parameters begin with %s now, so that the old "
    "symbol can't be loaded with them"
)
ONE_FILE = (
    "{first!r} and {second!r} lead to one file, {place!r}: remove the link, or give another name"
)
OTHER_DISK = (
    "{path!r} can't be replaced together with {place!r}, which is on another file system: remove "
    "the link, or give another name"
)
MIXED = (
    "{first!r} and {second!r} are of different models now: moving the new files to their places "
    "failed ({why}), and so did putting the old ones back: write them again"
)


# ---------------------------------------------------------------------- names of files


def model_files(prefix: Prefix, epoch: int) -> Files:
    """Return the paths of a saved model: `PREFIX-symbol.json` and `PREFIX-NNNN.params`."""
    name = os.fspath(prefix)
    if not name:
        raise ArgumentError(EMPTY)
    try:
        return Path(name + _SYMBOL), Path(f"{name}-{operator.index(epoch):04d}.params")
    except TypeError:
        raise ArgumentError(NO_EPOCH.format(given=shown(epoch))) from None


def files_to_write(out: Prefix, epoch: int) -> Files:
    """Return the paths to save a model to; raise unless `out` is a prefix that ends in a name."""
    name = os.fspath(out)
    match = _MODEL_FILE.match(name)
    if match is not None:
        raise ArgumentError(A_FILE.format(out=name, prefix=match[1]))
    folder, last = os.path.split(name)
    # MXNet would write the files of "folder/.." outside the folder.
    if name and not last.strip("."):
        example = os.path.join(folder, "model")
        raise ArgumentError(NO_LAST_PART.format(out=name, example=example))
    return model_files(out, epoch)


def epochs_of(prefix: Prefix) -> List[int]:
    """Return the sorted epochs of a prefix's parameter files."""
    symbol, _ = model_files(prefix, 0)
    name = re.escape(symbol.name[: -len(_SYMBOL)])
    try:
        files = os.listdir(symbol.parent)
    except OSError:
        return []
    found = (re.fullmatch(name + r"-(\d{4,})\.params", file) for file in files)
    return sorted(int(match[1]) for match in found if match)


# ---------------------------------------------------------------------- reading


def saved_semantics(prefix: Prefix, epoch: int = 0) -> Any:
    """Context with the shape semantics, NumPy's or classic, under which a model was saved.

    MXNet marks each array of a file with the semantics that were on when it was saved, and loads it
    under the same only.
    """
    path, head = model_files(prefix, epoch)[1], b""
    # load_model reports a missing file; reading a pipe would block.
    with suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                head = file.read(_FIRST_ARRAY.size)
    marked = len(head) == _FIRST_ARRAY.size and _FIRST_ARRAY.unpack(head)[-1] == _NUMPY_ARRAY
    return mx.util.np_shape(marked or mx.util.is_np_shape())


def load_model(prefix: Prefix, epoch: int = 0) -> Model:
    """Return the saved model with this prefix as (symbol, arg_params, aux_params).

    Waits while the files are replaced, and finishes what a killed process has left. Raises
    `ArgumentError`, with the file's name, where a file is missing or damaged, or where the
    parameters are not those of the symbol.
    """
    files = model_files(prefix, epoch)
    if not os.path.isdir(files[0].parent):
        raise _missing_file_error(prefix, files[0])
    try:
        with folder_lock(files[0].parent):
            _finish_interrupted_move(files)
            return _load_files(prefix, epoch, files)
    except OSError as error:
        raise ArgumentError(NOT_READ.format(path=str(files[0]), why=error)) from None


def _load_files(prefix: Prefix, epoch: int, files: Files) -> Model:
    """Return the model in a symbol file and a parameter file; raise `ArgumentError` if damaged."""
    for path in files:
        if not os.path.exists(path):
            raise _missing_file_error(prefix, path)
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or a device"
            raise ArgumentError(NOT_A_FILE.format(path=str(path), what=what))
    with saved_semantics(prefix, epoch):
        symbol = _read_symbol(files[0])
        args, auxs = _read_params(files[1])
    _check_params_match(files, symbol, {**args, **auxs})
    return symbol, args, auxs


def _missing_file_error(prefix: Prefix, path: Path) -> ArgumentError:
    """Return the error for the missing file `path`, with a hint at the right prefix or epoch."""
    name = os.fspath(prefix)
    match = _MODEL_FILE.match(name)
    if name.endswith(".onnx") and not Path(name[: -len(".onnx")] + _SYMBOL).is_file():
        return ArgumentError(ONNX_FILE.format(path=name))
    if match is not None:
        epoch = f", epoch {int(match[3])}" if match[3] else ""
        return ArgumentError(NO_PREFIX.format(path=name, prefix=match[1], epoch=epoch))
    epochs = epochs_of(prefix)
    hint = ""
    if path.suffix == ".params" and epochs:
        there = shortened([str(epoch) for epoch in epochs])
        hint = f"; there are parameters of epoch {there} (--epoch)"
    elif path.suffix == ".json":
        hint = f": the prefix {name!r} is what comes before -symbol.json"
    return ArgumentError(NO_FILE.format(path=str(path), hint=hint))


def _read_symbol(path: Path) -> Symbol:
    """Return the symbol in a JSON file; raise `ArgumentError` that says what is wrong with it."""
    try:
        # MXNet doesn't escape control characters.
        _check_graph_json(json.loads(path.read_bytes().decode(), strict=False))
        return mx.sym.load(str(path))
    except UnicodeDecodeError:
        why = "it is no text"
    except json.JSONDecodeError as error:
        why = f"it is no JSON, or was cut off: {error}"
    except RecursionError:
        why = "it is nested too deeply"
    except (AttributeError, LookupError, TypeError):
        why = "it has no lists of nodes and heads with their names"
    except (ArgumentError, OSError) as error:
        why = str(error)
    except MXNetError as error:
        custom = re.search(r"Cannot find custom operator (\S+)", str(error))
        if custom is not None:
            message = NOT_REGISTERED.format(path=str(path), name=custom[1])
            raise ArgumentError(message) from None
        why = _unknown_attribute_reason(str(error)) or error_reason(error)
    raise ArgumentError(NO_SYMBOL.format(path=str(path), why=why))


def _check_graph_json(graph: Any) -> None:
    """Raise unless a symbol's parsed JSON has nodes and heads, and no cycles."""
    for key in ("nodes", "heads"):
        if not graph[key]:
            raise ArgumentError(f"its list of {key} is empty")
    for i, node in enumerate(graph["nodes"]):
        name = f"node {i} ({node['op']} {node['name']!r})"
        # MXNet loads a graph with a cycle, and may then run forever.
        for source, *_ in node.get("inputs", ()):
            if not 0 <= source < i:
                raise ArgumentError(f"{name} reads node {source}, which does not come before it")
        for body in node.get("subgraphs", ()):
            _check_graph_json(body)


def _unknown_attribute_reason(message: str) -> Optional[str]:
    """Return MXNet's message on an unknown attribute as one line; None for other messages."""
    found = re.search(
        r"Cannot find argument '(.*?)'.*in operator (\w+)\(name=\"(.*?)\"", message, re.S
    )
    if found is None:
        return None
    attribute, operator_name, node = found.groups()
    known = re.findall(r"^(\w+) : ", message, re.M)
    return f"{operator_name} {node!r}: {unknown('attribute', attribute, known)}"


def _read_params(path: Path) -> Tuple[Dict[str, NDArray], Dict[str, NDArray]]:
    """Return the arg_params and aux_params of a file; raise `ArgumentError` if it is damaged."""
    try:
        arrays = mx.nd.load(str(path))
    except (MXNetError, OSError, ValueError, MemoryError) as error:
        why = CUT_OFF.format(why=error_reason(error))
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=why)) from None
    named = arrays if isinstance(arrays, dict) else {}
    if len(named) != len(arrays) or not all(key[:4] in ("arg:", "aux:") for key in named):
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=NO_NAMES))
    kinds = ({k[4:]: v for k, v in named.items() if k[:4] == kind} for kind in ("arg:", "aux:"))
    return next(kinds), next(kinds)


def _check_params_match(files: Files, symbol: Symbol, params: Mapping[str, NDArray]) -> None:
    """Raise if parameters of the symbol are missing in `params`; warn of those it doesn't read."""
    inputs = set(symbol.list_inputs())
    missing = sorted(_certain_param_names(symbol) - params.keys())
    more = sorted(params.keys() - inputs)
    if not missing and not more:
        return
    names, others = (f" ({shortened(names)})" if names else "" for names in (missing, more))
    given = {"names": names, "others": others, "missing": len(missing), "more": len(more)}
    message = OTHER_PARAMS.format(params=str(files[1]), symbol=str(files[0]), **given)
    if missing or not params.keys() & inputs:
        raise ArgumentError(message)
    logger.warning("%s; they are kept as they are", message)


def _certain_param_names(symbol: Symbol) -> Set[str]:
    """Return the names of inputs that can't be data: auxiliary states, and `NODE_weight` etc.

    MXNet calls the inputs of node "fc" fc_weight and fc_bias; Gluon's node is called fc_fwd.
    """
    graph = Graph.from_symbol(symbol)
    found = set(symbol.list_auxiliary_states())
    for node in graph.nodes:
        name = node.name[:-4] if node.name.endswith("_fwd") else node.name
        for source, _ in node.inputs[1:]:
            variable = graph.nodes[source]
            suffix = _PARAM_SUFFIX.search(variable.name)
            if variable.is_variable and suffix and variable.name[: suffix.start()] == name:
                found.add(variable.name)
    return found


# ---------------------------------------------------------------------- writing


def write_model(model: Model, files: Files, epoch: int, force: bool = True) -> str:
    """Write a model to its two files, which are replaced together or not at all.

    Returns the prefix that the parameters' names were given if they had to be renamed, else "".
    Without `force`, raises `ArgumentError` if a file exists. Raises `WriteError` if writing fails.
    """
    prefix = files[0].name[: -len(_SYMBOL)]
    with replaced_files(files) as (folder, is_locked):
        # Under the lock: another process may have written them during the conversion.
        for path in files:
            if path.exists() and not force:
                raise ArgumentError(IS_THERE.format(path=str(path)))
        model, name_prefix = _with_renamed_params(model, files[0], is_locked)
        try:
            mx.model.save_checkpoint(str(folder / prefix), epoch, *model, remove_amp_cast=False)
            mx.nd.waitall()
            sync_to_disk(folder / files[1].name)
            checksum(folder / files[1].name)  # reads the file from the disk, not from the cache
            symbol, *params = load_model(folder / prefix, epoch)
        except (ArgumentError, MXNetError) as error:
            raise OSError(NOT_THE_SAME) from error
        read_back = [_param_checksums(arrays) for arrays in params]
        same_params = read_back == [_param_checksums(arrays) for arrays in model[1:]]
        if not same_params or _symbol_json(symbol) != _symbol_json(model[0]):
            raise OSError(NOT_THE_SAME)
    return name_prefix


def _symbol_json(symbol: Symbol) -> str:
    return str(symbol.tojson(remove_amp_cast=False))


def _param_checksums(params: Mapping[str, NDArray]) -> Mapping[str, Any]:
    """Return the shape, dtype and CRC-32 of each parameter by name."""
    return {
        name: (array.shape, dtype_name(array.dtype), zlib.crc32(array.asnumpy().tobytes()))
        for name, array in params.items()
    }


def _with_renamed_params(model: Model, path: Path, is_locked: bool) -> Tuple[Model, str]:
    """Return a model, its parameters renamed if `path` may hold another symbol, and their prefix.

    The prefix is a hash of the symbol: the same symbol gets the same names each time. It is "" if
    the names are kept.
    """
    text, old = _symbol_json(model[0]), path.read_bytes() if path.exists() else None
    names = model[1].keys() | model[2].keys()
    # Without a lock another process may be writing another symbol right now.
    if not names or old == text.encode() or (old is None and is_locked):
        return model, ""
    name_prefix = f"amp{hashlib.sha256(text.encode()).hexdigest()[:8]}_"
    graph = Graph.from_symbol(model[0])
    nodes = [
        replace(n, name=name_prefix + n.name) if n.is_variable and n.name in names else n
        for n in graph.nodes
    ]
    symbol = replace(graph, nodes=nodes).to_symbol(type(model[0]))
    if _symbol_json(symbol).encode() != old:
        logger.info(RENAMED, path, name_prefix)
    args, auxs = ({name_prefix + name: array for name, array in one.items()} for one in model[1:])
    return (symbol, args, auxs), name_prefix


# ---------------------------------------------------------------------- replacing a pair


@contextmanager
def replaced_files(paths: Files) -> Iterator[Tuple[Path, bool]]:
    """Context with a folder for new files of the same names, which replace both `paths` at its end.

    The context's second value is whether other writers wait. The new files are on disk before
    `paths` change. Links stay links, and files keep the modes of the old ones. Temporary files
    that killed processes left are removed. On any failure raises `WriteError` and leaves `paths`
    unchanged.
    """
    for path in paths:
        check_file_path(path)
    first, places = paths[0], [resolve_links(path) for path in paths]
    if places[0] == places[1]:
        given = {"first": str(paths[0]), "second": str(paths[1]), "place": str(places[0])}
        raise ArgumentError(ONE_FILE.format(**given))
    for place in places:
        if os.stat(place.parent).st_dev != os.stat(first.parent).st_dev:
            raise ArgumentError(OTHER_DISK.format(path=str(first), place=str(place)))
    folder = temporary_beside(first)
    backups = [temporary_beside(place, "old-") for place in places]
    with wrap_write_errors(first), folder_lock(first.parent) as is_locked:
        _finish_interrupted_move(paths)
        for path in (first, *places):
            remove_orphans(path)
        try:
            folder.mkdir(exist_ok=True)
            yield folder, is_locked
            for path, place in zip(paths, places):
                copy_mode(folder / path.name, place)
                sync_to_disk(folder / path.name)
            sync_to_disk(folder)
            _move_into_place(folder, paths, places, backups)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for backup in backups:
                with suppress(OSError):
                    backup.unlink()
        with wrap_sync_errors(first):
            for parent in {first.parent, *(place.parent for place in places)}:
                sync_to_disk(parent)


def _move_into_place(
    folder: Path, paths: Sequence[Path], places: Sequence[Path], backups: Sequence[Path]
) -> None:
    """Move new files named as `paths` from `folder` to `places`; put old ones back if that fails.

    `places` are `paths` with links resolved; the old files are linked or copied to `backups`.
    """
    ready = _ready_folder(paths)
    existed = [_back_up(place, backup) for place, backup in zip(places, backups)]
    folder.replace(ready)
    try:
        sync_to_disk(ready.parent)
        # The symbol last: without it nobody reads the parameters.
        for path, place in reversed(list(zip(paths, places))):
            (ready / path.name).replace(place)
    except BaseException as error:
        try:
            # First, so that no other process finishes the replacement.
            ready.replace(folder)
            for place, backup, had_file in zip(places, backups, existed):
                if had_file:
                    backup.replace(place)
                else:
                    place.unlink(missing_ok=True)
        except OSError:
            given = {"first": str(paths[0]), "second": str(paths[1]), "why": str(error)}
            raise WriteError(MIXED.format(**given)) from error
        raise
    with suppress(OSError):  # an empty folder, which the next write removes
        ready.rmdir()


def _back_up(path: Path, backup: Path) -> bool:
    """Hard-link or copy a file to `backup`; return whether there is a file."""
    if not path.exists():
        return False
    try:
        os.link(path, backup)
    except OSError:  # a file system without hard links, or a file of another user
        shutil.copy2(path, backup)
    return True


def _finish_interrupted_move(paths: Sequence[Path]) -> None:
    """Finish a replacement of `paths` by a killed process: move the new files that are left."""
    ready = _ready_folder(paths)
    # Not Path.is_dir, which raises where a name is too long for a file.
    if not os.path.isdir(ready):
        return
    # Without a lock two processes may do this at once.
    with suppress(FileNotFoundError):
        for new in sorted(ready.iterdir()):
            with suppress(FileNotFoundError):
                new.replace(resolve_links(ready.parent / new.name))
        sync_to_disk(ready.parent)
        ready.rmdir()


def _ready_folder(paths: Sequence[Path]) -> Path:
    """Return the folder whose existence marks the new files of `paths` in it as complete."""
    return paths[0].with_name(f".{paths[0].name}{_READY}")
