"""Automatic mixed precision for Apache MXNet 1.9.1 and Gluon.

>>> import mxamp as amp
>>> amp.init("bfloat16")
>>> amp.is_enabled()
True
>>> amp.shutdown()

`__init__.pyi` lists the public names, and docs/api.md describes them by topic. Each is loaded when
it is first used. Importing mxamp imports MXNet and patches nothing; `init`, `autocast` and the
front ends do. Import mxamp before MXNet: it makes MXNet 1.9.1 importable on newer Python and NumPy.
"""

import sys as _sys
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import Any as _Any

import lazy_loader as _lazy_loader

_load, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)


def _is_command() -> bool:
    """Return whether this process is the `mxamp` command, which imports MXNet only on demand."""
    program = (getattr(_sys, "argv", None) or [""])[0]
    if program == "-m":  # as long as Python looks for the package
        given = getattr(_sys, "orig_argv", [])  # from Python 3.10 on
        return "mxamp" in given[given.index("-m") + 1 :][:1] if "-m" in given else False
    return _Path(program).name == "mxamp"


if not _is_command():
    from .framework.compat import import_mxnet as _import_mxnet

    _import_mxnet()


def __getattr__(name: str) -> _Any:
    # Stored, so that the next use does not come here.
    try:
        found = globals()[name] = _load(name)
    except AttributeError:
        from .framework.keywords import hint

        # `from mxamp import name` drops the message of an AttributeError: a submodule is next.
        imports = _sys._getframe(1).f_code.co_name == "_handle_fromlist"
        error = ImportError if imports and not _find_spec(f"{__name__}.{name}") else AttributeError
        owner = f"module {__name__!r}"
        raise error(f"{owner} has no attribute {name!r}{hint(owner, name, __all__)}") from None
    return found
