"""Models in files, `PREFIX-symbol.json` and `PREFIX-NNNN.params`: found, checked and read."""

import json
import logging
import operator
import os
import re
import struct
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.gluon import Parameter
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, unknown
from ..framework.wording import shortened, shown
from ..graph.ir import Graph
from .compare import Model
from .pairs import finish_replacing, pair_state

__all__ = [
    "check_symbol_json",
    "epochs_of",
    "files_to_write",
    "load_model",
    "model_files",
    "saved_alike",
    "saved_semantics",
]


def check_symbol_json(text: str) -> None:
    """Raise an `ArgumentError` of one sentence where `text` is no symbol's JSON."""
    try:
        data = json.loads(text, strict=False)  # MXNet writes control characters as they are
        _check_graph(data)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"it is no JSON, or was cut off: {error}") from None
    except RecursionError:
        raise ArgumentError("it is nested too deeply") from None
    for what in ("nodes", "heads"):
        if not data[what]:
            raise ArgumentError(f"its list of {what} is empty")


def _check_graph(data: Any) -> None:
    nodes = data.get("nodes") if isinstance(data, dict) else None
    heads = data.get("heads") if isinstance(data, dict) else None
    if not isinstance(nodes, list) or not isinstance(heads, list):
        raise ArgumentError("it has no lists of nodes and heads")
    for i, node in enumerate(nodes):
        if not isinstance(node, dict) or not all(
            isinstance(node.get(key), str) for key in ("op", "name")
        ):
            raise ArgumentError(f"node {i} has no op and name")
        # Inputs come before what reads them: no cycles.
        _check_entries(node.get("inputs", []), i, f"node {i} ({node['name']!r})")
        for body in node.get("subgraphs", ()):
            _check_graph(body)
    _check_entries(heads, len(nodes), "an output")


def _check_entries(entries: Any, limit: int, what: str) -> None:
    if not isinstance(entries, list):
        raise ArgumentError(f"{what} has no list of inputs")
    for entry in entries:
        # Two numbers, or three: the node, its output, a version.
        right = isinstance(entry, list) and len(entry) >= len(("node", "output"))
        if not right or not all(type(part) is int and part >= 0 for part in entry):
            raise ArgumentError(f"{what} reads {entry!r}, which is no output of a node")
        if entry[0] >= limit:
            raise ArgumentError(f"{what} reads node {entry[0]}, which does not come before it")


logger = logging.getLogger("mxamp")

Prefix = Union[str, "os.PathLike[str]"]

# A file of arrays: its magic, a reserved number, how many arrays, and the first one's magic
# (NDArray::Load in MXNet's ndarray.cc).
_FIRST_ARRAY = struct.Struct("<QQQI")
_NUMPY_ARRAY = 0xF993FACA

# As often a pair is read that is replaced meanwhile.
_TRIES = 100

_PART = re.compile(r"(.+?)(-symbol\.json|-(\d{4})\.params|\.onnx|\.json|\.params)$")
# How Gluon and Symbol call the parameters of the node in front of these.
_PARAMETER = re.compile(r"_(weight|bias|gamma|beta|parameters|\w+_(mean|var|weight|bias))$")

NO_EPOCH = "epoch must be a whole number, that in the name of the parameter file, not {given}"
EMPTY = "the prefix of the model is empty: give what comes before -symbol.json"
NO_PREFIX = (
    "{path!r} is the name of a file: give the prefix, which is what comes before -symbol.json "
    "({prefix!r}{epoch})"
)
A_FILE = (
    "`out` must be the prefix of the files to write, not the name of one: {prefix!r}, not {out!r}"
)
NO_LAST_PART = "`out` must end in a name for the files to write, such as {example!r}, not {out!r}"
NOT_A_FILE = "{path!r} is {what}, and not a file"
NO_FILE = "there is no file {path!r}{hint}"
UNFINISHED = "a conversion to {path!r} was cut off, and can't be finished here: {why}"
CHANGES = "{path!r} and its parameters are replaced all the time: read them when that has ended"
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


def model_files(prefix: Prefix, epoch: int) -> Tuple[Path, Path]:
    """Return where the symbol and the parameters of a saved model are."""
    if not os.fspath(prefix):
        raise ArgumentError(EMPTY)
    name = os.fspath(prefix)
    try:
        return Path(f"{name}-symbol.json"), Path(f"{name}-{operator.index(epoch):04d}.params")
    except TypeError:
        raise ArgumentError(NO_EPOCH.format(given=shown(epoch))) from None


def files_to_write(out: Prefix, epoch: int) -> Tuple[Path, Path]:
    """Return where a model is saved as `out`, which is a prefix that ends in a name."""
    folder, last = os.path.split(os.fspath(out))
    part = _PART.match(os.fspath(out))
    if part is not None:
        raise ArgumentError(A_FILE.format(out=os.fspath(out), prefix=part[1]))
    # Of these MXNet, given a folder and the last part, makes a path that leads out of the folder.
    if os.fspath(out) and not last.strip("."):
        example = os.path.join(folder, "model")
        raise ArgumentError(NO_LAST_PART.format(out=os.fspath(out), example=example))
    return model_files(out, epoch)


def epochs_of(prefix: Prefix) -> List[int]:
    """Return the epochs that there are parameters of, sorted."""
    symbol, _ = model_files(prefix, 0)
    name = re.escape(symbol.name[: -len("-symbol.json")])
    try:
        files = os.listdir(symbol.parent)
    except OSError:
        return []
    found = (re.fullmatch(name + r"-(\d{4,})\.params", file) for file in files)
    return sorted(int(match[1]) for match in found if match)


def saved_semantics(prefix: Prefix, epoch: int = 0) -> Any:
    """Return a context in which a saved model can be read and run: NumPy's shapes, or classic ones.

    MXNet marks each array of a file with the semantics that were on when it was saved, and loads it
    under the same only.
    """
    path, head = model_files(prefix, epoch)[1], b""
    # load_model says what is missing; a pipe would be waited for.
    with suppress(OSError):
        if path.is_file():
            with open(path, "rb") as file:
                head = file.read(_FIRST_ARRAY.size)
    marked = len(head) == _FIRST_ARRAY.size and _FIRST_ARRAY.unpack(head)[-1] == _NUMPY_ARRAY
    return mx.util.np_shape(marked or mx.util.is_np_shape())


def load_model(prefix: Prefix, epoch: int = 0) -> Model:
    """Read a saved model: (symbol, arg_params, aux_params).

    Reads again where the files are replaced meanwhile. Raises `ArgumentError`, with the file's
    name, where a file is missing or damaged, or where the parameters are not those of the symbol.
    """
    files = model_files(prefix, epoch)
    for _ in range(_TRIES):
        try:
            finish_replacing(files)
        except OSError as error:
            raise ArgumentError(UNFINISHED.format(path=str(files[0]), why=error)) from None
        before = pair_state(files)
        if before is None:
            continue
        try:
            model = _load(prefix, epoch, files)
        except ArgumentError:
            if pair_state(files) == before:
                raise
        else:
            if pair_state(files) == before:
                return model
    raise ArgumentError(CHANGES.format(path=str(files[0])))


def _load(prefix: Prefix, epoch: int, files: Tuple[Path, Path]) -> Model:
    for path in files:
        if not os.path.exists(path):
            raise _missing(prefix, path)
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a pipe or a device"
            raise ArgumentError(NOT_A_FILE.format(path=str(path), what=what))
    with saved_semantics(prefix, epoch):
        symbol = _read_symbol(files[0])
        args, auxs = _read_params(files[1])
    _check_together(files, symbol, {**args, **auxs})
    return symbol, args, auxs


def _missing(prefix: Prefix, path: Path) -> ArgumentError:
    """Return the error for a file that is not there, with what was probably meant."""
    name = os.fspath(prefix)
    part = _PART.match(name)
    if part is not None:
        epoch = f", epoch {int(part[3])}" if part[3] else ""
        return ArgumentError(NO_PREFIX.format(path=name, prefix=part[1], epoch=epoch))
    epochs = epochs_of(prefix)
    hint = ""
    if path.suffix == ".params" and epochs:
        there = shortened([str(epoch) for epoch in epochs])
        hint = f"; there are parameters of epoch {there} (--epoch)"
    elif path.suffix == ".json":
        hint = f": the prefix {name!r} is what comes before -symbol.json"
    return ArgumentError(NO_FILE.format(path=str(path), hint=hint))


def _read_symbol(path: Path) -> Symbol:
    try:
        check_symbol_json(path.read_bytes().decode())
        return mx.sym.load(str(path))
    except UnicodeDecodeError:
        why = "it is no text"
    except (ArgumentError, OSError) as error:
        why = str(error)
    except MXNetError as error:
        why = _unknown_attribute(str(error)) or _last_line(error)
        custom = re.search(r"Cannot find custom operator (\S+)", str(error))
        if custom is not None:
            said = NOT_REGISTERED.format(path=str(path), name=custom[1])
            raise ArgumentError(said) from None
    raise ArgumentError(NO_SYMBOL.format(path=str(path), why=why))


def _unknown_attribute(said: str) -> Optional[str]:
    """Return what is wrong where MXNet knows no such attribute; it lists those there are."""
    found = re.search(
        r"Cannot find argument '(.*?)'.*in operator (\w+)\(name=\"(.*?)\"", said, re.S
    )
    if found is None:
        return None
    attribute, operator, node = found.groups()
    known = re.findall(r"^(\w+) : ", said, re.M)
    return f"{operator} {node!r}: {unknown('attribute', attribute, known)}"


def _read_params(path: Path) -> Tuple[Mapping[str, NDArray], Mapping[str, NDArray]]:
    try:
        arrays = mx.nd.load(str(path))
    except (MXNetError, OSError, ValueError, MemoryError) as error:
        why = CUT_OFF.format(why=_last_line(error))
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=why)) from None
    named = arrays if isinstance(arrays, dict) else {}
    if len(named) != len(arrays) or not all(key[:4] in ("arg:", "aux:") for key in named):
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=NO_NAMES))
    kinds = ({k[4:]: v for k, v in named.items() if k[:4] == kind} for kind in ("arg:", "aux:"))
    return next(kinds), next(kinds)


def _check_together(
    files: Tuple[Path, Path], symbol: Symbol, params: Mapping[str, NDArray]
) -> None:
    """Raise where parameters are missing; warn of those that are too many."""
    inputs = symbol.list_inputs()
    missing = sorted(_surely_parameters(symbol) - params.keys())
    more = sorted(params.keys() - set(inputs))
    if not missing and not more:
        return
    message = OTHER_PARAMS.format(
        params=str(files[1]),
        symbol=str(files[0]),
        missing=len(missing),
        names=_in_brackets(missing),
        more=len(more),
        others=_in_brackets(more),
    )
    if missing or not params.keys() & set(inputs):
        raise ArgumentError(message)
    logger.warning("%s; they are kept as they are", message)


def _surely_parameters(symbol: Symbol) -> Set[str]:
    """Return the inputs that can't be data: auxiliary states, and those named after their reader.

    MXNet calls the inputs of node "fc" fc_weight and fc_bias; Gluon's node is called fc_fwd.
    """
    graph = Graph.from_symbol(symbol)
    found = set(symbol.list_auxiliary_states())
    for node in graph.nodes:
        name = node.name[:-4] if node.name.endswith("_fwd") else node.name
        for source, _ in node.inputs[1:]:
            variable = graph.nodes[source]
            suffix = _PARAMETER.search(variable.name)
            if variable.is_variable and suffix and variable.name[: suffix.start()] == name:
                found.add(variable.name)
    return found


def _in_brackets(names: Sequence[str]) -> str:
    return f" ({shortened(names)})" if names else ""


def _last_line(error: Exception) -> str:
    """Return what MXNet says at the end of its message, after the check that has failed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].rpartition(": ")[2]


@contextmanager
def saved_alike(params: Iterable[Parameter]) -> Iterator[None]:
    """Have MXNet save parameters in bfloat16 with NumPy semantics too.

    It saves NumPy's arrays alone there, and can't copy those that are in bfloat16.
    """
    if not mx.util.is_np_array():
        yield
        return
    kept = {param: param._data for param in params if param._data is not None}
    try:
        for param, arrays in kept.items():
            param._data = [array.as_nd_ndarray() for array in arrays]
        with mx.util.np_array(False):
            yield
    finally:
        for param, arrays in kept.items():
            param._data = arrays
