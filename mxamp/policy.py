"""A policy: which precision each operator computes in, as a value.

A policy is read from an operator list (`lists/float16.toml`, `lists/bfloat16.toml`, or a file of
your own), resolved against MXNet's registry and one kind of device, and never changes after that.
"""

import fnmatch
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import (
    AbstractSet,
    Any,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from . import machine
from . import substitutions as known
from .errors import ArgumentError, unknown
from .operators import resolve
from .rules import UNLISTED, Condition, Rule, read_rules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Policy"]

TARGETS = ("float16", "bfloat16")

Conditional = Tuple[str, str, Sequence[str]]


#: Classes of custom operators, by the name they were registered under.
custom_operators: Dict[str, str] = {}


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
    #: the faster equivalents that graphs about to run get: name, and what it was measured to gain
    substitutions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def rule(self, operator: str) -> Rule:
        """Return what the policy says of an operator, by canonical name."""
        return self.rules.get(operator, UNLISTED)

    def keeps_layer(self, name: str) -> bool:
        """Tell whether a graph node called `name` stays in float32 by its name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.fp32_layers)

    @cached_property
    def chooses(self) -> bool:
        """Whether there is anything that `choices.choose` has to look for."""
        return bool(self.substitutions) or any(rule.by_shape for rule in self.rules.values())

    def operators(self, kind: str) -> List[str]:
        """Return the operators of one class, sorted; "conditional" for those with conditions."""
        if kind == "conditional":
            return sorted(name for name, rule in self.rules.items() if rule.conditions)
        return sorted(
            name for name, rule in self.rules.items() if rule.kind == kind and not rule.conditions
        )

    def _key(self) -> Tuple[Any, ...]:
        return (
            self.target_dtype, self.device, self.fp32_layers, frozenset(self.substitutions),
            frozenset(self.rules.values()),
        )  # fmt: skip

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
        substitutions: Optional[Iterable[str]] = None,
    ) -> "Policy":
        """Return a policy with some operators put in other classes, by any of their names.

        >>> policy = Policy.default("float16", "cpu").override(fp32=["Convolution"])
        >>> policy.rule("Convolution").kind
        'fp32'

        `conditional` takes (operator, attribute, values) as `mxnet.contrib.amp` does. With
        `replace_lists`, a list that is given replaces the policy's own, as it does in
        `mxnet.contrib.amp.init`: what the old list held and no new one names becomes neutral.

        `substitutions` are those of the policy's own to make, by name. An operator that is given a
        class has it whatever its shapes are.

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
            rules = _emptied(rules, replaced, keep_conditions=conditional is None)
        _put(rules, chosen, conditions)
        made = self.substitutions
        if substitutions is not None:
            names = _known_substitutions(substitutions, made)
            made = MappingProxyType({name: made[name] for name in names})
        layers = tuple(dict.fromkeys((*self.fp32_layers, *fp32_layers)))
        return replace(self, rules=MappingProxyType(rules), fp32_layers=layers, substitutions=made)

    def untuned(self) -> "Policy":
        """Return the policy without substitutions and choices by shape.

        >>> Policy.default("bfloat16").untuned().substitutions
        mappingproxy({})

        With it, eager calls, hybridized blocks and converted models agree bit for bit in bfloat16
        too, as they do in float16 anyway.
        """
        rules = {name: replace(rule, by_shape=()) for name, rule in self.rules.items()}
        return replace(self.override(substitutions=()), rules=MappingProxyType(rules))


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


def _emptied(
    rules: Mapping[str, Rule], replaced: AbstractSet[str], keep_conditions: bool
) -> Dict[str, Rule]:
    """Return rules where the classes in `replaced` have become neutral."""
    found = {}
    for name, rule in rules.items():
        kept = rule.conditions if keep_conditions else ()
        if rule.kind in replaced and not kept:
            why = f"left out of {rule.kind}"
            found[name] = replace(rule, kind="neutral", reason=why, conditions=())
        else:
            found[name] = replace(rule, conditions=kept)
    return found


def _put(
    rules: Dict[str, Rule],
    chosen: Mapping[str, str],
    conditions: Mapping[str, Tuple[Condition, ...]],
) -> None:
    """Put operators in the classes that were chosen, and under conditions."""
    for name, kind in chosen.items():
        old = rules.get(name, UNLISTED)
        rules[name] = replace(
            old, operator=name, kind=kind, reason=f"given as {kind}", given=True,
            conditions=(), by_shape=(),
        )  # fmt: skip
    for name, found in conditions.items():
        old = rules.get(name, UNLISTED)
        # fp32 otherwise would make the condition void: the operator follows its input then.
        kind = "neutral" if old.kind in ("fp32", "untouched") else old.kind
        rules[name] = replace(old, operator=name, kind=kind, conditions=found)


def _known_substitutions(given: Iterable[str], there: Mapping[str, str]) -> List[str]:
    if isinstance(given, str):
        raise ArgumentError(f"substitutions is a list of names, not {given!r}")
    names = list(given)
    for name in names:
        if name not in there:
            raise unknown("substitution", name, there)
    return names


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
    rules = read_rules(data, device, features, where)
    made = data.get("substitutions", {})
    for name in made:
        if name not in known.NAMES:
            raise unknown("substitution", name, known.NAMES)
    return Policy(
        dtype, device, MappingProxyType(rules), substitutions=MappingProxyType(dict(made))
    )
