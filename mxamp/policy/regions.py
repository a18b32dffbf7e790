"""Regions in graphs: `autocast` in a model's own code, as attributes of nodes.

`autocast` inside `hybrid_forward`, or around code that builds a symbol, is in force while nodes are
made, not while they run. So each node made in a region gets a mark, an attribute that names the
policy under which the node is cast later. Marks are saved with the graph; MXNet ignores them.
"""

import hashlib
import os
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Iterable, Mapping, Optional, Tuple

from ..errors import ArgumentError, StateError
from ..framework import machine
from .active import FLOAT32, Choice, current_policy, nearest_policy
from .decision import Decision
from .overrides import neutral_rules
from .policy import Policy, _policy_registry
from .saving import policy_toml
from .targets import AUTO, DEFAULT_TARGET, TARGETS_OR_AUTO, is_auto

__all__ = [
    "CAST",
    "FLOAT32_INSIDE",
    "OFF",
    "REGION",
    "TARGET_INSIDE",
    "WIDEST_INSIDE",
    "Region",
    "current_region",
    "argument_dtype",
    "push_region",
    "pop_region",
    "marks_of",
    "node_policies",
    "policy_for_node",
    "policy_inside",
    "policy_for_regions",
    "with_region_reason",
]

#: The attribute with the mark of the region that a node was made in.
REGION = "__mxamp_region__"
#: The attribute of a copied function argument with the dtype that the function needs.
CAST = "__mxamp_cast__"
FLOAT32_INSIDE, TARGET_INSIDE, WIDEST_INSIDE = "float32", "target", "widest"

#: The mark of a region that turns mixed precision off, and the beginnings of all others.
OFF, _ON, _POLICY = "off", "on", "policy"

UNKNOWN_POLICY = (
    "a part of this graph was made under autocast(policy=...), and this process holds no equal "
    "policy (for {dtype}, fingerprint {number}): save that policy with Policy.save, and keep the "
    "result of Policy.load in a variable while the graph is used"
)
UNKNOWN_MARK = (
    "a node of the graph has the attribute {attribute}={mark!r}, which this version of mxamp does "
    "not know: was the graph made with a later one?"
)
OFF_WORDS = "autocast(enabled=False) in the model's code: runs as without mxamp"
NOT_HERE_WORDS = "autocast({mark}) in the model's code, which is not for this device: no casts"
ON_WORDS = "autocast({mark}) in the model's code: "
CAST_WORDS = {
    FLOAT32_INSIDE: "float_function in the model's code",
    TARGET_INSIDE: "half_function in the model's code",
    WIDEST_INSIDE: "promote_function in the model's code",
}


class Region:
    """One `autocast` region: its policy or dtype, and whether it has marked a node."""

    __slots__ = ("_choice", "_dtype", "has_nodes")

    def __init__(self, dtype: Optional[str], enabled: bool, choice: Optional[Choice]) -> None:
        self._dtype = OFF if not enabled else dtype or _ON
        self._choice = choice if enabled else None
        self.has_nodes = False

    @property
    def mark(self) -> str:
        """The mark of nodes that are made in the region."""
        if self._choice is FLOAT32:
            return OFF
        return _mark_policy(self._choice) if isinstance(self._choice, Policy) else self._dtype

    @property
    def is_bare(self) -> bool:
        """Whether the region is `autocast()` without arguments, which takes the outer policy."""
        return self._choice is None and self._dtype == _ON

    @property
    def is_off(self) -> bool:
        """Whether the region turns casts off."""
        return self._choice is None and self._dtype == OFF


#: The stack of regions; a global, as any context variable. Each thread and task has its own value.
_regions: "ContextVar[Tuple[Optional[Region], ...]]" = ContextVar("mxamp_marks", default=())


def push_region(region: Optional[Region]) -> None:
    """Mark graph nodes made until `pop_region` with `region`; with None, don't mark them."""
    outer = _regions.get()
    if region is not None and region.is_bare:
        for one in reversed(outer):
            if one is None:
                break
            if not one.is_off:
                region = one
                break
    _regions.set((*outer, region))


def pop_region() -> Optional[Region]:
    """End the region that `push_region` began last; return it."""
    *outer, innermost = _regions.get()
    _regions.set(tuple(outer))
    return innermost


def current_region() -> Optional[Region]:
    """Return the region that marks graph nodes made now, None for no marks."""
    regions = _regions.get()
    return regions[-1] if regions else None


def _mark_policy(policy: Policy) -> str:
    """Return the mark that names a policy by fingerprint, and keep the policy alive."""
    number = _fingerprint(policy)
    _policy_registry.by_fingerprint[number] = policy
    return f"{_POLICY} {policy.target_dtype} {number}"


def _fingerprint(policy: Policy) -> str:
    """Return the 16 hex digits that name a policy in marks: a hash of the text of its file."""
    if policy.caches.fingerprint is None:
        try:
            text = policy_toml(policy)
        except ArgumentError:
            # No file can hold the policy: only this process knows it.
            text = f"{os.getpid()} {id(policy)}"
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        policy.caches.fingerprint = digest[:16]
    return policy.caches.fingerprint


def _policy_of_fingerprint(mark: str) -> Policy:
    """Return the policy that a mark names; raise `StateError` if this process holds none."""
    _, dtype, number = mark.split()
    held = _policy_registry.by_fingerprint
    if number not in held:
        policies = list(_policy_registry.by_value.values())
        held.update((_fingerprint(policy), policy) for policy in policies)
    if number not in held:
        raise StateError(UNKNOWN_POLICY.format(dtype=dtype, number=number))
    return held[number]


# ---------------------------------------------------------------------- policies of nodes


def policy_inside(dtype: Optional[str], outer: Optional[Choice]) -> Choice:
    """Return the policy of an `autocast(dtype)` region in code under the policy `outer`."""
    dtype = machine.fast_dtype() if is_auto(dtype) else dtype
    if outer is not None and dtype in (None, outer.target_dtype):
        return outer
    return FLOAT32 if dtype == FLOAT32.target_dtype else Policy.default(dtype or DEFAULT_TARGET)


def policy_for_node(policy: Policy, attrs: Mapping[str, str], off: bool = False) -> Policy:
    """Return the policy for a graph node with these attributes, in a graph under `policy`.

    With `off`, mixed precision is off around the graph: nodes without a mark are not cast.
    """
    mark = attrs.get(REGION, OFF if off else None)
    if mark is None:
        return policy
    regions = policy.caches.regions
    if mark not in regions:
        regions[mark] = _policy_in_region(policy, mark)
    return regions[mark]


def _policy_in_region(policy: Policy, mark: str) -> Policy:
    """Return the policy for nodes with this mark; where they get no casts, all are neutral."""
    region = _policy_of_mark(policy, mark)
    if region is None:
        rules = neutral_rules(policy.rules, region_reason(mark, policy))
        return policy._replace(rules=MappingProxyType(rules))
    # The layers that the user keeps in float32 stay there under the model's own regions too.
    return region.override(fp32_layers=policy.fp32_layers)


def argument_dtype(policy: Policy, attrs: Mapping[str, str], off: bool = False) -> Optional[str]:
    """Return the dtype for a node that copies an argument of a `float_function` or its like.

    None for any other node, and where mixed precision is off.
    """
    cast, mark = attrs.get(CAST), attrs.get(REGION, OFF if off else _ON)
    region = _policy_of_mark(policy, mark) if cast is not None else None
    if region is None:
        return None
    return region.target_dtype if cast == TARGET_INSIDE and region.lowers else "float32"


def _policy_of_mark(policy: Policy, mark: str) -> Optional[Policy]:
    """Return the policy that a mark stands for in a graph under `policy`; None for no casts."""
    if mark in (OFF, _ON):
        return policy if mark == _ON else None
    if mark.startswith(_POLICY):
        given = _policy_of_fingerprint(mark)
        return given if given.device == policy.device else None
    dtype = machine.fast_dtype(policy.device) if _checked_dtype(mark) == AUTO else mark
    if dtype == policy.target_dtype:
        return policy
    if dtype == FLOAT32.target_dtype or (dtype, policy.device) == ("bfloat16", "gpu"):
        return None
    return Policy.default(dtype, policy.device)


def _checked_dtype(mark: str) -> str:
    """Return a mark that is a target dtype or "auto"; raise `ArgumentError` for any other."""
    if mark not in TARGETS_OR_AUTO:
        raise ArgumentError(UNKNOWN_MARK.format(attribute=REGION, mark=mark))
    return mark


def with_region_reason(decision: Decision, attrs: Mapping[str, str], policy: Policy) -> Decision:
    """Return `decision` with the `autocast` region of a graph node named in its reason."""
    mark, cast = attrs.get(REGION), attrs.get(CAST)
    if mark == OFF or (mark is not None and _policy_of_mark(policy, mark) is None):
        return decision
    if cast is not None:
        return replace(decision, reason=CAST_WORDS[cast.split()[0]])
    if mark is None:
        return decision
    return replace(decision, reason=region_reason(mark, policy) + decision.reason)


def region_reason(mark: str, policy: Policy) -> str:
    """Return the text about an `autocast` region that begins the reasons of its nodes' casts."""
    if mark == OFF:
        return OFF_WORDS
    given = "policy=..." if mark.startswith(_POLICY) else "" if mark == _ON else repr(mark)
    words = NOT_HERE_WORDS if _policy_of_mark(policy, mark) is None else ON_WORDS
    return words.format(mark=given)


# ---------------------------------------------------------------------- marks of graphs


def marks_of(attributes: Iterable[Mapping[str, str]]) -> "frozenset[str]":
    """Return the marks of `autocast` regions among the attributes of a graph's nodes."""
    return frozenset(attrs[REGION] for attrs in attributes if REGION in attrs)


def node_policies(policy: Policy, marks: Iterable[str]) -> Iterable[Policy]:
    """Yield the policies for the nodes of a graph under `policy` with these marks."""
    yield policy
    for mark in marks:
        yield policy_for_node(policy, {REGION: mark})


def policy_for_regions(marks: "frozenset[str]") -> Optional[Policy]:
    """Return the policy for graph nodes in regions with these marks while mixed precision is off.

    None if mixed precision is on, and if no region casts anything.
    """
    if marks <= {OFF} or current_policy() is not None:
        return None
    outer = nearest_policy()
    if isinstance(outer, Policy):
        return outer
    # Marks with a dtype come first; `autocast()` without arguments names none.
    for mark in sorted(marks - {OFF}, key=lambda one: (one != _ON, one)):
        if mark.startswith(_POLICY):
            return _policy_of_fingerprint(mark)
        choice = policy_inside(None if mark == _ON else _checked_dtype(mark), outer)
        if isinstance(choice, Policy):
            return choice
    return None
