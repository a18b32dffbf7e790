"""Distributed kvstores refuse what would end their servers."""

import functools
from typing import Any, Callable, List

from mxnet.kvstore import KVStore

from ..framework.kvstores import is_distributed
from ..framework.patching import Patch
from ..framework.transports import PARAMETER_SERVER

__all__ = ["patches"]


def patches() -> List[Patch]:
    """Return the patches."""
    return [Patch(KVStore, name, _build) for name in ("init", "broadcast", "push", "pushpull")]


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(self: KVStore, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if is_distributed(self):
            PARAMETER_SERVER.check_arrays(f"the array of key {key!r}", value)
        return original(self, key, value, *args, **kwargs)

    return checked
