"""Conversion of saved models: read a model's files, and write the converted model's files."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Tuple, Union

from ..errors import ArgumentError
from ..framework.keywords import checked_call
from ..framework.machine import Dtype, default_device
from ..framework.wording import shown
from ..graph.casts.widen import has_halves
from ..graph.ir import Graph
from ..policy.overrides import LayerArgument
from ..policy.policy import Policy, policy_of
from ..policy.targets import DEFAULT_TARGET
from .models import converted_model
from .options import Options, resolved_dtypes
from .outputs import OutputError, check_errors, compare_models
from .saved import checked_output_files, load_model, model_files, saved_semantics, write_model

INEXACT = "Keep more in float32 with `excluded_sym_names`, or give a larger `tolerance`"
#: The largest relative error of an output that `convert_files` accepts by default.
TOLERANCE = 0.25


class ConvertedFiles(NamedTuple):
    """The files that `convert_files` wrote, and the errors of the converted model's outputs."""

    symbol: Path
    params: Path
    bytes_before: int
    bytes_after: int
    errors: Tuple[OutputError, ...]


@checked_call
def convert_files(
    prefix: Union[str, Path],
    out: Union[str, Path],
    epoch: int = 0,
    target_dtype: Dtype = DEFAULT_TARGET,
    excluded_sym_names: LayerArgument = None,
    cast_optional_params: bool = False,
    *,
    policy: Optional[Policy] = None,
    keep_io_types: Optional[bool] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    check_inputs: Optional[Mapping[str, Any]] = None,
    tolerance: float = TOLERANCE,
    force: bool = False,
    fuse: bool = False,
) -> ConvertedFiles:
    """Convert the saved model `prefix` to mixed precision and save it as `out`.

    ::

        files = amp.convert_files("resnet", "resnet-bf16", target_dtype="bfloat16")
        print(files.params, files.bytes_before, files.bytes_after)

    The new files load in plain MXNet: `SymbolBlock.imports`, `mx.mod.Module.load`,
    `mx.model.load_checkpoint`. Either both files are written, or none is.

    Parameters
    ----------
    prefix : str or Path
        The saved model: the part of its files' names before `-symbol.json` and `-0000.params`.
    out : str or Path
        The same part of the names of the files to write.
    epoch : int, default 0
        The number in the name of the parameter file, the same for both models.
    target_dtype : str or dtype, default "float16"
        "float16", "bfloat16", or "float32" for a float32 model.
    check_inputs : dict of str to array, optional
        Run both models on these inputs before any file is written, and return the errors of
        `compare_models`. `random_inputs` returns suitable inputs. If the original is a 16-bit
        model, it runs in float32 for this check. Without a GPU, a conversion for GPUs is checked in
        float16 on the CPU, which rounds the same values.
    tolerance : float, default 0.25
        The largest relative error of an output that passes the check. Rounding gives errors of some
        hundredths, and of less than 0.2 with random weights. An output that has nothing to do with
        the original's output has an error of 1 or more.
    force : bool, default False
        Overwrite existing files, but never the files of the original. A process that reads the old
        files at the same time may read one old file and one new file. If other processes read the
        files, write to a new prefix.

    The other parameters are those of `convert_model`.

    Returns
    -------
    ConvertedFiles
        `symbol` and `params` are the written files. `bytes_before` and `bytes_after` are the sizes
        of both files together. `errors` are the errors of `compare_models`, and empty without
        `check_inputs`.

    Raises
    ------
    ArgumentError
        The model does not exist, its files are damaged or do not belong together, a file to write
        exists already, or `out` is the original.
    CheckError
        The converted model gives Inf or NaN where the original gives finite numbers, or has errors
        above `tolerance`. `CheckError.errors` has the errors of all outputs.
    StateError
        The converted model does not run here.
    WriteError
        The files can't be written.
    """
    options = Options.of(**locals())
    read = model_files(prefix, epoch)
    targets = checked_output_files(read, out, epoch, force)
    if not tolerance > 0:
        raise ArgumentError(f"`tolerance` must be a number above 0, not {shown(tolerance)}")
    with saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        converted = runnable = converted_model(model, options)
        errors: Tuple[OutputError, ...] = ()
        if check_inputs is not None:
            original, policy = model, options.policy
            if policy.device == "gpu" and default_device() == "cpu":
                # The CPU computes in float32, and rounds to float16 where a GPU computes in it.
                policy = policy_of(policy.target_dtype, "cpu", policy.changes)
                options = replace(options, policy=policy, notes=False)
                runnable = converted_model(model, options)
            dtypes = resolved_dtypes(model[0], {**model[1], **model[2]}, input_dtypes)
            # MXNet's CPU kernels don't run every half-precision model.
            if has_halves(Graph.from_symbol(model[0]), dtypes):
                original = converted_model(model, Options.of("float32", input_dtypes=input_dtypes))
            errors = compare_models(original, runnable, check_inputs)
            check_errors(errors, tolerance, INEXACT)
        write_model(converted, targets, force)
    before, after = (sum(path.stat().st_size for path in files) for files in (read, targets))
    return ConvertedFiles(*targets, before, after, errors)
