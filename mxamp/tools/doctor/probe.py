"""The process that imports MXNet for `collect`, and prints its results as lines of JSON.

It is a process of its own because some settings end the process at MXNet's import, and some
products never end.
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
    """Print the build and, without --no-measure, the speeds."""
    gpu = default_device() == "gpu"
    onednn = mx.runtime.Features().is_enabled("MKLDNN")
    gpus = mx.context.num_gpus() if gpu else 0
    _print({"mxnet": {"version": mx.__version__, "onednn": onednn, "gpus": gpus}})
    if "--no-measure" not in sys.argv:
        speeds: List[Any] = []
        for device in ("cpu", "gpu") if gpu else ("cpu",):
            with suspended():
                _measure(device, speeds)


def _measure(device: str, speeds: List[Any]) -> None:
    """Time a dense layer in float32 and in the device's low dtype, in turns.

    float32 is printed first, in case the low dtype never ends.
    """
    rows, inputs, outputs = _SIZES[device]
    low = "bfloat16" if device == "cpu" else "float16"
    work = 2 * rows * inputs * outputs / 1e9
    ctx = mx.Context(device)
    arrays = [mx.nd.ones(shape, ctx=ctx) for shape in ((rows, inputs), (outputs, inputs))]
    data = {"float32": arrays}
    _seconds(*arrays)  # compiles the kernel
    _print({"speed": [*speeds, [device, "float32", work / _seconds(*arrays)]]})
    if not Policy.default(low, device).rule("FullyConnected").missing:
        data[low] = [cast(array, low) for array in arrays]
        _seconds(*data[low])
    end = time.perf_counter() + _SECONDS
    times: Dict[str, List[float]] = {dtype: [] for dtype in data}
    for _ in range(_ROUNDS):
        for dtype, given in data.items():
            times[dtype].append(_seconds(*given))
        if time.perf_counter() > end:
            break
    speeds += [[device, dtype, work / min(seconds)] for dtype, seconds in times.items()]
    _print({"speed": speeds})


def _seconds(data: Any, weight: Any) -> float:
    start = time.perf_counter()
    mx.nd.FullyConnected(
        data, weight, num_hidden=weight.shape[0], no_bias=True, flatten=False
    ).wait_to_read()
    return time.perf_counter() - start


def _print(found: Dict[str, Any]) -> None:
    sys.stdout.write(f"mxamp-probe {json.dumps(found)}\n")
    sys.stdout.flush()
