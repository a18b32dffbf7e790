"""The command `mxamp compare`: the errors and the speed of a saved model against another one."""

import time

import click

from ..convert.outputs import compare_models
from ..convert.saved import load_model, saved_semantics
from ..tools.debugging.measured import Batch, block_of
from ..tools.tuning.forms import PLAIN, Form, time_in_turns
from .inputs import Named, checked_batch, input_values
from .options import input_options, model_options, split_prefix
from .output import examples, print_errors

_EXAMPLES = examples("mxamp compare model model-bf16 --input data:1,3,224,224")
#: No round of the timing begins after these seconds.
_BUDGET = 10


@click.command(epilog=_EXAMPLES)
@model_options
@click.argument("other")
@input_options
def compare(prefix: str, epoch: int, other: str, inputs: Named, input_dtypes: Named) -> None:
    """Compare the outputs and the time of the saved model OTHER with those of PREFIX.

    Both run in inference in plain MXNet, hybridized with static_alloc and static_shape, on the same
    inputs: those without a file of values get random numbers.
    """
    with saved_semantics(prefix, epoch):
        models = [load_model(prefix, epoch), load_model(*split_prefix(other, None))]
        values, _ = input_values(models[0], inputs, input_dtypes)
        print_errors(compare_models(models[0], models[1], values))
        ways = []
        for one in models:
            block, batches = block_of(
                one, [Batch((checked_batch(one, values, dict(input_dtypes)),))]
            )
            # Under other flags, fused operators pack their weights anew at each call.
            block.hybridize(static_alloc=True, static_shape=True)
            ways.append(Form(PLAIN, block, next(batches)))
        time_in_turns(ways, time.monotonic() + _BUDGET, [], float("inf"))
    first, second = (way.timing(ways[0]) for way in ways)
    times = f"{prefix}: {first.milliseconds:.3g} ms; {other}: {second.milliseconds:.3g} ms"
    low, high = second.quartiles
    click.echo(f"{times}, {second.speedup:.3g} times as fast (quartiles {low:g} and {high:g})")
