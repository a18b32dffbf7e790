"""Which operators have computed in the target dtype so far: for the summary of a whole run."""

from typing import Set

__all__ = ["lowered", "note"]

#: By canonical name.
lowered: Set[str] = set()


def note(operator: str, dtype: str) -> None:
    """Remember that an operator computes in a dtype."""
    if dtype in ("float16", "bfloat16"):
        lowered.add(operator)
