"""`mxamp tune`: a policy for a saved model, found by measuring it."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Sequence

import click
import mxnet as mx

from ..convert.options import with_excluded_layers
from ..convert.saved import load_model, saved_semantics
from ..graph.ir import Graph
from ..tools.tuning.tune import tune as tune_model
from . import options
from .inputs import checked_batch, input_values, read_batches, record_files
from .output import examples, in_options

RANDOM = "The errors are those on random numbers for {names}: give your own data with --data."
_EXAMPLES = examples(
    "mxamp tune model --data batch1.npz --data batch2.npz --out policy.toml",
    "mxamp tune model --input data:8,3,224,224 --budget 5m --out policy.toml",
    "mxamp tune model --data a.npz --device gpu --accuracy-only --out gpu.toml",
)
_ACCURACY = "Accuracy alone skips the timing, for use elsewhere; for a GPU, add --device gpu."


@click.command(epilog=_EXAMPLES)
@options.saved_model_options
@options.dtype_option
@click.option("--out", required=True, metavar="FILE", help="The policy file to write.")
@options.repeatable(
    "--data", metavar="FILE.npz", callback=record_files, text="A batch: arrays by input name."
)
@options.input_options
@click.option("--budget", metavar="TIME", default="60s", show_default=True, help="90s, 5m, 1h.")
@click.option("--rtol", type=float, help="Largest relative error of an output. Default: 0.05.")
@click.option("--timed/--accuracy-only", default=True, help=_ACCURACY)
@options.force_option
def tune(
    prefix: str, epoch: int, out: str, data: Sequence[str], inputs: Sequence[Any], **given: Any
) -> None:
    """Find the fastest form of a saved float32 model whose outputs are within --rtol of its own.

    The model runs in inference, on your data, in float32 and in 16 bits. Layers that cost too
    much accuracy stay in float32. Of the forms that are accurate enough, the fastest on this
    machine wins; this may be float32. The last line printed says how to make and run it. With
    --accuracy-only the policy is in 16 bits even if that is slower here. With --policy the
    search starts from that policy. Ctrl-C ends the search and keeps the best policy so far.
    """
    if data and inputs:
        raise click.UsageError("give --data or --input, not both")
    options.check_out(out, given["force"])
    dtypes = dict(given["input_dtypes"])
    notes: List[str] = []
    start = options.chosen_policy(given["target_dtype"], given["policy"], given["device"])
    device = start.device if mx.context.num_gpus() else "cpu"
    with mx.Context(device), saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        graph = Graph.from_symbol(model[0])
        start = with_excluded_layers(start, given["excluded_sym_names"], graph)
        batches = list(read_batches(model, data, dtypes))
        if not data:
            values, drawn = input_values(model, inputs, given["input_dtypes"])
            notes = [RANDOM.format(names=", ".join(drawn))] if drawn else []
            batches = [checked_batch(model, values, dtypes)]
        wanted = {name: given[name] for name in ("rtol", "budget", "timed")}
        tuning = tune_model(model, batches, policy=start, **wanted)
    name, form = shlex.quote(prefix), shlex.quote(Path(out).stem)
    use = "run the model as it is, in float32"
    if tuning.way == "openvino":
        shapes = [f"{key}:{','.join(map(str, one.shape))}" for key, one in batches[0].items()]
        given_as = [f"--input {shlex.quote(one)}" for one in shapes]
        given_as += [f"--input-dtype {shlex.quote(f'{key}:{one}')}" for key, one in dtypes.items()]
        use = f"mxamp export-onnx {name} {' '.join(given_as)} --out {name}.onnx"
    elif tuning.way != "plain":
        use = f"mxamp convert {name} --policy {shlex.quote(out)} --out {name}-{form}"
    replace(tuning, notes=(*tuning.notes, *notes, f"Use: {use}")).save(out)
    click.echo(in_options("\n".join([str(tuning), *notes, f"Wrote {out}. Next: {use}"])))
