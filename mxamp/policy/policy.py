"""A policy: which precision each operator computes in, as an immutable value."""

import fnmatch
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple, Union

from ..errors import ArgumentError
from ..framework import machine
from ..framework.files import write_file
from ..framework.keywords import checked_call
from ..framework.operators import resolve
from ..framework.wording import counted, shown
from . import overrides, targets
from .lists import OperatorList, own_list, read_list
from .overrides import Conditional, Layers, Names
from .rules import SHOWN_CLASSES, UNLISTED, CustomClasses, Rule
from .saving import policy_toml
from .targets import DEFAULT_TARGET

__all__ = ["Policy", "custom_classes", "set_custom_class"]

NO_POLICY = (
    "policy must be an mxamp.Policy, not {given}; Policy.default, Policy.load and Policy.override "
    "make one"
)
NOT_CALLED = (
    "policies are made by Policy.default('bfloat16'), Policy.load(file) and policy.override(...), "
    "not by Policy(...)"
)
TUNING = "; give the policy of the tuning: policy=tuning.policy"
BESIDE_LISTS = (
    "a policy contains operator lists: give no lists beside it, or change it with policy.override"
)
#: The fields that have no default.
_LEAST_FIELDS = 3


class Caches:
    """Results that other modules derive from one policy, by module."""

    __slots__ = ("eager", "fingerprint", "layers", "regions")

    def __init__(self) -> None:
        #: `patches.eager`: the casts of each operator, by its handle.
        self.eager: Optional[Any] = None
        #: `patches.announcements`: the layers of graphs under this policy; None once they have been
        #: compared with `fp32_layers`.
        self.layers: Optional[Set[str]] = set()
        #: `policy.regions`: the policies of regions in graphs under this policy, by mark.
        self.regions: Dict[str, Policy] = {}
        #: `policy.regions`: a hash of the policy's file.
        self.fingerprint: Optional[str] = None


@dataclass(frozen=True, eq=False, repr=False)
class Policy(OperatorList):
    """Which precision every operator computes in, on one kind of device.

    >>> policy = Policy.default("float16", device="cpu")
    >>> policy.rule("Convolution").op_class
    'low'

    `default`, `load` and `override` make policies, and `tune` finds one. Policies are immutable
    and compare by value.

    Parameters
    ----------
    target_dtype : str
        "float16" or "bfloat16".
    device : str
        The kind of device, "cpu" or "gpu".
    rules : dict of str to Rule
        The class of each operator, and its exceptions.
    fp32_layers : tuple of str
        The layers that stay in float32: names of nodes, where * and ? stand for any characters.
    substitutions : dict of str to str
        The faster equivalents of operators that graphs may use, each with its measured gain.
    """

    def __new__(cls, *args: Any, **fields: Any) -> "Policy":
        """Raise where fields are missing: `default`, `load` and `override` make policies."""
        if len(args) + len(fields) < _LEAST_FIELDS:
            raise ArgumentError(NOT_CALLED)
        return super().__new__(cls)

    def rule(self, operator: str) -> Rule:
        """Return the rule of an operator, by any of its names.

        `operator` is any name of an MXNet operator. Raises `UnknownNameError` for an operator that
        MXNet does not have.
        """
        found = self.rules.get(operator)
        return found if found is not None else self.rules.get(resolve(operator).name, UNLISTED)

    def keeps_layer(self, name: str) -> bool:
        """Return whether `fp32_layers` keep the graph node `name` in float32."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.fp32_layers)

    @cached_property
    def depends_on_shapes(self) -> bool:
        """Whether graphs depend on operators' shapes and neighbors (`graph.speed.shape_rules`)."""
        return bool(self.substitutions) or any(rule.by_shape for rule in self.rules.values())

    @cached_property
    def lowers(self) -> bool:
        """Whether any operator computes in the target dtype; False after `in_float32`."""
        return any(rule.lowers for rule in self.rules.values())

    def operators(self, op_class: str) -> List[str]:
        """Return the operators of one class, sorted.

        >>> "Convolution" in Policy.default("float16", "cpu").operators("low")
        True

        `op_class` is "low", "fp32", "widest", "neutral", "untouched", or "conditional" for
        operators that depend on an attribute. The target dtype stands for "low", and "float32" for
        "fp32".
        """
        wanted = targets.check_class(op_class, self.target_dtype)
        return sorted(name for name, rule in self.rules.items() if rule.shown_class == wanted)

    def __repr__(self) -> str:
        counts = Counter(rule.shown_class for rule in self.rules.values())
        (first, most), *others = [(name, counts[name]) for name in SHOWN_CLASSES if counts[name]]
        parts = [f"{counted(most, 'operator')} {first}", *(f"{n} {name}" for name, n in others)]
        given = sum(rule.given for rule in self.rules.values())
        parts += [counted(given, "override")] if given else []
        layers = len(self.fp32_layers)
        parts += [f"{counted(layers, 'layer name')} in float32"] if layers else []
        return f"<Policy {self.target_dtype} on {self.device}: {', '.join(parts)}>"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Fast: most policies share the `Rule` objects, which compare by identity first.
        return isinstance(other, Policy) and (
            self._identity == other._identity and dict(self.rules) == dict(other.rules)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _identity(self) -> Tuple[Any, ...]:
        """The fields that equal policies share, without rules."""
        names = frozenset(self.substitutions)
        return self.target_dtype, self.device, self.fp32_layers, names

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> Tuple[Any, ...]:
        rules, substitutions = dict(self.rules), dict(self.substitutions)
        return _unpickled, (
            self.target_dtype, self.device, rules, self.fp32_layers, substitutions,
        )  # fmt: skip

    @cached_property
    def caches(self) -> Caches:
        """Caches of other modules for this policy; freed with it."""
        return Caches()

    @classmethod
    @checked_call(dtype="write target_dtype='bfloat16'", ctx="write device='gpu'")
    def default(cls, target_dtype: Any = "float16", device: Any = None) -> "Policy":
        """Return mxamp's own policy for a dtype and a kind of device ("cpu", "gpu", a Context).

        >>> Policy.default("float16", device="gpu").target_dtype
        'float16'

        Parameters
        ----------
        target_dtype : str or dtype, default "float16"
            "float16" or "bfloat16".
        device : str or Context, optional
            The kind of device, such as "cpu" or "gpu". The default is the GPU if there is one, else
            the CPU.
        """
        dtype = targets.check_target(target_dtype)
        kind = targets.check_device(dtype, targets.device_type(device, "device"))
        return _own_policy(dtype, kind, machine.onednn_features(), custom_classes())

    @classmethod
    @checked_call(ctx="write device='gpu'")
    def load(cls, path: Union[str, Path], device: Any = None) -> "Policy":
        """Read a policy from a TOML file: one that `save` wrote, or your own operator list.

        ::

            amp.Policy.default("bfloat16").save("my.toml")
            policy = amp.Policy.load("my.toml")

        Parameters
        ----------
        path : str or Path
            The file to read.
        device : str or Context, optional
            The kind of device, such as "cpu" or "gpu". The default is the file's, else that of
            `default`.

        Raises
        ------
        ArgumentError
            There is no such file, or it has a mistake: the message names the file and the table.
        """
        kind = targets.device_type(device, "device")
        return _interned(
            Policy(**vars(read_list(path, kind, machine.onednn_features(), custom_classes())))
        )

    @checked_call()
    def save(self, path: Union[str, Path]) -> None:
        """Write the policy to a TOML file, from which `load` makes the same policy.

        ::

            policy = amp.Policy.default("bfloat16").override(fp32=["Convolution"])
            policy.save("my.toml")
            assert amp.Policy.load("my.toml") == policy

        An existing file is replaced whole, or not at all. Classes of custom operators
        (`register_custom_operator`) belong to a process and are not saved.

        Raises `ArgumentError` where `path` can't name a file, `WriteError` where writing fails.
        """
        write_file(path, policy_toml(self).encode())

    @classmethod
    def from_lists(
        cls,
        target_dtype: Any = DEFAULT_TARGET,
        low: Names = None,
        fp32: Names = None,
        widest: Names = None,
        conditional: Optional[Iterable[Conditional]] = None,
        *,
        policy: Optional["Policy"] = None,
        ctx: Any = None,
    ) -> "Policy":
        """Return the policy that the arguments of `init` and `convert_*` describe.

        That is `policy` if given; else the default policy for `target_dtype` and the kind of device
        of `ctx`, with each given operator list in place of the policy's own.

        Raises `ArgumentError` if `policy` is no policy, is given beside operator lists, or is for
        another dtype or device than `target_dtype` and `ctx`; and the errors of `override`.
        """
        lists = (low, fp32, widest, conditional)
        if policy is not None:
            if not isinstance(policy, Policy):
                raise _wrong_type_error(policy)
            if any(given is not None for given in lists):
                raise ArgumentError(BESIDE_LISTS)
            targets.check_same_target(policy.target_dtype, policy.device, target_dtype, ctx)
            return policy
        base = cls.default(targets.check_target(target_dtype), targets.device_type(ctx))
        if all(given is None for given in lists):
            return base
        return base.override(low, fp32, widest, conditional, replace_lists=True)

    @checked_call(
        fp32_ops="write fp32=[...]",
        target_dtype_ops="write low=[...]",
        target_precision_ops="write low=[...]",
        widest_ops="write widest=[...]",
        conditional_fp32_ops="write conditional=[...]",
        excluded_sym_names="write fp32_layers=[...]",
    )
    def override(
        self,
        low: Names = None,
        fp32: Names = None,
        widest: Names = None,
        conditional: Optional[Iterable[Conditional]] = None,
        *,
        replace_lists: bool = False,
        fp32_layers: Layers = (),
        substitutions: Optional[Iterable[str]] = None,
    ) -> "Policy":
        """Return a policy with some operators in other classes, given by any of their names.

        >>> policy = Policy.default("float16", "cpu").override(fp32=["Convolution"])
        >>> policy.rule("Convolution").op_class
        'fp32'

        Operators in `low` compute in the target dtype, in `fp32` in float32, in `widest` in the
        widest dtype of their inputs, whatever their shapes. `conditional` takes (operator,
        attribute, values) as `mxnet.contrib.amp` does: float32 where the attribute has one of the
        values. With `replace_lists`, a given list replaces the policy's own, as in
        `mxnet.contrib.amp.init`: operators of the old list that no new list names become neutral.

        `fp32_layers` stay in float32: Gluon blocks, or names that `explain` shows, with * and ?.
        `substitutions` names the policy's substitutions to keep.

        Raises `UnknownNameError` for a name that MXNet does not know, `ArgumentError` for a name in
        two lists.
        """
        given = {"low": low, "fp32": fp32, "widest": widest}
        rules = overrides.with_overrides(
            self.rules, given, conditional, replace_lists, self.target_dtype
        )
        kept = self.substitutions
        if substitutions is not None:
            names = overrides.checked_substitutions(substitutions, kept)
            kept = MappingProxyType({name: kept[name] for name in names})
        layers = tuple(dict.fromkeys((*self.fp32_layers, *overrides.checked_layers(fp32_layers))))
        return self._replace(rules=MappingProxyType(rules), fp32_layers=layers, substitutions=kept)

    def untuned(self) -> "Policy":
        """Return the policy without substitutions and without rules by shape for speed.

        >>> Policy.default("bfloat16").untuned().substitutions
        mappingproxy({})

        Under it, eager calls, graphs and converted models agree bit for bit in bfloat16 too.
        """
        rules = MappingProxyType(overrides.without_rules_for_speed(self.rules))
        return self._replace(rules=rules, substitutions=MappingProxyType({}))

    def in_float32(self) -> "Policy":
        """Return the policy with nothing lowered: every operator of class low is in class fp32.

        >>> Policy.default("bfloat16").in_float32().operators("low")
        []

        Under it, float32 models compute in float32 throughout. Substitutions stay, so graphs may
        use faster equivalents of their operators; without them graphs are as in plain MXNet.
        """
        return self._replace(rules=MappingProxyType(overrides.in_float32(self.rules)))

    def _replace(self, **fields: Any) -> "Policy":
        """Return a policy with some fields replaced."""
        return _interned(replace(self, **fields))


def _wrong_type_error(given: Any) -> ArgumentError:
    """Return the error for a `policy` argument that is no `Policy`."""
    hint = TUNING if isinstance(getattr(given, "policy", None), Policy) else ""
    return ArgumentError(NO_POLICY.format(given=shown(given)) + hint)


@lru_cache(maxsize=None)
def _own_policy(dtype: str, device: str, features: FrozenSet[str], custom: CustomClasses) -> Policy:
    """Return the policy of mxamp's own operator list."""
    # Cached: the caches of graphs and casts belong to a policy object.
    return _interned(Policy(**vars(own_list(dtype, device, features, custom))))


class _PolicyRegistry:
    """The policies of the process, and the classes of custom operators for new policies."""

    def __init__(self) -> None:
        #: One policy object for each value in use: code that makes an equal policy in each step
        #: finds the cached graphs and casts.
        self.by_value: "weakref.WeakValueDictionary[Policy, Policy]" = weakref.WeakValueDictionary()
        #: Policies of `autocast` regions. Graphs hold only the fingerprint, so keep them alive.
        self.by_fingerprint: Dict[str, Policy] = {}
        #: The class of each custom operator, by `op_type`.
        self.custom_classes: Dict[str, str] = {}


#: A global: graphs name policies by fingerprint, and MXNet's custom operators belong to a process.
_policy_registry = _PolicyRegistry()


def _interned(policy: Policy) -> Policy:
    """Return the existing policy equal to `policy`; else register `policy` and return it."""
    return _policy_registry.by_value.setdefault(policy, policy)


def set_custom_class(op_type: str, op_class: str) -> None:
    """Set the class ("low", "fp32" or "widest") of a custom operator, for policies made later."""
    _policy_registry.custom_classes[op_type] = op_class


def custom_classes() -> CustomClasses:
    """Return (`op_type`, class) of each custom operator that has a class, sorted."""
    return tuple(sorted(_policy_registry.custom_classes.items()))


def _unpickled(
    dtype: str,
    device: str,
    rules: Dict[str, Rule],
    layers: Tuple[str, ...],
    substitutions: Dict[str, str],
) -> Policy:
    """Return the policy of pickled fields."""
    frozen = MappingProxyType(rules), layers, MappingProxyType(substitutions)
    return _interned(Policy(dtype, device, *frozen))
