"""mxamp: automatic mixed precision for Apache MXNet 1.9.1 and Gluon.

>>> import mxamp as amp
>>> amp.init("bfloat16")
>>> amp.is_enabled()
True
>>> amp.shutdown()
"""

from ._compat import import_mxnet as _import_mxnet

_import_mxnet()

from .autocast import autocast, current_policy, init, is_enabled, shutdown  # noqa: E402
from .policy import Policy  # noqa: E402

__version__ = "0.1.0"
