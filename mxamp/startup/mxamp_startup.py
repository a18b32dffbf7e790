"""Start-up hook of Python: turns mixed precision on if an environment variable asks for it.

Every Python that has mxamp installed runs `mxamp_startup.pth` when it starts, and that runs
`install`. The hook reads the environment when the program imports MXNet, so a program or notebook
may set a variable before. It loads mxamp only then, and only if the first of these is set:

MXNET_ENABLE_AUTO_MIXED_PRECISION   a dtype, "auto" or "1"
MXAMP_POLICY                        the policy file of `mxamp run --policy`
MXAMP_STATS                         `mxamp run --stats`: print operator statistics at the end
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# Every start of Python pays for these imports; `typing` would take most of the time.
import sys


class _Finder:
    """Import finder that loads MXNet via mxamp if MXNET_ENABLE_AUTO_MIXED_PRECISION is set."""

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
    """Import loader for MXNet that imports mxamp first and turns mixed precision on."""

    def create_module(self, spec):
        del spec
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        import gc

        enabled, by_mxamp = gc.isenabled(), "mxamp" in sys.modules
        gc.disable()  # scanning MXNet's 100,000 objects would take a tenth of the run's start
        try:
            import mxamp  # noqa: F401

            _start_automatic_run(by_mxamp)
            import mxnet as module
        finally:
            gc.freeze()
            if enabled:
                gc.enable()
        self.attributes = module.__spec__, module.__loader__
        return module

    def exec_module(self, module):
        module.__spec__, module.__loader__ = self.attributes


def _start_automatic_run(imported_by_mxamp):
    """Turn mixed precision on; print errors, and exit on one if a policy file was given.

    `imported_by_mxamp`: the program has imported mxamp, which imports MXNet.
    """
    import os

    from mxamp.errors import AmpError
    from mxamp.frontends.automatic import start_from_environment

    if os.environ.pop("MXAMP_STATS", ""):  # popped: not for the processes that this one starts
        _print_statistics_at_exit()
    try:
        start_from_environment(imported_by_mxamp)
    except (AmpError, OSError) as error:
        print(f"mxamp: {error}", file=sys.stderr)
        if os.environ.get("MXAMP_POLICY"):
            sys.exit(2)


def _print_statistics_at_exit():
    """Count the operators that run from now on, and print the counts when the program ends."""
    import atexit

    from mxamp.tools.debugging.operator_counts import operator_stats

    context = operator_stats()
    counted = context.__enter__()

    def finish():
        context.__exit__(None, None, None)
        sys.stdout.flush()
        print(f"\n{counted}", file=sys.stderr)

    atexit.register(finish)


def install():
    """Install the import hook that turns mixed precision on: a `_Finder` in `sys.meta_path`."""
    # Some environments read their .pth files twice, through lib and lib64.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
