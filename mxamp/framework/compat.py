"""Import MXNet 1.9.1 with Python, NumPy and CUDA wheels that are newer than it supports.

MXNet reads names that later NumPy versions removed, imports `distutils`, which Python 3.12 removed,
and looks for CUDA on the system. `prepare_import` adds the missing names before
`import mxnet` and changes no existing ones. NumPy's arrays can't be given a method back:
`import_mxnet` changes its name in MXNet's functions.
"""

import contextvars
import importlib
import importlib.util
import math
import re
import sys
import types
import warnings
from typing import Any, Dict, NoReturn, Optional, Tuple

from .. import backends
from ..errors import InstallError

#: The version of MXNet that mxamp runs on: other versions have other operators and internals.
MXNET = "1.9.1"
# The tested versions of NumPy, as in setup.cfg.
NUMPY_FROM, NUMPY_BELOW = "1.17", "2.6"

FAILED_BEFORE = "MXNet's import has failed: start a new process, with `import mxamp` first"
BROKEN = "MXNet can't be imported: {error}. mxamp needs 1.9.1; `mxamp doctor` says what to do."
WRONG_NUMPY = f'NumPy {{}} is not for MXNet: pip install "numpy>={NUMPY_FROM},<{NUMPY_BELOW}"'
WRONG_MXNET = (
    f"MXNet {{}}, but mxamp needs MXNet {MXNET}: pip install mxnet=={MXNET}, or for NVIDIA GPUs "
    f"pip install mxnet-cu112=={MXNET}. `mxamp doctor` says what else this machine needs."
)


def import_mxnet() -> types.ModuleType:
    """Import MXNet and return it, even with Python and NumPy newer than it supports.

    Raises `InstallError` if MXNet or the GPU build's driver is missing, if MXNet is not 1.9.1, if
    NumPy is too old or too new, and if the import fails or has failed before in this process.
    """
    mxnet = sys.modules.get("mxnet") or _first_import()
    # A stand-in module may have no version.
    if getattr(mxnet, "__version__", MXNET) != MXNET:
        raise InstallError(WRONG_MXNET.format(f"{mxnet.__version__} is installed"))
    _restore_packing(sys.modules["numpy"], sys.modules.get("mxnet.recordio"))
    return mxnet


def _first_import() -> types.ModuleType:
    """Import MXNet if nothing in this process has imported it yet."""
    if any(name.startswith("mxnet.") for name in sys.modules):
        raise InstallError(FAILED_BEFORE)
    if importlib.util.find_spec("mxnet") is None:
        raise InstallError(WRONG_MXNET.format("is not installed"))
    prepare_import()
    with warnings.catch_warnings():
        # Warnings about NumPy and distutils in MXNet's own code.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return importlib.import_module("mxnet")
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise InstallError(BROKEN.format(error=said)) from error


def prepare_import() -> None:
    """Prepare MXNet's import: restore what newer NumPy and Python removed, load CUDA libraries."""
    import numpy

    if not release(NUMPY_FROM) <= release(numpy.__version__) < release(NUMPY_BELOW):
        raise InstallError(WRONG_NUMPY.format(numpy.__version__))
    _restore_numpy(numpy)
    _restore_distutils()
    backends.prepare_import()


def release(version: str) -> Tuple[int, ...]:
    """Return the leading numbers of a version string, at most three, as a tuple to compare.

    >>> release("2.6.0rc1"), release("450.80.02"), release("8.6")
    ((2, 6, 0), (450, 80, 2), (8, 6))
    """
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _restore_numpy(numpy: Any) -> None:
    """Add the names that newer NumPy removed, and make NumPy 2 print numbers as NumPy 1 does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 1.20 to 1.23 have the names and deprecate them
        missing = {k: v for k, v in _numpy_names(numpy).items() if not hasattr(numpy, k)}
    for name, value in missing.items():
        setattr(numpy, name, value)
    if not numpy.__version__.startswith("1."):
        _print_plain_numbers(numpy)
    if not hasattr(numpy, "compat"):
        numpy.compat = sys.modules["numpy.compat"] = types.ModuleType("numpy.compat")
    if not hasattr(numpy.compat, "basestring"):
        numpy.compat.basestring = str


def _print_plain_numbers(numpy: types.ModuleType) -> None:
    """Make NumPy 2 print 2, not np.int64(2): MXNet passes attributes to operators as text."""
    numpy.set_printoptions(legacy="1.25")
    options = getattr(sys.modules.get("numpy._core.printoptions"), "format_options", None)
    if isinstance(options, contextvars.ContextVar):
        # Each thread has its own options: change the default that other threads start with.
        contextvars.Context().run(options.get).update(legacy=options.get()["legacy"])


def _numpy_names(numpy: types.ModuleType) -> Dict[str, Any]:
    """Return replacements of NumPy names that MXNet reads and NumPy 1.24 to 2.5 removed."""

    def removed(*_args: object, **_options: object) -> NoReturn:
        raise AttributeError("this function was removed from NumPy; see numpy_financial")

    return {
        "bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str,
        "Inf": math.inf, "NAN": math.nan, "NaN": math.nan, "PINF": math.inf, "NINF": -math.inf,
        "PZERO": 0.0, "NZERO": -0.0,
        "alltrue": numpy.all, "sometrue": numpy.any, "product": numpy.prod,
        "cumproduct": numpy.cumprod, "round_": numpy.round,
        "msort": lambda a: numpy.sort(a, axis=0),
        "in1d": lambda a, b, **options: numpy.isin(numpy.ravel(a), b, **options),
        "trapz": getattr(numpy, "trapezoid", None),
        # MXNet only looks these up, for its table of fallbacks to NumPy.
        **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), removed),
    }  # fmt: skip


def _restore_packing(numpy: types.ModuleType, recordio: Optional[types.ModuleType]) -> None:
    """Make `mxnet.recordio` call `tobytes` instead of `tostring`, which NumPy 2.3 removed."""
    if recordio is None or hasattr(numpy.ndarray, "tostring"):
        return
    for function in (recordio.pack, recordio.pack_img):
        # In place: other modules may have imported the functions by name.
        names = function.__code__.co_names
        function.__code__ = function.__code__.replace(
            co_names=tuple("tobytes" if name == "tostring" else name for name in names)
        )


def _restore_distutils() -> None:
    """Add a stand-in for `distutils.version`, which MXNet imports and Python 3.12 removed."""
    if "distutils" in sys.modules or importlib.util.find_spec("distutils") is not None:
        return

    class LooseVersion(Tuple[int, ...]):
        def __new__(cls, text: str) -> "LooseVersion":
            return super().__new__(cls, map(int, re.findall(r"\d+", text)))

    package: Any = types.ModuleType("distutils")
    package.__path__ = []
    package.version = types.ModuleType("distutils.version")
    vars(package.version).update(LooseVersion=LooseVersion, StrictVersion=LooseVersion)
    sys.modules.update({"distutils": package, "distutils.version": package.version})
