"""Policies as files: operator lists in TOML, which `lists` reads as the same policies."""

import json
import re
from dataclasses import fields, replace
from itertools import count, groupby
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from .._version import __version__
from ..errors import ArgumentError
from ..framework.operators import registry
from ..framework.wording import shown
from .lists import OperatorList, list_of, loads
from .rules import CLASSES, LIMITED, Condition, Rule
from .schema import CPU_FEATURES, FORMAT, TABLES

__all__ = ["text_of"]

HEAD = f"""\
# A policy: which precision each of MXNet's operators computes in. Written by Policy.save of mxamp
# {__version__}, for Policy.load on any machine. Comments and the order of the tables mean nothing
# to it. docs/policy-files.md describes all tables and keys.
"""

NO_TEXT = (
    "the policy can't be saved: {line} holds half of a surrogate pair, which is no text; give what "
    "is called so another name"
)
NOT_THE_SAME = (
    "the policy can't be saved, as its {what} would not be read back; was it made by hand? Make it "
    "with Policy.default, Policy.load and Policy.override"
)

_WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")

# Operators that are written as one pattern where all of them are in a table: gradients, and what
# MXNet's GPU builds alone have, so that CPU builds can read the file.
_PATTERNS = (
    "_backward_", "CuDNNBatchNorm", "_FusedOp", "_TensorRT", "_contrib_mrcnn_mask_target",
)  # fmt: skip

Table = Dict[str, Any]


def text_of(policy: OperatorList) -> str:
    """Return the text of the file that holds a policy.

    Raises `ArgumentError` where none can: for a name that is no text, and rules that no file makes.
    """
    text = "\n".join([_head(policy), *_rules(policy), *_exceptions(policy)])
    _check(text, policy)
    return text


def _check(text: str, policy: OperatorList) -> None:
    """Raise where another policy would be read from a file than was to be written."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text[: error.end].rpartition("\n")[2]
        raise ArgumentError(NO_TEXT.format(line=shown(line))) from None
    read = _portable(list_of(loads(text), policy.device, frozenset(CPU_FEATURES)))
    written = _portable(policy)
    for field in fields(OperatorList):
        if getattr(read, field.name) != getattr(written, field.name):
            raise ArgumentError(NOT_THE_SAME.format(what=field.name))


def _portable(policy: OperatorList) -> OperatorList:
    """Return a policy without what belongs to a machine or a process, and is in no file."""
    rules = {
        name: replace(rule, missing=None, computes="float32", by_op_type=())
        for name, rule in policy.rules.items()
    }
    return replace(policy, rules=rules)


# ---------------------------------------------------------------------- what a policy holds


def _head(policy: OperatorList) -> str:
    custom = policy.rules.get("Custom")
    lines = _lines({
        "format": FORMAT, "dtype": policy.target_dtype, "device": policy.device,
        "fp32_layers": policy.fp32_layers or None,
        "lower_custom_operators": None if custom is None or custom.lowers_custom else False,
    })  # fmt: skip
    return "\n".join([HEAD, *lines, ""])


def _rules(policy: OperatorList) -> Iterator[str]:
    """Yield the tables of classes, conditions, missing kernels and shapes."""
    for items, name in (
        (_group_of, "group"),
        (_conditionals_of, "conditional"),
        (lambda rule: _missing_of(rule, policy.device), "missing"),
        (_shapes_of, "by_shape"),
    ):
        for table, operators in _grouped(policy.rules, items):
            yield _table(name, {**table, "operators": _listed(operators)})


def _grouped(
    rules: Mapping[str, Rule], tables_of: Callable[[Rule], Sequence[Table]]
) -> Iterator[Tuple[Table, Sequence[str]]]:
    """Yield tables with the operators that have them: each operator's in their order."""
    of_each = {name: tables_of(rule) for name, rule in rules.items()}
    for place in count():
        found: Dict[str, Tuple[Table, List[str]]] = {}
        for name, tables in of_each.items():
            if place < len(tables):
                found.setdefault(repr(tables[place]), (tables[place], []))[1].append(name)
        if not found:
            return
        yield from sorted(found.values(), key=lambda one: _rank(one[0]))


def _rank(table: Table) -> Tuple[int, str]:
    op_class = table.get("class", table.get("otherwise"))
    return CLASSES.index(op_class) if op_class else 0, str(list(table.values()))


def _group_of(rule: Rule) -> Sequence[Table]:
    table = {"class": rule.op_class, "override": rule.given or None, "reason": rule.reason}
    return [] if rule.conditions else [table]


def _conditionals_of(rule: Rule) -> Sequence[Table]:
    tables = []
    for shared, conditions in groupby(rule.conditions, _without_attribute):
        names = [condition.attribute for condition in conditions]
        tables.append({
            "attribute": names[0] if len(names) == 1 else names,
            "beyond_range": shared.beyond_range or None,
            "values": None if shared.beyond_range else shared.values,
            "otherwise": rule.op_class, "override": rule.given or None,
            "reason": shared.reason or rule.reason,
        })  # fmt: skip
    return tables


def _without_attribute(condition: Condition) -> Condition:
    return replace(condition, attribute="", default=None)


def _missing_of(rule: Rule, device: str) -> Sequence[Table]:
    return [
        {
            "device": device,
            "unless": kernel.unless,
            "computes": None if kernel.computes == "float32" else kernel.computes,
            "reason": kernel.reason,
        }
        for kernel in rule.missing_kernels
    ]


def _shapes_of(rule: Rule) -> Sequence[Table]:
    return [
        {
            "rule": one.name,
            "limit": one.limit if one.name in LIMITED else None,
            "reason": one.reason,
        }
        for one in rule.by_shape
    ]


def _listed(names: Sequence[str]) -> Sequence[str]:
    """Return names of operators, sorted, with patterns for those that belong together."""
    left, patterns = set(names), []
    for start in _PATTERNS:
        alike = {name for name in registry() if name.startswith(start)}
        if alike and alike <= left:
            patterns.append(f"{start}*")
            left -= alike
    return sorted([*left, *patterns])


def _exceptions(policy: OperatorList) -> Iterator[str]:
    for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
        exceptions = {name: getattr(rule, kind) for name, rule in sorted(policy.rules.items())}
        if any(exceptions.values()):
            yield _table(kind, {name: kept or None for name, kept in exceptions.items()})
    if policy.substitutions:
        yield _table("substitutions", dict(sorted(policy.substitutions.items())))


# ---------------------------------------------------------------------- TOML


def _table(name: str, values: Mapping[str, Any]) -> str:
    """Return a table with its header, and an empty line behind it."""
    return "\n".join([TABLES[name].header(name), *_lines(values), ""])


def _lines(values: Mapping[str, Any]) -> Sequence[str]:
    """Return keys with their values; None has no line."""
    return [_line(key, value) for key, value in values.items() if value is not None]


def _line(key: str, value: Any) -> str:
    """Return a key with its value; a long list is wrapped."""
    key = key if _BARE.fullmatch(key) else _value(key)
    line = f"{key} = {_value(value)}"
    if len(line) <= _WIDTH or not isinstance(value, (list, tuple)):
        return line
    wrapped = [""]
    for item in map(_value, value):
        if wrapped[-1] and len(f"    {wrapped[-1]} {item},") > _WIDTH:
            wrapped.append("")
        wrapped[-1] += f"{' ' if wrapped[-1] else ''}{item},"
    return "\n".join([f"{key} = [", *(f"    {line}" for line in wrapped), "]"])


def _value(value: Any) -> str:
    """Return a value on one line."""
    if isinstance(value, str):
        # JSON's escapes are TOML's; the one control character that JSON leaves is escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)  # of numbers: inf and nan are words of TOML's too
