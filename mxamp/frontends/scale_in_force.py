"""The loss scale of the next backward pass, and what an overflow does to it."""

import logging
from typing import Sequence

from ..framework.machine import dtype_name
from ..scaling.hook import TrainerHook
from ..scaling.shared_scale import scale_in_force
from .scaled_pass import Heads

__all__ = ["note_overflow", "scale_for"]

logger = logging.getLogger("mxamp")

RUN_AGAIN = (
    "a gradient that no trainer owns overflowed with the loss scale %g: the backward pass was run "
    "again with %g, and the next one uses %g"
)
RUN_AGAIN_ALONE = (
    "a gradient that no trainer owns overflowed with the loss scale %g: the backward pass was run "
    "again with %g, in this worker alone"
)
NOT_FINITE = (
    "a gradient that no trainer owns is not finite with a loss scale of 1 either: it is not in "
    "float32, or half precision has no room for it. Nothing was skipped for it"
)

# The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15


def scale_for(hooks: Sequence[TrainerHook], heads: Heads) -> float:
    """Return the scale of a pass from these heads: the lowest of all trainers."""
    scale = scale_in_force(hooks).loss_scale
    if any(dtype_name(head.dtype) == "float16" for head in heads.heads):
        scale = min(scale, _HALF_LIMIT)
    return scale


def note_overflow(hooks: Sequence[TrainerHook], tried: float, used: float, finite: bool) -> None:
    """Lower the shared scale where a pass had to be run again, and a lower scale was the cure."""
    if used == tried:
        return
    if finite and any(hook.reduction.is_distributed for hook in hooks):
        # All workers hold the same scale, and the others have not seen this.
        logger.info(RUN_AGAIN_ALONE, tried, used)
    elif finite:
        lowered = scale_in_force(hooks).lower(tried)
        logger.info(RUN_AGAIN, tried, used, lowered)
    else:
        # Float32 would have overflowed too: the scale is not to blame.
        logger.warning(NOT_FINITE)
