"""The process that imports MXNet for `collect.probe`, and prints its results as lines of JSON.

It is a process of its own because some settings end the process at MXNet's import, and a dense
layer may never end in some dtypes.
"""

import json
import sys
import time
from typing import Any, Dict, List

import mxnet as mx

from ...framework.arrays import cast
from ...framework.machine import default_device
from ...policy.active import suspended
from ...policy.policy import Policy

__all__ = ["main"]

_SECONDS = 2.0
_ROUNDS = 15
#: Rows, inputs and outputs of the dense layer, by device.
_SIZES = {"cpu": (256, 1024, 1024), "gpu": (4096, 4096, 4096)}


def main() -> None:
    """Print MXNet's build and, unless --no-measure is in `sys.argv`, the speeds of each device."""
    gpu = default_device() == "gpu"
    onednn = mx.runtime.Features().is_enabled("MKLDNN")
    gpus = mx.context.num_gpus() if gpu else 0
    _print_results({"mxnet": {"version": mx.__version__, "onednn": onednn, "gpus": gpus}})
    if "--no-measure" not in sys.argv:
        speeds: List[Any] = []
        for device in ("cpu", "gpu") if gpu else ("cpu",):
            with suspended():
                _measure(device, speeds)


def _measure(device: str, speeds: List[Any]) -> None:
    """Time a dense layer on a device in float32 and its low dtype; append to `speeds`, and print.

    The dtypes take turns. float32 is printed first, in case the low dtype never ends.
    """
    rows, inputs, outputs = _SIZES[device]
    low = "bfloat16" if device == "cpu" else "float16"
    work = 2 * rows * inputs * outputs / 1e9
    ctx = mx.Context(device)
    arrays = [mx.nd.ones(shape, ctx=ctx) for shape in ((rows, inputs), (outputs, inputs))]
    data = {"float32": arrays}
    _time_dense_layer(*arrays)  # compiles the kernel
    _print_results({"speed": [*speeds, [device, "float32", work / _time_dense_layer(*arrays)]]})
    if not Policy.default(low, device).rule("FullyConnected").missing:
        data[low] = [cast(array, low) for array in arrays]
        _time_dense_layer(*data[low])
    end = time.perf_counter() + _SECONDS
    times: Dict[str, List[float]] = {dtype: [] for dtype in data}
    for _ in range(_ROUNDS):
        for dtype, operands in data.items():
            times[dtype].append(_time_dense_layer(*operands))
        if time.perf_counter() > end:
            break
    speeds += [[device, dtype, work / min(seconds)] for dtype, seconds in times.items()]
    _print_results({"speed": speeds})


def _time_dense_layer(data: Any, weight: Any) -> float:
    """Return the seconds that one call of a dense layer takes."""
    start = time.perf_counter()
    mx.nd.FullyConnected(
        data, weight, num_hidden=weight.shape[0], no_bias=True, flatten=False
    ).wait_to_read()
    return time.perf_counter() - start


def _print_results(results: Dict[str, Any]) -> None:
    """Print results by name as a line that `collect.probe` reads."""
    sys.stdout.write(f"mxamp-probe {json.dumps(results)}\n")
    sys.stdout.flush()
