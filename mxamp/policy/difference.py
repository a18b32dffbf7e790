"""What differs between two policies, in the words of the arguments that make them."""

from typing import Any, Iterable, List, Tuple

from ..framework.wording import shortened
from .active import Choice
from .policy import Policy

__all__ = ["differing"]

#: What differs, and its two values.
Difference = Tuple[str, Any, Any]


def differing(old: Choice, new: Choice) -> str:
    """Return how two policies differ: "target_dtype: bfloat16 instead of float16".

    Policies for two dtypes or devices differ in most operators; those are not listed.
    """
    values: List[Difference] = [("target_dtype", old.target_dtype, new.target_dtype)]
    if isinstance(old, Policy) and isinstance(new, Policy):
        values += _of_policies(old, new)
    parts = [f"{name}: {here} instead of {there}" for name, here, there in values if here != there]
    return shortened(parts) or "the conditions of some operators"


def _of_policies(old: Policy, new: Policy) -> List[Difference]:
    values: List[Difference] = [("device", old.device, new.device)]
    if old.target_dtype != new.target_dtype:
        return values
    if all(here == there for _, here, there in values):
        values.append(("tuned", old != old.untuned(), new != new.untuned()))
        layers = "layers kept in float32"
        values.append((layers, _listed(old.fp32_layers), _listed(new.fp32_layers)))
    if all(here == there for _, here, there in values):
        here, there = (_listed(sorted(policy.substitutions)) for policy in (old, new))
        values = [*_operators(old, new), ("substitutions", here, there)]
    return values


def _operators(old: Policy, new: Policy) -> Iterable[Difference]:
    """Yield the operators with both classes."""
    for name in sorted({*old.rules, *new.rules}):
        yield name, old.rule(name).shown_class, new.rule(name).shown_class


def _listed(names: Iterable[str]) -> str:
    return shortened(list(names)) or "none"
