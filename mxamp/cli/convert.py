"""The command `mxamp convert`: convert a saved model, and check the result."""

from typing import Any, Dict, Optional

import click

from ..convert.files import TOLERANCE, convert_files
from ..convert.saved import load_model, model_files, saved_semantics
from ..policy.lists import read_toml
from ..policy.targets import DTYPES
from ..tools.tuning.forms import CONVERTED, FUSED, convert_options
from . import options
from .inputs import Named, input_values
from .output import examples, print_errors

FOR_HALVES = "--fp32-op and --device are for 16-bit dtypes: leave them out with --dtype float32"
NO_FORM = "the form in --policy is {!r}: only 'converted' and 'fused' need this command"

_EXAMPLES = examples(
    "mxamp convert model-fp16 --dtype float32 --out model-fp32",
    "mxamp convert model --dtype bfloat16 --check --input data:8,64 --out checked",
)
_DTYPE = "The target dtype. float32 is for 16-bit models, and for --fuse."
_CHECK = "Compare the outputs with the original's in float32: norm of the difference, by its norm."
_CAST_PARAMS = "Store parameters in 16 bits where possible."
_TOLERANCE = f"Largest relative error of an output for --check. Default: {TOLERANCE}."


@click.command(epilog=_EXAMPLES)
@options.saved_model_options
@click.option("--dtype", "target_dtype", type=click.Choice(DTYPES), help=_DTYPE)
@click.option("--out", metavar="PREFIX", required=True, help="Prefix of the files to write.")
@options.repeatable("--fp32-op", "fp32_ops", metavar="NAME", text="Operators to keep in float32.")
@click.option("--cast-params", "cast_optional_params", is_flag=True, help=_CAST_PARAMS)
@click.option("--cast-io", is_flag=True, help="Take and return the target dtype where possible.")
@options.input_options
@click.option("--check", is_flag=True, help=_CHECK)
@click.option("--tolerance", type=click.FloatRange(min=0, min_open=True), help=_TOLERANCE)
@click.option("--fuse", is_flag=True, help="Fuse for CPUs; without avx512, give float32.")
@options.force_option
def convert(prefix: str, epoch: int, inputs: Named, check: bool, **given: Any) -> None:
    """Convert a saved model, PREFIX-symbol.json and PREFIX-NNNN.params, to mixed precision.

    PREFIX may also be the name of either file. --dtype or --policy is required. With a policy that
    `mxamp tune` has written, the model is converted in the form that was the fastest.
    """
    dtype, out, fp32_ops = (given.pop(name) for name in ("target_dtype", "out", "fp32_ops"))
    policy, device = given.pop("policy"), given.pop("device")
    if not (dtype or policy):
        raise click.UsageError("Missing option '--dtype' (or '--policy').")
    if (inputs or given["tolerance"]) and not check:
        raise click.UsageError("--input and --tolerance are for --check: give --check too")
    if dtype == "float32" and (fp32_ops or device):
        raise click.UsageError(FOR_HALVES)
    for path in model_files(out, epoch):
        options.check_out(str(path), given["force"])
    if dtype == "float32" and not policy:
        given["target_dtype"] = dtype
    else:
        given["policy"] = options.chosen_policy(dtype, policy, device).override(fp32=fp32_ops)
    given.update(_options_of_tuned_form(policy))
    if check:
        with saved_semantics(prefix, epoch):
            model = load_model(prefix, epoch)
            given["check_inputs"], _ = input_values(model, inputs, given["input_dtypes"])
    given["input_dtypes"] = dict(given["input_dtypes"])
    given["keep_io_types"] = False if given.pop("cast_io") else None
    given["tolerance"] = given["tolerance"] or TOLERANCE
    new = convert_files(prefix, out, epoch, **given)
    if check:
        print_errors(new.errors)
        worst = max(one.relative for one in new.errors)
        click.echo(f"largest relative error: {worst:.4g}; --tolerance: {given['tolerance']:g}")
    click.echo(f"{new.symbol}, {new.params}: {new.bytes_after:,} bytes (was {new.bytes_before:,})")


def _options_of_tuned_form(policy: Optional[str]) -> Dict[str, bool]:
    """Return arguments of `convert_files` for the form (converted, fused) that `tune` found best.

    A form is a way to run a model, such as converted or fused.
    """
    form = read_toml(policy).get("form", "") if policy else ""
    if form not in ("", CONVERTED, FUSED):
        raise click.UsageError(NO_FORM.format(form))
    return {name: True for name, on in convert_options(form).items() if on}
