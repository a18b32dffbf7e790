"""Writing a policy to a TOML file, which `lists` reads as an equal policy."""

import json
import re
from dataclasses import fields, replace
from itertools import groupby
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from .._version import __version__
from ..errors import ArgumentError
from ..framework.operators import registry
from ..framework.wording import shown
from .lists import OperatorList, list_from_data, parse_toml
from .rules import CLASSES, LIMITED, Rule
from .schema import CPU_FEATURES, FORMAT, TABLES

__all__ = ["policy_toml"]

HEAD = f"""\
# A policy: which precision each of MXNet's operators computes in. Written by Policy.save of mxamp
# {__version__}, for Policy.load on any machine, which ignores comments and the order of the tables.
# docs/policy-files.md describes all tables and keys.
"""

NO_TEXT = (
    "the policy can't be saved: {line} holds half of a surrogate pair, which UTF-8 can't encode; "
    "choose another name"
)
NOT_THE_SAME = (
    "the policy can't be saved, as its {what} would not be read back; make policies only with "
    "Policy.default, Policy.load and Policy.override"
)

_WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")

# Operators written as one pattern if a table holds all of them: gradients, and operators that only
# GPU builds have, so that CPU builds can read the file.
_PATTERNS = (
    "_backward_", "CuDNNBatchNorm", "_FusedOp", "_TensorRT", "_contrib_mrcnn_mask_target",
)  # fmt: skip

Table = Dict[str, Any]


def policy_toml(policy: OperatorList) -> str:
    """Return the TOML text of a policy's file, from which `Policy.load` makes an equal policy.

    Raises `ArgumentError` if UTF-8 can't encode a name, or if no file can hold the policy's rules.
    """
    text = "\n".join([_top_toml(policy), *_rule_tables_toml(policy), *_other_tables_toml(policy)])
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text[: error.end].rpartition("\n")[2]
        raise ArgumentError(NO_TEXT.format(line=shown(line))) from None
    read = _portable(list_from_data(parse_toml(text), policy.device, frozenset(CPU_FEATURES)))
    written = _portable(policy)
    for field in fields(OperatorList):
        if getattr(read, field.name) != getattr(written, field.name):
            raise ArgumentError(NOT_THE_SAME.format(what=field.name))
    return text


def _portable(policy: OperatorList) -> OperatorList:
    """Return a policy without the parts that depend on the machine or process, for comparison."""
    rules = {
        name: replace(rule, missing=None, computes="float32", by_op_type=())
        for name, rule in policy.rules.items()
    }
    return replace(policy, rules=rules)


# ---------------------------------------------------------------------- tables of a policy


def _top_toml(policy: OperatorList) -> str:
    """Return the comment at the top and the top-level keys as TOML text."""
    custom = policy.rules.get("Custom")
    lines = _key_lines({
        "format": FORMAT, "dtype": policy.target_dtype, "device": policy.device,
        "fp32_layers": policy.fp32_layers or None,
        "lower_custom_operators": None if custom is None or custom.lowers_custom else False,
    })  # fmt: skip
    return "\n".join([HEAD, *lines, ""])


def _rule_tables_toml(policy: OperatorList) -> Iterator[str]:
    """Yield the TOML text of each table of rules; operators with equal tables share one table."""
    of_each = {name: _rule_tables(rule, policy.device) for name, rule in policy.rules.items()}
    for kind in ("group", "conditional", "missing", "by_shape"):
        of_kind = {name: tables[kind] for name, tables in of_each.items()}
        for place in range(max(map(len, of_kind.values()), default=0)):
            found: Dict[str, Tuple[Table, List[str]]] = {}
            for name, tables in of_kind.items():
                if place < len(tables):
                    found.setdefault(repr(tables[place]), (tables[place], []))[1].append(name)
            for table, names in sorted(found.values(), key=lambda one: _sort_key(one[0])):
                yield _table_toml(kind, {**table, "operators": _operator_patterns(names)})


def _sort_key(table: Table) -> Tuple[int, str]:
    """Return the key that sorts the tables of one kind: class first, then values."""
    op_class = table.get("class", table.get("otherwise"))
    return CLASSES.index(op_class) if op_class else 0, str(list(table.values()))


def _rule_tables(rule: Rule, device: str) -> Dict[str, List[Table]]:
    """Return one rule as dicts by table name ("group", ...), without `operators`.

    A value of None stands for a key that the file leaves out.
    """
    given = rule.given or None
    conditional: List[Table] = []
    for shared, conditions in groupby(
        rule.conditions, lambda condition: replace(condition, attribute="", default=None)
    ):
        names = [condition.attribute for condition in conditions]
        conditional.append({
            "attribute": names[0] if len(names) == 1 else names,
            "beyond_range": shared.beyond_range or None,
            "values": None if shared.beyond_range else shared.values,
            "otherwise": rule.op_class, "override": given,
            "reason": shared.reason or rule.reason,
        })  # fmt: skip
    group: Table = {"class": rule.op_class, "override": given, "reason": rule.reason}
    missing: List[Table] = [
        {
            "device": device,
            "unless": kernel.unless,
            "computes": None if kernel.computes == "float32" else kernel.computes,
            "reason": kernel.reason,
        }
        for kernel in rule.missing_kernels
    ]
    by_shape: List[Table] = [
        {
            "rule": one.name,
            "limit": one.limit if one.name in LIMITED else None,
            "reason": one.reason,
        }
        for one in rule.by_shape
    ]
    return {
        "group": [] if rule.conditions else [group],
        "conditional": conditional, "missing": missing, "by_shape": by_shape,
    }  # fmt: skip


def _operator_patterns(names: Sequence[str]) -> Sequence[str]:
    """Return sorted operator names, with a pattern in place of all operators that match it."""
    left, patterns = set(names), []
    for start in _PATTERNS:
        alike = {name for name in registry() if name.startswith(start)}
        if alike and alike <= left:
            patterns.append(f"{start}*")
            left -= alike
    return sorted([*left, *patterns])


def _other_tables_toml(policy: OperatorList) -> Iterator[str]:
    """Yield the TOML text of the tables of kept inputs, kept outputs and substitutions."""
    for kind in ("keep_inputs", "follow_inputs", "keep_outputs"):
        exceptions = {name: getattr(rule, kind) for name, rule in sorted(policy.rules.items())}
        if any(exceptions.values()):
            yield _table_toml(kind, {name: kept or None for name, kept in exceptions.items()})
    if policy.substitutions:
        yield _table_toml("substitutions", dict(sorted(policy.substitutions.items())))


# ---------------------------------------------------------------------- TOML


def _table_toml(name: str, values: Mapping[str, Any]) -> str:
    """Return the TOML text of a table: its header, its keys and an empty line."""
    return "\n".join([TABLES[name].header(name), *_key_lines(values), ""])


def _key_lines(values: Mapping[str, Any]) -> Sequence[str]:
    """Return the TOML line of each key whose value is not None."""
    return [_key_line(key, value) for key, value in values.items() if value is not None]


def _key_line(key: str, value: Any) -> str:
    """Return the TOML line `key = value`; a long list is wrapped."""
    key = key if _BARE.fullmatch(key) else _toml_value(key)
    line = f"{key} = {_toml_value(value)}"
    if len(line) <= _WIDTH or not isinstance(value, (list, tuple)):
        return line
    wrapped = [""]
    for item in map(_toml_value, value):
        if wrapped[-1] and len(f"    {wrapped[-1]} {item},") > _WIDTH:
            wrapped.append("")
        wrapped[-1] += f"{' ' if wrapped[-1] else ''}{item},"
    return "\n".join([f"{key} = [", *(f"    {line}" for line in wrapped), "]"])


def _toml_value(value: Any) -> str:
    """Return a string, boolean, number or list as TOML on one line."""
    if isinstance(value, str):
        # TOML has JSON's escapes, but also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)  # a number: TOML writes inf and nan like Python
