"""The rules of an operator list, read from its file's data: what it says of each operator."""

from dataclasses import dataclass, replace
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple

from .errors import ArgumentError
from .operators import registry, resolve

__all__ = ["BY_SHAPE", "CLASSES", "UNLISTED", "Condition", "Rule", "read_rules"]

CLASSES = ("low", "fp32", "widest", "neutral", "untouched")

#: Rules by shapes and neighbours: the functions of `choices`.
BY_SHAPE = ("few_rows", "odd_channels", "plain_layout")

# Largest and smallest magnitude that float16 holds as something else than infinity or zero.
_FLOAT16_MAX, _FLOAT16_TINY = 65504.0, 2.0**-25

# The one operator with exceptions that CPU builds of MXNet don't have.
_GPU_ONLY = "CuDNNBatchNorm"


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
    kind: str  #: one of `CLASSES`
    reason: str
    conditions: Tuple[Condition, ...] = ()
    keep_inputs: Tuple[str, ...] = ()
    keep_outputs: Tuple[int, ...] = ()
    missing: Optional[str] = None  #: why there is no kernel in the target dtype, if there is none
    computes: str = "float32"  #: what it runs in where the kernel is missing
    by_op_type: Tuple[Tuple[str, str], ...] = ()  #: classes of the user's own custom operators
    by_shape: Tuple[Tuple[str, str], ...] = ()  #: rules of `choices`, and why they keep float32
    given: bool = False  #: by a user, who wants this operator: nothing stands in for it


UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")


def read_rules(
    data: Mapping[str, Any], device: str, features: FrozenSet[str], where: str
) -> Dict[str, Rule]:
    """Return the rule of each operator that a list names, for a kind of device.

    `where` is what errors call the list.
    """
    rules: Dict[str, Rule] = {}
    _add_classes(rules, data, where)
    for name, inputs in data.get("keep_inputs", {}).items():
        if name != _GPU_ONLY or name in registry():
            _amend(rules, name, keep_inputs=tuple(inputs))
    for name, outputs in data.get("keep_outputs", {}).items():
        _amend(rules, name, keep_outputs=tuple(outputs))
    for group in data.get("missing", ()):
        if group["device"] == device and group.get("unless") not in features:
            for name in _expand(group["operators"], where):
                computes = group.get("computes", "float32")
                _amend(rules, name, missing=group["reason"], computes=computes)
    for group in data.get("by_shape", ()):
        if group["rule"] not in BY_SHAPE:
            raise ArgumentError(f"{where}: rule {group['rule']!r} is none of {', '.join(BY_SHAPE)}")
        for name in _expand(group["operators"], where):
            there = rules[name].by_shape
            _amend(rules, name, by_shape=(*there, (group["rule"], group["reason"])))
    return rules


def _add_classes(rules: Dict[str, Rule], data: Mapping[str, Any], where: str) -> None:
    for group in data.get("group", ()):
        kind = group["class"]
        if kind not in CLASSES:
            raise ArgumentError(f"{where}: class {kind!r} is none of {', '.join(CLASSES)}")
        for name in _expand(group["operators"], where):
            _add(rules, Rule(name, kind, group["reason"]), where)
    for group in data.get("conditional", ()):
        for name in _expand(group["operators"], where):
            default = registry()[name].defaults.get(group["attribute"])
            condition = Condition(
                group["attribute"], tuple(group.get("values", ())),
                group.get("beyond_range", False), default,
            )  # fmt: skip
            _add(rules, Rule(name, group["otherwise"], group["reason"], (condition,)), where)


def _expand(patterns: Iterable[str], where: str) -> List[str]:
    """Return the registered operators that names and patterns ending in * stand for."""
    names: List[str] = []
    for pattern in patterns:
        if pattern.endswith("*"):
            names.extend(name for name in registry() if name.startswith(pattern[:-1]))
        elif pattern in registry():
            names.append(pattern)
        else:
            canonical = resolve(pattern).name
            raise ArgumentError(f"{where}: {pattern!r} is an alias; write {canonical!r}")
    return names


def _add(rules: Dict[str, Rule], rule: Rule, where: str) -> None:
    if rule.operator in rules:
        raise ArgumentError(f"{where}: operator {rule.operator!r} stands in two groups")
    rules[rule.operator] = rule


def _amend(rules: Dict[str, Rule], name: str, **changes: Any) -> None:
    name = resolve(name).name
    rules[name] = replace(rules.get(name, replace(UNLISTED, operator=name)), **changes)


def _beyond_float16(text: str) -> bool:
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return value > _FLOAT16_MAX or 0 < value <= _FLOAT16_TINY
