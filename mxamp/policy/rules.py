"""What a policy says of one operator: its class, the exceptions to it, and the reason."""

from dataclasses import dataclass
from typing import Mapping, Optional, Tuple

__all__ = ["CLASSES", "SHAPE_RULES", "SUBSTITUTIONS", "UNLISTED", "Condition", "Rule"]

CLASSES = ("low", "fp32", "widest", "neutral", "untouched")

#: Names of rules by shapes and neighbours, which operator lists use: functions of
#: `graph.shape_rules`.
SHAPE_RULES = ("few_rows", "odd_channels", "plain_layout")

#: Names of substitutions, which operator lists and policies use: those of `graph.substitutions`,
#: and the optimizers whose steps `patches.optimizers` makes faster.
SUBSTITUTIONS = (
    "relu", "sigmoid", "tanh", "relu6", "layer_norm", "mean", "image_convolution", "split",
    "sgd", "adam",
)  # fmt: skip

# Largest and smallest magnitude that float16 holds as something else than infinity or zero.
_FLOAT16_MAX, _FLOAT16_TINY = 65504.0, 2.0**-25


@dataclass(frozen=True)
class Condition:
    """An operator is fp32 where `attribute` is one of `values`, or beyond float16's range."""

    attribute: str
    values: Tuple[str, ...] = ()
    beyond_range: bool = False
    default: Optional[str] = None

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """Tell whether it holds for a call with `attributes` (unset ones have their default)."""
        value = attributes.get(self.attribute, self.default)
        if value is None:
            return False
        if self.beyond_range:
            return _beyond_float16(str(value))
        return str(value) in self.values


@dataclass(frozen=True)
class Rule:
    """What a policy says of one operator."""

    operator: str
    op_class: str  #: one of `CLASSES`
    reason: str
    conditions: Tuple[Condition, ...] = ()
    keep_inputs: Tuple[str, ...] = ()
    keep_outputs: Tuple[int, ...] = ()
    missing: Optional[str] = None  #: why there is no kernel in the target dtype, if there is none
    computes: str = "float32"  #: what it runs in where the kernel is missing
    by_op_type: Tuple[Tuple[str, str], ...] = ()  #: classes of the user's own custom operators
    by_shape: Tuple[Tuple[str, str], ...] = ()  #: of `SHAPE_RULES`, and why they keep float32
    given: bool = False  #: by a user, who wants this operator: nothing is substituted for it


UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")


def _beyond_float16(text: str) -> bool:
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return value > _FLOAT16_MAX or 0 < value <= _FLOAT16_TINY
