"""Log lines and warnings: whether mixed precision is on, and whether it is fast here."""

import logging
from typing import Set

from ..backends import DEVICES, backend_of
from ..framework.machine import default_device
from ..graph.ir import Graph
from ..policy.overrides import unknown_layers
from ..policy.policy import PerPolicy, Policy, PolicyChoice
from ..policy.targets import is_auto

logger = logging.getLogger("mxamp")

AUTO_FLOAT32 = "'auto' is float32 here: %s. %s. %s"
PLAIN = "Mixed precision stays off"
ADVICE = "Pass tuned=False for MXNet's own operators, 'bfloat16' for bfloat16"
EQUIVALENTS = "Graphs get faster equivalents of operators"
UNSCALED_EXECUTORS = (
    "executors that compute gradients stay in float32: nothing scales their losses, which float16 "
    "needs. Bind with grad_req='null' for inference. To train in float16, decorate the optimizer "
    "of a Module before it is bound, use Gluon, or bfloat16, which needs no scale"
)
UNKNOWN_LAYER = "fp32_layers of the policy, in the graphs that have run so far: %s"


#: The keys of the warnings that this process has logged: it logs each once.
_logged: Set[str] = set()


def announce(
    choice: PolicyChoice, dtype: object = None, is_new: bool = True, advice: str = ADVICE
) -> None:
    """Log that mixed precision is on, or warn that "auto" chose float32.

    Logs only if it `is_new`; warns once.
    """
    if is_auto(dtype) and not choice.lowers:
        backends = [backend_of(device) for device in (default_device(), *DEVICES)]
        why = next(one.why_float32() for one in backends if one.fast_dtype() == "float32")
        warn_once("auto", AUTO_FLOAT32, why, EQUIVALENTS if choice else PLAIN, advice)
    elif is_new and isinstance(choice, Policy):
        logger.info("mixed precision is on: %s on %s", choice.precision, choice.device)
        warn_of_speed(choice)


def warn_of_speed(policy: Policy, of_model: bool = False) -> None:
    """Warn once if mixed precision under `policy` is no faster than float32 on this machine.

    Of a model that is explained or converted, say what that means for the model.
    """
    warning = backend_of(policy.device).speed_warning(policy, of_model) if policy.lowers else None
    if warning is not None:
        warn_once(*warning)


class _Seen:
    """Layer names seen in a policy's graphs, to warn of `fp32_layers` that match none."""

    def __init__(self, _policy: Policy) -> None:
        self.layers: Set[str] = set()
        self.is_compared = False


_seen = PerPolicy(_Seen)


def record_layers(policy: Policy, graph: Graph) -> None:
    """Record a graph's layer names if the policy it will run under has `fp32_layers`."""
    if policy.fp32_layers:
        _seen(policy).layers.update(graph.layer_names)


def warn_of_unknown_layers(policy: Policy) -> None:
    """Warn once per policy of names in its `fp32_layers` that no graph has had so far.

    A policy may serve several graphs, so call this when graphs begin to run again.
    """
    seen = _seen(policy)
    if policy.fp32_layers and seen.layers and not seen.is_compared:
        seen.is_compared = True
        for error in unknown_layers(policy.fp32_layers, sorted(seen.layers)):
            logger.warning(UNKNOWN_LAYER, error)


def warn_once(key: str, line: str, *values: object) -> None:
    """Log a warning, unless this process has already logged one with the same `key`."""
    if key not in _logged:
        _logged.add(key)
        logger.warning(line, *values)
