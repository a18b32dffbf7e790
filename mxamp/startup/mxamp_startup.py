"""Turns mixed precision on when MXNet is imported, where the environment asks for it.

Every Python that has mxamp installed runs `mxamp_startup.pth` when it starts, and that runs
`install`. The environment is looked at when the program imports MXNet, so that a program or a
notebook may set the variable itself before. mxamp is loaded only then, and only if it is set.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Every start of Python pays for what is imported here: `typing` would be most of it.
import sys


class _Finder:
    """Finds MXNet as Python does, and has it loaded by way of mxamp."""

    def find_spec(self, name, path=None, target=None):
        if name != "mxnet":
            return None
        import os

        if not os.environ.get("MXNET_ENABLE_AUTO_MIXED_PRECISION", "").strip():
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                spec.loader = _Loader()
                return spec
        return None


class _Loader:
    """Lets mxamp import MXNet, which makes it importable on newer Python and NumPy before."""

    def create_module(self, spec):
        del spec
        _remove_finder()
        by_mxamp = "mxamp" in sys.modules
        from mxamp.errors import AmpError
        from mxamp.frontends.automatic import start_from_environment

        try:
            start_from_environment(by_mxamp)
        except AmpError as error:
            print(f"mxamp: {error}", file=sys.stderr)
        module = sys.modules["mxnet"]
        self.attributes = module.__spec__, module.__loader__
        return module

    def exec_module(self, module):
        module.__spec__, module.__loader__ = self.attributes


def install():
    """Wait for the import of MXNet."""
    # Some environments read their .pth files twice, through lib and lib64.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _remove_finder():
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
