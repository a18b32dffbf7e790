"""The command `mxamp export-onnx`: write a saved model as ONNX, checked in ONNX Runtime."""

from typing import Any

import click

from ..convert.saved import load_model, model_files, saved_semantics
from ..tools import onnx
from .inputs import NamedInput, input_values
from .options import check_out, force_option, input_options, model_options
from .output import examples, print_errors

_EXAMPLES = examples(
    "mxamp export-onnx model --input data:1,3,224,224 --out model.onnx",
    "mxamp export-onnx model --input data:1,64 --also data:8,64 --out model.onnx",
)


@click.command(epilog=_EXAMPLES)
@model_options
@click.option("--out", required=True, metavar="FILE", help="The file to write.")
@input_options
@click.option("--also", multiple=True, type=NamedInput(), help="The same input in another size.")
@click.option("--check/--no-check", default=True, help="Compare the outputs in ONNX Runtime.")
@force_option
def export_onnx(prefix: str, epoch: int, out: str, force: bool, **given: Any) -> None:
    """Write a saved model as ONNX, in float32, and check it in ONNX Runtime.

    A size that differs between --input and --also is variable in the ONNX file; all other sizes are
    fixed. Inputs without a file of values get random numbers.
    """
    check_out(out, force, *model_files(prefix, epoch))
    with saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        sizes = [given["inputs"], *([given["also"]] if given["also"] else [])]
        values = [input_values(model, one, given["dtypes"])[0] for one in sizes]
        print_errors(onnx.export_onnx(model, out, values, check=given["check"]))
