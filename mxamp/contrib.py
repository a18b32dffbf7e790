"""`mxnet.contrib.amp` itself, for scripts whose import lines can't be changed."""

import sys
from types import ModuleType
from typing import Any, Callable, Dict, List

import mxnet.contrib
from mxnet.contrib import amp as stock

from .doors import on_shut, open_door
from .patching import Patch

__all__ = ["patch_contrib"]

_NAMES = ("mxnet.contrib.amp", "mxnet.contrib.amp.amp")
_stock: Dict[str, ModuleType] = {}


def patch_contrib() -> None:
    """Make `mxnet.contrib.amp` mean mxamp, until `shutdown`.

    ::

        import mxamp

        mxamp.patch_contrib()
        from mxnet.contrib import amp  # mxamp

    What has imported functions of the old one by name before keeps those.
    """
    import mxamp

    patches: List[Patch] = [
        Patch(mxnet.contrib, "amp", _returning(mxamp)),
        # What holds the old package by name finds mxamp's functions in it.
        *(
            Patch(owner, name, _returning(getattr(mxamp, name)))
            for owner in (stock, stock.amp)
            for name in mxamp.__all__
            if name in vars(owner) and callable(vars(owner)[name])
        ),
    ]
    open_door("patch_contrib", patches)
    for name in _NAMES:
        _stock.setdefault(name, sys.modules[name])
        sys.modules[name] = mxamp


def _returning(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _restore() -> None:
    for name in list(_stock):
        sys.modules[name] = _stock.pop(name)


on_shut(_restore)
