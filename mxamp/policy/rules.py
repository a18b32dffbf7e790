"""What a policy says of one operator: its class, the exceptions to it, and the reason."""

from dataclasses import dataclass, replace
from typing import Mapping, NamedTuple, Optional, Tuple

from .values import out_of_range, same_value

__all__ = [
    "CLASSES",
    "DETOURS",
    "EXACT_RULES",
    "LIMITED",
    "SHAPE_RULES",
    "SHOWN_CLASSES",
    "SUBSTITUTIONS",
    "UNLISTED",
    "Condition",
    "MissingKernel",
    "Rule",
    "ShapeRule",
]

CLASSES = ("low", "fp32", "widest", "neutral", "untouched")

#: What readers see: a class, or that it depends on an attribute.
SHOWN_CLASSES = (*CLASSES, "conditional")

#: Names of rules by shapes and neighbours, which operator lists use: functions of
#: `graph.shape_rules`.
SHAPE_RULES = (
    "few_rows", "odd_channels", "plain_layout", "long_sums", "cast_weight", "volume_views",
)  # fmt: skip

#: Those without which results are wrong, or none. The others are about speed, and hold in tuned
#: graphs alone.
EXACT_RULES = frozenset({"long_sums", "cast_weight", "volume_views"})

#: Those by which an operator computes in float32 on values of the target dtype, as where a kernel
#: is missing. By the others it stays in float32.
DETOURS = frozenset({"volume_views"})

#: Those that have a limit.
LIMITED = frozenset({"long_sums"})

#: Names of substitutions, which operator lists and policies use: those of `graph.substitutions`,
#: those that fused models alone have, and the optimizer whose steps `patches.optimizers` makes
#: faster.
SUBSTITUTIONS = (
    "relu", "sigmoid", "tanh", "broadcast", "relu6", "layer_norm", "mean", "sum",
    "global_pool", "pool_in_parts", "image_convolution", "split",
    "merged_groups", "rnn", "rnn_params", "padded_channels",
    "dense_convolution",
    "sgd",
)  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """An operator is fp32 where `attribute` is one of `values`, or beyond the range of `dtype`."""

    attribute: str
    values: Tuple[str, ...] = ()
    beyond_range: bool = False
    default: Optional[str] = None
    dtype: str = "float16"
    reason: Optional[str] = None  #: of its own; else the rule's

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """Tell whether it holds for a call with `attributes` (unset ones have their default)."""
        value = attributes.get(self.attribute, self.default)
        if value is None:
            return False
        if self.beyond_range:
            return out_of_range(str(value), self.dtype)
        return any(same_value(str(value), one) for one in self.values)


class ShapeRule(NamedTuple):
    """A rule by shape that looks at an operator."""

    name: str  #: one of `SHAPE_RULES`
    reason: str
    limit: int = 0  #: the longest sum that long_sums leaves in the target dtype

    @property
    def exact(self) -> bool:
        """Whether results depend on it, and not speed alone."""
        return self.name in EXACT_RULES

    @property
    def is_detour(self) -> bool:
        """Whether it says that a kernel is missing, whatever the operator's class is."""
        return self.name in DETOURS


class MissingKernel(NamedTuple):
    """A kind of device has no kernel in the target dtype."""

    reason: str
    unless: Optional[str] = None  #: the CPU feature that has the kernel after all
    computes: str = "float32"  #: what the operator runs in then


@dataclass(frozen=True)
class Rule:
    """What a policy says of one operator."""

    operator: str
    op_class: str  #: one of `CLASSES`
    reason: str
    conditions: Tuple[Condition, ...] = ()
    keep_inputs: Tuple[str, ...] = ()
    follow_inputs: Tuple[str, ...] = ()  #: they get the others' dtype, and don't decide on it
    keep_outputs: Tuple[int, ...] = ()
    missing: Optional[str] = None  #: why there is no kernel in the target dtype, if there is none
    computes: str = "float32"  #: what it runs in where the kernel is missing
    missing_kernels: Tuple[MissingKernel, ...] = ()  #: those two on any CPU: the last that holds
    by_op_type: Tuple[Tuple[str, str], ...] = ()  #: classes of the user's own custom operators
    lowers_custom: bool = True  #: whether those that were registered as low are
    by_shape: Tuple[ShapeRule, ...] = ()
    given: bool = False  #: by a user, who wants this operator: nothing is substituted for it

    def with_custom_operators(self, classes: Tuple[Tuple[str, str], ...]) -> "Rule":
        """Return the rule with the classes of the user's own custom operators."""
        lowest = "low" if self.lowers_custom else "fp32"
        by_op_type = tuple((name, lowest if one == "low" else one) for name, one in classes)
        return replace(self, by_op_type=by_op_type)

    @property
    def lowers(self) -> bool:
        """Whether the operator may be computed in the target dtype for its own sake."""
        return self.op_class == "low" or any(one == "low" for _, one in self.by_op_type)

    @property
    def shown_class(self) -> str:
        """What readers see of the class."""
        return "conditional" if self.conditions else self.op_class

    def looks_at(self, shape_rule: str) -> bool:
        """Tell whether this rule by shape looks at the operator."""
        return any(one.name == shape_rule for one in self.by_shape)

    def is_detour(self, reason: Optional[str]) -> bool:
        """Tell whether `reason` is that of a rule by shape that says that a kernel is missing."""
        return any(one.is_detour and one.reason == reason for one in self.by_shape)

    def is_exact(self, reason: Optional[str]) -> bool:
        """Tell whether `reason`, why a call stays in float32, is that of an exact shape rule."""
        return any(one.exact and one.reason == reason for one in self.by_shape)


UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")
