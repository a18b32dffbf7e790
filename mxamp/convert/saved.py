"""Saved models, `PREFIX-symbol.json` and `PREFIX-NNNN.params`: read or replace both files.

MXNet opens the two files by name, one after the other, so no single step replaces both for a
reader: one that reads at the very moment of the replacement may open one file of each model.
"""

import json
import logging
import operator
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, closest
from ..framework.files import (
    NOT_THE_SAME,
    check_file_path,
    checksum,
    leftovers,
    locked,
    replaced_files,
)
from ..framework.machine import dtype_name
from ..framework.operators import resolve
from ..framework.wording import shortened
from ..graph.inspect import shapes_for_any_data
from ..graph.ir import Graph
from .outputs import Model, error_reason

logger = logging.getLogger("mxamp")

Prefix = Union[str, "os.PathLike[str]"]
Files = Tuple[Path, Path]

_SYMBOL = "-symbol.json"

#: Where a parameter file has the magic of its first array, and the magic of one saved under NumPy
#: semantics (NDArray::Load in MXNet's ndarray.cc).
_MAGIC, _NUMPY_ARRAY = slice(24, 28), (0xF993FACA).to_bytes(4, "little")

_MODEL_FILE = re.compile(r"(.+?)(-symbol\.json|-\d{4}\.params|\.(onnx|json|params|toml))$")

NOT_A_PREFIX = "{path!r} is a file: the prefix of its model is {prefix!r} (`policy` takes policies)"
LEFT = "; a killed conversion has left {names}: convert again, with `force=True`"
NUMPY_BFLOAT16 = "%s: under npx.set_np(), use it within mx.util.np_array(False), np_shape(True)"
SAME_FILES = "{out!r} names the model's own file {path!r}: give another `out`"
IS_THERE = "{path!r} is there already: give another `out`, or overwrite it with `force=True`"
NO_PARAMS = "{path!r} can't be read as parameters: {why}"
NO_NAMES = "its arrays are not named arg:... or aux:..., as block.export and save_checkpoint do"
UNREAD = "%r holds %s, which the model does not read: SymbolBlock.imports and Module.load refuse it"


def model_files(prefix: Prefix, epoch: int) -> Files:
    """Return the paths of a saved model: `PREFIX-symbol.json` and `PREFIX-NNNN.params`."""
    name = os.fspath(prefix)
    if not os.path.basename(name).strip("."):
        raise ArgumentError(f"the prefix {name!r} has no name: give what precedes -symbol.json")
    return Path(name + _SYMBOL), Path(f"{name}-{operator.index(epoch):04d}.params")


def checked_output_files(read: Files, out: Prefix, epoch: int, force: bool) -> Files:
    """Return the paths to write a model to; raise if one exists or is a file of the source model.

    Existing files raise without `force` only.
    """
    check_prefix(out)
    targets = model_files(out, epoch)
    for path in targets:
        check_file_path(path)
        if any(os.path.realpath(path) == os.path.realpath(other) for other in read):
            raise ArgumentError(SAME_FILES.format(out=os.fspath(out), path=str(path)))
        if path.exists() and not force:
            raise ArgumentError(IS_THERE.format(path=str(path)))
    return targets


def check_prefix(prefix: Prefix) -> None:
    """Raise if a model's prefix is the full name of a file, such as model-symbol.json."""
    match = _MODEL_FILE.match(os.fspath(prefix))
    if match is not None:
        raise ArgumentError(NOT_A_PREFIX.format(path=match[0], prefix=match[1]))


def epochs_of(prefix: Prefix) -> List[int]:
    """Return the epochs of the parameter files of a saved model, sorted."""
    folder, name = os.path.split(os.fspath(prefix))
    files = (path.name for path in Path(folder).glob("*.params"))
    found = (re.fullmatch(re.escape(name) + r"-(\d{4,})\.params", file) for file in files)
    return sorted(int(match[1]) for match in found if match)


def saved_semantics(prefix: Prefix, epoch: int = 0) -> Any:
    """Return a context manager that sets a saved model's shape semantics (NumPy's or classic).

    MXNet marks each array of a file with the semantics that were on when it was saved, and loads it
    under the same only.
    """
    path, head = model_files(prefix, epoch)[1], b""
    if os.path.isfile(path):  # load_model reports a missing file, and opening a pipe would block
        with suppress(OSError), open(path, "rb") as file:
            head = file.read(_MAGIC.stop)
    return mx.util.np_shape(head[_MAGIC] == _NUMPY_ARRAY or mx.util.is_np_shape())


def load_model(prefix: Prefix, epoch: int = 0) -> Model:
    """Return the saved model with a prefix and epoch as (symbol, arg_params, aux_params).

    Raises `ArgumentError`, with the file's name, where a file is missing or damaged, or where the
    parameters are not those of the symbol.
    """
    files = model_files(prefix, epoch)
    for path in files:
        if not os.path.isfile(path):
            check_prefix(prefix)
            if not os.access(path.parent, os.R_OK | os.X_OK):
                raise ArgumentError(f"there is no folder {str(path.parent)!r} that you may list")
            epochs = ", ".join(map(str, epochs_of(prefix))) if path == files[1] else ""
            names = [one.name[: -len(_SYMBOL)] for one in path.parent.glob("*" + _SYMBOL)]
            near = closest(Path(prefix).name, names) if path == files[0] else ""
            hint = f"; there are parameters of epoch {epochs} (--epoch)" if epochs else near
            raise ArgumentError(f"there is no file {str(path)!r}{hint}{_hint_of_leftovers(path)}")
    with saved_semantics(prefix, epoch):
        symbol = _read_symbol(files[0])
        args, auxs = _read_params(files[1])
    _check_params_match(files, symbol, {**args, **auxs})
    return symbol, args, auxs


def _hint_of_leftovers(path: Path) -> str:
    """Return a hint for error messages about files that killed conversions left; "" if none."""
    with locked(path):  # other conversions set files aside for a moment
        left = leftovers(path) if os.access(path.parent, os.R_OK) else []
    return LEFT.format(names=shortened([one.name for one in left])) if left else ""


def _read_symbol(path: Path) -> Symbol:
    """Return the symbol in a JSON file; raise with the reason if the file is damaged."""
    try:
        # MXNet doesn't escape control characters.
        graph = json.loads(path.read_bytes().decode(), strict=False)
        nodes = [*enumerate(graph["nodes"])]
        # MXNet loads a graph with a cycle, and may then run forever.
        has_order = all(0 <= k < i for i, node in nodes for k, *_ in node.get("inputs", ()))
        if not (nodes and graph["heads"] and has_order):
            raise ValueError("it has no nodes or no heads, or a node that reads a later one")
        return mx.sym.load(str(path))
    except (MXNetError, OSError) as error:
        why = error_reason(error)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = f"it is no graph in JSON, or was cut off: {error}"
    raise ArgumentError(f"{str(path)!r} can't be read as a symbol: {why}")


def _read_params(path: Path) -> Tuple[Dict[str, NDArray], Dict[str, NDArray]]:
    """Return the arg_params and aux_params in a parameter file; raise if it is damaged."""
    try:
        named = mx.nd.load(str(path)) or {}
    except (MXNetError, OSError, ValueError, MemoryError) as error:
        why = f"it was cut off, or is another kind of file ({error_reason(error)})"
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=why)) from None
    if not isinstance(named, dict) or {key[:4] for key in named} - {"arg:", "aux:"}:
        raise ArgumentError(NO_PARAMS.format(path=str(path), why=NO_NAMES))
    kinds = ({k[4:]: v for k, v in named.items() if k[:4] == kind} for kind in ("arg:", "aux:"))
    return next(kinds), next(kinds)


def _check_params_match(files: Files, symbol: Symbol, params: Mapping[str, NDArray]) -> None:
    """Raise if a symbol needs parameters that `params` lacks or has in other shapes."""
    graph, read, wrong = Graph.from_symbol(symbol), set(symbol.list_inputs()), ""
    missing = _certain_param_names(graph).union(symbol.list_auxiliary_states()) - params.keys()
    unread = sorted(params.keys() - read)
    for name, fitting in shapes_for_any_data(graph, params.keys()).items():
        shape = params[name].shape
        if len(shape) != len(fitting) or any(b not in (0, a) for a, b in zip(shape, fitting)):
            sizes = " x ".join(str(size or "any") for size in fitting)
            wrong = f"holds {name!r} of shape {shape}, which has to be {sizes} in"
    if missing or (unread and len(unread) == len(params)):
        wrong = f"lacks {shortened(sorted(missing or read))} of"
    if wrong:
        hint = f"use the files that were saved together{_hint_of_leftovers(files[0])}"
        raise ArgumentError(f"{str(files[1])!r} {wrong} {str(files[0])!r}: {hint}")
    if unread:
        logger.warning(UNREAD, str(files[1]), shortened(unread))


def _certain_param_names(graph: Graph) -> Set[str]:
    """Return the names of variables that are surely parameters, by their names or attributes."""
    found = {one.name for one in graph.variables if "__lr_mult__" in one.attrs}
    for node in graph.nodes:
        layers = node.name, node.name.partition("_fwd")[0]  # Gluon adds _fwd
        for (source, _), name in zip(node.inputs, node.inputs and resolve(node.op).inputs):
            variable = graph.nodes[source]
            if variable.is_variable and name in ("weight", "bias", "gamma", "beta", "parameters"):
                found.update({f"{layer}_{name}" for layer in layers} & {variable.name})
    return found


def write_model(model: Model, files: Files, force: bool = True) -> None:
    """Write a model's two files; after an error, both old files are unchanged.

    Without `force`, raises `ArgumentError` if a file exists. Raises `WriteError` if writing fails.
    """
    content = {f"arg:{name}": array for name, array in model[1].items()}
    content.update({f"aux:{name}": array for name, array in model[2].items()})
    if mx.util.is_np_shape() and "bfloat16" in {dtype_name(a.dtype) for a in content.values()}:
        logger.warning(NUMPY_BFLOAT16, files[0])

    def check_content(temporary: Sequence[Path]) -> None:
        for path in files:
            if not force and (path.exists() or leftovers(path)):
                raise ArgumentError(IS_THERE.format(path=str(path)))
        checksum(temporary[1])  # reads the file from the disk, not from the cache
        try:
            found = _read_symbol(temporary[0]), *_read_params(temporary[1])
        except ArgumentError as error:
            raise OSError(NOT_THE_SAME) from error
        if _fingerprint(found) != _fingerprint(model):
            raise OSError(NOT_THE_SAME)

    with replaced_files(files, check_content) as (symbol_file, params_file):
        try:
            model[0].save(str(symbol_file), remove_amp_cast=False)
            mx.nd.save(str(params_file), content)
            mx.nd.waitall()
        except MXNetError as error:
            raise OSError(error_reason(error)) from error


def _fingerprint(model: Model) -> object:
    """Return a model's symbol as JSON, and shape, dtype and checksum of each parameter."""

    def described(array: NDArray) -> object:
        return array.shape, dtype_name(array.dtype), zlib.crc32(array.asnumpy().tobytes())

    arrays = {name: described(array) for name, array in {**model[1], **model[2]}.items()}
    return model[0].tojson(remove_amp_cast=False), arrays
