"""Log lines: that mixed precision is on, or stays off, and what to expect of it on this machine."""

import logging
from typing import Optional, Set, Tuple

from ..framework import machine
from ..policy.policy import Policy

__all__ = ["announce", "announce_float32", "announce_off", "announce_unscaled_executors"]

logger = logging.getLogger("mxamp")

NO_GPU = (
    "mixed precision is on for GPUs, and MXNet sees none here: arrays on the CPU stay as they are, "
    "so nothing runs in mixed precision. For the CPU leave ctx out, or give ctx=mx.cpu()"
)
SLOW = (
    "this CPU (%s) computes no bfloat16 in hardware: the results are right, but it will not be "
    "faster than float32"
)
ONLY_TRUE = (
    "float16 on a CPU is for trying and testing: its values are true half-precision ones, and most "
    "models run 10 to 25 times slower than in float32. %s"
)
STAYS_OFF = (
    "'auto' is float32 here, and mixed precision stays off: %s. To turn it on all the same, %s"
)
UNSCALED_EXECUTORS = (
    "executors that compute gradients stay in float32: nothing scales their losses, which float16 "
    "needs. Bind with grad_req='null' for inference. To train in float16, decorate the optimizer "
    "of a Module before it is bound, use Gluon, or bfloat16, which needs no scale"
)
IN_CODE = "give 'bfloat16' in place of 'auto'"


class _Said:
    """What the log lines of this process have said."""

    def __init__(self) -> None:
        self.on: Optional[Tuple[str, str]] = None  #: None once they have said that it is off
        self.speed: Set[Tuple[str, str]] = set()
        self.executors = False  #: that some stay in float32


_said = _Said()


def announce(policy: Policy) -> None:
    """Say that mixed precision is on, and what to expect of it; nothing that was said before."""
    kind = (policy.target_dtype if policy.lowers else "float32", policy.device)
    if _said.on != kind:
        logger.info("mixed precision is on: %s on %s", *kind)
    _said.on = kind
    if kind not in _said.speed and policy.lowers:
        _warn_of_speed(policy)
        _said.speed.add(kind)


def announce_off() -> None:
    """Say that mixed precision is off."""
    _said.on, _said.executors = None, False
    logger.info("mixed precision is off")


def announce_float32(advice: str = IN_CODE) -> None:
    """Say, once, that "auto" is float32 here, and why; `advice` tells how to choose otherwise."""
    kind = ("float32", "cpu")
    if kind not in _said.speed:
        _said.speed.add(kind)
        logger.warning(STAYS_OFF, machine.why_float32(), advice)


def announce_unscaled_executors() -> None:
    """Say, once, that executors in training stay in float32, and why."""
    if not _said.executors:
        _said.executors = True
        logger.warning(UNSCALED_EXECUTORS)


def _warn_of_speed(policy: Policy) -> None:
    """Say where a policy does not make this machine faster, or does nothing on it."""
    if policy.device != "cpu":
        if machine.default_device() == "cpu":
            logger.warning(NO_GPU)
        return
    fast = machine.computes_bfloat16()
    if policy.target_dtype == "bfloat16" and not fast:
        logger.warning(SLOW, machine.cpu_name())
    elif policy.target_dtype == "float16":
        advice = "bfloat16 is the fast one here" if fast else "float32 is the fast one here"
        logger.warning(ONLY_TRUE, advice)
