"""Gluon's `clip_global_norm`, right under mixed precision.

It takes its norm by `dot`, which a policy would lower: half precision has no room for the square of
a norm.
"""

import functools
from typing import Any, Callable, List

from mxnet import gluon

from ..framework.patching import Patch
from ..policy.active import suspended

__all__ = ["patches"]


def patches() -> List[Patch]:
    """Return the patch."""
    return [Patch(gluon.utils, "clip_global_norm", _build)]


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_global_norm(arrays: Any, max_norm: float, check_isfinite: bool = True) -> Any:
        with suspended():
            return original(arrays, max_norm, check_isfinite)

    return clip_global_norm
