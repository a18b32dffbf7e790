"""Measure one contender of `scripts/bench/overhead` in this process, and print JSON.

Arguments: the part ("calls" or "startup"), the contender ("plain", "imported", or a library and a
dtype such as "mxamp float16"), and how often to call. Only "plain" never imports mxamp.
"""

import json
import logging
import sys
import time
import warnings
from typing import Any, Callable, Dict


def switched_on(contender: str) -> None:
    """Import a contender's library, and turn its AMP on."""
    if contender == "imported":
        import mxamp  # noqa: F401
    elif contender.startswith("mxamp"):
        import mxamp as amp

        amp.init(contender.split()[1], ctx="cpu")
    elif contender.startswith("stock"):
        from mxnet.contrib import amp

        amp.init(contender.split()[1])


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Return the fastest of five rounds of calls, in microseconds a call."""
    from mxnet import nd

    call().wait_to_read()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls // 5):
            call()
        best = min(best, (time.perf_counter() - began) / (calls // 5))
        nd.waitall()
    return best * 1e6


def calls(contender: str, count: int) -> Dict[str, Any]:
    """Return the microseconds of small eager calls."""
    switched_on(contender)
    from mxnet import nd

    x, w, b = nd.ones((2, 4)), nd.ones((3, 4)), nd.ones((3,))
    cases = {
        "relu": lambda: nd.relu(x),
        "broadcast_add": lambda: nd.broadcast_add(x, x),
        "FullyConnected": lambda: nd.FullyConnected(x, w, b, num_hidden=3),
    }
    found: Dict[str, Any] = {}
    for case, call in cases.items():
        try:
            found[case] = microseconds(call, count)
        except Exception:  # contrib.amp lacks bfloat16 kernels for some
            found[case] = None
    return found


def startup(contender: str, _count: int) -> Dict[str, Any]:
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
    switched_on(contender)

    def spent() -> float:
        began = time.process_time()
        net(data).wait_to_read()
        return time.process_time() - began

    def first_call() -> float:
        net.hybridize()
        first = spent()
        return (first - min(spent() for _ in range(3))) * 1e3

    return {"import, s": imported, "first call, ms": first_call(), "again, ms": first_call()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    part, name, number = sys.argv[1:]
    print(json.dumps({"calls": calls, "startup": startup}[part](name, int(number))))
