"""Overflow check, norm and scaling of gradients: exact, with one wait for all GPU work.

On CPUs the check reads an array's memory in place. A float32 array's dot product with itself runs
at memory speed and is finite only if every element is. Where it is not (a finite 1e25 squares to
infinity too) the elements are checked one by one. Half precision is checked by its exponent bits.
MXNet's `multi_all_finite` takes 40 % of a ResNet-50 training step on CPUs and knows no bfloat16.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray

from ..framework.arrays import cast, dtype_of, flat_view, plain_array, shape_of
from ..framework.machine import device_kind
from ..framework.patching import Original, wrapping
from ..policy.active import suspended

# The exponent bits of half-precision numbers: all set in Inf and NaN, and only there.
_EXPONENT = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
# The smallest normal float16.
_LEAST_NORMAL = 2.0**-14
# The most arrays that one call of multi_all_finite or multi_sum_sq takes.
_CHUNK = 200


def all_finite(arrays: Sequence[NDArray]) -> bool:
    """Return whether no element of `arrays` is Inf or NaN.

    Arrays may be dense or row_sparse, of any float dtypes, on any devices. Waits for them.
    """
    batches, on_cpu = _split_by_device(arrays)
    if not batches:
        with np.errstate(all="ignore"):
            return all(map(_is_finite, on_cpu))
    with autograd.pause(), suspended(), np.errstate(all="ignore"):
        # Runs while the CPU checks its own arrays.
        pending = [mx.nd.multi_all_finite(*batch, num_arrays=len(batch)) for batch in batches]
        return all(map(_is_finite, on_cpu)) and bool(_to_numpy(pending).all())


def square_sum(arrays: Sequence[NDArray]) -> float:
    """Return the sum of squares of all elements; Inf or NaN if one is. Waits for the arrays."""
    batches, on_cpu = _split_by_device(arrays)
    with autograd.pause(), suspended(), np.errstate(all="ignore"):
        pending = [mx.nd.multi_sum_sq(*batch, num_arrays=len(batch)) for batch in batches]
        total = _to_numpy(pending).sum()
        if not np.isfinite(total):  # squares of finite numbers may overflow float32
            wide = [array.astype("float64").square().sum() for batch in batches for array in batch]
            total = _to_numpy(wide).sum()
        return float(total) + sum(map(_square_sum_on_cpu, on_cpu))


def multiply(arrays: Sequence[NDArray], factor: float) -> None:
    """Multiply arrays in place, each in its own dtype."""
    if factor == 1:
        return
    with autograd.pause(), suspended():
        for array in arrays:
            # MXNet casts the factor to the array's dtype, and float16 rounds small ones to 0.
            left, small = factor, dtype_of(array) == "float16"
            while small and 0 < abs(left) < _LEAST_NORMAL:
                array.__imul__(_LEAST_NORMAL)
                left /= _LEAST_NORMAL
            array.__imul__(left)


def unscale(arrays: Sequence[NDArray], scale: float) -> list[int]:
    """Divide arrays by `scale` in place; return the positions of those that are not finite.

    Waits for the arrays.
    """
    multiply(arrays, 1 / scale)
    return [] if all_finite(arrays) else [i for i, a in enumerate(arrays) if not all_finite([a])]


def _square_sum_on_cpu(array: NDArray) -> float:
    """Return the sum of the squares of an array's elements, summed in float64 on overflow."""
    array = cast(array, "float32") if dtype_of(array) in _EXPONENT else array
    values = flat_view(array, np.dtype(dtype_of(array)))
    total = np.dot(values, values)
    # Squares of finite numbers may overflow float32.
    return float(total if np.isfinite(total) else np.square(values, dtype=np.float64).sum())


def _split_by_device(arrays: Sequence[NDArray]) -> tuple[list[list[NDArray]], list[NDArray]]:
    """Return nonempty arrays as dense `mx.nd` arrays: batches of those on GPUs, and those on CPUs.

    A batch has one device and one dtype, and is as long as one operator call takes.
    """
    groups: dict[Any, list[NDArray]] = {}
    on_cpu: list[NDArray] = []
    every = (plain_array(a.data if isinstance(a, RowSparseNDArray) else a) for a in arrays)
    for dense in [array for array in every if 0 not in shape_of(array)]:
        if device_kind(dense.context) == "cpu":
            on_cpu.append(dense)
        else:
            # multi_all_finite and multi_sum_sq infer no shape of a 0-d array.
            one = dense if dense.ndim else dense.reshape((1,))
            groups.setdefault((dense.context, dtype_of(dense)), []).append(one)
    batches = [g[i : i + _CHUNK] for g in groups.values() for i in range(0, len(g), _CHUNK)]
    return batches, on_cpu


def _is_finite(array: NDArray) -> bool:
    """Return whether all elements of a CPU array are finite."""
    dtype = dtype_of(array)
    if dtype in _EXPONENT:
        bits = flat_view(array, np.uint16)
        return bool((bits & _EXPONENT[dtype]).max() != _EXPONENT[dtype])
    values = flat_view(array, np.dtype(dtype))
    return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def _to_numpy(arrays: Sequence[NDArray]) -> Any:
    """Return the elements of all arrays in one float64 NumPy array, with one wait."""
    if not arrays:
        return np.empty(0)
    copies = [array.astype("float64").as_in_context(mx.cpu()) for array in arrays]
    return mx.nd.concat(*copies, dim=0).asnumpy()


def _clip_global_norm(
    original: Original, arrays: Any, max_norm: float, check_isfinite: bool = True
) -> Any:
    """Replace `gluon.utils.clip_global_norm` for gradients of any precision.

    MXNet's norm is a `dot`, which a policy would lower, and half precision can't hold the square
    of a norm. In float16 MXNet's norm is Inf above 256, and clipping by it zeroes the gradients.
    """
    if not any(dtype_of(array) in _EXPONENT for array in arrays):
        with suspended():
            return original(arrays, max_norm, check_isfinite)
    norm = math.sqrt(square_sum(arrays))
    if math.isfinite(norm):
        # MXNet adds the same number, against a division by zero.
        multiply(arrays, min(1.0, max_norm / (norm + 1e-8)))
    elif check_isfinite:
        warnings.warn("nan or inf is detected: the arrays are left as they are", stacklevel=3)
    return norm if check_isfinite else mx.nd.array([norm], ctx=arrays[0].context)


build_clip_global_norm = wrapping(_clip_global_norm)
