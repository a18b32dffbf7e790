"""The format of policy files: every table and key, its allowed values, and the check of a file.

`TABLES` is the format; docs/policy-files.md describes it. Names of operators, attributes and
inputs, which MXNet's registry knows, are checked in `lists`.
"""

from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Tuple

from ..errors import ArgumentError, UnknownNameError, unknown
from ..framework.wording import one_of, shown
from .rules import CLASSES, SHAPE_RULES, SUBSTITUTIONS
from .targets import DEVICES, TARGETS

__all__ = ["CPU_FEATURES", "FORMAT", "TABLES", "TOP", "check_data", "table_label"]

FORMAT = 1

#: Instructions of CPUs that kernels may need.
CPU_FEATURES = ("avx512", "avx512_bf16", "amx_bf16")

Keys = Mapping[str, "Key"]


class Kind(NamedTuple):
    """A type of TOML values: its name in error messages, and its check."""

    words: str
    holds: Callable[[Any], bool]


class Key(NamedTuple):
    """The type of a key, and its allowed values."""

    kind: Kind
    required: bool = True
    allowed: Tuple[Any, ...] = ()


class Table(NamedTuple):
    """A kind of table: a repeatable [[table]] of `keys`, or one [table] of names and an `entry`."""

    keys: Keys = MappingProxyType({})
    entry: Key = Key(Kind("", bool))
    names: Tuple[str, ...] = ()  #: the allowed names; empty: any

    def header(self, name: str) -> str:
        """Return the TOML header of a table of this name: [name], or [[name]] if repeatable."""
        return f"[[{name}]]" if self.keys else f"[{name}]"


def _is_nonblank_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # a boolean is no count


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for a list whose items all pass `holds`."""
    return lambda value: isinstance(value, list) and all(map(holds, value))


STRINGS = Kind("a list of strings", _list_of(lambda value: isinstance(value, str)))
TEXT = Kind("a string that is not empty", _is_nonblank_text)
TEXTS = Kind("a list of strings", _list_of(_is_nonblank_text))
SOME_TEXTS = Kind(
    "a list of strings that is not empty", lambda value: value != [] and TEXTS.holds(value)
)
COUNT = Kind("a whole number from 0", _is_count)
COUNTS = Kind("a list of whole numbers from 0", _list_of(_is_count))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT_OR_TEXTS = Kind(
    "a string or a list of strings", lambda value: TEXT.holds(value) or SOME_TEXTS.holds(value)
)

TOP: Keys = {
    "format": Key(COUNT, allowed=(FORMAT,)), "dtype": Key(TEXT, allowed=TARGETS),
    "device": Key(TEXT, required=False, allowed=DEVICES),
    "fp32_layers": Key(STRINGS, required=False),
    "lower_custom_operators": Key(TRUTH, required=False),
}  # fmt: skip

TABLES: Mapping[str, Table] = {
    "group": Table({
        "class": Key(TEXT, allowed=CLASSES), "operators": Key(SOME_TEXTS), "reason": Key(TEXT),
        "override": Key(TRUTH, required=False),
    }),
    "conditional": Table({
        "operators": Key(SOME_TEXTS), "attribute": Key(TEXT_OR_TEXTS), "reason": Key(TEXT),
        "values": Key(STRINGS, required=False), "beyond_range": Key(TRUTH, required=False),
        "otherwise": Key(TEXT, allowed=CLASSES), "override": Key(TRUTH, required=False),
    }),
    "missing": Table({
        "device": Key(TEXT, allowed=DEVICES), "operators": Key(SOME_TEXTS), "reason": Key(TEXT),
        "unless": Key(TEXT, required=False, allowed=CPU_FEATURES),
        "computes": Key(TEXT, required=False, allowed=("float32", "float64")),
    }),
    "by_shape": Table({
        "rule": Key(TEXT, allowed=SHAPE_RULES), "operators": Key(SOME_TEXTS), "reason": Key(TEXT),
        "device": Key(TEXT, required=False, allowed=DEVICES), "limit": Key(COUNT, required=False),
    }),
    "exempt": Table({"attributes": Key(TEXTS), "reason": Key(TEXT)}),
    "keep_inputs": Table(entry=Key(TEXTS)),
    "follow_inputs": Table(entry=Key(TEXTS)),
    "keep_outputs": Table(entry=Key(COUNTS)),
    "slower": Table(entry=Key(TEXT)),
    "substitutions": Table(entry=Key(TEXT), names=SUBSTITUTIONS),
}  # fmt: skip

NOTHING_LOWERED = (
    "it has no [[group]] and no [[conditional]] table, so no operator would compute in {dtype}: "
    'add a [[group]] table with class = "low"'
)


def table_label(table: str, number: int) -> str:
    """Return the label of a repeatable table for error messages, counted from 1.

    >>> table_label("group", 0)
    '[[group]] table 1'
    """
    return f"[[{table}]] table {number + 1}"


def check_data(data: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a policy file has valid keys with values of the right types."""
    _check_keys({name: data[name] for name in data if name not in TABLES}, TOP, "", tuple(TABLES))
    for name, table in TABLES.items():
        for where, value in _tables(name, table, data.get(name)):
            if table.keys:
                _check_keys(value, table.keys, where)
                continue
            for key, entry in value.items():
                if table.names and key not in table.names:
                    raise unknown(name.rstrip("s"), key, table.names)
                _check_value(key, entry, table.entry, where)
    if not (data.get("group") or data.get("conditional")):
        raise ArgumentError(NOTHING_LOWERED.format(dtype=data["dtype"]))


def _tables(name: str, table: Table, value: Any) -> Iterator[Tuple[str, Mapping[str, Any]]]:
    """Yield (label for error messages, table) for each table called `name` in a policy file."""
    header = table.header(name)
    if value is None:
        return
    tables = value if table.keys else [value]
    if not (isinstance(tables, list) and all(isinstance(one, dict) for one in tables)):
        several = "tables" if table.keys else "one table"
        raise ArgumentError(
            f"{name} must be written as {header}, {several}, not as {_written_form(value)}"
        )
    for i, one in enumerate(tables):
        yield (table_label(name, i) if table.keys else header), one


def _written_form(value: Any) -> str:
    """Return how a TOML value of the wrong form was written, for an error message."""
    if isinstance(value, dict):
        return "one [table]"
    several = isinstance(value, list) and any(isinstance(one, dict) for one in value)
    return "[[tables]]" if several else shown(value)


def _check_keys(
    given: Mapping[str, Any], keys: Keys, where: str, others: Tuple[str, ...] = ()
) -> None:
    """Raise unless a table has the required `keys` with valid values; errors also list `others`."""
    prefix = f"{where}: " if where else ""
    for name, value in given.items():
        if name not in keys:
            raise UnknownNameError(f"{prefix}{unknown('key', name, (*keys, *others))}")
        _check_value(name, value, keys[name], where)
    for name, key in keys.items():
        if key.required and name not in given:
            needed = one_of(key.allowed) if key.allowed else key.kind.words
            above = "" if where else ", above the first table"
            raise ArgumentError(f"{prefix}the key {name!r} is missing; it must be {needed}{above}")


def _check_value(name: str, value: Any, key: Key, where: str) -> None:
    """Raise `ArgumentError` if the value of the key `name` has a wrong type or is not allowed."""
    prefix = f"{where}: " if where else ""
    if key.allowed and (type(value) is not type(key.allowed[0]) or value not in key.allowed):
        raise ArgumentError(f"{prefix}{name} must be {one_of(key.allowed)}, not {shown(value)}")
    if not key.kind.holds(value):
        raise ArgumentError(f"{prefix}{name} must be {key.kind.words}, not {shown(value)}")
