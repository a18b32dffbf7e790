"""`mxamp tune`: a policy for a saved model, found by measuring it."""

import shlex
from dataclasses import replace
from typing import Any, Iterable, Optional, Sequence, Tuple

import click
import mxnet as mx

from ..convert.options import with_excluded_layers
from ..convert.saved import load_model, saved_semantics
from ..errors import ArgumentError
from ..graph.ir import Graph
from ..tools.tuning.tune import STOPPED
from ..tools.tuning.tune import tune as tune_model
from .inputs import checked_batch, input_values, read_batches
from .options import (
    check_out,
    chosen_policy,
    dtype_option,
    force_option,
    input_dtype_option,
    input_option,
    saved_model_options,
)
from .output import examples

__all__ = ["tune"]

TWO_WAYS = "--data holds batches of all inputs: give --data or --input, not both"
NO_GPU = (
    "the policy is for GPUs, and there is none here that MXNet can use: tune it on a machine with "
    "one, or for this machine with --device cpu"
)
RANDOM = (
    "The errors were measured on random numbers for {names}, and may be others on your own data: "
    "give that with --data FILE.npz or --input NAME:FILE.npy."
)
INTERRUPTED = "interrupted: the best policy so far is written"
#: How to use the policy, by the form that was the fastest.
_USES = {
    "plain": "nothing faster was found within the tolerance: run the model as it is, in float32",
    "autocast": "mxamp run --policy {out} SCRIPT, or {convert}",
    "converted": "{convert} --cast-params",
    "fused": "{convert} --cast-params --fuse",
}

_EXAMPLES = examples(
    "mxamp tune model --data batch1.npz --data batch2.npz --out policy.toml",
    "mxamp tune model --input data:8,3,224,224 --budget 5m --out policy.toml",
)


@click.command(epilog=_EXAMPLES)
@saved_model_options
@dtype_option
@click.option("--out", required=True, metavar="FILE", help="The policy file to write.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE.npz",
    help="A batch: an .npz file of arrays by name of input. Repeat for each batch.",
)
@input_option
@input_dtype_option
@click.option(
    "--budget", default="60s", show_default=True, metavar="TIME", help="Time: 90s, 5m, 1h."
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0, min_open=True),
    help="Largest allowed relative error of an output. Default: 0.05.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Random seed."
)
@click.option("--accuracy-only", is_flag=True, help="Skip the timing, for use on another machine.")
@force_option
def tune(
    prefix: str,
    epoch: int,
    device: Optional[str],
    keep_fp32: Sequence[str],
    policy: Optional[str],
    dtype: Optional[str],
    out: str,
    data: Sequence[str],
    inputs: Sequence[Tuple[str, Any]],
    dtypes: Sequence[Tuple[str, str]],
    accuracy_only: bool,
    force: bool,
    **options: Any,
) -> None:
    """Find the fastest form of a saved float32 model whose outputs are within --rtol of its own.

    The model runs in inference, on your data, in float32 and in low precision. Layers that cost too
    much accuracy stay in float32. Of the forms that are accurate enough, the fastest on this
    machine wins; this may be float32. The last line printed is the command that makes it. With
    --accuracy-only the policy is in low precision even if that is slower here. With --policy the
    search starts from that policy. Ctrl-C ends the search and keeps the best policy so far.
    """
    if data and inputs:
        raise click.UsageError(TWO_WAYS)
    check_out(out, force)
    input_dtypes = dict(dtypes)
    start = chosen_policy(dtype, policy, device)
    if start.device == "gpu" and not mx.context.num_gpus():
        raise ArgumentError(NO_GPU)
    with mx.Context(start.device, 0), saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        start = with_excluded_layers(start, keep_fp32, Graph.from_symbol(model[0]))
        drawn: Sequence[str] = ()  # the inputs that are random numbers
        batches: Iterable[Any] = read_batches(model, data, input_dtypes)
        if not data:
            values, drawn = input_values(model, inputs, dtypes, options["seed"])
            batches = [checked_batch(model, values, input_dtypes)]
        tuning = tune_model(model, batches, policy=start, timed=not accuracy_only, **options)
    notes = [RANDOM.format(names=", ".join(drawn))] if drawn else []
    tuning = replace(tuning, notes=(*tuning.notes, *notes))
    file, name = shlex.quote(out), shlex.quote(prefix)
    convert = f"mxamp convert {name} --policy {file} --out {name}-tuned"
    use = _USES[tuning.way].format(out=file, convert=convert)
    replace(tuning, notes=(*tuning.notes, f"Use: {use}")).save(out)
    click.echo(f"{tuning}\n\n{out}: {use}")
    if STOPPED in tuning.notes:
        click.echo(INTERRUPTED, err=True)
