"""The memory of arrays on the CPU, as NumPy sees it."""

import ctypes
from typing import Any

import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.ndarray.ndarray import NDArray

__all__ = ["memory"]


def memory(array: NDArray, dtype: Any, write: bool = False) -> Any:
    """Return the elements of a dense CPU array as a flat NumPy array over the same memory.

    Waits for what computes the array, and with `write` for what reads it too. It is there only as
    long as the array is, and as nobody gives the array another layout.
    """
    if write:
        check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    array.wait_to_read()
    data = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(data)))
    count = array.size * np.dtype(dtype).itemsize
    buffer = (ctypes.c_char * count).from_address(data.value)
    return np.frombuffer(buffer, dtype=dtype)
