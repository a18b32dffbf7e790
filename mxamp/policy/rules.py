"""Precision rules: each operator's precision class, its exceptions and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import FrozenSet, Mapping, NamedTuple, Tuple

from ..backends import backend_of
from .values import out_of_range, same_value

#: (registered name, class) of each custom operator.
CustomClasses = Tuple[Tuple[str, str], ...]


def not_lowered(custom: CustomClasses) -> CustomClasses:
    """Return custom operators' precision classes with each 16-bit class replaced by float32."""
    return tuple((name, "fp32" if one == "low" else one) for name, one in custom)


#: The classes ("low", "fp32" or "widest") of custom operators for policies made later, by
#: `op_type`; a global, as are MXNet's custom operators.
custom_operators: dict[str, str] = {}


def custom_classes() -> CustomClasses:
    """Return (`op_type`, precision class) of each registered custom operator, sorted."""
    return tuple(sorted(custom_operators.items()))


#: The parts of rules that a machine and a process decide: instructions, and custom operators.
Surroundings = Tuple[FrozenSet[str], CustomClasses]


def surroundings(device: str) -> Surroundings:
    """Return the device features and custom operators on which precision rules depend."""
    return backend_of(device).features(), custom_classes()


#: To what an operator's floating-point inputs are cast: low, to the target dtype; fp32, to float32;
#: widest, to the widest of their dtypes; neutral, to that if they differ; untouched, never.
CLASSES = ("low", "fp32", "widest", "neutral", "untouched")

#: The classes that reports show: "conditional" operators depend on an attribute.
SHOWN_CLASSES = (*CLASSES, "conditional")


@dataclass(frozen=True)
class Condition:
    """A test of an attribute's value: operator calls that meet it compute in float32.

    The value is one of `values` or, with `beyond_range`, a number beyond the range of `dtype`.
    """

    attribute: str
    values: tuple[str, ...] = ()
    beyond_range: bool = False
    default: str | None = None
    dtype: str = "float16"
    reason: str | None = None  #: None: the rule's reason

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """Return whether an operator call with these attributes meets the condition."""
        value = attributes.get(self.attribute, self.default)
        if value is None:
            return False
        if self.beyond_range:
            return out_of_range(str(value), self.dtype)
        return any(same_value(str(value), one) for one in self.values)


class Reason(NamedTuple):
    """The reason why shapes or neighbors in the graph keep an operator call in float32."""

    kind: str  #: the name of a rule by shape, or "substitution"
    text: str  #: for reports; never compared
    changes_results: bool = False  #: it is not only about speed
    is_missing_kernel: bool = False  #: the operator is emulated here, whatever its class


class ShapeRule(NamedTuple):
    """A rule by which an operator stays in float32 for some shapes or graph neighbors."""

    name: str  #: in operator lists, such as "long_sums"
    reason: Reason
    limit: int = 0  #: the longest sum of `long_sums`, or the multiplications of `small_layers`


@dataclass(frozen=True)
class Rule:
    """The precision rule of one operator: its precision class, exceptions and reason."""

    operator: str
    op_class: str  #: one of `CLASSES`
    reason: str
    conditions: tuple[Condition, ...] = ()
    keep_inputs: tuple[str, ...] = ()  #: inputs that are never cast
    follow_inputs: tuple[str, ...] = ()  #: inputs that get the dtype that the other inputs decide
    keep_outputs: tuple[int, ...] = ()
    no_kernel: str | None = None  #: why the kernel in the target dtype is missing; None: it exists
    computed_in: str = "float32"  #: the dtype to compute in where the kernel is missing
    by_op_type: CustomClasses = ()  #: classes of registered custom operators
    by_shape: tuple[ShapeRule, ...] = ()
    given: bool = False  #: given by the user: nothing is substituted for the operator

    @property
    def lowers(self) -> bool:
        """Whether the operator may compute in 16 bits on float32 inputs."""
        return self.op_class == "low" or any(one == "low" for _, one in self.by_op_type)

    def has_shape_rule(self, shape_rule: str) -> bool:
        """Return whether the rule contains the shape rule named `shape_rule`."""
        return any(one.name == shape_rule for one in self.by_shape)


UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")
