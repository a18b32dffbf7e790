"""The import of MXNet 1.9.1 on today's Python, NumPy and CUDA wheels.

MXNet reads names that later NumPy versions removed, imports `distutils`, which Python 3.12 removed,
and looks for CUDA on the system. `prepare_import` adds the missing names before
`import mxnet` and changes no existing ones. NumPy's arrays can't be given a method back:
`import_mxnet` changes its name in MXNet's functions.
"""

import contextvars
import functools
import importlib
import importlib.util
import math
import os
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

from ..errors import InstallError
from . import cuda

#: The version of MXNet that mxamp runs on: other versions have other operators and internals.
MXNET = "1.9.1"
# The tested versions of NumPy, as in setup.cfg.
NUMPY_FROM, NUMPY_BELOW = "1.17", "2.6"

FAILED_BEFORE = (
    "MXNet was imported before mxamp and failed, and can't be imported a second time in the same "
    "process. Start a new process and put `import mxamp` above the first `import mxnet`."
)
BROKEN = "MXNet is installed, but can't be imported: {error}. `mxamp doctor` says what to do."
SERVING = (
    "the {role} of this run has failed: {error}. If it could not bind, another program uses its "
    "port: set another DMLC_PS_ROOT_PORT"
)
NO_NUMPY = f'NumPy is not installed: pip install "numpy>={NUMPY_FROM},<{NUMPY_BELOW}"'
WRONG_NUMPY = (
    f"NumPy {{}} is installed, but MXNet needs {NUMPY_FROM} or later, below {NUMPY_BELOW}: "
    f'pip install "numpy>={NUMPY_FROM},<{NUMPY_BELOW}"'
)
WRONG_MXNET = (
    f"MXNet {{}} is installed, but mxamp needs MXNet {MXNET}: pip install mxnet=={MXNET}, or for "
    f"NVIDIA GPUs pip install {cuda.WHEEL}=={MXNET}"
)
NOT_INSTALLED = (
    "MXNet is not installed. Install mxamp with one of its extras: mxamp[cpu] for "
    f"mxnet=={MXNET}, mxamp[cu112] for {cuda.WHEEL}=={MXNET}."
)


def import_mxnet() -> Any:
    """Import MXNet, on Python and NumPy newer than it supports, and return the module.

    Raises `InstallError` if MXNet, NumPy or the GPU build's driver is missing, if MXNet is not
    1.9.1, if NumPy is too old or too new, and if the import fails or has failed before in this
    process.
    """
    if sys.modules.get("mxnet") is None:
        failure = _first_import_failure()
        if failure is not None:
            raise failure
    mxnet: Any = sys.modules["mxnet"]
    # A stand-in module may have no version.
    _check_version(getattr(mxnet, "__version__", MXNET))
    _restore_packing(sys.modules["numpy"], sys.modules.get("mxnet.recordio"))
    return mxnet


@functools.lru_cache(maxsize=1)
def _first_import_failure() -> Optional[InstallError]:
    """Import MXNet once in this process; return the error if its own code fails, else None.

    Later calls return the same error, since MXNet can't be imported twice.
    """
    if any(name.startswith("mxnet.") for name in sys.modules):
        raise InstallError(FAILED_BEFORE)
    _check_version(_installed_version())
    prepare_import()
    with warnings.catch_warnings():
        # Warnings about NumPy and distutils in MXNet's own code.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        try:
            importlib.import_module("mxnet")
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[-1]
            role = os.environ.get("DMLC_ROLE", "")
            # In a scheduler or server, `import mxnet` serves until all workers have ended.
            serves = role in ("scheduler", "server") and type(error).__name__ == "MXNetError"
            failure = InstallError((SERVING if serves else BROKEN).format(role=role, error=said))
            failure.__cause__ = error
            return failure
    return None


def _installed_version() -> str:
    """Return the version of the MXNet that an import would load; raise if there is none.

    Reads libinfo.py, which wheels of any name and builds from source have. Without it, returns
    1.9.1, and the version is checked after the import.
    """
    spec = importlib.util.find_spec("mxnet")
    if spec is None:
        raise InstallError(NOT_INSTALLED)
    places = [Path(place) / "libinfo.py" for place in spec.submodule_search_locations or ()]
    text = "".join(place.read_text(encoding="utf-8") for place in places if place.is_file())
    found = re.search(r"^__version__ *= *['\"](.+?)['\"]", text, re.MULTILINE)
    return found[1] if found else MXNET


def _check_version(version: str) -> None:
    """Raise unless `version` is the version of MXNet that mxamp runs on."""
    if version != MXNET:
        raise InstallError(WRONG_MXNET.format(version))


def prepare_import() -> None:
    """Add the names to NumPy and `sys.modules` that MXNet imports, and preload CUDA's libraries."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise InstallError(NO_NUMPY) from None
    if not release(NUMPY_FROM) <= release(numpy.__version__) < release(NUMPY_BELOW):
        raise InstallError(WRONG_NUMPY.format(numpy.__version__))
    _restore_numpy(numpy)
    _restore_distutils()
    cuda.preload()


def release(version: str) -> Tuple[int, ...]:
    """Return up to three leading numbers of a version, for comparisons.

    >>> release("2.6.0rc1"), release("450.80.02"), release("8.6")
    ((2, 6, 0), (450, 80, 2), (8, 6))
    """
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _restore_numpy(numpy: Any) -> None:
    """Add removed names to NumPy, and make NumPy 2 print numbers as NumPy 1 does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 1.20 to 1.23 have the names and deprecate them
        missing = {k: v for k, v in _numpy_names(numpy).items() if not hasattr(numpy, k)}
    for name, value in missing.items():
        setattr(numpy, name, value)
    if not numpy.__version__.startswith("1."):
        _print_plain_numbers(numpy)
    compat: Any = getattr(numpy, "compat", None)
    if compat is None:
        compat = types.ModuleType("numpy.compat")
        sys.modules.setdefault("numpy.compat", compat)
        numpy.compat = compat
    if not hasattr(compat, "basestring"):
        compat.basestring = str


def _print_plain_numbers(numpy: Any) -> None:
    """Make NumPy 2 print 2, not np.int64(2): MXNet passes attributes as str()."""
    numpy.set_printoptions(legacy="1.25")
    options = getattr(sys.modules.get("numpy._core.printoptions"), "format_options", None)
    if isinstance(options, contextvars.ContextVar):
        # Each thread has its own options: change the default that other threads start with.
        contextvars.Context().run(options.get).update(legacy=options.get()["legacy"])


def _numpy_names(numpy: Any) -> Dict[str, Any]:
    """Return the values of the names that MXNet reads and NumPy 1.24 to 2.5 removed, by name."""

    def removed_function(name: str) -> Callable[..., Any]:
        # MXNet only looks these functions up, for its table of fallbacks to NumPy.
        def raise_removed(*_args: Any, **_kwargs: Any) -> Any:
            raise AttributeError(f"numpy.{name} was removed from NumPy; see numpy_financial")

        raise_removed.__name__ = name
        return raise_removed

    names: Dict[str, Any] = {
        "bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str,
        "Inf": math.inf, "NAN": math.nan, "NaN": math.nan, "PINF": math.inf, "NINF": -math.inf,
        "PZERO": 0.0, "NZERO": -0.0,
        "alltrue": numpy.all, "sometrue": numpy.any, "product": numpy.prod,
        "cumproduct": numpy.cumprod, "round_": numpy.round,
        "msort": lambda a: numpy.sort(a, axis=0),
        "in1d": lambda a, b, **options: numpy.isin(numpy.ravel(a), b, **options),
        "trapz": getattr(numpy, "trapezoid", None),
    }  # fmt: skip
    names.update(
        (name, removed_function(name)) for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate")
    )
    return names


def _restore_packing(numpy: Any, recordio: Any) -> None:
    """Make `mxnet.recordio` call `tobytes` where NumPy lacks `tostring`, from NumPy 2.3 on."""
    if recordio is None or hasattr(numpy.ndarray, "tostring"):
        return
    for function in (recordio.pack, recordio.pack_img):
        # In place: other modules may have imported the functions by name.
        names = function.__code__.co_names
        function.__code__ = function.__code__.replace(
            co_names=tuple("tobytes" if name == "tostring" else name for name in names)
        )


def _restore_distutils() -> None:
    """Add `distutils.version` with LooseVersion's comparisons, the only part that MXNet uses."""
    if "distutils" in sys.modules or importlib.util.find_spec("distutils") is not None:
        return

    @functools.total_ordering
    class LooseVersion:
        def __init__(self, vstring: Any = "0") -> None:
            self.vstring = str(getattr(vstring, "vstring", vstring))
            self.version = [int(p) for p in self.vstring.split(".") if p.isdigit()]

        def __lt__(self, other: Any) -> bool:
            return self.version < LooseVersion(other).version

        def __eq__(self, other: object) -> bool:
            return self.version == LooseVersion(other).version

    package: Any = types.ModuleType("distutils")
    module: Any = types.ModuleType("distutils.version")
    package.__path__ = []
    module.LooseVersion = LooseVersion
    module.StrictVersion = LooseVersion
    package.version = module
    sys.modules["distutils"] = package
    sys.modules["distutils.version"] = module
