"""Operator lists: TOML files that say what a policy does with each operator.

mxamp's own are `lists/float16.toml` and `lists/bfloat16.toml`.
"""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from ..errors import ArgumentError, located
from ..framework.operators import Operator, registry, resolve
from ..framework.wording import shown
from .custom_operators import CustomClasses
from .rules import UNLISTED, Condition, Rule, ShapeRule
from .schema import check_list, place
from .targets import check_device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OperatorList", "lists_folder", "own_list", "read_list"]

# The one operator with exceptions that CPU builds of MXNet don't have.
_GPU_ONLY = "CuDNNBatchNorm"

Table = Mapping[str, Any]


class OperatorList(NamedTuple):
    """A list resolved against MXNet's registry, for one kind of device and set of CPU features."""

    target_dtype: str
    device: str
    rules: Mapping[str, Rule]  #: by canonical operator name
    fp32_layers: Tuple[str, ...]
    substitutions: Mapping[str, str]  #: name, and what it was measured to gain


_ONE_OF_SEVERAL = re.compile(r"^ *\[(group|conditional|missing|by_shape|exempt)\]", re.MULTILINE)
SINGLE_BRACKETS = ". Tables of which there are several have two brackets: [[group]]"


def lists_folder() -> Path:
    """Return where mxamp's own lists are: in the package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return next(path for path in (package / "lists", package.parent / "lists") if path.is_dir())


def own_list(
    dtype: str, device: str, features: FrozenSet[str], custom: CustomClasses
) -> OperatorList:
    """Return mxamp's own list for a dtype."""
    return read_list(lists_folder() / f"{dtype}.toml", device, features, custom)


def read_list(
    path: Union[str, Path],
    device: Optional[str],
    features: FrozenSet[str],
    custom: CustomClasses = (),
) -> OperatorList:
    """Read an operator list; every error names the file.

    `custom` are the classes of the user's own custom operators.
    """
    data = _parsed(path)
    with located(path):
        return _resolved(data, device, features, custom)


def _parsed(path: Union[str, Path]) -> Table:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"an operator list must be given by its path, not by {shown(path)}")
    if not os.fspath(path):
        raise ArgumentError("the path of the operator list is empty: give that of a TOML file")
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        data: Table = tomllib.loads(text)
        return data
    except FileNotFoundError:
        raise ArgumentError(f"there is no operator list {str(path)!r}") from None
    except IsADirectoryError:
        raise ArgumentError(f"{str(path)!r} is a folder; give the path of a TOML file") from None
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: it is no UTF-8 text") from None
    except RecursionError:
        raise ArgumentError(f"{str(path)!r} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # TOML's, with line and column, or a path that no file can have
        hint = SINGLE_BRACKETS if _ONE_OF_SEVERAL.search(text) else ""
        raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}{hint}") from None


def _resolved(
    data: Table, device: Optional[str], features: FrozenSet[str], custom: CustomClasses
) -> OperatorList:
    check_list(data)
    dtype = data["dtype"]
    device = check_device(dtype, device)
    rules = _Rules(data)
    rules.add_missing(device, features)
    rules.add_shape_rules(device)
    rules.add_custom_operators(custom)
    substitutions = MappingProxyType(dict(data.get("substitutions", {})))
    return OperatorList(dtype, device, MappingProxyType(rules.by_name), (), substitutions)


class _Rules:
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
            if table["device"] == device and table.get("unless") not in features:
                computes = table.get("computes", "float32")
                for name in names:
                    there = self.by_name.get(name, UNLISTED)
                    if there.missing is not None and there.computes != computes:
                        raise ArgumentError(
                            f"{where}: operator {name!r} computes in {computes} here and in "
                            f"{there.computes} in another [[missing]] table"
                        )
                    self._amend(name, missing=table["reason"], computes=computes)

    def add_shape_rules(self, device: str) -> None:
        """Add the rules by shape."""
        for i, (table, names) in enumerate(self._tables("by_shape")):
            with located(place("by_shape", i)):
                self._add_shape_rule(table, names, device)

    def add_custom_operators(self, classes: CustomClasses) -> None:
        """Note the classes of the user's own custom operators."""
        if classes:
            rule = self.by_name.get("Custom", replace(UNLISTED, operator="Custom"))
            self.by_name["Custom"] = rule.with_custom_operators(classes)

    def _add_shape_rule(self, table: Table, names: List[str], device: str) -> None:
        limited, limit = table["rule"] == "long_sums", table.get("limit")
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
                self._add(Rule(name, table["class"], table["reason"]), place("group", i))

    def _add_conditions(self) -> None:
        for i, (table, names) in enumerate(self._tables("conditional")):
            where = place("conditional", i)
            with located(where):
                if bool(table.get("values")) == table.get("beyond_range", False):
                    raise ArgumentError("give either values or beyond_range = true")
                added = {name: self._conditions(registry()[name], table) for name in names}
            for name, conditions in added.items():
                there = self.by_name.get(name, UNLISTED)
                if not there.conditions:
                    self._add(Rule(name, table["otherwise"], table["reason"], conditions), where)
                elif there.op_class == table["otherwise"]:
                    self._amend(name, conditions=(*there.conditions, *conditions))
                else:
                    raise ArgumentError(
                        f"{where}: operator {name!r} is otherwise {table['otherwise']!r} here and "
                        f"{there.op_class!r} in {self._given_by[name]}; write the same in both"
                    )

    def _conditions(self, operator: Operator, table: Table) -> Tuple[Condition, ...]:
        attributes = table["attribute"]
        return tuple(
            Condition(
                operator.attribute(attribute),
                values=operator.values(attribute, table.get("values", ())),
                beyond_range=table.get("beyond_range", False),
                default=operator.defaults.get(attribute),
                dtype=self._data["dtype"],
                reason=table["reason"],
            )
            for attribute in ([attributes] if isinstance(attributes, str) else attributes)
        )

    def _add_exceptions(self) -> None:
        for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
            for name, kept in self._data.get(kind, {}).items():
                if name == _GPU_ONLY and name not in registry():
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
    """Return the registered operators that names and patterns ending in * stand for."""
    names: List[str] = []
    for pattern in patterns:
        if pattern.endswith("*"):
            names.extend(name for name in registry() if name.startswith(pattern[:-1]))
        else:
            names.append(_canonical(pattern).name)
    return names


def _canonical(name: str) -> Operator:
    """Return the operator of this canonical name."""
    operator = resolve(name)
    if operator.name != name:
        raise ArgumentError(f"{name!r} is an alias; write {operator.name!r}")
    return operator
