"""The command `mxamp convert`: convert a saved model, and check the result."""

import re
from pathlib import Path
from typing import Any, Dict, Optional

import click

from ..convert.files import TOLERANCE, convert_files
from ..convert.saved import load_model, saved_semantics
from ..policy.targets import TARGETS
from .inputs import Named, input_values
from .options import chosen_policy, force_option, input_options, saved_model_options
from .output import examples, print_errors

_EXAMPLES = examples(
    "mxamp convert model --dtype bfloat16 --out model-bf16",
    "mxamp convert model-fp16 --dtype float32 --out model-fp32",
    "mxamp convert model --dtype bfloat16 --check --input data:8,64 --out checked",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@click.option(
    "--dtype",
    type=click.Choice([*TARGETS, "float32"]),
    help="The target dtype. float32 removes half precision from a model.",
)
@click.option("--out", required=True, help="Prefix of the files to write.")
@click.option("--fp32-op", multiple=True, metavar="NAME", help="Operators to keep in float32.")
@click.option("--cast-params", is_flag=True, help="Store parameters in 16 bits where possible.")
@click.option("--cast-io", is_flag=True, help="Take and return the target dtype where possible.")
@input_options
@click.option("--check", is_flag=True, help="Compare the outputs with the original's.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help="Largest relative error of an output that --check accepts.",
)
@click.option("--fuse", is_flag=True, help="Fuse operators: fastest for inference on CPUs.")
@force_option
def convert(
    prefix: str,
    epoch: int,
    dtype: Optional[str],
    policy: Optional[str],
    inputs: Named,
    dtypes: Named,
    check: bool,
    **given: Any,
) -> None:
    """Convert a saved model, PREFIX-symbol.json and PREFIX-NNNN.params, to mixed precision.

    PREFIX may also be the name of either file. --dtype or --policy is required. With a policy that
    `mxamp tune` has written, the model is converted in the form that was the fastest.
    """
    if not (dtype or policy):
        raise click.UsageError("Missing option '--dtype' (or '--policy').")
    if inputs and not check:
        raise click.UsageError("--input is for --check; give that too")
    target: Dict[str, Any] = {"target_dtype": dtype}
    if dtype != "float32" or policy:
        chosen = chosen_policy(dtype, policy, given["device"])
        target = {"policy": chosen.override(fp32=given["fp32_op"])}
    fuse, cast_params = given["fuse"], given["cast_params"]
    if policy:  # tuned in a form: this is the one with the speed that was measured
        forms = re.findall("^# Form: (converted|fused)$", Path(policy).read_text(), re.M)
        fuse, cast_params = fuse or "fused" in forms, cast_params or bool(forms)
    check_inputs = None
    if check:
        with saved_semantics(prefix, epoch):
            check_inputs, _ = input_values(load_model(prefix, epoch), inputs, dtypes)
    done = convert_files(
        prefix,
        given["out"],
        epoch,
        excluded_sym_names=given["keep_fp32"],
        cast_optional_params=cast_params,
        keep_io_types=False if given["cast_io"] else None,
        input_dtypes=dict(dtypes),
        check_inputs=check_inputs,
        tolerance=given["tolerance"],
        force=given["force"],
        fuse=fuse,
        **target,
    )
    if check:
        print_errors(done.errors)
    click.echo(
        f"{done.symbol}, {done.params}: {done.bytes_after:,} bytes, from {done.bytes_before:,}"
    )
