"""Types of the part of MXNet 1.9.1 that mxamp uses; mypy alone reads them.

`Any` stands where MXNet decides at run time: operators, which it generates, and what they return.
`X | Any` is an X, or None where nothing was initialized or recorded.
"""

from typing import Any

from . import autograd as autograd
from . import base as base
from . import context as context
from . import executor as executor
from . import gluon as gluon
from . import kvstore as kvstore
from . import module as module
from . import ndarray as ndarray
from . import numpy as numpy
from . import optimizer as optimizer
from . import symbol as symbol
from .base import MXNetError as MXNetError
from .context import Context as Context
from .context import cpu as cpu
from .context import current_context as current_context
from .context import gpu as gpu

mod = module
nd = ndarray
np = numpy
sym = symbol

def __getattr__(name: str) -> Any: ...
