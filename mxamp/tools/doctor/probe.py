"""The process that imports MXNet for `collect.probe`, and prints its results as lines of JSON."""

import json
import sys
import time
from typing import Any

import mxnet as mx

from ...framework.arrays import cast
from ...framework.machine import default_device, default_dtype
from ...policy.active import suspended
from ...policy.policy import Policy
from ..tuning.turns import Timed, time_in_turns

_SECONDS = 2.0
#: Rows, inputs and outputs of the dense layer, by device.
_SIZES = {"cpu": (256, 1024, 1024), "gpu": (4096, 4096, 4096)}


def main() -> None:
    """Print MXNet's version and GPUs, then how much faster the low dtype is."""
    device = default_device()
    gpus = mx.context.num_gpus() if device == "gpu" else 0
    _print_results(mxnet=mx.__version__, mxnet_gpus=gpus)
    low = default_dtype(device)
    if Policy.default(low, device).rule("FullyConnected").missing:
        return
    with suspended():
        plain, half = (_dense_layer(device, dtype) for dtype in ("float32", low))
        time_in_turns([[plain, half]], time.monotonic() + _SECONDS)
    _print_results(speedup=half.measured(plain)[1])


def _dense_layer(device: str, dtype: str) -> Timed:
    """Return a dense layer in a dtype, to be timed."""
    rows, inputs, outputs = _SIZES[device]
    shapes = (rows, inputs), (outputs, inputs)
    arrays = [cast(mx.nd.ones(shape, ctx=mx.Context(device)), dtype) for shape in shapes]
    options = {"num_hidden": outputs, "no_bias": True, "flatten": False}
    return Timed(lambda: mx.nd.FullyConnected(*arrays, **options).wait_to_read())


def _print_results(**results: Any) -> None:
    """Print results by name as a line that `collect.probe` reads."""
    sys.stdout.write(f"mxamp-probe {json.dumps(results)}\n")
    sys.stdout.flush()
