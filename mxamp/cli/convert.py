"""The command `mxamp convert`: convert a saved model, and check the result."""

import re
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import click

from ..convert.files import TOLERANCE, convert_files
from ..convert.saved import load_model, saved_semantics
from ..policy.targets import TARGETS
from .inputs import input_values, parse_input_dtypes
from .options import (
    TargetDtype,
    chosen_policy,
    force_option,
    input_dtype_option,
    input_option,
    saved_model_options,
)
from .output import examples, usage_error
from .screen import print_errors

NOTHING_LOWERED = (
    "--dtype float32 has no operator in half precision: leave out --policy and --fp32-op"
)
LARGER = " (larger: the graph now holds casts; --cast-params stores parameters in 16 bits)"
TUNED_AS = "{policy} was tuned as {form}: add {option}, or the model is slower than measured"
_EXAMPLES = examples(
    "mxamp convert model --dtype bfloat16 --out model-bf16",
    "mxamp convert model --dtype float16 --device gpu --out model-fp16",
    "mxamp convert model-fp16 --dtype float32 --out model-fp32",
    "mxamp convert model --dtype bfloat16 --check --input data:8,64 --out checked",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option(
    "--dtype",
    type=TargetDtype((*TARGETS, "float32")),
    help="The target dtype. float32 removes half precision from a model.",
)
@click.option("--out", required=True, help="Prefix of the files to write.")
@click.option("--fp32-op", multiple=True, metavar="NAME", help="Operators to keep in float32.")
@click.option(
    "--cast-params", is_flag=True, help="Store parameters in the target dtype where possible."
)
@click.option("--cast-io", is_flag=True, help="Take and return the target dtype where possible.")
@input_option
@input_dtype_option
@click.option("--check", is_flag=True, help="Compare the outputs with the original's.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Largest relative error of an output that --check accepts. Default: {TOLERANCE}.",
)
@click.option("--fuse", is_flag=True, help="Fuse operators: fastest for inference on CPUs.")
@force_option
def convert(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    policy: Optional[str],
    dtype: Optional[str],
    fp32_op: Sequence[str],
    cast_params: bool,
    cast_io: bool,
    inputs: Sequence[str],
    dtypes: Sequence[str],
    check: bool,
    tolerance: Optional[float],
    **options: Any,
) -> None:
    """Convert a saved model, PREFIX-symbol.json and PREFIX-NNNN.params, to mixed precision.

    PREFIX may also be the name of either file. --dtype or --policy is required.
    """
    input_dtypes, check_inputs = parse_input_dtypes(dtypes), None
    for option, given in (("--input", inputs), ("--tolerance", tolerance)):
        if given and not check:
            raise usage_error(f"{option} is for --check; give that too")
    target: Dict[str, Any] = {"target_dtype": "float32"}
    if dtype != "float32":
        chosen = chosen_policy(dtype, policy, device, default=False)
        form = (
            re.search("^# Form: (fused|converted)$", Path(policy).read_text(), re.M)
            if policy
            else None
        )
        if form and not (options["fuse"] if form[1] == "fused" else cast_params):
            option = "--fuse" if form[1] == "fused" else "--cast-params"
            click.echo(TUNED_AS.format(policy=policy, form=form[1], option=option), err=True)
        target = {"policy": chosen.override(fp32=fp32_op)}
    elif policy or fp32_op:
        raise usage_error(NOTHING_LOWERED)
    if check:
        with saved_semantics(prefix, epoch):
            check_inputs, _ = input_values(load_model(prefix, epoch), inputs, input_dtypes)
    done = convert_files(
        prefix,
        epoch=epoch,
        excluded_sym_names=keep_fp32,
        cast_optional_params=cast_params,
        keep_io_types=False if cast_io else None,
        input_dtypes=input_dtypes,
        check_inputs=check_inputs,
        tolerance=TOLERANCE if tolerance is None else tolerance,
        **target,
        **options,
    )
    if check:
        print_errors(done.errors)
    is_larger = done.bytes_after > done.bytes_before
    click.echo(
        f"{done.symbol}, {done.params}: {done.bytes_after:,} bytes, from {done.bytes_before:,}"
        + (LARGER if is_larger and not cast_params and dtype != "float32" else "")
    )
