"""A shape rule for matrix products on GPUs: long sums in float32, not in float16."""

from __future__ import annotations

from ...policy.values import same_value
from .. import Site, rule


@rule("long_sums", changes_results=True, in_calls=True, reads_weight=True)
def has_long_sums(site: Site, limit: int) -> bool:
    """Return whether a matrix product may sum more than `limit` terms; True if unknown.

    Some kernels sum in half precision, which loses digits in long sums. A product of M by K and K
    by N sums K terms, and its gradients sum N and M.
    """
    shapes = (*site.shapes, None, None)[:2]
    if site.training:
        return not all(shapes) or max(n for one in shapes for n in (one or ())[-2:]) > limit
    transposed = same_value(site.attrs.get("transpose_a", "0"), "1")
    first = shapes[0]
    return not first or first[-2 if transposed else -1] > limit
