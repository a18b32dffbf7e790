"""Log lines: whether mixed precision is on, and how fast it is on this machine."""

import logging
from contextlib import contextmanager
from typing import Iterator, Optional, Set, Tuple
from weakref import WeakKeyDictionary

from mxnet.gluon import HybridBlock

from ..framework import machine
from ..graph.ir import Graph
from ..policy.active import current_policy
from ..policy.overrides import unknown_layers
from ..policy.policy import Policy

__all__ = [
    "announce",
    "announce_float32",
    "announce_off",
    "announce_unscaled_executors",
    "hint_to_hybridize",
    "record_layers",
    "warn_of_model_in_float16",
    "warn_of_speed",
    "warn_of_unknown_layers",
    "without_hint",
]

logger = logging.getLogger("mxamp")

NO_GPU = (
    "mixed precision is on for GPUs, but MXNet sees no GPU: arrays on the CPU stay as they are, "
    "so nothing runs in mixed precision. For the CPU leave ctx out, or give ctx=mx.cpu()"
)
SLOW = (
    "this CPU (%s) computes no bfloat16 in hardware: the results are right, but it will not be "
    "faster than float32"
)
ONLY_TRUE = (
    "float16 on a CPU is for trying and testing: it rounds values to true half precision, but most "
    "convolutional nets run 10 to 25 times slower than in float32. %s"
)
FOR_GPUS = ". For GPUs give `policy=Policy.default('float16', 'gpu')`"
STAYS_OFF = (
    "'auto' is float32 here, and mixed precision stays off: %s. To turn it on all the same, %s"
)
UNSCALED_EXECUTORS = (
    "executors that compute gradients stay in float32: nothing scales their losses, which float16 "
    "needs. Bind with grad_req='null' for inference. To train in float16, decorate the optimizer "
    "of a Module before it is bound, use Gluon, or bfloat16, which needs no scale"
)
NOT_HYBRIDIZED = (
    "block %r runs in bfloat16 but is not hybridized: call its hybridize(). Only graphs get the "
    "full speed of bfloat16 on CPUs. This line is logged once"
)
UNKNOWN_LAYER = "fp32_layers of the policy, in the graphs that have run so far: %s"
# The first calls may only initialize parameters. Few layers gain little.
_CALLS, _WEIGHTS = 3, 3
#: The target and the device that graphs are tuned for.
_TUNED = ("bfloat16", "cpu")
IN_CODE = "give 'bfloat16' in place of 'auto'"


class _LoggedLines:
    """The log lines that this process has written, so that it writes each warning once."""

    def __init__(self) -> None:
        self.on: Optional[Tuple[str, str]] = None  #: dtype and device; None after "off"
        self.speed: Set[Tuple[str, str]] = set()
        self.executors = False
        #: The eager calls of each block in bfloat16; None once the hint to hybridize is given.
        self.eager_calls: Optional[WeakKeyDictionary[HybridBlock, int]] = WeakKeyDictionary()


#: Global, since the process has one log.
_logged = _LoggedLines()


def announce(policy: Policy) -> None:
    """Log that mixed precision is on under `policy`, and warn once if it won't be faster here."""
    kind = (policy.target_dtype if policy.lowers else "float32", policy.device)
    if _logged.on != kind:
        logger.info("mixed precision is on: %s on %s", *kind)
    _logged.on = kind
    warn_of_speed(policy)


def warn_of_speed(policy: Policy) -> None:
    """Warn once that mixed precision under `policy` is no faster than float32 here, if so."""
    kind = policy.target_dtype, policy.device
    if kind not in _logged.speed and policy.lowers:
        _logged.speed.add(kind)
        _warn_of_speed(policy)


def warn_of_model_in_float16(policy: Policy) -> None:
    """Warn once, of a model that is explained or converted, that float16 is slow on CPUs."""
    kind = policy.target_dtype, policy.device
    if kind == ("float16", "cpu") and kind not in _logged.speed and policy.lowers:
        _logged.speed.add(kind)
        logger.warning(ONLY_TRUE, _fast_dtype() + FOR_GPUS)


def announce_off() -> None:
    """Log that mixed precision is off."""
    _logged.on, _logged.executors = None, False
    logger.info("mixed precision is off")


def announce_float32(advice: str = IN_CODE) -> None:
    """Warn once that "auto" is float32 here and why, with advice on how to choose another dtype."""
    kind = ("float32", "cpu")
    if kind not in _logged.speed:
        _logged.speed.add(kind)
        logger.warning(STAYS_OFF, machine.why_float32(), advice)


def announce_unscaled_executors() -> None:
    """Warn once that executors in training stay in float32, and why."""
    if not _logged.executors:
        _logged.executors = True
        logger.warning(UNSCALED_EXECUTORS)


def hint_to_hybridize(block: HybridBlock) -> None:
    """Count an eager call; log once that a block of several layers runs in bfloat16 eagerly."""
    policy, calls = current_policy(), _logged.eager_calls
    if calls is None or policy is None or (policy.target_dtype, policy.device) != _TUNED:
        return
    calls[block] = calls.get(block, 0) + 1
    if calls[block] != _CALLS or not (policy.lowers and machine.computes_bfloat16()):
        return
    shapes = [parameter.shape for parameter in block.collect_params().values()]
    if sum(len(shape or ()) > 1 for shape in shapes) >= _WEIGHTS:
        _logged.eager_calls = None
        logger.warning(NOT_HYBRIDIZED, block.name)


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


@contextmanager
def without_hint() -> Iterator[None]:
    """Context in which eager calls are not counted: those of measurements that want them."""
    kept, _logged.eager_calls = _logged.eager_calls, None
    try:
        yield
    finally:
        _logged.eager_calls = kept


def _warn_of_speed(policy: Policy) -> None:
    """Log a warning if mixed precision under `policy` is no faster than float32 here."""
    if policy.device != "cpu":
        if machine.default_device() == "cpu":
            logger.warning(NO_GPU)
        return
    if policy.target_dtype == "float16":
        logger.warning(ONLY_TRUE, _fast_dtype())
    elif not machine.computes_bfloat16():
        logger.warning(SLOW, machine.cpu_name())


def _fast_dtype() -> str:
    """Return advice on the dtype that is fast on this CPU."""
    return f"{machine.fast_dtype('cpu')} is the fast dtype here"
