"""The command `mxamp export-onnx`: write a saved model as ONNX, checked in ONNX Runtime."""

from typing import Any

import click

from ..convert.saved import load_model, saved_semantics
from ..tools import onnx
from . import options
from .inputs import NamedInput, input_values
from .output import examples, print_errors

_EXAMPLES = examples("mxamp export-onnx model --input data:1,64 --also data:8,64 --out model.onnx")


@click.command(epilog=_EXAMPLES)
@options.model_options
@click.option("--out", required=True, metavar="FILE", help="The file to write.")
@options.input_options
@options.repeatable("--also", type=NamedInput(), text="The same input in another size.")
@click.option("--check/--no-check", default=True, help="Compare the outputs in ONNX Runtime.")
@options.force_option
def export_onnx(prefix: str, epoch: int, out: str, force: bool, **given: Any) -> None:
    """Write a saved model as ONNX, in float32, and check it in ONNX Runtime.

    A size that differs between --input and --also is variable in the ONNX file; all other sizes are
    fixed. Inputs without a file of values get random numbers.
    """
    options.check_out(out, force)
    with saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        sizes = [given["inputs"], *([given["also"]] if given["also"] else [])]
        values = [input_values(model, one, given["input_dtypes"])[0] for one in sizes]
        print_errors(onnx.export_onnx(model, out, values, check=given["check"]))
    click.echo(f"Wrote {out}")
