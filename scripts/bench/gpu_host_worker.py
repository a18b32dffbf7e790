"""A contender of `scripts/bench/gpu_host`: train a model on a simulated GPU, a round for each line.

gpu_host_worker.py CONTENDER MODEL

A line of input is the number of steps of a round. Kernels do nothing, so gradients are zeros.
"""

import ctypes
import sys
import time
from typing import Any, Callable, Dict, List

from models_worker import passes_and_step, print_json

GPUS = ctypes.CDLL("libsimulated_gpu.so")


def counts() -> List[int]:
    """Return launches, waits, copies and bytes copied since the last reset."""
    found = (ctypes.c_long * 4)()
    GPUS.simulated_gpu_counts(found)
    return list(found)


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the processor's seconds in a call and in what MXNet does for it behind the call."""
    from mxnet import nd

    began = time.process_time()
    function()
    nd.waitall()
    return time.process_time() - began


def skip_steps(trainer: Any) -> None:
    """Let overflow checks find Inf in every gradient, after the calls that they make for it."""
    import mxamp
    from mxamp.scaling import trainer as module

    mxamp.init_trainer(trainer, mxamp.StaticLossScaler(1024))  # another scale costs more, once
    GPUS.simulated_gpu_set_finite(0)
    real = vars(module)["nonfinite"]
    vars(module)["nonfinite"] = lambda arrays: [*real(arrays), *range(len(arrays))]


def main() -> None:
    """Print the figures of each round that standard input asks for."""
    contender, model = sys.argv[1:]
    skipping = contender == "skipped"
    passes, step, trainer = passes_and_step("mxamp" if skipping else contender, model)
    for _ in range(3):
        seconds_of(passes), seconds_of(step)
    if contender == "mxamp" and not trainer.amp_last_step.stepped:
        sys.exit("error: the simulated GPU finds overflows where there are none")
    if skipping:
        skip_steps(trainer)
    print_json()
    for line in sys.stdin:
        total: Dict[str, float] = {"passes": 0.0, "step": 0.0}
        GPUS.simulated_gpu_reset_counts()
        for _ in range(int(line)):
            total["passes"] += seconds_of(passes)
            total["step"] += seconds_of(step)
        each = {name: value / int(line) for name, value in total.items()}
        print_json(**each, counts=[count / int(line) for count in counts()])


if __name__ == "__main__":
    main()
