"""Log lines: whether mixed precision is on, and whether it is fast on this machine."""

import logging
from typing import Any, Set

from ..framework import machine
from ..graph.ir import Graph
from ..policy.overrides import unknown_layers
from ..policy.policy import Policy

logger = logging.getLogger("mxamp")

NO_GPU = (
    "mixed precision is on for GPUs, but MXNet sees no GPU: arrays on the CPU stay as they are, "
    "so nothing runs in mixed precision. For the CPU leave ctx out, or give ctx=mx.cpu(); for a "
    "GPU run `mxamp doctor`, which checks the driver and the wheel"
)
SLOW = (
    "%s: bfloat16's results are right, but no faster than float32's, and convolutions without "
    "avx512 are up to 100 times slower%s"
)
IN_MODEL = (
    ". A model converted here computes in float32 on rounded values, on other CPUs too: for "
    "bfloat16 kernels, convert it on a CPU with avx512; for speed here, to float32 with `fuse=True`"
)
ONLY_TRUE = (
    "float16 on a CPU is for trying and testing: it rounds values to true float16, but most "
    "convolutional nets run 10 to 25 times slower than in float32. %s is the fast dtype here%s"
)
FOR_GPUS = ". For GPUs (--device gpu, Policy.default('float16', 'gpu')) a check runs like this too"
STAYS_OFF = (
    "'auto' is float32 here, and mixed precision stays off: %s. To turn it on all the same, %s"
)
UNSCALED_EXECUTORS = (
    "executors that compute gradients stay in float32: nothing scales their losses, which float16 "
    "needs. Bind with grad_req='null' for inference. To train in float16, decorate the optimizer "
    "of a Module before it is bound, use Gluon, or bfloat16, which needs no scale"
)
UNKNOWN_LAYER = "fp32_layers of the policy, in the graphs that have run so far: %s"


#: The keys of the warnings that this process has logged: it logs each once.
_logged: Set[str] = set()


def announce(policy: Policy) -> None:
    """Log that mixed precision is on under `policy`, and warn once if it won't be faster here."""
    dtype = policy.target_dtype if policy.lowers else "float32"
    logger.info("mixed precision is on: %s on %s", dtype, policy.device)
    warn_of_speed(policy)


def announce_float32(advice: str = "give 'bfloat16' in place of 'auto'") -> None:
    """Warn once that "auto" is float32 here and why, with advice on how to choose another dtype."""
    warn_once("auto", STAYS_OFF, machine.why_float32(machine.default_device()), advice)


def warn_of_speed(policy: Policy, of_model: bool = False) -> None:
    """Warn once that mixed precision under `policy` is no faster than float32 here, if so.

    Of a model that is explained or converted, say what that means for the model.
    """
    if not policy.lowers:
        return
    if policy.device != "cpu":
        if machine.default_device() == "cpu" and not of_model:
            warn_once("gpu", NO_GPU)
    elif policy.target_dtype == "float16":
        warn_once("float16", ONLY_TRUE, machine.fast_dtype("cpu"), FOR_GPUS if of_model else "")
    elif not machine.computes_bfloat16():
        advice = IN_MODEL if of_model and policy.rule("Convolution").missing else ""
        warn_once(f"bfloat16{advice}", SLOW, machine.why_float32(), advice)


def record_layers(policy: Policy, graph: Graph) -> None:
    """Record the layers of a graph that is about to run under a policy with `fp32_layers`."""
    if policy.fp32_layers and policy.caches.layers is not None:
        policy.caches.layers.update(graph.layer_names)


def warn_of_unknown_layers(policy: Policy) -> None:
    """Warn, once a policy, of names in its `fp32_layers` that no graph so far has.

    A policy may serve several graphs, so call this when graphs begin to run again.
    """
    layers, policy.caches.layers = policy.caches.layers, None
    for error in unknown_layers(policy.fp32_layers, sorted(layers or ())) if layers else ():
        logger.warning(UNKNOWN_LAYER, error)


def warn_once(key: str, line: str, *values: Any) -> None:
    """Log a warning unless the process has logged the one of this key."""
    if key not in _logged:
        _logged.add(key)
        logger.warning(line, *values)
