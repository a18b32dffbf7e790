"""A faster SGD update on CPUs, computed in NumPy on blocks that fit the cache.

MXNet's kernel runs at a fraction of the memory's speed on one core. In-place work on blocks that
fit the cache is up to 3 times as fast, and equal bit for bit: each operation rounds to float32 in
the order of MXNet's kernel.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Iterator

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import SGD

from ...framework import machine
from ...framework.arrays import as_float, dtypes_of, flat_view, invoke, on_device, shape_of
from ...framework.operators import handle_of
from ...framework.patching import Original
from ...policy.active import current_policy

#: The name of the substitution.
SGD_STEP = "sgd"

#: Elements per block: weight, gradient, momentum and two scratch blocks fit into the cache.
_BLOCK = 2**15

#: With more cores MXNet's kernel, which uses all of them, is as fast as NumPy on one.
_MOST_CORES = 3

#: Elements of a weight from which NumPy is faster. A step in NumPy waits for the gradient, which
#: costs nets of many small weights more than it saves (DenseNet121, MobileNetV2).
_LEAST = 2**21

_float = np.float32


def patched_update_impl(
    original: Original, self: SGD, indices: Any, *arrays: Any, multi_precision: bool = False
) -> None:
    """Run `SGD._update_impl`, with NumPy for weights that NumPy updates faster than MXNet."""
    policy = current_policy()
    if policy is None or SGD_STEP not in policy.substitutions:
        original(self, indices, *arrays, multi_precision)
        return
    is_list = isinstance(indices, (tuple, list))
    rows = list(zip(indices, *arrays)) if is_list else [(indices, *arrays)]
    fast = [_is_large(row[1]) and _is_faster(self, *row[1:]) for row in rows]
    if multi_precision or not any(fast):
        original(self, indices, *arrays, multi_precision)
        return
    for row, is_fast in zip(rows, fast):
        if is_fast:
            _sgd(self, *row)
        else:
            original(self, *([one] for one in row), multi_precision)


def _is_large(weight: NDArray) -> bool:
    """Return whether a weight is large enough to update in NumPy; cache this on its handle."""
    handle = weight.handle
    if not hasattr(handle, "is_large"):
        handle.is_large = math.prod(shape_of(weight)) >= _LEAST
    return bool(handle.is_large)


def _is_faster(optimizer: SGD, *arrays: NDArray | None) -> bool:
    """Return whether NumPy can do an SGD update of these arrays faster than MXNet."""
    used = [array for array in arrays if array is not None]
    return (
        type(optimizer) is SGD  # a subclass may compute something else
        and not optimizer.clip_gradient
        and machine.threads() <= _MOST_CORES
        and all(isinstance(array, NDArray) for array in used)
        and {*dtypes_of(used)} == {"float32"}  # sparse arrays are "sparse"
        and on_device(used, "cpu")
    )


def _blocks(*arrays: machine.Values) -> Iterator[list[machine.Values]]:
    """Yield matching slices of all arrays, together with two scratch arrays of the same size."""
    buffers = [np.empty(min(_BLOCK, arrays[0].size), _float) for _ in range(2)]
    for start in range(0, arrays[0].size, _BLOCK):
        parts = [array[start : start + _BLOCK] for array in arrays]
        yield [*parts, *(buffer[: parts[0].size] for buffer in buffers)]


def _sgd(optimizer: SGD, index: int, weight: NDArray, grad: NDArray, state: NDArray | None) -> None:
    """Update a weight in place: m = momentum * m - (lr * wd) * w - (lr * rescale) * g; w += m.

    With momentum, m is kept in `state`.
    """
    optimizer._update_count(index)
    momentum = state if optimizer.momentum > 0 else None
    # MXNet takes rates and decays as lists of numbers, all else as text.
    lr = _float(optimizer._get_lr(index))
    lr_wd = lr * _float(optimizer._get_wd(index))
    # `trainer.step(batch_size)` takes arrays of one element.
    lr_rescale = lr * _parsed_number(as_float(optimizer.rescale_grad))
    factor = _parsed_number(as_float(optimizer.momentum))
    arrays = [flat_view(weight, _float, write=True), flat_view(grad, _float)]
    if momentum is not None:
        arrays.append(flat_view(momentum, _float, write=True))
    with np.errstate(all="ignore"):
        # Without momentum, the first scratch block takes its place.
        for w, g, change, *_unused, term in _blocks(*arrays):
            np.multiply(w, lr_wd, out=term)
            if momentum is not None:
                np.multiply(change, factor, out=change)
                np.subtract(change, term, out=change)
            else:
                np.subtract(_float(0), term, out=change)
            np.multiply(g, lr_rescale, out=term)
            np.subtract(change, term, out=change)
            np.add(w, change, out=w)


@functools.lru_cache(maxsize=256)
def _parsed_number(value: float) -> np.float32:
    """Round a number to float32 as MXNet's text parser does: its last bit may differ from NumPy's.

    An operator computes 0 - value * -1, which is slow: cached.
    """
    arrays = [mx.nd.array([number], ctx=mx.cpu()) for number in (0, -1)]
    return _float(
        invoke(handle_of("sgd_update"), arrays, ["lr"], [value], None, False, False).asscalar()
    )
