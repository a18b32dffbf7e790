"""Faster equivalents of convolutions whose channels do not fill oneDNN's blocks.

A first layer has 3 input channels, for which oneDNN has no blocked bfloat16 kernel. A grouped
convolution with 4 or 8 channels a group gets blocks of that size, and a BatchNorm next to it falls
back to a reference kernel, about 20 times slower, in float32 too.
"""

from __future__ import annotations

import math

from ..passes import Call, Detail, Parts, Tensor
from .layouts import BLOCK, COLORS, PLANAR_AXES, block_size

# With larger kernels, the products of the fourth channel cost more than the layout saves.
_LARGEST_KERNEL = 7
# The widest depthwise kernel whose weight has a fast gradient with AVX2.
_WIDEST_FAST = 3
# The least multiplications of a call that gains; depthwise ones need as many as in inference.
_LEAST, _LEAST_WHEN_TRAINING = 2**22, 2**19


def match_narrow_groups(call: Call) -> Detail | None:
    """Return (block, *weight shape) if `merged_groups` makes a convolution faster; else None."""
    weight = _planar_weight(call)
    if weight is None or (call.training and call.behind_concat):
        return None
    groups, narrow = int(call.attrs.get("num_group", "1")), weight[1]
    block, slow = block_size(call.policy), [2, 4]
    if call.training:
        # In training alone, groups of 8 are slow with avx512, and wide depthwise kernels with AVX2.
        slow += [8] if block == BLOCK else [1] * (weight[3] > _WIDEST_FAST)
    fits = narrow in slow and weight[0] == groups * narrow and weight[0] % block == 0
    least = _LEAST_WHEN_TRAINING if call.training and narrow > 1 else _LEAST
    size = math.prod(call.shape or (least,)) * math.prod(weight) // weight[0]
    return (block, *weight) if fits and size >= least else None


def merged_groups(parts: Parts, detail: Detail) -> None:
    """Merge a convolution's narrow groups until they fill a block, with zeros in the weight.

    Conditions: float32 inputs. In training it is not behind a Concat of channels, since the
    gradient of its data is in blocks of channels.

    The result takes no more time, since narrow kernels leave most of each vector unused. The weight
    is repeated for each of the merged groups and multiplied by a mask.
    """
    block, channels, narrow, height, width = detail
    merged, groups = block // narrow, channels // block
    data, weight, *bias = parts.inputs
    add = parts.add_float32
    # A copy, since other operators can't read a weight in oneDNN's layout.
    weight = add("_copy", "weight", weight)
    repeated = add("Concat", "repeated", *[weight] * merged, num_args=str(merged), dim="1")
    eye = add("_eye", "eye", N=str(merged))
    shape = (groups, merged, narrow, merged, narrow * height * width)
    apart = add("Reshape", "apart", eye, shape=str((1, merged, 1, merged, 1)))
    whole = add("broadcast_to", "whole", apart, shape=str(shape))
    mask = add("Reshape", "mask", whole, shape=str((channels, block, height, width)))
    masked = add("elemwise_mul", "masked", repeated, mask)
    attrs = {**parts.attrs, "num_group": str(groups)}
    parts.add("Convolution", "", data, masked, *bias, **attrs)


def _planar_weight(call: Call) -> tuple[int, ...] | None:
    """Return the weight shape of a 2-D convolution in NCHW layout; None for any other call."""
    plain = call.attrs.get("layout", "None") in ("None", "NCHW")
    return call.weight if plain and len(call.weight or ()) == PLANAR_AXES else None


def match_image_convolution(call: Call) -> Detail | None:
    """Return () if a fourth channel makes a convolution of color images faster; else None.

    `image_convolution` needs no numbers: the tuple is empty.
    """
    weight = _planar_weight(call)
    fits = (
        weight is not None
        and weight[1] == COLORS
        and weight[0] % BLOCK == 0
        and max(weight[2:]) <= _LARGEST_KERNEL
        and call.attrs.get("num_group", "1") == "1"
        and call.lowers("Convolution")
    )
    return () if fits else None


def image_convolution(parts: Parts, _detail: Detail) -> list[Tensor]:
    """Replace a convolution of 3 channels with one of 4: add zeros to images and weight.

    Conditions: the number of filters is a multiple of 16, and convolutions compute in bfloat16.

    oneDNN's bfloat16 convolution works on pairs of channels. For 3 channels it falls back to a
    matrix product per image, whose output has the plain layout.
    """
    data, weight, *bias = parts.inputs
    padded = [_add_zero_channel(parts, *one) for one in (("data", data), ("weight", weight))]
    return [parts.add("Convolution", "", *padded, *bias, **parts.attrs)]


def _add_zero_channel(parts: Parts, name: str, tensor: Tensor) -> Tensor:
    """Add operators that append a channel of zeros to a tensor; return the result."""
    channel = parts.add("slice_axis", f"{name}_red", tensor, axis="1", begin="0", end="1")
    zeros = parts.add("zeros_like", f"{name}_zeros", channel)
    return parts.add("Concat", f"{name}_four", tensor, zeros, num_args="2", dim="1")
