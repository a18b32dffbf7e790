"""`mxnet.contrib.amp` itself, for scripts whose import lines can't be changed."""

import sys
from types import ModuleType
from typing import Any, Callable, Sequence

from mxnet.contrib import amp as stock

from ..framework.patching import FrontEnd, Patch
from ..policy.active import is_enabled

__all__ = ["contrib_patches", "patch_contrib"]


class _StandIn(ModuleType):
    """What the modules of `mxnet.contrib.amp` are while mxamp stands in for it."""

    @property
    def _amp_initialized(self) -> bool:
        # GluonNLP reads it, to mask attention with numbers that half precision can hold.
        return is_enabled()

    def __getattr__(self, name: str) -> Any:
        if name in _public_package().__all__:
            return getattr(_public_package(), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _ContribPatches(FrontEnd):
    """The functions in `mxnet.contrib.amp` and `mxnet.contrib.amp.amp`.

    The modules stay, so that every way of importing them, and their lists, are there.
    """

    _MODULES = (stock, stock.amp)

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        public = _public_package()
        return [
            Patch(module, name, _returning(getattr(public, name)))
            for module in self._MODULES
            for name in public.__all__
            if callable(vars(module).get(name))
        ]

    def open(self) -> None:
        """Put the patches in place."""
        super().open()
        for module in self._MODULES:
            module.__class__ = _StandIn

    def close(self) -> None:
        """Put the old functions back."""
        super().close()
        for module in self._MODULES:
            module.__class__ = ModuleType


#: One a process, as the modules that it patches are.
contrib_patches = _ContribPatches()


def patch_contrib() -> None:
    """Make `mxnet.contrib.amp` mean mxamp, until `shutdown`.

    ::

        import mxamp

        mxamp.patch_contrib()
        from mxnet.contrib import amp  # its functions are mxamp's

    So are those of `mxnet.contrib.amp.amp`. What has imported functions of the old one by name
    before keeps those.
    """
    contrib_patches.open()


def _public_package() -> ModuleType:
    # Whoever calls this has imported the package on top.
    return sys.modules[__name__.split(".", maxsplit=1)[0]]


def _returning(value: Any) -> Callable[[Any], Any]:
    return lambda original: value
