"""Products whose kernels sum in half precision: how many terms an element of the result has."""

from typing import Mapping, Optional, Tuple

from .rules import Rule
from .values import same_value

__all__ = ["reason_by_sums", "terms"]

Shape = Tuple[int, ...]


def terms(operator: str, attributes: Mapping[str, str], first: Optional[Shape]) -> Optional[int]:
    """Return how many products a sum has; None where the first input's shape is not known.

    >>> terms("batch_dot", {"transpose_a": "True"}, (8, 64, 32))
    64
    """
    if not first:
        return None
    transposed = operator == "batch_dot" and same_value(attributes.get("transpose_a", "0"), "1")
    return first[-2] if transposed else first[-1]


def reason_by_sums(
    rule: Rule, attributes: Mapping[str, str], first: Optional[Shape]
) -> Optional[str]:
    """Return why a call stays in float32 for the length of its sums; None if it does not."""
    for one in rule.by_shape:
        if one.name == "long_sums":
            count = terms(rule.operator, attributes, first)
            if count is None or count > one.limit:
                return one.reason
    return None
