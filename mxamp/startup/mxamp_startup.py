"""Python's start-up hook: loads mxamp with MXNet if environment variables are set.

Every Python that has mxamp installed runs `mxamp_startup.pth` when it starts, and that runs
`install`. The hook reads the environment when the program imports MXNet, so a program or notebook
may set a variable before. It loads mxamp only then, and only if a variable is set:

MXNET_ENABLE_AUTO_MIXED_PRECISION   turns mixed precision on
MXAMP_LAUNCHED                      prepares a worker that `mxamp launch` has started
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Every start of Python pays for these imports; `typing` would take most of the time.
import sys


class _Finder:
    """An import finder that loads MXNet through mxamp if one of the variables is set."""

    def find_spec(self, name, path=None, target=None):
        if name != "mxnet":
            return None
        import os

        automatic = os.environ.get("MXNET_ENABLE_AUTO_MIXED_PRECISION", "").strip()
        if not (automatic or os.environ.get("MXAMP_LAUNCHED")):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                spec.loader = _Loader(bool(automatic))
                return spec
        return None


class _Loader:
    """A loader that lets mxamp import MXNet, and turns mixed precision on if `automatic`."""

    def __init__(self, automatic):
        self.automatic = automatic

    def create_module(self, spec):
        del spec
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        import os

        by_mxamp = "mxamp" in sys.modules
        import mxamp  # noqa: F401

        if os.environ.get("MXAMP_LAUNCHED"):
            from mxamp.framework.worker_process import prepare_worker

            prepare_worker()
        if self.automatic:
            _start_automatic_run(by_mxamp)
        import mxnet as module

        self.attributes = module.__spec__, module.__loader__
        return module

    def exec_module(self, module):
        module.__spec__, module.__loader__ = self.attributes


def _start_automatic_run(imported_by_mxamp):
    """Turn mixed precision on, or print the error.

    `imported_by_mxamp`: the program has imported mxamp, which imports MXNet.
    """
    from mxamp.errors import AmpError
    from mxamp.frontends.automatic import start_from_environment

    try:
        start_from_environment(imported_by_mxamp)
    except AmpError as error:
        print(f"mxamp: {error}", file=sys.stderr)


def install():
    """Insert a `_Finder` at the front of `sys.meta_path`, unless it has one."""
    # Some environments read their .pth files twice, through lib and lib64.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
