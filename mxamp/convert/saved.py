"""Saved models, `PREFIX-symbol.json` and `PREFIX-NNNN.params`: read, and replaced as a pair.

MXNet opens the two files by name, one after the other, so no single step replaces both for a
reader: one that reads at the very moment of the replacement may open one file of each model.
"""

import json
import logging
import operator
import os
import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..framework.files import NOT_THE_SAME, checksum, left_beside, replaced_files
from ..framework.machine import dtype_name
from ..framework.wording import shortened, shown
from ..graph.ir import Graph
from .outputs import Model, error_reason

logger = logging.getLogger("mxamp")

Prefix = Union[str, "os.PathLike[str]"]
Files = Tuple[Path, Path]

_SYMBOL = "-symbol.json"

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
LEFT = (
    "; a conversion that was killed has left {names} beside it: a new conversion with force=True "
    "writes both files again"
)
NUMPY_BFLOAT16 = (
    "%s: under npx.set_np() MXNet can't load its bfloat16 parameters, and loads them within "
    "mx.util.np_shape(True) only"
)
NOT_A_FILE = "{path!r} is {what}, and not a file"
NO_FILE = "there is no file {path!r}{hint}"
IS_THERE = "{path!r} is there already: give another `out`, or overwrite it with `force=True`"
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
    files = model_files(out, epoch)
    left = _left_by_kills(files[0])
    if left:
        logger.warning("%s%s", files[0], left)
    return files


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

    Raises `ArgumentError`, with the file's name, where a file is missing or damaged, or where the
    parameters are not those of the symbol.
    """
    files = model_files(prefix, epoch)
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
    return ArgumentError(NO_FILE.format(path=str(path), hint=hint + _left_by_kills(path)))


def _left_by_kills(path: Path) -> str:
    """Return the end of a message about a symbol file: what a killed conversion has left there."""
    left = left_beside(path) if path.parent.is_dir() else []
    return LEFT.format(names=shortened([one.name for one in left])) if left else ""


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
        why = error_reason(error)
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
        raise ArgumentError(message + _left_by_kills(files[0]))
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


def write_model(model: Model, files: Files, force: bool = True) -> None:
    """Write a model to its two files, which are replaced together or not at all.

    Without `force`, raises `ArgumentError` if a file exists. Raises `WriteError` if writing fails.
    """
    dtypes = {dtype_name(array.dtype) for one in model[1:] for array in one.values()}
    if mx.util.is_np_shape() and "bfloat16" in dtypes:
        logger.warning(NUMPY_BFLOAT16, files[0])
    content = {
        f"{kind}:{n}": a for kind, one in zip(("arg", "aux"), model[1:]) for n, a in one.items()
    }

    def check_content(written: Sequence[Path]) -> None:
        checksum(written[1])  # reads the file from the disk, not from the cache
        try:
            symbol, *params = _read_symbol(written[0]), *_read_params(written[1])
        except ArgumentError as error:
            raise OSError(NOT_THE_SAME) from error
        same = _param_checksums(params) == _param_checksums(model[1:])
        if not same or _symbol_json(symbol) != _symbol_json(model[0]):
            raise OSError(NOT_THE_SAME)

    with replaced_files(files, check_content) as (symbol_file, params_file):
        # Not before: what a killed conversion has set aside is back now.
        for path in files:
            if path.exists() and not force:
                raise ArgumentError(IS_THERE.format(path=str(path)))
        try:
            model[0].save(str(symbol_file), remove_amp_cast=False)
            mx.nd.save(str(params_file), content)
            mx.nd.waitall()
        except MXNetError as error:
            raise OSError(error_reason(error)) from error


def _symbol_json(symbol: Symbol) -> str:
    return str(symbol.tojson(remove_amp_cast=False))


def _param_checksums(params: Sequence[Mapping[str, NDArray]]) -> List[Dict[str, Any]]:
    """Return the shape, dtype and CRC-32 of each parameter by name."""
    return [
        {
            name: (array.shape, dtype_name(array.dtype), zlib.crc32(array.asnumpy().tobytes()))
            for name, array in arrays.items()
        }
        for arrays in params
    ]
