"""Measure one contender of `scripts/bench/overhead` in this process, and print JSON.

Arguments: the part ("calls" or "startup") and the contender ("plain", "imported", or a library and
a dtype such as "mxamp float16"). Only "plain" never imports mxamp.
"""

import json
import logging
import sys
import time
import warnings
from typing import Any, Callable, Dict

CALLS = 5000


def enable_amp(contender: str) -> None:
    """Import a contender's library and, if the contender names a dtype, turn its AMP on."""
    if contender == "imported":
        import mxamp  # noqa: F401
    elif contender.startswith("mxamp"):
        import mxamp as amp

        amp.init(contender.split()[1], ctx="cpu")
    elif contender.startswith("stock"):
        from mxnet.contrib import amp

        amp.init(contender.split()[1])


def microseconds(function: Callable[[], Any]) -> float:
    """Return the microseconds of one call in the fastest of five loops."""
    from mxnet import nd

    function().wait_to_read()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(CALLS // 5):
            function()
        best = min(best, (time.perf_counter() - began) / (CALLS // 5))
        nd.waitall()
    return best * 1e6


def measure_calls(contender: str) -> Dict[str, Any]:
    """Return the microseconds of small eager calls, None for calls that fail."""
    enable_amp(contender)
    from mxnet import nd

    x, w, b = nd.ones((2, 4)), nd.ones((3, 4)), nd.ones((3,))
    functions = {
        "relu": lambda: nd.relu(x),
        "broadcast_add": lambda: nd.broadcast_add(x, x),
        "FullyConnected": lambda: nd.FullyConnected(x, w, b, num_hidden=3),
    }
    found: Dict[str, Any] = {}
    for name, function in functions.items():
        try:
            found[name] = microseconds(function)
        except Exception:  # contrib.amp lacks bfloat16 kernels for some
            found[name] = None
    return found


def measure_startup(contender: str) -> Dict[str, Any]:
    """Return the CPU seconds of the import, and of a ResNet-50's first hybridized call."""
    began = time.process_time()
    if contender == "plain":
        import mxnet as mx
    else:
        import mxamp  # noqa: F401
    imported = time.process_time() - began
    import mxnet as mx

    mx.random.seed(0)
    net = mx.gluon.model_zoo.vision.resnet50_v1()
    net.initialize()
    data = mx.nd.ones((1, 3, 32, 32))
    net(data).wait_to_read()
    enable_amp(contender)

    def cpu_seconds_of_call() -> float:
        began = time.process_time()
        net(data).wait_to_read()
        return time.process_time() - began

    def first_call() -> float:
        """Hybridize; return the extra milliseconds of the first call."""
        net.hybridize()
        first = cpu_seconds_of_call()
        return (first - min(cpu_seconds_of_call() for _ in range(3))) * 1e3

    return {"import, s": imported, "first call, ms": first_call(), "again, ms": first_call()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    part, name = sys.argv[1:]
    print(json.dumps({"calls": measure_calls, "startup": measure_startup}[part](name)))
