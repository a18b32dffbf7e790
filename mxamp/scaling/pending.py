"""The gradients of one trainer from a backward pass to the step that uses them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import AbstractSet, List, Sequence

from mxnet.ndarray.ndarray import NDArray

__all__ = ["PendingGradients", "Stage"]


class Stage(Enum):
    """Whether a trainer's gradients carry the loss scale."""

    NONE = "none"
    SCALED = "scaled"
    UNSCALED = "unscaled"


@dataclass
class PendingGradients:
    """Whether gradients that wait for a step are scaled, by how much, and what is known of them."""

    stage: Stage = Stage.NONE
    scale: float = 1.0  #: of the losses: what gradients carry, or carried before they were unscaled
    losses: int = 0  #: how many were scaled
    values: List[NDArray] = field(default_factory=list)  #: the losses, before they were scaled
    overflown: AbstractSet[int] = frozenset()  #: arrays whose gradients were not finite, by `id`
    reduced: bool = False  #: summed over devices already

    def add(self, scale: float, values: Sequence[NDArray]) -> None:
        """Count losses that were scaled; the first ones set the scale until the step."""
        if self.stage is Stage.NONE:
            self.scale, self.stage = scale, Stage.SCALED  # in this order: other threads read both
        self.losses += 1
        self.values.extend(values)

    def take_back(self, values: Sequence[NDArray]) -> None:
        """Undo `add`."""
        self.losses = max(self.losses - 1, 0)
        self.stage = self.stage if self.losses else Stage.NONE
        kept = {id(value) for value in values}
        self.values = [value for value in self.values if id(value) not in kept]
