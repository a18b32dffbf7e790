"""MXNet's arrays: dtype, device, memory, and casts between float dtypes."""

import ctypes
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet._ctypes import ndarray as mx_ctypes
from mxnet.base import _LIB, check_call
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import CSRNDArray, RowSparseNDArray

from .machine import DTYPE_CODES, DTYPE_NAMES, Dtype, Values, default_device, device_kind
from .operators import handle_of

_SPARSE = -2
#: The name of each number that `kind_code` returns: a dtype, or "sparse".
KIND_NAMES: Mapping[int, str] = {**DTYPE_NAMES, _SPARSE: "sparse"}
_SPARSE_TYPES = frozenset({CSRNDArray, RowSparseNDArray})
_BFLOAT16 = DTYPE_CODES["bfloat16"]
_FLOAT32, _FLOAT64 = DTYPE_CODES["float32"], DTYPE_CODES["float64"]
_CASTABLE = frozenset({DTYPE_CODES["float16"], _BFLOAT16, _FLOAT32})
#: The elements in a part of `float32_parts`.
_PART = 2**22

# Looked up once, since every eager call reads dtypes. The calls are too short to release the lock
# of Python's interpreter.
_held = ctypes.PyDLL(_LIB._name)
_get_dtype, _get_shape = _held.MXNDArrayGetDType, _held.MXNDArrayGetShapeEx64
_c_int, _byref = ctypes.c_int, ctypes.byref
_Sizes = ctypes.POINTER(ctypes.c_int64)

#: MXNet's entry to every operator, unpatched: mxamp's own calls, mostly of operators with one
#: output, bypass the policy.
invoke: Callable[..., NDArray] = mx_ctypes._imperative_invoke
_AMP_CAST = handle_of("amp_cast")
_CAST = handle_of("Cast")
_COPY = handle_of("identity")
_SLICE_AXIS = handle_of("slice_axis")
_RESHAPE = handle_of("_np_reshape")
_SUM = handle_of("add_n")
#: The dtypes to which this process has cast arrays.
cast_dtypes: Set[str] = set()


def dtype_code(array: NDArray) -> int:
    """Return MXNet's integer code of an array's dtype, eight times as fast as `array.dtype`."""
    code = _c_int()
    _get_dtype(array.handle, _byref(code))
    return code.value


def shape_of(array: NDArray) -> Tuple[int, ...]:
    """Return an array's shape, in two thirds of the time of `array.shape`."""
    count, sizes = _c_int(), _Sizes()
    _get_shape(array.handle, _byref(count), _byref(sizes))
    return tuple(sizes[: count.value])


def all_float32(arrays: Sequence[NDArray]) -> bool:
    """Return whether all arrays have the dtype float32, dense or sparse."""
    code = _c_int()
    pointer = _byref(code)
    for array in arrays:
        _get_dtype(array.handle, pointer)
        if code.value:
            return False
    return True


def dtype_of(array: NDArray) -> str:
    """Return the name of an array's dtype, ten times as fast as `dtype_name(array.dtype)`."""
    return DTYPE_NAMES.get(dtype_code(array), "other")


def kind_code(array: NDArray) -> int:
    """Return MXNet's dtype code of a dense array; all sparse arrays share one code.

    Both are keys of `KIND_NAMES`.
    """
    return _SPARSE if type(array) in _SPARSE_TYPES else dtype_code(array)


def dtypes_of(arrays: Sequence[NDArray]) -> Tuple[str, ...]:
    """Return the dtype name of each array, or "sparse" for a sparse array."""
    return tuple([KIND_NAMES.get(kind_code(array), "other") for array in arrays])


def on_device(arrays: Sequence[NDArray], device: str) -> bool:
    """Return whether all arrays are on a device of the kind `device`: "cpu" or "gpu"."""
    if device == default_device() == "cpu":  # there is no other device
        return True
    return all(device_kind(array.context) == device for array in arrays)


def plain_array(array: NDArray) -> NDArray:
    """Return an `mx.np` array as an `mx.nd` array over the same memory; other arrays unchanged."""
    return array.as_nd_ndarray() if isinstance(array, mx.np.ndarray) else array


def as_float(number: Any) -> float:
    """Return a number or a one-element array as a Python float."""
    return float(plain_array(number).asscalar() if isinstance(number, NDArray) else number)


def copy(array: NDArray, is_np_op: bool = False, operator: int = _COPY) -> NDArray:
    """Return a copy of an array in MXNet's default memory layout; autograd records the copy."""
    if dtype_code(array) == _BFLOAT16 and array.ndim:
        # MXNet's copies fail on views of bfloat16 arrays; a slice of the whole array does not.
        keys, whole = ["axis", "begin", "end"], ["0", "0", "None"]
        array = invoke(_SLICE_AXIS, [array], keys, whole, None, is_np_op, False)
        if operator == _COPY:
            return array
    return invoke(operator, [array], [], [], None, is_np_op, False)


def copy_inputs_at(
    arrays: Sequence[NDArray], positions: Sequence[int], is_np_op: bool
) -> List[NDArray]:
    """Return an operator's inputs with those at `positions` copied, to prevent a backward crash.

    `positions` are those of gradients that are zero by definition. If an array gets no gradient but
    such zeros, eager backward calls `zeros_like` on the inputs of the preceding operators, back to
    one that computes a gradient. But autograd has freed the inputs that no gradient needs, such as
    the input of a cast: reading one is a segmentation fault. Each copy is an `add_n` of one array,
    whose gradient needs no inputs.
    """
    return [
        copy(array, is_np_op, _SUM) if i in positions and dtype_code(array) in _CASTABLE else array
        for i, array in enumerate(arrays)
    ]


def cast(array: NDArray, dtype: str, is_np_op: bool = False) -> NDArray:
    """Return an array cast to a float dtype, or the array itself if it has that dtype.

    Rounds to nearest even. Autograd records the cast.
    """
    code = dtype_code(array)
    if code == DTYPE_CODES[dtype]:
        return array
    operator = _AMP_CAST
    if _FLOAT64 in (code, DTYPE_CODES[dtype]):
        # amp_cast has no float64, and Cast truncates to bfloat16: cast by way of float32.
        if _FLOAT32 not in (code, DTYPE_CODES[dtype]):
            return cast(cast(array, "float32", is_np_op), dtype, is_np_op)
        operator = _CAST
    bfloat16 = _BFLOAT16 in (code, DTYPE_CODES[dtype])
    if mx.util.is_np_shape() and not array.size:
        # amp_cast fails on empty arrays: on GPUs, and in bfloat16.
        operator = _CAST
    elif bfloat16 and mx.util.is_np_shape() and not array.ndim:
        # oneDNN, which casts bfloat16, fails on 0-d arrays.
        row = invoke(_RESHAPE, [array], ["newshape"], ["(1,)"], None, is_np_op, False)
        row = cast(row, dtype, is_np_op)
        return invoke(_RESHAPE, [row], ["newshape"], ["()"], None, is_np_op, False)
    cast_dtypes.add(dtype)
    if not (bfloat16 and autograd.is_recording() and has_gradient(array)):
        return invoke(operator, [array], ["dtype"], [dtype], None, is_np_op, False)
    # amp_cast's gradient forgets grad_req="add" in bfloat16; the view in between keeps it.
    view, memory = _recorded_view(array), leaf_casts.memory(array, dtype)
    result = invoke(operator, [view], ["dtype"], [dtype], memory, is_np_op, False)
    leaf_casts.keep(array, dtype, result)
    return result


class _LeafCasts(threading.local):
    """Per-thread cache of weights' casts during `record()`; weights are arrays with gradients.

    Autograd keeps the casts that operators have read, once for each use of a weight. So all casts
    of a leaf share the memory of the first. Each of them writes it: an operator reads the current
    values of the leaf. The backward pass reads the values of the last cast, where float32's reads
    the leaf itself. Each cast has a gradient of its own, and they are summed in float32.
    """

    def __init__(self) -> None:
        #: Of the scope whose end frees the casts; without one nothing is kept. Weak: Ctrl-C may
        #: come before a scope has begun, and it never ends then.
        self._scope: Callable[[], Any] = lambda: None
        self._casts: Dict[Tuple[int, str], Tuple[NDArray, NDArray]] = {}

    def begin(self, scope: object) -> None:
        """Cache the casts of weights until the autograd scope `scope` or an outer one ends."""
        if self._scope() is None:
            self._casts.clear()
            self._scope = weakref.ref(scope)

    def end(self, scope: object) -> None:
        """Free the cached casts of weights if the autograd scope `scope` started the cache."""
        if self._scope() is scope:
            self._scope = lambda: None
            self._casts.clear()

    def memory(self, leaf: NDArray, dtype: str) -> Optional[NDArray]:
        """Return an array over the memory of a weight's cached cast to `dtype`, or None."""
        if not self._keeps():
            return None
        _, cast_before = self._casts.get((leaf.handle.value, dtype), (leaf, None))
        return None if cast_before is None else cast_before.detach()

    def keep(self, leaf: NDArray, dtype: str, result: NDArray) -> None:
        """Cache `result`, a weight's first cast to `dtype`, and keep the weight alive with it."""
        if self._keeps():
            self._casts.setdefault((leaf.handle.value, dtype), (leaf, result.detach()))

    def _keeps(self) -> bool:
        """Return whether to cache casts of weights: only in training."""
        return self._scope() is not None and autograd.is_training()


#: Global, as autograd's own state of each thread is.
leaf_casts = _LeafCasts()


def float32_parts(array: NDArray) -> Iterator[Values]:
    """Yield an array's values in float32, as NumPy arrays of consecutive rows, about 16 MB each.

    An operator cuts the parts, since views misread oneDNN's layouts.
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


def cast_into(source: NDArray, target: NDArray, dtype: str, castable: bool) -> None:
    """Write `source` into `target`, cast by `amp_cast` if `castable`, else by `Cast`."""
    operator = _AMP_CAST if castable else _CAST
    invoke(operator, [source], ["dtype"], [dtype], target, False, False)


def has_gradient(array: NDArray) -> bool:
    """Return whether an array has a gradient buffer, three times as fast as `array.grad`."""
    gradient = ctypes.c_void_p()
    check_call(_held.MXNDArrayGetGrad(array.handle, _byref(gradient)))
    if gradient:
        check_call(_held.MXNDArrayFree(gradient))
    return bool(gradient)


def _recorded_view(array: NDArray) -> NDArray:
    """Return a view of an array's memory that autograd records as a reshape of the array."""
    shape = array.shape
    if not shape or not all(shape):  # 0 stands for an unknown size in a reshape
        return copy(array)
    handle, sizes = ctypes.c_void_p(), (ctypes.c_int64 * len(shape))(*shape)
    call = _LIB.MXNDArrayReshape64
    check_call(call(array.handle, len(shape), sizes, False, ctypes.byref(handle)))
    return type(array)(handle=handle, writable=array.writable)


def shallow_copy(array: NDArray) -> NDArray:
    """Return another NDArray object over an array's memory, the same variable for autograd."""
    handle = ctypes.c_void_p()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    return type(array)(handle=handle, writable=array.writable)


def address(array: NDArray) -> int:
    """Return the memory address of an array, 0 if it has no memory; wait for pending writes."""
    array.wait_to_read()
    data = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(data)))
    return data.value or 0


def flat_view(array: NDArray, dtype: Dtype, write: bool = False) -> Values:
    """Return a one-dimensional, zero-copy NumPy view of a dense CPU array.

    Waits for pending writes of the array, and with `write` for pending reads too. The view is valid
    while the array lives and keeps its layout.
    """
    if write:
        check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    count = array.size * np.dtype(dtype).itemsize
    buffer: Any = (ctypes.c_char * count).from_address(address(array))
    return np.frombuffer(buffer, dtype=dtype)


def as_list(outputs: object) -> Sequence[Any]:
    """Return the outputs of an operator or block as a sequence: a single array in a list."""
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def map_arrays(
    value: object, function: Callable[[NDArray], Any], otherwise: Callable[[Any], Any]
) -> Any:
    """Apply `function` to each array in nested containers, and `otherwise` to other values.

    The result has the same containers.
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
