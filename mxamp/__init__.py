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

from typing import Any as _Any
from typing import Optional as _Optional

import lazy_loader as _lazy_loader

from .cli import starting as _starting
from .errors import InstallError as _InstallError

_load, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
_problem: _Optional[_InstallError] = None
#: Names of mxamp 1.0, and what to use instead.
_GONE = {
    "Benchmark": "what benchmark(...) returns",
    "LayerCost": "tune(...).kept, the layers that stay in float32",
    "Trial": "tune(...).trials",
    "Tuning": "what tune(...) returns",
    "draw": "explain(...).to_dot(), the graph in Graphviz's language",
}
_starting.exit_on_ctrl_c()
try:
    if _starting.without_mxnet():
        raise _InstallError("this command of `mxamp` does not import MXNet")
    from .framework.compat import import_mxnet as _import_mxnet

    with _starting.outside_collector():
        _import_mxnet()
except _InstallError as _error:
    # The command `mxamp` reports the error itself, in one line.
    if not _starting.is_starting():
        raise
    _problem = _error


def __getattr__(name: str) -> _Any:
    if _problem is not None and not name.startswith("__"):
        raise _InstallError(str(_problem))
    if name in _GONE:
        raise AttributeError(f"mxamp.{name} is gone; use {_GONE[name]}")
    # Stored, so that the next use does not come here.
    try:
        found = globals()[name] = _load(name)
    except AttributeError:
        from .framework.keywords import missing_attribute

        raise AttributeError(missing_attribute(f"module {__name__!r}", name, __all__)) from None
    return found
