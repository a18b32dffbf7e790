"""The command `mxamp compare`: errors and speed of a saved model against another one."""

import time
from typing import Any

import click
import mxnet as mx

from ..convert.outputs import compare_models, run_model
from ..convert.saved import load_model, saved_semantics
from ..tools.debugging.measured import Batch, block_of
from ..tools.tuning.forms import PLAIN, Form, metric_of, time_in_turns
from .inputs import checked_batch, read_batches
from .options import batch_options, model_options, named_metric, split_prefix
from .output import examples, print_errors, progress

_EXAMPLES = examples("mxamp compare model model-bf16 --data a.npz --data b.npz --metric accuracy")
#: No round of the timing begins after these seconds.
_BUDGET = 10


@click.command(epilog=_EXAMPLES)
@model_options
@click.argument("other")
@batch_options
def compare(prefix: str, epoch: int, other: str, **given: Any) -> None:
    """Compare the outputs and the time of the saved model OTHER with those of PREFIX.

    Both run in inference in plain MXNet, hybridized with static_alloc and static_shape, on the same
    inputs: those without a file of values get random numbers. Of several batches, the one with the
    largest error is shown for each output, and the first is timed.
    """
    metric = named_metric(given["metric"])
    with progress("Comparing"), saved_semantics(prefix, epoch):
        models = [load_model(prefix, epoch), load_model(*split_prefix(other, None))]
        batches, labels, _ = read_batches(models[0], **given)
        errors = zip(*(compare_models(models[0], models[1], batch) for batch in batches))
        worst = [max(found, key=lambda one: (one.lost, one.relative)) for found in errors]
        ways, scores = [], []
        for one in models:
            first = Batch((checked_batch(one, batches[0], dict(given["input_dtypes"])),))
            block, called = block_of(one, [first])
            # Under other flags, fused operators pack their weights anew at each call.
            block.hybridize(static_alloc=True, static_shape=True)
            ways.append(Form(PLAIN, block, next(called)))
            found = (run_model(one, batch, mx.current_context()) for batch in batches)
            scores += [metric_of(metric, labels, found)] if metric else []
        time_in_turns(ways, time.monotonic() + _BUDGET, [], float("inf"))
    print_errors(worst)
    if metric:
        click.echo(f"{metric.name}: {scores[0]:.4g} for {prefix}, {scores[1]:.4g} for {other}")
    base, timing = (way.timing(ways[0]) for way in ways)
    times = f"{prefix}: {base.milliseconds:.3g} ms; {other}: {timing.milliseconds:.3g} ms"
    low, high = timing.quartiles
    click.echo(f"{times}, {timing.speedup:.3g} times as fast (quartiles {low:g} and {high:g})")
