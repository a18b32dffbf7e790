"""Policies that were tuned on another machine: what was measured need not hold on this one."""

import logging
from typing import Any, Dict, Optional, Tuple

import mxnet as mx

from ..framework import machine
from .evidence import Evidence

__all__ = ["here", "warn_elsewhere"]

logger = logging.getLogger("mxamp")

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
    """Warn, once for each policy, where the machine is not the one that a policy was tuned on."""
    if evidence is None or "elsewhere" in said:
        return
    said["elsewhere"] = True
    this = dict(here(device))
    differences = [
        f"{name}: {this.get(name, 'none')} instead of {there}"
        for name, there in evidence.machine
        if this.get(name) != there
    ]
    if differences:
        logger.warning(OTHER_MACHINE, "; ".join(differences))
