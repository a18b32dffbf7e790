"""Rules: the class of each operator, its exceptions, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple, Sequence, Tuple

from .values import out_of_range, same_value

#: (registered name, class) of each custom operator.
CustomClasses = Tuple[Tuple[str, str], ...]


def not_lowered(custom: CustomClasses) -> CustomClasses:
    """Return the classes of custom operators with fp32 in place of low."""
    return tuple((name, "fp32" if one == "low" else one) for name, one in custom)


CLASSES = ("low", "fp32", "widest", "neutral", "untouched")

#: The classes that reports show: "conditional" operators depend on an attribute.
SHOWN_CLASSES = (*CLASSES, "conditional")

#: Names of rules by shapes and neighbors in operator lists: functions of `graph.speed.shape_rules`.
SHAPE_RULES = (
    "few_rows", "odd_channels", "plain_layout", "long_sums", "cast_weight", "volume_views",
    "few_columns", "small_layers", "padded_kernel",
)  # fmt: skip

#: Shape rules that affect results. The others only affect speed, and apply only in tuned graphs.
_EXACT = frozenset({"long_sums", "cast_weight", "volume_views", "padded_kernel"})

#: Shape rules that stand for a missing kernel: the operator computes in float32 on values of the
#: target dtype. All other shape rules keep the operator in float32.
_DETOURS = frozenset({"volume_views"})

#: Names of substitutions in operator lists and policies: first those of `graph.speed` for graphs,
#: then those for fused models only, "sgd", the faster optimizer step of `patches.optimizers`, and
#: those of `ON_DEMAND`.
#: Files of 1.0 may name "global_pool", which no longer exists.
SUBSTITUTIONS = (
    "relu", "sigmoid", "tanh", "broadcast", "relu6", "layer_norm", "mean", "sum",
    "batch_dot", "global_pool", "pool_in_parts", "image_convolution", "split",
    "merged_groups", "rnn", "rnn_layers", "rnn_params", "masked_softmax",
    "padded_channels", "dense_convolution", "attention",
    "sgd", "gemm2",
)  # fmt: skip

#: Substitutions that a policy for GPUs has on demand alone: nobody has measured them yet.
ON_DEMAND = {"gemm2": "float32 batch_dot by linalg.gemm2, with TF32 from compute capability 8.0 on"}


@dataclass(frozen=True)
class Condition:
    """A condition under which an operator is fp32: `attribute` has one of `values`.

    With `beyond_range` instead: its number is beyond the range of `dtype`.
    """

    attribute: str
    values: tuple[str, ...] = ()
    beyond_range: bool = False
    default: str | None = None
    dtype: str = "float16"
    reason: str | None = None  #: None: the rule's reason

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """Return whether a call with these attributes, else the default, meets the condition."""
        value = attributes.get(self.attribute, self.default)
        if value is None:
            return False
        if self.beyond_range:
            return out_of_range(str(value), self.dtype)
        return any(same_value(str(value), one) for one in self.values)


class Reason(NamedTuple):
    """Why shapes or neighbors keep one call of an operator in float32."""

    kind: str  #: one of `SHAPE_RULES`, or "substitution"
    text: str  #: for reports; never compared

    @property
    def exact(self) -> bool:
        """Whether the reason affects results, not only speed."""
        return self.kind in _EXACT

    @property
    def is_detour(self) -> bool:
        """Whether the reason is a missing kernel, whatever the operator's class is."""
        return self.kind in _DETOURS


class ShapeRule(NamedTuple):
    """A rule that, depending on shapes and neighbors, keeps one operator in float32."""

    reason: Reason
    limit: int = 0  #: the longest sum of `long_sums`, or the multiplications of `small_layers`

    @property
    def name(self) -> str:
        """The rule's name, one of `SHAPE_RULES`."""
        return self.reason.kind


@dataclass(frozen=True)
class Rule:
    """The class of one operator, and its exceptions."""

    operator: str
    op_class: str  #: one of `CLASSES`
    reason: str
    conditions: tuple[Condition, ...] = ()
    keep_inputs: tuple[str, ...] = ()  #: inputs that are never cast
    follow_inputs: tuple[str, ...] = ()  #: inputs that get the dtype that the other inputs decide
    keep_outputs: tuple[int, ...] = ()
    missing: str | None = None  #: why the kernel in the target dtype is missing; None: it exists
    computes: str = "float32"  #: the dtype to compute in where the kernel is missing
    by_op_type: CustomClasses = ()  #: classes of registered custom operators
    by_shape: tuple[ShapeRule, ...] = ()
    given: bool = False  #: given by the user: nothing is substituted for the operator

    @property
    def lowers(self) -> bool:
        """Whether the operator may compute in the target dtype where its inputs do not."""
        return self.op_class == "low" or any(one == "low" for _, one in self.by_op_type)

    @property
    def shown_class(self) -> str:
        """The class, or "conditional"."""
        return "conditional" if self.conditions else self.op_class

    def has_shape_rule(self, shape_rule: str) -> bool:
        """Return whether the operator has the shape rule of this name, one of `SHAPE_RULES`."""
        return any(one.name == shape_rule for one in self.by_shape)


UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")


# ---------------------------------------------------------------------- long sums

Shape = Tuple[int, ...]


def long_sum_reason(
    rule: Rule, attributes: Mapping[str, str], shapes: Sequence[Shape | None], training: bool
) -> Reason | None:
    """Return why the rule long_sums keeps a matrix product in float32; None if it does not.

    `shapes` are those of the inputs. Some kernels sum in half precision, which loses digits in long
    sums.
    """
    for one in rule.by_shape:
        if one.name == "long_sums" and has_long_sums(
            one.limit, rule.operator, attributes, shapes, training
        ):
            return one.reason
    return None


def has_long_sums(
    limit: int,
    operator: str,
    attributes: Mapping[str, str],
    shapes: Sequence[Shape | None],
    training: bool,
) -> bool:
    """Return whether a matrix product may sum more than `limit` terms; True for unknown shapes.

    A product of M by K and K by N sums K terms, and its gradients sum N and M.

    >>> has_long_sums(64, "batch_dot", {"transpose_a": "True"}, [(8, 64, 99), (8, 64, 9)], False)
    False
    >>> has_long_sums(64, "batch_dot", {"transpose_a": "True"}, [(8, 64, 99), (8, 64, 9)], True)
    True
    """
    if training:
        return not all(shapes) or max(n for shape in shapes for n in (shape or ())[-2:]) > limit
    transposed = operator == "batch_dot" and same_value(attributes.get("transpose_a", "0"), "1")
    first = (*shapes, None)[0]
    return not first or first[-2 if transposed else -1] > limit
