"""Models in files, converted to files: `PREFIX-symbol.json` and `PREFIX-NNNN.params`."""

import logging
import os
import zlib
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet.base import MXNetError
from mxnet.context import current_context

from ..errors import ArgumentError, StateError
from ..framework.files import NOT_THE_SAME, checked_folder, checksum, place_of
from ..framework.machine import default_device, device_kind, dtype_name
from ..framework.wording import counted, shown
from ..policy.layers import Layers
from ..policy.policy import Policy
from ..policy.targets import DEFAULT_TARGET, check_target
from .arguments import as_tuned
from .compare import Model, OutputError, compare_models
from .models import convert_model
from .pairs import renamed, replaced_files, set_apart
from .saved import files_to_write, load_model, model_files, saved_semantics

__all__ = ["TOLERANCE", "ConvertedFiles", "convert_files"]

logger = logging.getLogger("mxamp")

#: What `convert_files` lets outputs be off by, relatively.
TOLERANCE = 0.25

NUMPY_BFLOAT16 = (
    "{prefix!r} was saved under NumPy semantics, where MXNet can't load bfloat16 parameters: leave "
    "out `cast_optional_params` and `fuse=True`, or convert to float16"
)
LOST = (
    "the converted model gives Inf or NaN in {elements} of output {name!r} where the "
    "original is finite; nothing was written. Keep more of it in float32 with `excluded_sym_names`"
)
FAR_OFF = (
    "output {name!r} of the converted model has a relative error of {found:.2g}, above the "
    "tolerance of {limit:g}; nothing was written. Keep more of it in float32 with "
    "`excluded_sym_names`, or give a larger `tolerance`"
)
OTHER_DEVICE = "The model was converted for {device}s, and can be checked there"
NO_OUT = "the prefix of the files to write is empty: give another `out`"
SAME_FILES = (
    "{out!r} names the files of the model itself ({path!r}), which a conversion never overwrites: "
    "give another `out`"
)
IS_THERE = "{path!r} is there already: give another `out`, or overwrite it with `force=True`"
LARGER = (
    "the converted files are larger than the model's (%s bytes, from %s): the graph holds casts "
    "now. `cast_optional_params` stores parameters in 16 bits"
)


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
    excluded_sym_names: Layers = None,
    cast_optional_params: Optional[bool] = None,
    *,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    check_inputs: Optional[Mapping[str, Any]] = None,
    tolerance: float = TOLERANCE,
    force: bool = False,
    fuse: Optional[bool] = None,
) -> ConvertedFiles:
    """Convert the saved model `prefix` to mixed precision and save it as `out`.

    ::

        amp.convert_files("resnet", "resnet-bf16", target_dtype="bfloat16")

    The new files load in plain MXNet: `SymbolBlock.imports`, `mx.mod.Module.load`,
    `mx.model.load_checkpoint`. Either both are written or none is.

    Parameters
    ----------
    prefix, out : str or Path
        What comes before `-symbol.json` and `-0000.params`.
    epoch : int, default 0
        The number in the name of the parameter file, of both models.
    check_inputs : dict of str to array, optional
        Run both models on these inputs before anything is written, and return the errors
        (`compare_models`; `random_inputs` makes inputs).
    tolerance : float, default 0.25
        The largest relative error of an output that passes this check. Models that compute right
        in half precision stay well below: rounding adds up to some hundredths, on random weights
        to less than 0.2. An output that has nothing to do with the original's has 1 and more.
    force : bool, default False
        Overwrite files that are there; never the model's own. Where they hold another symbol, the
        parameters get names of their own, so that nobody can read one file of each pair.

    The other parameters are those of `convert_model`.

    Raises
    ------
    ArgumentError
        There is no such model, its files are damaged or do not belong together, a file to write
        is there already, or is one of the model's own.
    StateError
        The converted model does not run here, gives Inf or NaN where the original doesn't, or has
        errors above `tolerance`.
    WriteError
        The files can't be written.
    """
    read, written = model_files(prefix, epoch), _files_to_write(prefix, out, epoch, force)
    if not isinstance(tolerance, (int, float)) or not tolerance > 0:
        raise ArgumentError(f"`tolerance` must be a number above 0, not {shown(tolerance)}")
    logger.info("reading %s", os.fspath(prefix))
    with saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        dtype = check_target(policy.target_dtype if policy is not None else target_dtype)
        if policy is not None:
            cast_optional_params, fuse = as_tuned(policy, cast_optional_params, fuse)
        lowers = policy is None or policy.lowers
        offline = lowers and dtype == "bfloat16" and (cast_optional_params or fuse)
        if offline and mx.util.is_np_shape():
            raise ArgumentError(NUMPY_BFLOAT16.format(prefix=str(prefix)))
        logger.info("converting %s to %s", os.fspath(prefix), dtype)
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
        errors: Tuple[OutputError, ...] = ()
        if check_inputs is not None:
            logger.info("running %s before and after", os.fspath(prefix))
            errors = _compared(model, converted, check_inputs, policy)
            _check(errors, tolerance)
        before = sum(path.stat().st_size for path in read)
        logger.info("writing %s", os.fspath(out))
        _write(converted, written, epoch, force)
    after = sum(path.stat().st_size for path in written)
    if after > before:
        logger.info(LARGER, f"{after:,}", f"{before:,}")
    return ConvertedFiles(*written, before, after, errors)


def _files_to_write(
    prefix: Union[str, Path], out: Union[str, Path], epoch: int, force: bool
) -> Tuple[Path, Path]:
    """Return where the converted model is written: not over the model itself, by any name."""
    if not os.fspath(out):
        raise ArgumentError(NO_OUT)
    read = [place_of(path) for path in model_files(prefix, epoch)]
    written = files_to_write(out, epoch)
    for path in written:
        checked_folder(path)
        if place_of(path) in read or (path.exists() and _is_one_of(path, read)):
            raise ArgumentError(SAME_FILES.format(out=os.fspath(out), path=str(path)))
    _check_absent(written, force)
    return written


def _check_absent(files: Sequence[Path], force: bool) -> None:
    for path in files:
        if path.exists() and not force:
            raise ArgumentError(IS_THERE.format(path=str(path)))


def _is_one_of(path: Path, others: Any) -> bool:
    return any(os.path.exists(other) and path.samefile(other) for other in others)


def _compared(
    model: Model, converted: Model, inputs: Mapping[str, Any], policy: Optional[Policy]
) -> Tuple[OutputError, ...]:
    """Return the errors of a converted model's outputs."""
    try:
        return compare_models(model, converted, inputs)
    except StateError as error:
        device = default_device() if policy is None else policy.device
        if device == device_kind(current_context()):
            raise
        raise StateError(f"{error}. {OTHER_DEVICE.format(device=device.upper())}") from None


def _check(errors: Sequence[OutputError], tolerance: float) -> None:
    """Raise where errors of outputs are too large."""
    for error in errors:
        if error.lost:
            raise StateError(LOST.format(elements=counted(error.lost, "element"), name=error.name))
    worst = max(errors, key=lambda error: error.relative, default=None)
    if worst is not None and worst.relative > tolerance:
        off = {"name": worst.name, "found": worst.relative, "limit": tolerance}
        raise StateError(FAR_OFF.format(**off))


def _write(model: Model, files: Tuple[Path, Path], epoch: int, force: bool) -> None:
    """Write a model's two files, read them back, and put them in their places as one."""
    prefix = files[0].name[: -len("-symbol.json")]
    wanted, start = model[0].tojson(remove_amp_cast=False), ""

    def check(folder: Path) -> None:
        checksum(folder / files[1].name)  # from the disk, into memory
        text = (folder / files[0].name).read_bytes().decode()
        try:
            _, *params = load_model(folder / prefix, epoch)
        except ArgumentError as error:
            raise OSError(NOT_THE_SAME) from error
        same = [_sums(p) for p in params] == [_sums(p, start) for p in model[1:]]
        if not same or text != renamed(wanted, model[1].keys() | model[2].keys(), start):
            raise OSError(NOT_THE_SAME)

    with replaced_files(files, check) as (folder, is_locked):
        # Since it was looked for first, another process may have written it.
        _check_absent(files, force)
        try:
            mx.model.save_checkpoint(str(folder / prefix), epoch, *model, remove_amp_cast=False)
            mx.nd.waitall()
            start = set_apart(folder, files, is_locked)
        except MXNetError as error:
            raise OSError(str(error).strip().splitlines()[-1]) from error


def _sums(params: Mapping[str, Any], start: str = "") -> Mapping[str, Any]:
    """Return the shape, the dtype and a checksum of each parameter, by its name after `start`."""
    return {
        start + name: (array.shape, dtype_name(array.dtype), zlib.crc32(array.asnumpy().tobytes()))
        for name, array in params.items()
    }
