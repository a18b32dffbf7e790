"""Policies that were tuned on another machine: what was measured need not hold on this one."""

import logging
from typing import Any, Dict, Optional, Tuple

import mxnet as mx

from ..framework import machine
from ..framework.wording import counted
from .evidence import Evidence

__all__ = ["here", "warn_elsewhere"]

logger = logging.getLogger("mxamp")

OTHER_THREADS = (
    "the policy was tuned with %s and runs with %s: it may be slower than float32. Tune it "
    "with the threads that it is to run with: OMP_NUM_THREADS=%s"
)
OTHER_MACHINE = (
    "the policy was tuned on another machine (%s): it may be slower than float32 on this one. Tune "
    "the model here"
)


def here(device: str) -> Tuple[Tuple[str, str], ...]:
    """Return what times depend on: the machine, and MXNet's version."""
    return (
        ("device", device),
        ("cpu", machine.cpu_name()),
        ("instructions", ", ".join(sorted(machine.features())) or "no avx512"),
        ("threads", str(machine.threads())),
        ("mxnet", mx.__version__),
    )


def warn_elsewhere(evidence: Optional[Evidence], device: str, said: Dict[str, Any]) -> None:
    """Warn, once for each policy, where the machine is not the one that a policy was tuned on.

    One that changes nothing is nowhere slower than float32.
    """
    if evidence is None or evidence.way == "plain" or "elsewhere" in said:
        return
    said["elsewhere"] = True
    this = dict(here(device))
    differences = {
        name: (there, this.get(name, "none"))
        for name, there in evidence.machine
        if this.get(name) != there
    }
    if differences.keys() == {"threads"}:
        tuned, running = differences["threads"]
        words = [_threads(number) for number in (tuned, running)]
        logger.warning(OTHER_THREADS, *words, running)
    elif differences:
        listed = (f"{name}: {now} instead of {then}" for name, (then, now) in differences.items())
        logger.warning(OTHER_MACHINE, "; ".join(listed))


def _threads(number: str) -> str:
    # What a file holds of it is text.
    return counted(int(number), "thread") if number.isdigit() else f"{number} threads"
