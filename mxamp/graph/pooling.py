"""Averages over whole feature maps, as oneDNN's Pooling computes them fast forward and backward.

The gradient of a map's one average has no layout of its own in oneDNN: where a map is higher or
wider than it has blocks of channels, the gradient that is computed from it comes in an order of
axes that has only reference kernels, here and in the BatchNorm behind it (156 and 213 ms for two
images of 256 maps of 56x56). An average of few averages, of equal parts of the map, has one; where
a map has no such parts, a product with ones has the fast gradient.
"""

from typing import Sequence

from ..policy.values import integers, is_true
from .equivalents import BLOCK, Attributes, Call, Detail, Part, has_elements
from .reductions import mean

__all__ = ["global_pool", "is_global_pool", "is_slow_pool", "parts_of_map"]

_GLOBAL = {"kernel": "(1, 1)", "global_pool": "True", "pool_type": "avg"}


def is_global_pool(call: Call) -> bool:
    """Tell whether AdaptiveAvgPooling2D leaves one average of each map."""
    size = integers(call.attrs.get("output_size", "()"))
    return size in ([], [1], [1, 1]) and has_elements(call)


def is_slow_pool(call: Call) -> bool:
    """Tell whether the gradient of a global average by Pooling is slow."""
    attrs = call.attrs
    if not is_true(attrs.get("global_pool", "False")) or attrs.get("pool_type", "max") != "avg":
        return False
    planar = call.shape is not None and len(call.shape) == len("NCHW") and has_elements(call)
    return planar and attrs.get("layout", "None") in ("None", "NCHW") and bool(parts_of_map(call))


def global_pool(_attrs: Attributes, detail: Detail) -> Sequence[Part]:
    """Return oneDNN's average, which has bfloat16 and reads its input's layout."""
    if not detail:
        return [Part("Pooling", "", (0,), _GLOBAL)]
    if len(detail) == len("CHW"):
        parts = mean({"axis": "(2, 3)", "keepdims": "True"}, (2, 4, 0, *detail))
        return [part._replace(float32=True) for part in parts]
    size = f"({detail[0]}, {detail[1]})"
    first = {"kernel": size, "stride": size, "pool_type": "avg"}
    return [Part("Pooling", "parts", (0,), first), Part("Pooling", "", (1,), _GLOBAL)]


def parts_of_map(call: Call) -> Detail:
    """Return height and width of the parts that are averaged first, () for one step.

    Where parts are of no help, the shape without the batch is returned, for a product.
    """
    if not call.training or call.shape is None:
        return ()
    _, channels, *sides = call.shape
    blocks = channels // BLOCK
    if channels % BLOCK or max(sides) <= blocks:
        return ()
    fewest = [_divisor(side) for side in sides]
    if max(fewest) > blocks:
        return call.shape[1:]
    return tuple([side // count for side, count in zip(sides, fewest)])


def _divisor(side: int) -> int:
    """Return the least divisor but 1."""
    return next((count for count in range(2, side) if side % count == 0), side)
