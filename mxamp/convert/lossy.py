"""Values of parameters that a conversion can't keep, or that are no numbers: named in the log."""

import logging
from typing import Mapping, Set

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import float32_parts
from ..framework.machine import dtype_name
from ..framework.wording import counted
from ..graph.casts.offline import count_losses
from ..graph.ir import CASTS, Graph
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..policy.values import INFINITE_FROM

__all__ = ["warn_of_losses", "warn_of_values"]

logger = logging.getLogger("mxamp")

LOSSY = (
    "casting parameter %r to %s turns %s into infinity and %s into zero: keep "
    "what reads it in float32 with `excluded_sym_names`, or leave `cast_optional_params` off"
)
OVERFLOWS = (
    "parameter %r holds %s that would be infinity in %s, in which it is read: keep what "
    "reads it in float32 with `excluded_sym_names`"
)
NOT_FINITE = "parameter %r of the model holds %s of NaN or infinity, among %d"


def warn_of_values(graph: Graph, params: Mapping[str, NDArray], dtype: str) -> None:
    """Warn of parameters that are not finite, or not when the converted `graph` casts them."""
    read = _cast_by(graph, dtype)
    with suspended():
        for name, array in params.items():
            if dtype_name(array.dtype) not in CASTABLE or array.stype != "default":
                continue
            bad = over = 0
            for values in float32_parts(array):
                finite = np.isfinite(values)
                bad += int((~finite).sum())
                over += int((finite & (np.abs(values) >= INFINITE_FROM[dtype])).sum())
            if bad:
                logger.warning(NOT_FINITE, name, counted(bad, "value"), array.size)
            if over and name in read:
                logger.warning(OVERFLOWS, name, counted(over, "finite value"), dtype)


def warn_of_losses(name: str, before: NDArray, after: NDArray) -> None:
    """Warn where casting parameter `name`, `before`, has lost values of it."""
    overflown, vanished = count_losses(before, after)
    if overflown or vanished:
        lost = counted(overflown, "finite value"), counted(vanished, "value")
        logger.warning(LOSSY, name, dtype_name(after.dtype), *lost)


def _cast_by(graph: Graph, dtype: str) -> Set[str]:
    """Return the variables that are read through a cast to `dtype`, be it of a copy."""
    found = set()
    for node in graph.nodes:
        if node.op in CASTS and node.attrs.get("dtype") == dtype:
            source = graph.nodes[node.inputs[0][0]]
            if source.op == "_copy":
                source = graph.nodes[source.inputs[0][0]]
            if source.is_variable:
                found.add(source.name)
    return found
