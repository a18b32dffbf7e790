"""The process that imports MXNet for `collect`, and prints its results as lines of JSON.

It is a process of its own because some settings end the process at MXNet's import, and some
products never end.
"""

import json
import sys
import time
from typing import Any, Callable, Dict, List

import mxnet as mx

from ...errors import AmpError
from ...framework.arrays import cast
from ...framework.machine import default_device
from ...framework.patching import patched
from ...framework.versions import has_feature
from ...policy.active import current_policy, suspended
from ...policy.policy import Policy
from .facts import MARK

__all__ = ["main", "measure", "report"]

_SECONDS = 2.0
_ROUNDS = 15
#: Rows, inputs and outputs of the dense layer, by device.
_SIZES = {"cpu": (256, 1024, 1024), "gpu": (4096, 4096, 4096)}


def main() -> None:
    """Print the report and, without --no-measure, the speeds."""
    _print({"mxnet": report()})
    if "--no-measure" not in sys.argv:
        for device in ("cpu", "gpu") if default_device() == "gpu" else ("cpu",):
            measure(device, lambda found: _print({"speed": found}))


def report() -> Dict[str, Any]:
    """Return the build of MXNet, and the state of mixed precision in this process."""
    policy = current_policy()
    gpus = mx.context.num_gpus() if default_device() == "gpu" else 0
    pairs = [("bfloat16", "cpu"), *([("float16", "gpu")] if gpus else [])]
    if has_feature("float16_on_cpus"):
        pairs.insert(0, ("float16", "cpu"))
    policies_error = ""
    try:
        for pair in pairs:
            Policy.default(*pair)
    except AmpError as error:  # another MXNet, with other operators
        policies_error = str(error)
    return {
        "version": mx.__version__,
        "features": {
            name: bool(feature.enabled) for name, feature in mx.runtime.Features().items()
        },
        "gpus": gpus,
        "policies_error": policies_error,
        "on": policy.target_dtype if policy is not None else None,
        "patched": patched(),
    }


def measure(device: str, found: Callable[[List[Any]], None]) -> None:
    """Time a dense layer in float32 and in the device's low dtype, in turns.

    `found` is called with [device, dtype, GFLOP/s]: first for float32, in case the low dtype never
    ends, then for each dtype that has a kernel.
    """
    rows, inputs, outputs = _SIZES[device]
    low = "bfloat16" if device == "cpu" else "float16"
    work = 2 * rows * inputs * outputs / 1e9
    with suspended():
        ctx = mx.Context(device)
        arrays = [mx.nd.ones(shape, ctx=ctx) for shape in ((rows, inputs), (outputs, inputs))]
        runs: Dict[str, Callable[[], float]] = {"float32": lambda: _seconds(*arrays)}
        runs["float32"]()  # compiles the kernel
        found([device, "float32", work / runs["float32"]()])
        if not Policy.default(low, device).rule("FullyConnected").missing:
            cast_down = [cast(array, low) for array in arrays]
            runs[low] = lambda: _seconds(*cast_down)
            runs[low]()
        end = time.perf_counter() + _SECONDS
        times: Dict[str, List[float]] = {dtype: [] for dtype in runs}
        while not times["float32"] or (
            time.perf_counter() < end and len(times["float32"]) < _ROUNDS
        ):
            for dtype, run in runs.items():
                times[dtype].append(run())
    for dtype, seconds in times.items():
        found([device, dtype, work / min(seconds)])


def _seconds(data: Any, weight: Any) -> float:
    start = time.perf_counter()
    mx.nd.FullyConnected(
        data, weight, num_hidden=weight.shape[0], no_bias=True, flatten=False
    ).wait_to_read()
    return time.perf_counter() - start


def _print(found: Dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(found) + "\n")
    sys.stdout.flush()
