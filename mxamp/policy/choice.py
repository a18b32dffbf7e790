"""The choice that `init` makes: the policy that its arguments describe, or float32 for "auto"."""

from typing import Any, Iterable, Iterator, List, Optional, Tuple

from ..errors import ArgumentError
from ..framework import machine
from ..framework.wording import shortened
from .active import FLOAT32, Choice
from .overrides import Conditional, Names
from .policy import Policy
from .rules import UNLISTED
from .targets import DEFAULT_TARGET, TARGETS_OR_AUTO, check_target, device_type, is_auto

__all__ = ["chosen_policy", "describe_difference"]

OTHER_POLICY = (
    "'auto' is {chosen} here, but the policy is for {own}: leave 'auto' out to use the policy as "
    "it is, or give ctx to choose the kind of device"
)


def chosen_policy(
    target_dtype: Any,
    low: Names = None,
    fp32: Names = None,
    widest: Names = None,
    conditional: Optional[Iterable[Conditional]] = None,
    *,
    policy: Optional[Policy] = None,
    ctx: Any = None,
) -> Choice:
    """Return the policy that the arguments of `init` describe, or `FLOAT32`.

    Like `Policy.from_lists`, but `target_dtype` may be "auto". Arguments are checked even where
    "auto" means float32 and ignores them.
    """
    if policy is None or target_dtype is not DEFAULT_TARGET:
        target_dtype = check_target(target_dtype, TARGETS_OR_AUTO)
    lists = (low, fp32, widest, conditional)
    if not is_auto(target_dtype):
        return Policy.from_lists(target_dtype, *lists, policy=policy, ctx=ctx)
    device = device_type(ctx) or machine.default_device()
    dtype = machine.fast_dtype(device)
    if policy is None:
        wanted = Policy.from_lists(machine.default_dtype(device), *lists, ctx=device)
    else:
        wanted = Policy.from_lists(DEFAULT_TARGET, *lists, policy=policy, ctx=ctx)
    if dtype == "float32":
        return FLOAT32
    if (wanted.target_dtype, wanted.device) != (dtype, device):
        own = f"{wanted.target_dtype} on the {wanted.device.upper()}"
        chosen = f"{dtype} on the {device.upper()}"
        raise ArgumentError(OTHER_POLICY.format(chosen=chosen, own=own))
    return wanted


#: A name, and its values in two policies.
_Values = Tuple[str, Any, Any]


def describe_difference(old: Choice, new: Choice) -> str:
    """Return how two policies differ, in words: "target_dtype: bfloat16 instead of float16"."""
    for values in _values_to_compare(old, new):
        parts = [f"{name}: {one} instead of {other}" for name, one, other in values if one != other]
        if parts:
            return shortened(parts)
    return "the conditions of some operators"


def _values_to_compare(old: Choice, new: Choice) -> Iterator[List[_Values]]:
    """Yield lists of (name, old value, new value): dtypes first, which imply different rules."""
    dtypes = ("target_dtype", old.target_dtype, new.target_dtype)
    if not (isinstance(old, Policy) and isinstance(new, Policy)):
        yield [dtypes]
        return
    yield [dtypes, ("device", old.device, new.device)]
    layers = _names_or_none(old.fp32_layers), _names_or_none(new.fp32_layers)
    yield [
        ("tuned", old != old.untuned(), new != new.untuned()),
        ("layers kept in float32", *layers),
    ]
    names = sorted({*old.rules, *new.rules})

    def shown_class(policy: Policy, name: str) -> str:
        return policy.rules.get(name, UNLISTED).shown_class

    classes = [(name, shown_class(old, name), shown_class(new, name)) for name in names]
    substitutions = (
        _names_or_none(sorted(old.substitutions)),
        _names_or_none(sorted(new.substitutions)),
    )
    yield [*classes, ("substitutions", *substitutions)]


def _names_or_none(names: Iterable[str]) -> str:
    """Return the first few names and the number of the rest, "none" without names."""
    return shortened(list(names)) or "none"
