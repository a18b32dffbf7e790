"""Operator lists: TOML files, read as one rule for each operator of MXNet's registry.

mxamp's own lists are `lists/float16.toml` and `lists/bfloat16.toml`.
"""

import logging
import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple, Union

from ..errors import ArgumentError, prefix_errors
from ..framework.operators import Operator, registry, resolve
from ..framework.wording import shortened, shown
from .rules import LIMITED, UNLISTED, Condition, CustomClasses, MissingKernel, Rule, ShapeRule
from .schema import check_data, table_label
from .targets import check_device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OperatorList", "list_from_data", "lists_folder", "parse_toml", "own_list", "read_list"]

logger = logging.getLogger("mxamp")

Table = Mapping[str, Any]

OTHER_DEVICE = (
    'the list is for the {own} only (device = "{own}"), not for the {given}: load it without a '
    "device, or load a file for the {given}"
)
NO_KERNELS = (
    "%s: MXNet has no %s kernel on a %s for %s, and no [[missing]] table says so: calls fail, or "
    "give wrong results. Copy the [[missing]] tables of %s"
)
SINGLE_BRACKETS = ". Tables that can be repeated have two brackets: [[group]]"
NOT_THE_SAME = (
    "{where}: operator {name!r} {key} {here} here and {there} in {first}; write the same in both"
)
OTHER_DETOUR = (
    "operator {name!r} computes in {here} here and in {there} in another [[missing]] table"
)

_ONE_OF_SEVERAL = re.compile(r"^ *\[(group|conditional|missing|by_shape|exempt)\]", re.MULTILINE)

#: An operator of the lists that CPU builds of MXNet lack.
_GPU_ONLY = "CuDNNBatchNorm"


@dataclass(frozen=True, eq=False, repr=False)
class OperatorList:
    """A list resolved against MXNet's registry, for one kind of device and set of CPU features."""

    target_dtype: str
    device: str
    rules: Mapping[str, Rule]  #: by canonical operator name
    #: names (with * and ?) of graph nodes that stay in float32; eager calls have none
    fp32_layers: Tuple[str, ...] = ()
    #: faster equivalents that graphs get before they run: name, and measured gain
    substitutions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


# ---------------------------------------------------------------------- files


def lists_folder() -> Path:
    """Return the folder of mxamp's own operator lists: in the package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return next(path for path in (package / "lists", package.parent / "lists") if path.is_dir())


def own_list(
    dtype: str, device: str, features: FrozenSet[str], custom: CustomClasses
) -> OperatorList:
    """Return mxamp's own operator list for a target dtype (lists/<dtype>.toml)."""
    path = lists_folder() / f"{dtype}.toml"
    with prefix_errors(path):
        return list_from_data(_parse_file(path), device, features, custom)


def read_list(
    path: Union[str, Path],
    device: Optional[str],
    features: FrozenSet[str],
    custom: CustomClasses = (),
) -> OperatorList:
    """Return the operator list in a TOML file; every error names the file.

    `custom` are the classes of registered custom operators. Logs a warning if the list lowers
    operators that have no kernel.
    """
    data = _parse_file(path)
    with prefix_errors(path):
        found = list_from_data(data, device, features, custom)
    _warn_of_missing_kernels(path, found, features)
    return found


def _warn_of_missing_kernels(
    path: Union[str, Path], found: OperatorList, features: FrozenSet[str]
) -> None:
    """Log a warning if a file's operator list lowers operators that have no kernel."""
    dtype, device = found.target_dtype, found.device
    known = own_list(dtype, device, features, ()).rules
    lacking = [
        name
        for name, rule in found.rules.items()
        if rule.op_class == "low" and rule.missing is None
        if name in known and known[name].missing is not None
    ]
    if lacking:
        own = lists_folder() / f"{dtype}.toml"
        logger.warning(NO_KERNELS, path, dtype, device.upper(), shortened(lacking), own)


def _parse_file(path: Union[str, Path]) -> Table:
    """Return the tables of a TOML file; raise `ArgumentError` if it can't be read or parsed."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"a policy file must be given by its path, not by {shown(path)}")
    if not os.fspath(path):
        raise ArgumentError("the path of the policy file is empty: give the path of a TOML file")
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return parse_toml(text)
    except FileNotFoundError:
        raise ArgumentError(f"there is no policy file {str(path)!r}") from None
    except IsADirectoryError:
        raise ArgumentError(f"{str(path)!r} is a folder; give the path of a TOML file") from None
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: it is not UTF-8 text") from None
    except RecursionError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # of TOML, with line and column, or of a path with a null byte
        hint = SINGLE_BRACKETS if _ONE_OF_SEVERAL.search(text) else ""
        raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}{hint}") from None


def parse_toml(text: str) -> Table:
    """Return the tables of TOML text; raise `ValueError` if it is not valid TOML."""
    data: Table = tomllib.loads(text)
    return data


# ---------------------------------------------------------------------- rules


def list_from_data(
    data: Table, device: Optional[str], features: FrozenSet[str], custom: CustomClasses = ()
) -> OperatorList:
    """Return the operator list that TOML tables describe; raise `ArgumentError` for any mistake."""
    check_data(data)
    dtype, own = data["dtype"], data.get("device")
    found = check_device(dtype, device or own)
    if own not in (None, found):
        raise ArgumentError(OTHER_DEVICE.format(own=own, given=found))
    return OperatorList(
        dtype,
        found,
        MappingProxyType(_RuleBuilder(data, found, features, custom).by_name),
        tuple(dict.fromkeys(data.get("fp32_layers", ()))),
        MappingProxyType(dict(data.get("substitutions", {}))),
    )


class _RuleBuilder:
    """Builds the rules of an operator list from its TOML tables; `by_name` holds the result."""

    def __init__(
        self, data: Table, device: str, features: FrozenSet[str], custom: CustomClasses
    ) -> None:
        self._data, self._device, self._features = data, device, features
        self._given_by: Dict[str, str] = {}  # the label of the table with the operator's class
        self.by_name: Dict[str, Rule] = {}
        for kind, add in (
            ("group", self._add_group),
            ("conditional", self._add_conditional),
            ("missing", self._add_missing),
            ("by_shape", self._add_by_shape),
        ):
            for i, table in enumerate(data.get(kind, ())):
                with prefix_errors(table_label(kind, i)):
                    names = _operator_names(table["operators"])
                add(table, names, table_label(kind, i))
        self._add_exceptions()
        if not data.get("lower_custom_operators", True):
            self._amend_rule("Custom", lowers_custom=False)
        if custom:
            self._amend_rule("Custom")
            self.by_name["Custom"] = self.by_name["Custom"].with_custom_operators(custom)

    def _add_group(self, table: Table, names: List[str], where: str) -> None:
        """Add the rules of a [[group]] table; `where` labels the table in errors."""
        for name in names:
            given = table.get("override", False)
            self._add_rule(Rule(name, table["class"], table["reason"], given=given), where)

    def _add_conditional(self, table: Table, names: List[str], where: str) -> None:
        """Add the rules of a [[conditional]] table, or its conditions to existing rules."""
        with prefix_errors(where):
            ranged, values = table.get("beyond_range", False), table.get("values")
            if bool(values) if ranged else values is None:
                raise ArgumentError("give either values or beyond_range = true")
            added = {name: self._table_conditions(registry()[name], table) for name in names}
        for name, conditions in added.items():
            self._add_conditions(name, conditions, table, where)

    def _table_conditions(self, operator: Operator, table: Table) -> Tuple[Condition, ...]:
        """Return the conditions of a [[conditional]] table for one operator."""
        attributes, there = table["attribute"], self.by_name.get(operator.name, UNLISTED)
        own_reason = bool(there.conditions) and table["reason"] != there.reason
        return tuple(
            Condition(
                operator.check_attribute(attribute),
                values=operator.check_values(attribute, table.get("values", ())),
                beyond_range=table.get("beyond_range", False),
                default=operator.defaults.get(attribute),
                dtype=self._data["dtype"],
                reason=table["reason"] if own_reason else None,
            )
            for attribute in ([attributes] if isinstance(attributes, str) else attributes)
        )

    def _add_conditions(
        self, name: str, conditions: Tuple[Condition, ...], table: Table, where: str
    ) -> None:
        """Add one operator's rule with these conditions, or the conditions to its rule."""
        there, given = self.by_name.get(name, UNLISTED), table.get("override", False)
        otherwise = table["otherwise"]
        if not there.conditions:
            self._add_rule(Rule(name, otherwise, table["reason"], conditions, given=given), where)
            return
        for key, here, before in (
            ("is otherwise", repr(otherwise), repr(there.op_class)),
            ("has override =", str(given).lower(), str(there.given).lower()),
        ):
            if here != before:
                first = self._given_by[name]
                raise ArgumentError(
                    NOT_THE_SAME.format(
                        where=where, name=name, key=key, here=here, there=before, first=first
                    )
                )
        self._amend_rule(name, conditions=(*there.conditions, *conditions))

    def _add_missing(self, table: Table, names: List[str], where: str) -> None:
        """Record in the rules the missing kernels of a [[missing]] table."""
        if table["device"] == "gpu" and "unless" in table:
            raise ArgumentError(f"{where}: 'unless' names CPU instructions, but device is 'gpu'")
        if table["device"] != self._device:
            return
        unless, computes = table.get("unless"), table.get("computes", "float32")
        kernel = MissingKernel(table["reason"], unless, computes)
        for name in names:
            there = self.by_name.get(name, UNLISTED)
            self._amend_rule(name, missing_kernels=(*there.missing_kernels, kernel))
            if unless in self._features:
                continue
            if there.missing is not None and there.computes != computes:
                why = OTHER_DETOUR.format(name=name, here=computes, there=there.computes)
                raise ArgumentError(f"{where}: {why}")
            self._amend_rule(name, missing=kernel.reason, computes=computes)

    def _add_by_shape(self, table: Table, names: List[str], where: str) -> None:
        """Add the shape rule of a [[by_shape]] table to the rules of its operators."""
        limited, limit = table["rule"] in LIMITED, table.get("limit")
        if limited != (limit is not None):
            wrong = "needs the key 'limit'" if limited else "takes no 'limit'; long_sums does"
            raise ArgumentError(f"{where}: rule {table['rule']!r} {wrong}")
        rule = ShapeRule(table["rule"], table["reason"], limit or 0)
        for name in names:
            if name not in self.by_name:
                raise ArgumentError(
                    f"{where}: operator {name!r} has no class; name it in a [[group]] or "
                    "[[conditional]] table too"
                )
            if table.get("device", self._device) == self._device:
                self._amend_rule(name, by_shape=(*self.by_name[name].by_shape, rule))

    def _add_exceptions(self) -> None:
        """Record inputs and outputs of [keep_inputs], [follow_inputs] and [keep_outputs]."""
        for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
            for name, kept in self._data.get(kind, {}).items():
                if name == _GPU_ONLY and name not in registry():
                    continue
                with prefix_errors(f"[{kind}]"):
                    operator = _operator_called(name)
                    for one in kept if kind != "keep_outputs" else ():
                        operator.check_input(one)
                    followed = self._data.get("follow_inputs", {}).get(name, ())
                    both = sorted(set(kept) & set(followed)) if kind == "keep_inputs" else []
                    if both:
                        raise ArgumentError(f"input {both[0]!r} of {name} is in [follow_inputs]")
                self._amend_rule(name, **{kind: tuple(kept)})
        with prefix_errors("[slower]"):
            _operator_names(self._data.get("slower", {}))

    def _add_rule(self, rule: Rule, where: str) -> None:
        """Add the rule of a new operator; raise if another table gave the operator a class."""
        first = self._given_by.setdefault(rule.operator, where)
        if rule.operator in self.by_name:
            where = f"twice in {where}" if first == where else f"in {first} and in {where}"
            raise ArgumentError(f"operator {rule.operator!r} is listed {where}; list it once")
        self.by_name[rule.operator] = rule

    def _amend_rule(self, name: str, **changes: Any) -> None:
        """Change fields of an operator's rule, by default those of an unlisted operator."""
        there = self.by_name.get(name, replace(UNLISTED, operator=name))
        self.by_name[name] = replace(there, **changes)


def _operator_names(patterns: Iterable[str]) -> List[str]:
    """Return the names of the operators that canonical names and patterns ending in * match."""
    names: List[str] = []
    for pattern in patterns:
        if pattern.endswith("*"):
            names += [name for name in registry() if name.startswith(pattern[:-1])]
        else:
            names.append(_operator_called(pattern).name)
    return names


def _operator_called(name: str) -> Operator:
    """Return the operator of this canonical name; raise for an alias."""
    operator = resolve(name)
    if operator.name != name:
        raise ArgumentError(f"{name!r} is an alias; write {operator.name!r}")
    return operator
