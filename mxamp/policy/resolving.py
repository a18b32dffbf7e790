"""Operator lists resolved: the rules of single operators, by the names of MXNet's registry."""

from dataclasses import replace
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Sequence, Tuple

from ..errors import ArgumentError, located
from ..framework.operators import (
    Operator,
    lacks,
    needs_one_dtype,
    registry,
    resolve,
    without_bfloat16,
)
from .custom_operators import CustomClasses
from .rules import LIMITED, UNLISTED, Condition, MissingKernel, Rule, ShapeRule
from .schema import place

__all__ = ["ListRules"]

# The one operator with exceptions that CPU builds of MXNet don't have.
_GPU_ONLY = "CuDNNBatchNorm"

Table = Mapping[str, Any]


class ListRules:
    """The rules of a list while they are put together, and the table that gave each its class."""

    def __init__(self, data: Table) -> None:
        self._data = data
        self._given_by: Dict[str, str] = {}
        self.by_name: Dict[str, Rule] = {}
        self._add_classes()
        self._add_conditions()
        self._add_exceptions()

    def add_missing(self, device: str, features: FrozenSet[str]) -> None:
        """Note the kernels that a kind of device with these features does not have."""
        for i, (table, names) in enumerate(self._tables("missing")):
            where = place("missing", i)
            if table["device"] == "gpu" and "unless" in table:
                raise ArgumentError(f"{where}: unless names instructions of CPUs, not of gpu")
            if table["device"] == device:
                unless, computes = table.get("unless"), table.get("computes", "float32")
                kernel = MissingKernel(table["reason"], unless, computes)
                with located(where):
                    for name in names:
                        self._add_missing(name, kernel, features)

    def keep_later_kernels(self, device: str) -> None:
        """Keep operators in float32 whose bfloat16 kernels came with a later MXNet."""
        if (self._data["dtype"], device) != ("bfloat16", "cpu"):
            return
        for name, since in without_bfloat16().items():
            reason = f"its bfloat16 kernel came with MXNet {since}"
            self._amend(name, missing=reason, computes="float64")
            if self.by_name[name].op_class == "low":
                self._amend(name, op_class="fp32", reason=reason, by_shape=())

    def _add_missing(self, name: str, kernel: MissingKernel, features: FrozenSet[str]) -> None:
        there = self.by_name.get(name, UNLISTED)
        self._amend(name, missing_kernels=(*there.missing_kernels, kernel))
        if kernel.unless in features:
            return
        if there.missing is not None and there.computes != kernel.computes:
            raise ArgumentError(
                f"operator {name!r} computes in {kernel.computes} here and in {there.computes} in "
                "another [[missing]] table"
            )
        self._amend(name, missing=kernel.reason, computes=kernel.computes)

    def add_shape_rules(self, device: str) -> None:
        """Add the rules by shape."""
        for i, (table, names) in enumerate(self._tables("by_shape")):
            with located(place("by_shape", i)):
                self._add_shape_rule(table, names, device)

    def add_custom_operators(self, classes: CustomClasses) -> None:
        """Note the classes of the user's own custom operators."""
        if not self._data.get("lower_custom_operators", True):
            self._amend("Custom", lowers_custom=False)
        if classes:
            self._amend("Custom")
            self.by_name["Custom"] = self.by_name["Custom"].with_custom_operators(classes)

    def _add_shape_rule(self, table: Table, names: List[str], device: str) -> None:
        limited, limit = table["rule"] in LIMITED, table.get("limit")
        if limited != (limit is not None):
            wrong = "needs the key 'limit'" if limited else "takes no 'limit'; long_sums does"
            raise ArgumentError(f"rule {table['rule']!r} {wrong}")
        rule = ShapeRule(table["rule"], table["reason"], limit or 0)
        for name in names:
            if name not in self.by_name:
                raise ArgumentError(
                    f"operator {name!r} has no class; name it in a [[group]] or [[conditional]] "
                    "table too"
                )
            if table.get("device", device) == device:
                self._amend(name, by_shape=(*self.by_name[name].by_shape, rule))

    def _tables(self, kind: str) -> Iterator[Tuple[Table, List[str]]]:
        """Yield the tables of a kind, and their operators."""
        for i, table in enumerate(self._data.get(kind, ())):
            with located(place(kind, i)):
                names = _expand(table["operators"])
            yield table, names

    def _add_classes(self) -> None:
        for i, (table, names) in enumerate(self._tables("group")):
            for name in names:
                given = table.get("override", False)
                rule = Rule(name, table["class"], table["reason"], given=given)
                self._add(rule, place("group", i))

    def _add_conditions(self) -> None:
        for i, (table, names) in enumerate(self._tables("conditional")):
            where = place("conditional", i)
            with located(where):
                ranged, values = table.get("beyond_range", False), table.get("values")
                if bool(values) if ranged else values is None:
                    raise ArgumentError("give either values or beyond_range = true")
                added = {name: self._conditions(registry()[name], table) for name in names}
            for name, conditions in added.items():
                self._add_conditional(name, conditions, table, where)

    def _conditions(self, operator: Operator, table: Table) -> Tuple[Condition, ...]:
        attributes, there = table["attribute"], self.by_name.get(operator.name, UNLISTED)
        own_reason = bool(there.conditions) and table["reason"] != there.reason
        return tuple(
            Condition(
                operator.attribute(attribute),
                values=operator.values(attribute, table.get("values", ())),
                beyond_range=table.get("beyond_range", False),
                default=operator.defaults.get(attribute),
                dtype=self._data["dtype"],
                reason=table["reason"] if own_reason else None,
            )
            for attribute in ([attributes] if isinstance(attributes, str) else attributes)
        )

    def _add_conditional(
        self, name: str, conditions: Tuple[Condition, ...], table: Table, where: str
    ) -> None:
        there, given = self.by_name.get(name, UNLISTED), table.get("override", False)
        if not there.conditions:
            otherwise = table["otherwise"]
            self._add(Rule(name, otherwise, table["reason"], conditions, given=given), where)
            return
        first = self._given_by[name]
        if table["otherwise"] != there.op_class:
            raise ArgumentError(
                f"{where}: operator {name!r} is otherwise {table['otherwise']!r} here and "
                f"{there.op_class!r} in {first}; write the same in both"
            )
        if given != there.given:
            here, before = ("true", "false") if given else ("false", "true")
            raise ArgumentError(
                f"{where}: operator {name!r} has override = {here} here and {before} in {first}; "
                "write the same in both"
            )
        self._amend(name, conditions=(*there.conditions, *conditions))

    def _add_exceptions(self) -> None:
        for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
            for name, kept in self._data.get(kind, {}).items():
                if (name == _GPU_ONLY and name not in registry()) or lacks(name):
                    continue
                if kind == "keep_inputs" and needs_one_dtype(name):
                    continue
                with located(f"[{kind}]"):
                    operator = _canonical(name)
                    if kind != "keep_outputs":
                        for one in kept:
                            operator.input(one)
                    self._check_inputs(kind, name, kept)
                self._amend(operator.name, **{kind: tuple(kept)})
        for name in self._data.get("slower", {}):
            with located("[slower]"):
                if not lacks(name):
                    _canonical(name)

    def _check_inputs(self, kind: str, name: str, kept: Sequence[Any]) -> None:
        """Raise where an input is to be kept as it is and to be followed."""
        followed = self._data.get("follow_inputs", {}).get(name, ())
        both = sorted(set(kept) & set(followed)) if kind == "keep_inputs" else []
        if both:
            raise ArgumentError(f"input {both[0]!r} of {name} stands in [follow_inputs] too")

    def _add(self, rule: Rule, where: str) -> None:
        first = self._given_by.setdefault(rule.operator, where)
        if rule.operator in self.by_name:
            where = f"twice in {where}" if first == where else f"in {first} and in {where}"
            raise ArgumentError(f"operator {rule.operator!r} stands {where}; leave it in one place")
        self.by_name[rule.operator] = rule

    def _amend(self, name: str, **changes: Any) -> None:
        there = self.by_name.get(name, replace(UNLISTED, operator=name))
        self.by_name[name] = replace(there, **changes)


def _expand(patterns: Iterable[str]) -> List[str]:
    """Return the registered operators that names and patterns ending in * stand for.

    Those that came with a later MXNet are left out: no program can call them here.
    """
    names: List[str] = []
    for pattern in patterns:
        if pattern.endswith("*"):
            names.extend(name for name in registry() if name.startswith(pattern[:-1]))
        elif not lacks(pattern):
            names.append(_canonical(pattern).name)
    return names


def _canonical(name: str) -> Operator:
    """Return the operator of this canonical name."""
    operator = resolve(name)
    if operator.name != name:
        raise ArgumentError(f"{name!r} is an alias; write {operator.name!r}")
    return operator
