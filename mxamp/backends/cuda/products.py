"""batch_dot on GPUs: float32 for long sums in half precision, and linalg.gemm2 for TF32."""

from __future__ import annotations

from ...policy.values import same_value
from .. import Site, rule
from ..choices import Passes, last_reason
from ..passes import Call, Detail, Parts, Pass

#: A substitution on demand: nobody has measured it yet.
GEMM2 = "gemm2"
ABOUT_GEMM2 = "float32 batch_dot by linalg.gemm2, with TF32 from compute capability 8.0 on"


@rule("long_sums", changes_results=True, in_calls=True, reads_weight=True)
def has_long_sums(site: Site, limit: int) -> bool:
    """Return whether a matrix product may add more than `limit` terms; True for unknown shapes.

    Some kernels sum in half precision, which loses digits in long sums. A product of M by K and K
    by N sums K terms, and its gradients sum N and M.
    """
    shapes = (*site.shapes, None, None)[:2]
    if site.training:
        return not all(shapes) or max(n for one in shapes for n in (one or ())[-2:]) > limit
    transposed = same_value(site.attrs.get("transpose_a", "0"), "1")
    first = shapes[0]
    return not first or first[-2 if transposed else -1] > limit


def match_long_products(call: Call) -> Detail | None:
    """Return () for a batch_dot that a shape rule keeps in float32 (long sums); else None."""
    rules = call.policy.rule(call.operator).by_shape
    kept = last_reason(Site(call.operator, call.attrs, call.shapes, call.training), rules)
    return () if kept is not None else None


def gemm2(parts: Parts, _detail: Detail) -> None:
    """Before: batch_dot in float32. After: linalg.gemm2, which may use TF32.

    Conditions: the product's sums are long.
    """
    sides = {name: parts.attrs.get(name, "False") for name in ("transpose_a", "transpose_b")}
    parts.add("_linalg_gemm2", "", *parts.inputs, **sides)


PASSES = Passes([
    Pass(GEMM2, gemm2, frozenset({"batch_dot"}), match_long_products, float32="float32 sums"),
])  # fmt: skip
