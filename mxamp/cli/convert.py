"""The command `mxamp convert`: convert a saved model, and check the result."""

from typing import Any, Dict, Iterable, Mapping, Optional, Sequence

import click
from rich.markup import escape
from rich.table import Table

from ..convert.files import TOLERANCE, convert_files
from ..convert.outputs import OutputError
from ..convert.saved import load_model, saved_semantics
from .inputs import dtypes_of_inputs, values_for
from .options import DTYPES, chosen_policy, saved_model_options
from .output import console, examples, table_of, usage_error

__all__ = ["convert"]

_INPUT_HELP = "Shape or values of an input, such as data:1,3,224,224, for --check."
RENAMED = "{symbol} has replaced another symbol: its parameters' names begin with {renamed}"
LARGER = " (larger: the graph now holds casts; --cast-params stores parameters in 16 bits)"
_DTYPE_HELP = "Dtype of an input that is not float32, such as index:int64."
_EXAMPLES = examples(
    "mxamp convert model --dtype bfloat16 --out model-bf16",
    "mxamp convert model --dtype float16 --device gpu --cast-params --out half/model",
    "mxamp convert model --dtype bfloat16 --check --input data:8,3,224,224 --out model-bf16",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option("--dtype", type=DTYPES, help="The target dtype; required without --policy.")
@click.option("--out", required=True, help="Prefix of the files to write.")
@click.option("--fp32-op", multiple=True, metavar="NAME", help="Operators to keep in float32.")
@click.option("--cast-params", is_flag=True, help="Store parameters in DTYPE where all read it.")
@click.option("--cast-io", is_flag=True, help="Take and return DTYPE where that is computed in.")
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME:SHAPE|NAME:FILE.npy", help=_INPUT_HELP
)
@click.option("--input-dtype", "dtypes", multiple=True, metavar="NAME:DTYPE", help=_DTYPE_HELP)
@click.option("--check", is_flag=True, help="Run both models on the inputs, or random ones.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Largest relative error of an output that --check accepts. Default: {TOLERANCE}.",
)
@click.option("--fuse", is_flag=True, help="Fuse operators, for inference on CPUs only.")
@click.option("--force", is_flag=True, help="Overwrite files.")
def convert(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    dtype: Optional[str],
    out: str,
    fp32_op: Sequence[str],
    cast_params: bool,
    cast_io: bool,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    check: bool,
    tolerance: Optional[float],
    fuse: bool,
    force: bool,
) -> None:
    """Convert a saved model, PREFIX-symbol.json and PREFIX-NNNN.params, to mixed precision.

    PREFIX may also be the name of either file.
    """
    input_dtypes = dtypes_of_inputs(dtypes)
    for option, given in (("--input", inputs), ("--tolerance", tolerance)):
        if given and not check:
            raise usage_error(f"{option} is for --check; give that too")
    policy = chosen_policy(dtype, device, default=False)
    done = convert_files(
        prefix,
        out,
        epoch,
        excluded_sym_names=keep_fp32,
        cast_optional_params=cast_params,
        policy=policy.override(fp32=fp32_op),
        keep_io_types=not cast_io,
        input_dtypes=input_dtypes,
        check_inputs=_check_inputs(prefix, epoch, inputs, input_dtypes) if check else None,
        tolerance=TOLERANCE if tolerance is None else tolerance,
        force=force,
        fuse=fuse,
    )
    if check:
        console().print(_errors_table(done.errors))
    if done.renamed:
        click.echo(RENAMED.format(symbol=done.symbol, renamed=done.renamed))
    click.echo(
        f"{done.symbol}, {done.params}: {done.bytes_after:,} bytes, from {done.bytes_before:,}"
        + (LARGER if done.bytes_after > done.bytes_before and not cast_params else "")
    )


def _check_inputs(
    prefix: str, epoch: int, inputs: Sequence[str], dtypes: Mapping[str, str]
) -> Dict[str, Any]:
    """Return the given values of inputs, and random values for the other inputs."""
    with saved_semantics(prefix, epoch):
        return values_for(load_model(prefix, epoch), inputs, dtypes)[0]


def _errors_table(errors: Iterable[OutputError]) -> Table:
    rows = []
    for error in errors:
        same = "" if error.same_argmax is None else f"{error.same_argmax:.1%}"
        shape = "x".join(map(str, error.shape))
        numbers = f"{error.relative:.2e}", f"{error.maximum:.2e}"
        rows.append((escape(error.name), shape, *numbers, same))
    return table_of(["output", "shape", "relative error", "largest", "same argmax"], rows)
