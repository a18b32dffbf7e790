"""Horovod's functions refuse dtypes that it does not know, by name."""

import functools
import sys
from typing import Any, Callable, List

from ..framework.patching import Patch
from ..framework.transports import HOROVOD

__all__ = ["patches"]

_NAMES = (
    "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather",
    "grouped_allgather", "broadcast", "broadcast_", "alltoall", "reducescatter",
    "grouped_reducescatter",
)  # fmt: skip


def patches() -> List[Patch]:
    """Return the patches: none where the program has not imported Horovod by now."""
    horovod = sys.modules.get("horovod.mxnet")
    return [Patch(horovod, name, _build) for name in _NAMES] if horovod is not None else []


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arrays = args[0] if args else kwargs.get("tensor", kwargs.get("tensors"))
        name = kwargs.get("name")
        HOROVOD.check_arrays("the array" if name is None else f"the array {name!r}", arrays)
        return original(*args, **kwargs)

    return checked
