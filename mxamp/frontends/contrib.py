"""`mxnet.contrib.amp` itself, for scripts whose import lines can't be changed."""

import sys
from types import ModuleType
from typing import Any, Callable, Dict, Sequence

import mxnet.contrib
from mxnet.contrib import amp as stock

from ..framework.patching import FrontEnd, Patch

__all__ = ["patch_contrib"]

_NAMES = ("mxnet.contrib.amp", "mxnet.contrib.amp.amp")


class _ContribPatches(FrontEnd):
    """The attribute `mxnet.contrib.amp`, its functions, and its entries in `sys.modules`."""

    def __init__(self) -> None:
        super().__init__()
        self._stock: Dict[str, ModuleType] = {}

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        public = _public_package()
        names = [n for n in public.__all__ if n in vars(stock) or n in vars(stock.amp)]
        return [
            Patch(mxnet.contrib, "amp", _returning(public)),
            # What holds the old package by name finds mxamp's functions in it.
            *(
                Patch(owner, name, _returning(getattr(public, name)))
                for owner in (stock, stock.amp)
                for name in names
                if callable(vars(owner).get(name))
            ),
        ]

    def open(self) -> None:
        """Put the patches in place, and mxamp where `import` finds the old package."""
        super().open()
        for name in _NAMES:
            self._stock.setdefault(name, sys.modules[name])
            sys.modules[name] = _public_package()

    def close(self) -> None:
        """Put the old package back."""
        super().close()
        while self._stock:
            name, module = self._stock.popitem()
            sys.modules[name] = module


#: One a process, as `sys.modules` is.
_contrib_patches = _ContribPatches()


def patch_contrib() -> None:
    """Make `mxnet.contrib.amp` mean mxamp, until `shutdown`.

    ::

        import mxamp

        mxamp.patch_contrib()
        from mxnet.contrib import amp  # mxamp

    What has imported functions of the old one by name before keeps those.
    """
    _contrib_patches.open()


def _public_package() -> ModuleType:
    # Whoever calls this has imported the package on top.
    return sys.modules[__name__.split(".", maxsplit=1)[0]]


def _returning(value: Any) -> Callable[[Any], Any]:
    return lambda original: value
