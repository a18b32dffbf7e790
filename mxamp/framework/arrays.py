"""Arrays as MXNet holds them: dtype, device and memory, and casts between float dtypes."""

import ctypes
from typing import Any, Iterator, Mapping, Sequence, Tuple

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
    "as_float",
    "cast",
    "copy",
    "dtype_code",
    "dtypes_of",
    "flat_view",
    "float32_parts",
    "invoke",
    "kind_code",
    "on_device",
    "plain_array",
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
