"""What `check_numerics` finds, as values."""

from dataclasses import dataclass
from typing import Any, Dict, Optional

from ....errors import AmpError
from .statistics import Statistics

__all__ = ["Finding", "NumericsError"]

_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
    "vanish": "loses most of its values to zero",
    "dead": "is all zero",
}


@dataclass(frozen=True)
class Finding:
    """An operator where values went wrong.

    `kind` is "nonfinite" (Inf or NaN from finite values), "input" (an input or a parameter was not
    finite before anything was computed with it), "overflow" (finite values became infinite in a
    cast, or would in the low dtype), "vanish" (most became zero there) or "dead" (a layer's
    output is zero everywhere). `tensor` says which of the operator's tensors `statistics` are of.
    """

    kind: str
    phase: str  #: "forward" or "backward"
    step: int  #: updates that had been made before, since the check began
    block: str  #: the Gluon block, "" where there is none
    node: str  #: the graph node; of an eager call, the block and the operator
    operator: str
    tensor: str
    dtype: str  #: of the tensor
    statistics: Statistics
    detail: str = ""

    def to_dict(self) -> Dict[str, Any]:
        """Return it as a flat dict for JSON."""
        data = {key: getattr(self, key) for key in self.__dataclass_fields__}
        del data["statistics"]
        return {**data, **self.statistics.to_dict()}

    def __str__(self) -> str:
        block = f" in block {self.block!r}" if self.block else ""
        where = f"{self.node!r} ({self.operator}{block})"
        backward = "the backward pass of " if self.phase == "backward" else ""
        detail = f"; {self.detail}" if self.detail else ""
        return (
            f"step {self.step}: {backward}{where} {_KINDS[self.kind]}: "
            f"{self.tensor} is {self.statistics}{detail}"
        )


class NumericsError(AmpError, ArithmeticError):
    """A check of numerics has found something; `finding` says what and where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding: Optional[Finding] = finding
