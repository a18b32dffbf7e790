"""A policy: which precision each operator computes in, as a value.

A policy is read from an operator list (`lists/float16.toml`, `lists/bfloat16.toml`, or a file of
your own), resolved against MXNet's registry and one kind of device, and never changes after that.
"""

import fnmatch
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from . import machine
from .errors import ArgumentError
from .operators import registry, resolve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["CLASSES", "Condition", "Policy", "Rule"]

CLASSES = ("low", "fp32", "widest", "neutral", "untouched")
TARGETS = ("float16", "bfloat16")

# Largest and smallest magnitude that float16 holds as something else than infinity or zero.
_FLOAT16_MAX, _FLOAT16_TINY = 65504.0, 2.0**-25

# The one operator with exceptions that CPU builds of MXNet don't have.
_GPU_ONLY = "CuDNNBatchNorm"

Conditional = Tuple[str, str, Sequence[str]]


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


#: Classes of custom operators, by the name they were registered under.
custom_operators: Dict[str, str] = {}

UNLISTED = Rule("", "fp32", "not in the list: runs as it would without mxamp")


@dataclass(frozen=True, eq=False)
class Policy:
    """Which precision every operator computes in, on one kind of device.

    >>> policy = Policy.default("float16", device="cpu")
    >>> policy.rule("Convolution").kind
    'low'

    Policies compare and hash by value; two that say the same are the same.
    """

    target_dtype: str
    device: str
    rules: Mapping[str, Rule] = field(repr=False)
    #: names (with * and ?) of graph nodes that stay in float32; eager calls have no names
    fp32_layers: Tuple[str, ...] = ()

    def rule(self, operator: str) -> Rule:
        """Return what the policy says of an operator, by canonical name."""
        return self.rules.get(operator, UNLISTED)

    def keeps_layer(self, name: str) -> bool:
        """Tell whether a graph node called `name` stays in float32 by its name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.fp32_layers)

    def operators(self, kind: str) -> List[str]:
        """Return the operators of one class, sorted; "conditional" for those with conditions."""
        if kind == "conditional":
            return sorted(name for name, rule in self.rules.items() if rule.conditions)
        return sorted(
            name for name, rule in self.rules.items() if rule.kind == kind and not rule.conditions
        )

    def _key(self) -> Tuple[Any, ...]:
        return (self.target_dtype, self.device, self.fp32_layers, frozenset(self.rules.values()))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Policy) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.target_dtype, self.device, self.fp32_layers))

    # ------------------------------------------------------------------ making one

    @classmethod
    def default(cls, target_dtype: str = "float16", device: Optional[str] = None) -> "Policy":
        """Return mxamp's own policy for a dtype and a device type ("cpu" or "gpu").

        The default device is the GPU if there is one, else the CPU.
        """
        dtype = check_target(target_dtype)
        return _with_custom(_default(dtype, check_device(dtype, device), machine.features()))

    @classmethod
    def load(cls, path: Union[str, Path], device: Optional[str] = None) -> "Policy":
        """Read an operator list in the format of `lists/float16.toml`."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ArgumentError(f"no operator list at {str(path)!r}") from None
        except tomllib.TOMLDecodeError as error:
            raise ArgumentError(f"{str(path)!r} is not valid TOML: {error}") from None
        return _with_custom(_read(data, device, machine.features(), where=str(path)))

    def override(
        self,
        low: Optional[Iterable[str]] = None,
        fp32: Optional[Iterable[str]] = None,
        widest: Optional[Iterable[str]] = None,
        conditional: Optional[Iterable[Conditional]] = None,
        *,
        replace_lists: bool = False,
        fp32_layers: Sequence[str] = (),
    ) -> "Policy":
        """Return a policy with some operators put in other classes, by any of their names.

        >>> policy = Policy.default("float16", "cpu").override(fp32=["Convolution"])
        >>> policy.rule("Convolution").kind
        'fp32'

        `conditional` takes (operator, attribute, values) as `mxnet.contrib.amp` does. With
        `replace_lists`, a list that is given replaces the policy's own, as it does in
        `mxnet.contrib.amp.init`: what the old list held and no new one names becomes neutral.

        Raises `UnknownNameError` for a name MXNet does not know, `ArgumentError` for one that
        stands in two lists.
        """
        chosen: Dict[str, str] = {}
        for kind, names in (("low", low), ("fp32", fp32), ("widest", widest)):
            for name in check_names(kind, names):
                if chosen.setdefault(name, kind) != kind:
                    raise ArgumentError(
                        f"operator {name!r} is given as {chosen[name]} and as {kind}; "
                        "leave it in one list"
                    )
        conditions = _conditions(conditional)
        for name in conditions:
            if chosen.get(name) in ("fp32", "widest"):
                raise ArgumentError(
                    f"operator {name!r} is given as {chosen[name]} and as conditionally fp32; "
                    "leave it in one list"
                )
        rules = dict(self.rules)
        if replace_lists:
            given = {"low": low, "fp32": fp32, "widest": widest}
            replaced = {kind for kind, names in given.items() if names is not None}
            for name, rule in self.rules.items():
                kept = rule.conditions if conditional is None else ()
                if rule.kind in replaced and not kept:
                    why = f"left out of {rule.kind}"
                    rules[name] = replace(rule, kind="neutral", reason=why, conditions=())
                else:
                    rules[name] = replace(rule, conditions=kept)
        for name, kind in chosen.items():
            old = rules.get(name, UNLISTED)
            why = f"given as {kind}"
            rules[name] = replace(old, operator=name, kind=kind, reason=why, conditions=())
        for name, found in conditions.items():
            old = rules.get(name, UNLISTED)
            # fp32 otherwise would make the condition void: the operator follows its input then.
            kind = "neutral" if old.kind in ("fp32", "untouched") else old.kind
            rules[name] = replace(old, operator=name, kind=kind, conditions=found)
        layers = tuple(dict.fromkeys((*self.fp32_layers, *fp32_layers)))
        return replace(self, rules=MappingProxyType(rules), fp32_layers=layers)


# ---------------------------------------------------------------------- checks on arguments


def check_target(dtype: Any) -> str:
    """Return the target dtype's name; strings, NumPy types and MXNet's bfloat16 are taken."""
    name = machine.dtype_name(dtype)
    if name not in TARGETS:
        raise ArgumentError(f"target_dtype is 'float16' or 'bfloat16', not {dtype!r}")
    return name


def check_device(dtype: str, device: Optional[str]) -> str:
    """Return the device type a policy for `dtype` is made for."""
    if device is None:
        # MXNet 1.9.1 has no bfloat16 kernel on GPUs, so bfloat16 always means the CPU.
        return machine.default_device() if dtype == "float16" else "cpu"
    if device not in ("cpu", "gpu"):
        raise ArgumentError(f"a policy's device is 'cpu' or 'gpu', not {device!r}")
    if dtype == "bfloat16" and device == "gpu":
        raise ArgumentError(
            "MXNet 1.9.1 has no bfloat16 kernels on GPUs: use target_dtype='float16' there, or "
            "ctx=mx.cpu()"
        )
    return device


def check_names(kind: str, names: Optional[Iterable[str]]) -> List[str]:
    """Return the canonical names of operators given by any name."""
    if names is None:
        return []
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"the {kind} operators are a list of names, not {names!r}")
    return [resolve(name).name for name in names]


def _conditions(
    conditional: Optional[Iterable[Conditional]],
) -> Dict[str, Tuple[Condition, ...]]:
    found: Dict[str, Tuple[Condition, ...]] = {}
    for entry in conditional if conditional is not None else ():
        try:
            name, attribute, values = entry
        except (TypeError, ValueError):
            raise ArgumentError(
                f"a conditional operator is (operator, attribute, [values]), not {entry!r}"
            ) from None
        if isinstance(values, str):
            raise ArgumentError(f"the values of {attribute!r} are a list, not {values!r}")
        operator = resolve(name)
        condition = Condition(
            attribute, tuple(map(str, values)), default=operator.defaults.get(attribute)
        )
        found[operator.name] = (*found.get(operator.name, ()), condition)
    return found


# ---------------------------------------------------------------------- reading lists


@lru_cache(maxsize=None)
def _default(dtype: str, device: str, features: FrozenSet[str]) -> Policy:
    path = lists_folder() / f"{dtype}.toml"
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return _read(data, device, features, where=path.name)


def _with_custom(policy: Policy) -> Policy:
    if not custom_operators:
        return policy
    rule = replace(policy.rule("Custom"), by_op_type=tuple(sorted(custom_operators.items())))
    return replace(policy, rules=MappingProxyType({**policy.rules, "Custom": rule}))


def lists_folder() -> Path:
    """Return where the operator lists are: beside the package when run from a clone."""
    here = Path(__file__).resolve().parent
    return next(path for path in (here / "lists", here.parent / "lists") if path.is_dir())


def _read(
    data: Mapping[str, Any], device: Optional[str], features: FrozenSet[str], where: str
) -> Policy:
    if data.get("format") != 1:
        raise ArgumentError(f"{where} has format {data.get('format')!r}; this mxamp reads format 1")
    dtype = check_target(data.get("dtype"))
    device = check_device(dtype, device)
    rules: Dict[str, Rule] = {}
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
    return Policy(dtype, device, MappingProxyType(rules))


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
