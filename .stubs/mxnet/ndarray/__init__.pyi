from typing import Any, Callable

from .._ctypes.ndarray import CachedOp as CachedOp
from . import ndarray as ndarray
from . import sparse as sparse
from .ndarray import NDArray as NDArray

_Operator = Callable[..., NDArray]

def array(source_array: Any, ctx: Any = None, dtype: Any = None) -> NDArray: ...
def zeros(shape: Any, ctx: Any = None, dtype: Any = None, **kwargs: Any) -> NDArray: ...
def ones(shape: Any, ctx: Any = None, dtype: Any = None, **kwargs: Any) -> NDArray: ...
def full(shape: Any, val: float, ctx: Any = None, dtype: Any = ...) -> NDArray: ...
def empty(shape: Any, ctx: Any = None, dtype: Any = None) -> NDArray: ...
def save(fname: str, data: Any) -> None: ...
def waitall() -> None: ...

# Operators with one output, which MXNet generates.
BlockGrad: _Operator
add_n: _Operator
broadcast_mul: _Operator
concat: _Operator
ones_like: _Operator
where: _Operator
zeros_like: _Operator

def __getattr__(name: str) -> Any: ...
