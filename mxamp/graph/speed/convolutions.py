"""Equivalents of convolutions whose channels don't fit oneDNN's blocks of 16.

A first layer has 3 input channels, for which oneDNN has no blocked bfloat16 kernel. A grouped
convolution with 4 or 8 channels a group gets blocks of that size, and a BatchNorm next to it falls
back to a reference kernel, about 20 times slower, in float32 too.
"""

from typing import Optional, Sequence, Tuple

from ...policy.values import is_true
from .equivalents import BLOCK, COLORS, PLANAR_AXES, Attributes, Call, Detail, Part, Parts

__all__ = [
    "image_convolution",
    "match_image_convolution",
    "match_narrow_groups",
    "merged_groups",
]

# With larger kernels, the products of the fourth channel cost more than the layout saves.
_LARGEST_KERNEL = 7
# Channels per group. In inference, groups of 8 have fast kernels too.
_NARROW, _NARROW_WHEN_TRAINING = (2, 4), (2, 4, 8)


def match_narrow_groups(call: Call) -> Optional[Detail]:
    """Return the weight's shape of a convolution that `merged_groups` makes faster; else None."""
    weight = _planar_weight(call)
    if weight is None:
        return None
    groups, narrow = int(call.attrs.get("num_group", "1")), weight[1]
    fits = (
        narrow in (_NARROW_WHEN_TRAINING if call.training else _NARROW)
        and weight[0] == groups * narrow
        and weight[0] % BLOCK == 0
    )
    return weight if fits else None


def merged_groups(attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return the parts of a convolution with groups of 16 channels, padded with zeros.

    The result takes no more time, since narrow kernels leave most of each vector unused. The weight
    is repeated for each of the merged groups and multiplied by a mask.
    """
    channels, narrow, height, width = detail
    merged, groups = BLOCK // narrow, channels // BLOCK
    inputs = 2 if is_true(attrs.get("no_bias", "False")) else 3
    parts = Parts(inputs=inputs)
    # A copy, since other operators can't read a weight in oneDNN's layout.
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


def _planar_weight(call: Call) -> Optional[Tuple[int, ...]]:
    """Return the weight's shape of a 2-D convolution in NCHW layout; None for other calls."""
    plain = call.attrs.get("layout", "None") in ("None", "NCHW")
    return call.weight if plain and len(call.weight or ()) == PLANAR_AXES else None


def match_image_convolution(call: Call) -> Optional[Detail]:
    """Return () for a convolution of color images that `image_convolution` fits; else None."""
    weight = _planar_weight(call)
    fits = (
        weight is not None
        and weight[1] == COLORS
        and weight[0] % BLOCK == 0
        and max(weight[2:]) <= _LARGEST_KERNEL
        and call.attrs.get("num_group", "1") == "1"
    )
    return () if fits else None


def image_convolution(attrs: Attributes, _detail: Detail) -> Sequence[Part]:
    """Return the parts of a convolution with a channel of zeros added to images and weight.

    oneDNN's bfloat16 convolution works on pairs of channels. For 3 channels it falls back to a
    matrix product per image, whose output has the plain layout.
    """
    bias = () if is_true(attrs.get("no_bias", "False")) else (2,)
    parts = Parts(inputs=2 + len(bias))
    padded = [
        _add_zero_channel(parts, tensor, name) for tensor, name in enumerate(("data", "weight"))
    ]
    parts.add("Convolution", "", *padded, *bias, **attrs)
    return parts.made


def _add_zero_channel(parts: Parts, tensor: int, name: str) -> int:
    """Add parts that append a channel of zeros to input `tensor`; return the result's number."""
    channel = parts.add("slice_axis", f"{name}_red", tensor, axis="1", begin="0", end="1")
    zeros = parts.add("zeros_like", f"{name}_zeros", channel)
    return parts.add("Concat", f"{name}_four", tensor, zeros, num_args="2", dim="1")
