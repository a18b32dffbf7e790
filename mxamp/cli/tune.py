"""The command `mxamp tune`: measure a saved model, and write the best policy for it."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import mxnet as mx

from ..convert.options import with_excluded_layers
from ..convert.saved import load_model, saved_semantics
from ..graph.ir import Graph
from ..tools.tuning.tune import tune as tune_model
from . import options
from .inputs import read_batches
from .output import examples, in_options, progress

RANDOM = "The errors are those on random numbers for {names}: give your own data with --data."
_EXAMPLES = examples(
    "mxamp tune model --input data:8,3,224,224 --budget 5m --out policy.toml",
    "mxamp tune model --data a.npz --data b.npz --metric accuracy --out p.toml",
    "mxamp tune model --data a.npz --device gpu --accuracy-only --out gpu.toml",
)
_ACCURACY = "Accuracy alone skips the timing, for use elsewhere; for a GPU, add --device gpu."


@click.command(epilog=_EXAMPLES)
@options.saved_model_options
@options.dtype_option
@click.option("--out", required=True, metavar="FILE", help="The policy file to write.")
@options.batch_options
@click.option("--min-metric", type=float, help="Lowest --metric. Default: 99 % of float32's.")
@click.option("--budget", metavar="TIME", default="60s", show_default=True, help="90s, 5m, 1h.")
@click.option("--rtol", type=float, help="Largest relative error of an output. Default: 0.05.")
@click.option("--timed/--accuracy-only", default=True, help=_ACCURACY)
@options.force_option
def tune(prefix: str, epoch: int, out: str, **given: Any) -> None:
    """Find the fastest way to run a saved model within --rtol of its float32 outputs.

    The model runs in inference, on your data, in float32 and in 16 bits. Layers that cost too
    much accuracy stay in float32. Of the forms that are accurate enough, the fastest on this
    machine wins; this may be float32. The last lines printed say how to make and run it. With
    --accuracy-only the policy is in 16 bits even if that is slower here. With --policy the
    search starts from that policy. Ctrl-C ends the search and keeps the best policy so far.
    """
    options.check_out(out, given["force"])
    metric = options.named_metric(given["metric"])
    start = options.chosen_policy(**given)
    device = start.device if mx.context.num_gpus() else "cpu"
    with progress("Tuning"), mx.Context(device), saved_semantics(prefix, epoch):
        model = load_model(prefix, epoch)
        graph = Graph.from_symbol(model[0])
        start = with_excluded_layers(start, given["excluded_sym_names"], graph)
        batches, labels, drawn = read_batches(model, **given)
        wanted = {name: given[name] for name in ("rtol", "min_metric", "budget", "timed")}
        data: Any = [*zip(batches, labels)] if metric else batches
        tuning = tune_model(model, data, policy=start, metric=metric, **wanted)
    notes = [RANDOM.format(names=", ".join(drawn))] if drawn else []
    name, form = shlex.quote(prefix), shlex.quote(Path(out).stem)
    use = "run the model as it is, in float32"
    if tuning.way_in_mxnet == "autocast":
        use = f"in Python, amp.init(policy=amp.Policy.load({out!r})), and run the model as it is"
    elif tuning.way_in_mxnet != "plain":
        use = f"mxamp convert {name} --policy {shlex.quote(out)} --out {name}-{form}"
    uses = [f"Next: {use}"]
    if tuning.way == "openvino":
        shapes = [f"{key}:{','.join(map(str, one.shape))}" for key, one in batches[0].items()]
        given_as = [f"--input {shlex.quote(one)}" for one in shapes]
        given_as += [f"--input-dtype {shlex.quote(':'.join(one))}" for one in given["input_dtypes"]]
        export = f"mxamp export-onnx {name} {' '.join(given_as)} --out {name}.onnx"
        uses = [f"Next, for OpenVINO: {export}", f"Or in MXNet: {use}"]
    replace(tuning, notes=(*tuning.notes, *notes, *uses)).save(out)
    click.echo(in_options("\n".join([str(tuning), *notes, f"Wrote {out}.", *uses])))
