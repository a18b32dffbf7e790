"""Models in files: `PREFIX-symbol.json` and `PREFIX-NNNN.params`, read, converted and written."""

import struct
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError

from ..errors import ArgumentError, StateError
from ..framework.machine import dtype_name
from ..framework.wording import counted
from ..graph.validation import check_symbol_json
from ..policy.policy import Policy
from ..policy.targets import DEFAULT_TARGET, check_target
from .arguments import Names
from .compare import Model, OutputError, compare_models
from .models import convert_model
from .pairs import finish_replacing, replaced_files

__all__ = ["ConvertedFiles", "convert_files", "load_model", "saved_semantics"]

# A file of arrays: its magic, a reserved number, how many arrays, and the first one's magic
# (NDArray::Load in MXNet's ndarray.cc).
_FIRST_ARRAY = struct.Struct("<QQQI")
_NUMPY_ARRAY = 0xF993FACA

NUMPY_BFLOAT16 = (
    "{prefix!r} was saved under NumPy semantics, where MXNet can't load bfloat16 parameters: leave "
    "out cast_optional_params (--cast-params) and fuse (--fuse), or convert to float16"
)
LOST = (
    "the converted model gives Inf or NaN in {elements} of output {name!r} where the "
    "original is finite; nothing was written. Keep more of it in float32"
)
NOT_WRITTEN = "{path!r} and its parameters can't be written: {why}; nothing was changed"
UNFINISHED = "a conversion to {path!r} was cut off, and can't be finished here: {why}"


class ConvertedFiles(NamedTuple):
    """What `convert_files` has written, and the errors of the outputs if it was to check them."""

    symbol: Path
    params: Path
    bytes_before: int
    bytes_after: int
    errors: Tuple[OutputError, ...]


def convert_files(
    prefix: Union[str, Path],
    out: Union[str, Path],
    epoch: int = 0,
    target_dtype: Any = DEFAULT_TARGET,
    excluded_sym_names: Names = None,
    cast_optional_params: bool = False,
    *,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    check_inputs: Optional[Mapping[str, Any]] = None,
    force: bool = False,
    fuse: bool = False,
) -> ConvertedFiles:
    """Convert the saved model `prefix` to mixed precision and save it as `out`.

    ::

        amp.convert_files("resnet", "resnet-bf16", target_dtype="bfloat16")

    The new files load in plain MXNet: `SymbolBlock.imports`, `mx.mod.Module.load`,
    `mx.model.load_checkpoint`. Both appear at once, complete, or not at all.

    Parameters
    ----------
    prefix, out : str or Path
        What comes before `-symbol.json` and `-0000.params`.
    epoch : int, default 0
        The number in the name of the parameter file, of both models.
    check_inputs : dict of str to array, optional
        Run both models on these inputs before anything is written, and return the errors
        (`compare_models`; `random_inputs` makes inputs).
    force : bool, default False
        Overwrite files that are there.

    The other parameters are those of `convert_model`.

    Raises
    ------
    ArgumentError
        There is no such model, or a file to write is there already.
    StateError
        The converted model does not run here, or gives Inf or NaN where the original doesn't.
    """
    read, written = _files(prefix, epoch), _files(out, epoch)
    folder = written[0].parent
    if not folder.is_dir():
        raise ArgumentError(f"there is no folder {str(folder)!r} to write to")
    for path in written:
        if path.exists() and not force:
            raise ArgumentError(
                f"{str(path)!r} is there already; overwrite it with force (--force)"
            )
    with saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        dtype = check_target(policy.target_dtype if policy is not None else target_dtype)
        if (cast_optional_params or fuse) and dtype == "bfloat16" and mx.util.is_np_shape():
            raise ArgumentError(NUMPY_BFLOAT16.format(prefix=str(prefix)))
        converted = convert_model(
            *model,
            target_dtype=target_dtype,
            excluded_sym_names=excluded_sym_names,
            cast_optional_params=cast_optional_params,
            policy=policy,
            keep_io_types=keep_io_types,
            input_dtypes=input_dtypes,
            fuse=fuse,
        )
        errors = _checked(model, converted, check_inputs) if check_inputs is not None else ()
        before = sum(path.stat().st_size for path in read)
        _write(converted, written, epoch)
        after = sum(path.stat().st_size for path in written)
        return ConvertedFiles(*written, before, after, errors)


def _checked(model: Model, converted: Model, inputs: Mapping[str, Any]) -> Tuple[OutputError, ...]:
    """Return the errors of a converted model's outputs; raise where it loses finite ones."""
    errors = compare_models(model, converted, inputs)
    for error in errors:
        if error.lost:
            raise StateError(LOST.format(elements=counted(error.lost, "element"), name=error.name))
    return errors


def _write(model: Model, files: Tuple[Path, Path], epoch: int) -> None:
    """Write a model's two files, read them back, and put them in their places as one."""
    prefix = files[0].name[: -len("-symbol.json")]
    try:
        with replaced_files(files) as folder:
            mx.model.save_checkpoint(str(folder / prefix), epoch, *model)
            mx.nd.waitall()
            _, *written = load_model(folder / prefix, epoch)
            if [_shapes(params) for params in written] != [_shapes(p) for p in model[1:]]:
                raise OSError("what was written is not what is read back")
    except (OSError, MXNetError, ArgumentError) as error:
        raise StateError(NOT_WRITTEN.format(path=str(files[0]), why=_last_line(error))) from None


def _shapes(params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: (array.shape, dtype_name(array.dtype)) for name, array in params.items()}


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else "MXNet refuses it"


def saved_semantics(prefix: Union[str, Path], epoch: int = 0) -> Any:
    """Return a context in which a saved model can be read and run: NumPy's shapes, or classic ones.

    MXNet marks each array of a file with the semantics that were on when it was saved, and loads it
    under the same only.
    """
    try:
        with open(_files(prefix, epoch)[1], "rb") as file:
            head = file.read(_FIRST_ARRAY.size)
    except OSError:
        head = b""  # load_model says what is missing
    marked = len(head) == _FIRST_ARRAY.size and _FIRST_ARRAY.unpack(head)[-1] == _NUMPY_ARRAY
    return mx.util.np_shape(marked or mx.util.is_np_shape())


def load_model(prefix: Union[str, Path], epoch: int = 0) -> Model:
    """Read a saved model: (symbol, arg_params, aux_params)."""
    files = _files(prefix, epoch)
    try:
        finish_replacing(files)
    except OSError as error:
        raise ArgumentError(UNFINISHED.format(path=str(files[0]), why=error)) from None
    for path in files:
        if not path.is_file():
            raise ArgumentError(f"there is no file {str(path)!r}")
    try:
        check_symbol_json(files[0].read_text(encoding="utf-8"))
    except (ArgumentError, OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{str(files[0])!r} can't be read as a symbol: {error}") from None
    try:
        with saved_semantics(prefix, epoch):
            symbol, args, auxs = mx.model.load_checkpoint(str(prefix), epoch)
    except (MXNetError, ValueError, UnicodeDecodeError) as error:
        why = _last_line(error)
        raise ArgumentError(f"{str(prefix)!r} can't be read as a model: {why}") from None
    return symbol, args, auxs


def _files(prefix: Union[str, Path], epoch: int) -> Tuple[Path, Path]:
    return Path(f"{prefix}-symbol.json"), Path(f"{prefix}-{epoch:04d}.params")
