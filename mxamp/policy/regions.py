"""`autocast` regions in a model's own code, which graph nodes record as an attribute.

`autocast` inside `hybrid_forward`, or around code that builds a symbol, is in force while nodes are
made, not while they run. So each node made in a region gets a mark, an attribute that names the
policy under which the node is cast later. Marks are saved with the graph; MXNet ignores them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Mapping

from ..backends import backend_of
from ..framework.machine import default_device
from .active import OFF, ON, current_policy, nearest_policy
from .decision import Decision
from .overrides import Change
from .policy import PLAIN_FLOAT32, PerPolicy, Policy, PolicyChoice, float32_choice, policy_from_data
from .rules import Surroundings, surroundings
from .targets import AUTO, DEFAULT_TARGET

#: The attribute with the mark of the region that a node was made in.
REGION = "__mxamp_region__"
#: The attribute of a copied function argument with the dtype that the function needs.
CAST = "__mxamp_cast__"
FLOAT32_INSIDE, TARGET_INSIDE, WIDEST_INSIDE = "float32", "target", "widest"

#: The beginning of the marks of regions with a whole policy, which follows as text.
_POLICY = "policy "

#: How reasons show the marks of regions without a dtype.
_SHOWN = {OFF: "enabled=False", ON: ""}
_DECORATORS = {FLOAT32_INSIDE: "float", TARGET_INSIDE: "half", WIDEST_INSIDE: "promote"}


def mark_of(dtype: str | None, enabled: bool, given: PolicyChoice | None) -> str:
    """Return the mark for these `autocast` arguments: the text that nodes in the region store."""
    if not enabled:
        return OFF
    return _POLICY + given.text if isinstance(given, Policy) else dtype or ON


# ---------------------------------------------------------------------- policies of nodes


def policy_inside(dtype: str | None, outer: PolicyChoice | None) -> PolicyChoice:
    """Return the policy that applies inside `autocast(dtype)` if `outer` applies around it."""
    dtype = backend_of(default_device()).fast_dtype() if dtype == AUTO else dtype
    if outer is not None and dtype in (None, outer.target_dtype):
        return outer
    if dtype == PLAIN_FLOAT32.target_dtype:
        return float32_choice(default_device())
    return Policy.default(dtype or DEFAULT_TARGET)


#: The policies of regions in graphs under a policy, by mark.
_policies_inside: PerPolicy[dict[str, Policy]] = PerPolicy(lambda _policy: {})


def policy_for_node(policy: Policy, attrs: Mapping[str, str], regions_only: bool = False) -> Policy:
    """Return the policy for a node: that of its recorded `autocast` region, else the graph's.

    With `regions_only`, mixed precision is off around the graph: nodes without a mark are not cast.
    """
    mark = attrs.get(REGION, OFF if regions_only else None)
    if mark is None:
        return policy
    regions = _policies_inside(policy)
    if mark not in regions:
        region = _policy_of_mark(policy, mark)
        if region is None:
            reason = "runs as without mxamp" if mark == OFF else "not for this device"
            regions[mark] = policy.changed(Change(neutral=reason))
        else:
            # The layers that the user keeps in float32 stay there under the model's regions too.
            regions[mark] = region.override(fp32_layers=policy.fp32_layers)
    return regions[mark]


def argument_dtype(policy: Policy, attrs: Mapping[str, str], regions_only: bool) -> str | None:
    """Return the dtype to which a decorator such as `half_function` casts arguments in a graph.

    None where mixed precision is off.
    """
    region = _policy_of_mark(policy, attrs.get(REGION, OFF if regions_only else ON))
    if region is None:
        return None
    return region.precision if attrs[CAST] == TARGET_INSIDE else "float32"


def _policy_of_mark(policy: Policy, mark: str) -> Policy | None:
    """Return the policy inside an `autocast`, given its mark on a graph node; None for no casts.

    `policy` is that of the whole graph.
    """
    if mark.startswith(_POLICY):
        given = _policy_in_mark(mark, surroundings(policy.device))
        return given if given.device == policy.device else None
    backend = backend_of(policy.device)
    dtype = backend.fast_dtype() if mark == AUTO else mark
    if dtype in (ON, policy.target_dtype):
        return policy
    is_known = dtype in (*backend.dtypes, "float32")  # OFF is no dtype
    return Policy.default(dtype, policy.device) if is_known else None


@lru_cache(maxsize=64)
def _policy_in_mark(mark: str, _now: Surroundings) -> Policy:
    """Parse the policy that graph nodes store as text for an `autocast(policy=...)`."""
    return policy_from_data(json.loads(mark[len(_POLICY) :]))


def with_region_reason(decision: Decision, attrs: Mapping[str, str]) -> Decision:
    """Return a node's cast decision with a reason that names the `autocast` around the node."""
    mark = attrs.get(REGION)
    if CAST in attrs and mark != OFF:
        reason = f"{_DECORATORS[attrs[CAST].split()[0]]}_function in the model's code"
    elif mark is not None:
        given = "policy=..." if mark.startswith(_POLICY) else _SHOWN.get(mark, repr(mark))
        reason = f"autocast({given}) in the model's code: {decision.reason}"
    else:
        return decision
    return replace(decision, reason=reason)


# ---------------------------------------------------------------------- marks of graphs


def policy_for_regions(marks: frozenset[str]) -> Policy | None:
    """Return a policy for a graph in which only nodes of `autocast` regions are cast.

    That is, mixed precision is off around it. None if it is on, or if no region casts anything.
    """
    if marks <= {OFF} or current_policy() is not None:
        return None
    outer = nearest_policy()
    if isinstance(outer, Policy):
        return outer
    # `autocast()` comes first: it names no dtype, and takes that of the policy found here.
    for mark in sorted(marks - {OFF}, key=lambda one: (one != ON, one)):
        if mark.startswith(_POLICY):
            return _policy_in_mark(mark, surroundings(default_device()))
        choice = policy_inside(None if mark == ON else mark, outer)
        if isinstance(choice, Policy):
            return choice
    return None
