"""Gluon's `clip_global_norm`, right under mixed precision.

It takes its norm by `dot`, which a policy would lower: half precision has no room for the square of
a norm. And it may be given gradients that carry a loss scale the script knows nothing of.
"""

import functools
from typing import Any, Callable, List

from mxnet import gluon

from .patching import Patch

__all__ = ["patches", "scales"]

#: Functions that return the scale of gradients that wait for a step, 1.0 for none.
scales: List[Callable[[], float]] = []


def patches(plain: Callable[[], Any]) -> List[Patch]:
    """Return the patch; `plain` is a context in which nothing is lowered."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip_global_norm(arrays: Any, max_norm: float, check_isfinite: bool = True) -> Any:
            scale = max([1.0, *(of() for of in scales)])
            with plain():
                return original(arrays, max_norm * scale, check_isfinite) / scale

        return clip_global_norm

    return [Patch(gluon.utils, "clip_global_norm", build)]
