"""Operator lists in TOML: read them, and build a precision rule for each MXNet operator.

mxamp's own lists are `lists/float16.toml` and `lists/bfloat16.toml`; the tests prove what only they
could get wrong. docs/policy-files.md describes the format.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Iterable, Mapping, NamedTuple

from ..backends import DEVICES, FEATURES, backend_of, shape_checks, substitutions
from ..errors import ArgumentError, prefix_errors, unknown
from ..framework.data import own_tables, parse_toml
from ..framework.operators import registry, resolve
from ..framework.wording import one_of, shown
from . import rules
from .rules import UNLISTED, Condition, CustomClasses, Reason, Rule, ShapeRule, not_lowered
from .targets import DTYPES

Table = Mapping[str, Any]

AS_IN_MXNET = "it computes as in plain MXNet"
LISTED = "operator {!r} has a class already, {!r} with override {}: list it once"

#: The kinds of values in lists/schema.toml: a type, or the allowed values.
_KINDS: Mapping[str, Any] = {
    "string": str, "boolean": bool, "non-negative integer": range(2**63), "table": dict,
    "string or list of strings": object, "class": rules.CLASSES, "dtype": DTYPES,
    "wide dtype": ("float32", "float64"), "device": DEVICES, "feature": FEATURES, "format": (1, 2),
}  # fmt: skip


class OperatorList(NamedTuple):
    """The precision rule of each operator, for one kind of device and its CPU features."""

    rules: Mapping[str, Rule]  #: by canonical operator name
    #: names (with * and ?) of graph nodes that stay in float32; eager calls have none
    fp32_layers: tuple[str, ...]
    #: faster equivalents that graphs get before they run: name, and measured gain
    substitutions: Mapping[str, str]


# ---------------------------------------------------------------------- files


@lru_cache(maxsize=None)
def own_data(dtype: str) -> str:
    """Return mxamp's own operator list for a dtype, lists/<dtype>.toml, as JSON text."""
    return json.dumps(own_tables(dtype), sort_keys=True)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raise `ArgumentError` if it can't be read or parsed."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError) as error:
        raise ArgumentError(f"{str(path)!r} can't be read: {error.args[-1]}") from None
    except (ValueError, RecursionError) as error:  # of the path, of UTF-8 or TOML
        raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}") from None


# ---------------------------------------------------------------------- checks


def check_data(data: Table) -> None:
    """Raise `ArgumentError` for unknown keys, or values of wrong types, in a policy file.

    The keys of [[tables]] are checked as their rules are made.
    """
    schema = own_tables("schema")
    _check_keys(data, schema["file"])
    for kind, entry in schema["named"].items():
        table = data.get(kind, {})
        with prefix_errors(f"[{kind}]"):
            _check_keys(table, dict.fromkeys((f"{name}?" for name in table), entry))


def _check_keys(given: Table, keys: Table) -> None:
    """Raise for missing or unknown keys, or values of wrong types, in a TOML table."""
    known = {name.rstrip("?"): kind for name, kind in keys.items()}
    for name in given:
        if name not in known:
            raise unknown("key", name, known)
    for name, kind in known.items():
        if name not in given and name in keys:
            raise ArgumentError(f"the key {name!r} is missing; it must be {_words(kind)}")
        if name in given and not _fits(given[name], kind):
            raise ArgumentError(f"{name} must be {_words(kind)}, not {shown(given[name])}")


def _fits(value: object, kind: str | list[str]) -> bool:
    """Return whether a TOML value has a type that lists/schema.toml names."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(one, kind[0]) for one in value)
    allowed = _KINDS[kind]
    if isinstance(allowed, type):
        return isinstance(value, allowed)
    return type(value) is type(allowed[0]) and value in allowed  # a boolean is no integer


def _words(kind: str | list[str]) -> str:
    """Return how messages name a type of lists/schema.toml: "a string", "'cpu' or 'gpu'"."""
    if isinstance(kind, list):
        return f"a list of {kind[0]}s"
    allowed = _KINDS[kind]
    return one_of(allowed) if isinstance(allowed, tuple) else f"a {kind}"


# ---------------------------------------------------------------------- rules


@lru_cache(maxsize=8)
def list_from_json(
    text: str, device: str, features: frozenset[str], custom: CustomClasses
) -> OperatorList:
    """Return the precision rules of a TOML operator list, stored as JSON, for a kind of device.

    `custom` are the classes of registered custom operators. Raises `ArgumentError` for a mistake.
    """
    data, gone = json.loads(text), own_tables("schema")["gone_substitutions"]
    named = {name: gain for name, gain in data.get("substitutions", {}).items() if name not in gone}
    for name in named:
        if name not in substitutions():
            raise unknown("substitution", name, substitutions())
    rules = _RuleBuilder(data, device, features, custom).by_name
    return OperatorList(MappingProxyType(rules), (), MappingProxyType(named))


def list_without_casts(gains: Mapping[str, str]) -> OperatorList:
    """Return the operator list for float32: no casts, only faster equivalents of operators."""
    rules = {name: Rule(name, "untouched", AS_IN_MXNET) for name in registry()}
    return OperatorList(MappingProxyType(rules), (), MappingProxyType({**gains}))


class _RuleBuilder:
    """Builder of the precision rules of an operator list, from its TOML tables."""

    def __init__(
        self, data: Table, device: str, features: frozenset[str], custom: CustomClasses
    ) -> None:
        self._data, self._device = data, device
        self.by_name: dict[str, Rule] = {}
        for kind, keys in own_tables("schema")["repeated"].items():
            for i, table in enumerate(data.get(kind, ())):
                with prefix_errors(f"[[{kind}]] table {i + 1}"):
                    _check_keys(table, keys)
                    names = _operator_names(table["operators"])
                    is_for_device = table.get("device", device) == device
                    if is_for_device and table.get("unless") not in features:
                        getattr(self, f"_add_{kind}")(table, names)
        self._add_exceptions()
        if custom:
            lowers = data.get("lower_custom_operators", True)
            self._amend_rule("Custom", by_op_type=custom if lowers else not_lowered(custom))

    def _add_group(self, table: Table, names: list[str]) -> None:
        """Add the rules of a [[group]] or [[conditional]] table, one for each operator.

        Several [[conditional]] tables may add conditions to the rule of one operator.
        """
        attributes = table.get("attribute", ())
        ranged, values = table.get("beyond_range", False), table.get("values")
        if "attribute" in table and (bool(values) if ranged else values is None):
            raise ArgumentError("give either values or beyond_range = true")
        op_class, given = table.get("class", table.get("otherwise")), table.get("override", False)
        for name in names:
            operator = registry()[name]
            conditions = tuple(
                Condition(
                    operator.check_argument("attribute", attribute),
                    values=operator.check_values(attribute, values or ()),
                    beyond_range=ranged,
                    default=operator.defaults.get(attribute),
                    dtype=self._data["dtype"],
                    reason=table["reason"],
                )
                for attribute in ([attributes] if isinstance(attributes, str) else attributes)
            )
            there = self.by_name.get(name)
            if there is None:
                self.by_name[name] = Rule(name, op_class, table["reason"], conditions, given=given)
            elif not there.conditions or (op_class, given) != (there.op_class, there.given):
                raise ArgumentError(LISTED.format(name, there.op_class, there.given))
            else:
                self._amend_rule(name, conditions=(*there.conditions, *conditions))

    _add_conditional = _add_group

    def _add_missing(self, table: Table, names: list[str]) -> None:
        """Record that a [[missing]] table's operators have no kernel in the target dtype."""
        why = backend_of(self._device).said(table["reason"])
        for name in names:
            self._amend_rule(name, no_kernel=why, computed_in=table.get("computes", "float32"))

    def _add_by_shape(self, table: Table, names: list[str]) -> None:
        """Record that a [[by_shape]] table's operators stay in float32 at certain shapes."""
        kind, checks = table["rule"], shape_checks()
        if kind not in checks:
            raise unknown("rule", kind, checks)
        text = backend_of(self._device).said(table["reason"])
        reason = Reason(kind, text, checks[kind].changes_results, checks[kind].is_missing_kernel)
        rule = ShapeRule(kind, reason, table.get("limit", 0))
        for name in names:
            before = self.by_name.get(name, UNLISTED).by_shape
            self._amend_rule(name, by_shape=(*before, rule))

    def _add_exceptions(self) -> None:
        """Record which inputs and outputs of operators the list exempts from the usual casts."""
        for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
            for name, kept in self._data.get(kind, {}).items():
                if name == "CuDNNBatchNorm" and name not in registry():
                    continue  # CPU builds of MXNet lack it
                with prefix_errors(f"[{kind}]"):
                    operator = resolve(name)
                    for one in kept if kind != "keep_outputs" else ():
                        operator.check_argument("input", one)
                self._amend_rule(operator.name, **{kind: tuple(kept)})

    def _amend_rule(self, name: str, **changes: Any) -> None:
        """Replace fields of an operator's rule; create a default rule if it has none."""
        there = self.by_name.get(name, replace(UNLISTED, operator=name))
        self.by_name[name] = replace(there, **changes)


def _operator_names(patterns: Iterable[str]) -> list[str]:
    """Return the canonical names of the operators in a TOML list; a name may end in *."""
    names: list[str] = []
    for pattern in patterns:
        if pattern.endswith("*"):
            names += [name for name in registry() if name.startswith(pattern[:-1])]
        else:
            names.append(resolve(pattern).name)
    return names
