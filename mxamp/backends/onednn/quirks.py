"""What oneDNN's kernels of single operators get wrong, for `policy.decision`."""

from __future__ import annotations

from typing import Mapping, Sequence

from ...errors import ArgumentError
from ...policy.decision import CASTABLE
from ...policy.rules import Rule
from ...policy.values import is_dilated, kernel_axes
from .. import Quirk

CAST_WEIGHT = "oneDNN's gradient for a weight that was cast writes out of bounds"
NO_FLOAT64 = "3-D and dilated ones have no kernel in half precision, and a wrong one in float64"
HALF_WEIGHT = (
    "a dilated transposed convolution with a weight in {dtype} has no right kernel on CPUs: keep "
    "the weight in float32"
)


def reason_to_widen(rule: Rule, attributes: Mapping[str, str]) -> str | None:
    """Return why a transposed convolution without a kernel reads a float32 weight as it is.

    oneDNN has no gradient for a cast one.
    """
    if rule.operator != "Deconvolution" or not rule.missing:
        return None
    is_volume = kernel_axes(attributes) == len("DHW")
    return NO_FLOAT64 if is_volume or is_dilated(attributes) else None


def weight_quirk(
    rule: Rule, attributes: Mapping[str, str], dtypes: Sequence[str], dtype: str, target: str
) -> Quirk | None:
    """Return the detour of a transposed convolution whose weight would be cast."""
    casts = {*dtypes[1:2]} & (CASTABLE - {dtype})
    # The rule `cast_weight` keeps calls with a gradient in float32.
    guarded = dtype == target and rule.has_shape_rule("cast_weight")
    if rule.operator != "Deconvolution" or not casts or guarded:
        return None
    if is_dilated(attributes):
        raise ArgumentError(HALF_WEIGHT.format(dtype=dtypes[1]))
    # MXNet's own kernel, which float64 selects, computes that gradient.
    return Quirk("float64", CAST_WEIGHT)


def inputs_to_copy(
    operator: str, attributes: Mapping[str, str], dtype: str, reads: Sequence[str | None]
) -> frozenset[int]:
    """Return the positions of the inputs to copy before the cast: weights in blocked layouts.

    After a float32 inference pass, oneDNN leaves the weight of a grouped convolution in a blocked
    layout that it can't reorder to bfloat16; a copy has the plain layout.
    """
    grouped = str(attributes.get("num_group", "1")) != "1"
    convolution = operator in ("Convolution", "Deconvolution")
    if convolution and dtype == "bfloat16" and grouped and reads[1] is not None:
        return frozenset({1})
    return frozenset()
