"""Turns mixed precision on when MXNet is imported, where the environment asks for it.

Every Python that has mxamp installed runs `mxamp_startup.pth` when it starts: one look at the
environment. This module, which imports nothing of mxamp, is loaded only if the variable is set, and
mxamp only if the program then imports MXNet.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Optional


class _Loaded(importlib.abc.Loader):
    """Hands out the MXNet that was imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__
        # Else Python would take this one in place of the finder's, and run the package again.
        module.__spec__ = None

    def create_module(self, spec: Any) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != "mxnet":
            return None
        sys.meta_path.remove(self)
        # Imports MXNet too, and makes it importable on newer Python and NumPy before.
        from mxamp.errors import AmpError
        from mxamp.frontends.automatic import start_from_environment

        try:
            start_from_environment()
        except AmpError as error:
            print(f"mxamp: {error}", file=sys.stderr)
        return importlib.machinery.ModuleSpec(name, _Loaded(sys.modules[name]))


def install() -> None:
    """Wait for the import of MXNet."""
    # Some environments read their .pth files twice, through lib and lib64.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
