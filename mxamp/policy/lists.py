"""Operator lists: TOML files that say what a policy does with each operator.

mxamp's own are `lists/float16.toml` and `lists/bfloat16.toml`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Union

from ..errors import ArgumentError, unknown
from ..framework.operators import registry, resolve
from .rules import (
    CLASSES,
    SHAPE_RULES,
    SUBSTITUTIONS,
    UNLISTED,
    Condition,
    Rule,
    ShapeRule,
)
from .targets import check_device, check_target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OperatorList", "lists_folder", "own_list", "read_list"]

FORMAT = 1

LACKS = (
    "{path!r} lacks {key!r}: a required key of a table, or an operator that [[by_shape]] names and "
    "that stands in no group"
)

# The one operator with exceptions that CPU builds of MXNet don't have.
_GPU_ONLY = "CuDNNBatchNorm"


class OperatorList(NamedTuple):
    """A list resolved against MXNet's registry, for one kind of device and set of CPU features."""

    target_dtype: str
    device: str
    rules: Mapping[str, Rule]  #: by canonical operator name
    substitutions: Mapping[str, str]  #: name, and what it was measured to gain


def lists_folder() -> Path:
    """Return where mxamp's own lists are: in the package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return next(path for path in (package / "lists", package.parent / "lists") if path.is_dir())


def own_list(dtype: str, device: str, features: FrozenSet[str]) -> OperatorList:
    """Return mxamp's own list for a dtype."""
    path = lists_folder() / f"{dtype}.toml"
    return _resolved(tomllib.loads(path.read_text(encoding="utf-8")), device, features, path.name)


def read_list(
    path: Union[str, Path], device: Optional[str], features: FrozenSet[str]
) -> OperatorList:
    """Read a list of the user's own."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(f"no operator list at {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}") from None
    try:
        return _resolved(data, device, features, where=str(path))
    except KeyError as error:
        raise ArgumentError(LACKS.format(path=str(path), key=error.args[0])) from None
    except ArgumentError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


def _resolved(
    data: Mapping[str, Any], device: Optional[str], features: FrozenSet[str], where: str
) -> OperatorList:
    """Return a file's data as a list; `where` is what errors call the file."""
    if data.get("format") != FORMAT:
        raise ArgumentError(
            f"{where} has format {data.get('format')!r}; this mxamp reads format {FORMAT}"
        )
    dtype = check_target(data.get("dtype"))
    device = check_device(dtype, device)
    substitutions = dict(data.get("substitutions", {}))
    for name in substitutions:
        if name not in SUBSTITUTIONS:
            raise unknown("substitution", name, SUBSTITUTIONS)
    rules = _rules(data, device, features, where)
    return OperatorList(dtype, device, MappingProxyType(rules), MappingProxyType(substitutions))


def _rules(
    data: Mapping[str, Any], device: str, features: FrozenSet[str], where: str
) -> Dict[str, Rule]:
    rules: Dict[str, Rule] = {}
    _add_classes(rules, data, where)
    _add_conditions(rules, data, where)
    for key in ("keep_inputs", "follow_inputs"):
        for name, inputs in data.get(key, {}).items():
            if name != _GPU_ONLY or name in registry():
                _amend(rules, name, **{key: tuple(inputs)})
    for name, outputs in data.get("keep_outputs", {}).items():
        _amend(rules, name, keep_outputs=tuple(outputs))
    for group in data.get("missing", ()):
        if group["device"] == device and group.get("unless") not in features:
            for name in _expand(group["operators"], where):
                computes = group.get("computes", "float32")
                _amend(rules, name, missing=group["reason"], computes=computes)
    _add_shape_rules(rules, data, device, where)
    return rules


def _add_shape_rules(
    rules: Dict[str, Rule], data: Mapping[str, Any], device: str, where: str
) -> None:
    for group in data.get("by_shape", ()):
        if group["rule"] not in SHAPE_RULES:
            raise ArgumentError(
                f"{where}: rule {group['rule']!r} is none of {', '.join(SHAPE_RULES)}"
            )
        if group.get("device", device) != device:
            continue
        limit = group["limit"] if group["rule"] == "long_sums" else 0
        rule = ShapeRule(group["rule"], group["reason"], limit)
        for name in _expand(group["operators"], where):
            _amend(rules, name, by_shape=(*rules[name].by_shape, rule))


def _add_classes(rules: Dict[str, Rule], data: Mapping[str, Any], where: str) -> None:
    for group in data.get("group", ()):
        if group["class"] not in CLASSES:
            raise ArgumentError(
                f"{where}: class {group['class']!r} is none of {', '.join(CLASSES)}"
            )
        for name in _expand(group["operators"], where):
            _add(rules, Rule(name, group["class"], group["reason"]), where)


def _add_conditions(rules: Dict[str, Rule], data: Mapping[str, Any], where: str) -> None:
    for group in data.get("conditional", ()):
        attributes, op_class = group["attribute"], group["otherwise"]
        attributes = [attributes] if isinstance(attributes, str) else attributes
        for name in _expand(group["operators"], where):
            conditions = tuple(
                Condition(
                    attribute,
                    values=tuple(group.get("values", ())),
                    beyond_range=group.get("beyond_range", False),
                    default=registry()[name].defaults.get(attribute),
                    dtype=data["dtype"],
                    reason=group["reason"],
                )
                for attribute in attributes
            )
            there = rules.get(name, UNLISTED)
            if not there.conditions:
                _add(rules, Rule(name, op_class, group["reason"], conditions), where)
            elif there.op_class == op_class:
                _amend(rules, name, conditions=(*there.conditions, *conditions))
            else:
                raise ArgumentError(
                    f"{where}: operator {name!r} is {there.op_class} in one conditional table and "
                    f"{op_class} in another"
                )


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
