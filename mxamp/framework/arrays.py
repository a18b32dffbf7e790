"""Arrays as MXNet holds them: dtype, device and memory, and casts between float dtypes."""

import ctypes
from functools import lru_cache
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.base import _LIB, check_call
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import CSRNDArray, RowSparseNDArray

from .machine import DTYPE_CODES, DTYPE_NAMES, device_kind
from .operators import handle_of

__all__ = [
    "KIND_NAMES",
    "address",
    "as_float",
    "as_list",
    "cast",
    "copy",
    "dtype_code",
    "dtypes_of",
    "flat_view",
    "float32_parts",
    "holders",
    "invoke",
    "kind_code",
    "map_arrays",
    "on_device",
    "plain_array",
    "shallow_copy",
]

_SPARSE = -2
#: What `kind_code` returns, by name: a dtype, or "sparse".
KIND_NAMES: Mapping[int, str] = {**DTYPE_NAMES, _SPARSE: "sparse"}
_SPARSE_TYPES = frozenset({CSRNDArray, RowSparseNDArray})
_BFLOAT16 = DTYPE_CODES["bfloat16"]
_FLOAT32, _FLOAT64 = DTYPE_CODES["float32"], DTYPE_CODES["float64"]
#: Elements of a part of `float32_parts`.
_PART = 2**22

#: MXNet's own entry to every operator, as it was before anything was patched: calls that mxamp
#: makes itself never go through its patch.
invoke = mx_ctypes._imperative_invoke
_AMP_CAST = handle_of("amp_cast")
_CAST = handle_of("Cast")
_COPY = handle_of("identity")
_SLICE_AXIS = handle_of("slice_axis")


def dtype_code(array: NDArray) -> int:
    """Return MXNet's number for an array's dtype (0.3 us; `array.dtype` takes 2)."""
    code = ctypes.c_int()
    _LIB.MXNDArrayGetDType(array.handle, ctypes.byref(code))
    return code.value


def kind_code(array: NDArray) -> int:
    """Return the number of an array's dtype, or one of its own for sparse storage."""
    return _SPARSE if type(array) in _SPARSE_TYPES else dtype_code(array)


def dtypes_of(arrays: Sequence[NDArray]) -> Tuple[str, ...]:
    """Return the kind of each array as `policy.decision` takes it: a dtype's name, or "sparse"."""
    return tuple([KIND_NAMES.get(kind_code(array), "other") for array in arrays])


def on_device(arrays: Sequence[NDArray], device: str) -> bool:
    """Tell whether all arrays are on the policy's kind of device ("cpu" or "gpu")."""
    return all(device_kind(array.context) == device for array in arrays)


def plain_array(array: NDArray) -> NDArray:
    """Return an array of `mx.np` as one of `mx.nd`, over the same memory; others as they are."""
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array


def as_float(number: Any) -> float:
    """Return a number as a float: an array's, where it has one element."""
    return float(plain_array(number).asscalar() if isinstance(number, NDArray) else number)


def copy(array: NDArray, is_np_op: bool = False) -> NDArray:
    """Return a copy in the plain memory layout, recorded by autograd."""
    return invoke(_COPY, [array], [], [], None, is_np_op, False)


def cast(array: NDArray, dtype: str, is_np_op: bool = False) -> NDArray:
    """Return `array` in another float dtype; the array itself where it has that dtype.

    Rounds to nearest even. Autograd records the cast.
    """
    code = dtype_code(array)
    if code == DTYPE_CODES[dtype]:
        return array
    operator = _AMP_CAST
    if _FLOAT64 in (code, DTYPE_CODES[dtype]):
        # amp_cast knows no float64, and Cast does not round to bfloat16: by way of float32.
        if _FLOAT32 not in (code, DTYPE_CODES[dtype]):
            return cast(cast(array, "float32", is_np_op), dtype, is_np_op)
        operator = _CAST
    bfloat16 = _BFLOAT16 in (code, DTYPE_CODES[dtype])
    if bfloat16 and _is_leaf(array):
        # amp_cast's gradient forgets grad_req="add" in bfloat16; the copy in between keeps it.
        array = copy(array, is_np_op)
    if mx.util.is_np_shape() and array.size <= (1 if bfloat16 else 0):
        # On GPUs amp_cast launches an empty grid for an empty array, which is an error; oneDNN,
        # which does it in bfloat16, knows no empty and no 0-d arrays.
        operator = _CAST
    return invoke(operator, [array], ["dtype"], [dtype], None, is_np_op, False)


def float32_parts(array: NDArray) -> Iterator[Any]:
    """Yield an array's values in float32, row after row: a large one in parts of some 16 MB.

    Parts are cut by an operator, which reads any layout of memory; views of MXNet's do not.
    """
    dense = array if array.stype == "default" else array.tostype("default")
    if not dense.ndim:
        yield cast(dense, "float32").asnumpy()
        return
    rows = dense.shape[0]
    step = max(1, _PART * rows // max(1, dense.size))
    for begin in range(0, rows if dense.size else 0, step):
        bounds = ["0", str(begin), str(min(begin + step, rows))]
        part = invoke(_SLICE_AXIS, [dense], ["axis", "begin", "end"], bounds, None, False, False)
        yield cast(part, "float32").asnumpy()


def write(source: NDArray, target: NDArray, dtype: str, castable: bool) -> None:
    """Write `source` into `target`, which has this dtype; `castable`: amp_cast knows both."""
    operator = _AMP_CAST if castable else _CAST
    invoke(operator, [source], ["dtype"], [dtype], target, False, False)


def _is_leaf(array: NDArray) -> bool:
    """Tell whether autograd would write a gradient of `array` now."""
    return autograd.is_recording() and array.grad is not None


def shallow_copy(array: NDArray) -> NDArray:
    """Return another array over the same memory, which autograd takes for the same variable."""
    handle = ctypes.c_void_p()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    return type(array)(handle=handle, writable=array.writable)


def address(array: NDArray) -> int:
    """Return where an array's elements are, 0 where it has none. Waits for the array."""
    array.wait_to_read()
    data = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(data)))
    return data.value or 0


def holders(array: NDArray) -> int:
    """Return how many arrays hold this one's memory: of Python's, autograd's and waiting calls'.

    Views of it count. MXNet has no call for it: this reads the count of the `std::shared_ptr` that
    an NDArray begins with. 0 where that is not to be found.
    """
    least = _least_count()
    return 0 if least is None else _shared_count(array) - least + 1


@lru_cache(maxsize=1)
def _least_count() -> Optional[int]:
    """Return the count of an array that one object holds: 1, or 0 (libc++); None if unknown."""
    with autograd.pause():
        array = mx.nd.zeros((1,))
        array.wait_to_read()
        alone = _shared_count(array)
        second = array.detach()
        counts = _shared_count(array), _shared_count(second)
    return alone if alone in (0, 1) and counts == (alone + 1, alone + 1) else None


def _shared_count(array: NDArray) -> int:
    pointers = ctypes.cast(array.handle, ctypes.POINTER(ctypes.c_void_p))
    # Behind the control block's virtual table.
    count = (pointers[1] or 0) + ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_int32.from_address(count).value if pointers[1] else 0


def flat_view(array: NDArray, dtype: Any, write: bool = False) -> Any:
    """Return the elements of a dense CPU array as a flat NumPy array over the same memory.

    Waits for what computes the array, and with `write` for what reads it too. The view is valid
    while the array lives and keeps its layout.
    """
    if write:
        check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    array.wait_to_read()
    data = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(data)))
    count = array.size * np.dtype(dtype).itemsize
    buffer = (ctypes.c_char * count).from_address(data.value)
    return np.frombuffer(buffer, dtype=dtype)


def as_list(outputs: Any) -> Sequence[Any]:
    """Return what MXNet gives as one array or several as a list or tuple."""
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def map_arrays(
    value: Any, function: Callable[[NDArray], Any], otherwise: Callable[[Any], Any]
) -> Any:
    """Return `value` with `function` applied to each array in it, in the same containers.

    What is neither an array nor a container goes through `otherwise`.
    """
    if isinstance(value, NDArray):
        return function(value)
    if isinstance(value, dict):
        return type(value)((k, map_arrays(v, function, otherwise)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_arrays(item, function, otherwise) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_arrays(item, function, otherwise) for item in value)
    return otherwise(value)
