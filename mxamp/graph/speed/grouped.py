"""Grouped convolutions of few channels a group, as convolutions of fewer and wider groups.

oneDNN works on blocks of 16 channels. Groups of 4 or 8 get blocks of 4 or 8, and a BatchNorm next
to them, forward or backward, falls back to a reference kernel that is some 20 times slower, in
float32 too. Groups of 16 channels, with zeros in the weight between what were different groups,
cost no more time: the narrow kernels leave most of each vector unused.
"""

from typing import Sequence

from ...policy.values import is_true
from .equivalents import BLOCK, Attributes, Call, Detail, Part, Parts, planar_weight

__all__ = ["is_narrow_grouped", "merged_groups", "widths"]

# Channels a group. Without gradients those of 8 have kernels as fast, and a fast BatchNorm.
_NARROW, _NARROW_WHEN_TRAINING = (2, 4), (2, 4, 8)


def is_narrow_grouped(call: Call) -> bool:
    """Tell whether it is a convolution of narrow groups that can be merged into groups of 16."""
    weight = planar_weight(call)
    if weight is None:
        return False
    groups, narrow = int(call.attrs.get("num_group", "1")), weight[1]
    return (
        narrow in (_NARROW_WHEN_TRAINING if call.training else _NARROW)
        and weight[0] == groups * narrow
        and weight[0] % BLOCK == 0
    )


def widths(call: Call) -> Detail:
    """Return the shape of the weight."""
    return call.weight or ()


def merged_groups(attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the convolution with groups of 16 channels, with zeros in its weight.

    The weight is repeated for each of the groups that become one, and multiplied by a mask.
    """
    channels, narrow, height, width = detail
    merged, groups = BLOCK // narrow, channels // BLOCK
    inputs = 2 if is_true(attrs.get("no_bias", "False")) else 3
    parts = Parts(inputs=inputs)
    # A copy: the weight may be in a layout of oneDNN's that other operators can't read.
    weight = parts.add_float32("_copy", "weight", 1)
    repeated = parts.add_float32(
        "Concat", "repeated", *[weight] * merged, num_args=str(merged), dim="1"
    )
    eye = parts.add_float32("_eye", "eye", N=str(merged))
    shape = (groups, merged, narrow, merged, narrow * height * width)
    apart = parts.add_float32("Reshape", "apart", eye, shape=str((1, merged, 1, merged, 1)))
    whole = parts.add_float32("broadcast_to", "whole", apart, shape=str(shape))
    mask = parts.add_float32("Reshape", "mask", whole, shape=str((channels, BLOCK, height, width)))
    masked = parts.add_float32("elemwise_mul", "masked", repeated, mask)
    parts.add(
        "Convolution", "", 0, masked, *range(2, inputs), **{**attrs, "num_group": str(groups)}
    )
    return parts.made
