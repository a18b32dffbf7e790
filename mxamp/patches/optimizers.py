"""Faster optimizer steps on CPUs: SGD's and Adam's arithmetic, done block by block in NumPy.

MXNet's kernels for these run at a fraction of the memory's speed on a core. Blocks of the arrays
that fit into the cache, worked on in place, are up to 3 times faster, and the same bit for bit:
each operation rounds to float32 in the order in which MXNet's kernels do it.
"""

import functools
import math
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.optimizer import SGD, Adam

from ..framework import machine
from ..framework.arrays import as_float, flat_view
from ..policy.active import current_policy

__all__ = ["build_adam", "build_sgd"]

# So many elements fit into the cache: weight, gradient, state and what is in between.
_BLOCK = 2**15

# MXNet's kernels use all cores and catch up with the one that runs NumPy.
_MOST_CORES = {"sgd": 3, "adam": 1}

_float = np.float32


def build_sgd(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `SGD._update_impl` that updates in NumPy where that is faster."""

    @functools.wraps(original)
    def _update_impl(
        self: SGD,
        indices: Any,
        weights: Any,
        grads: Any,
        states: Any,
        multi_precision: bool = False,
    ) -> None:
        one = not isinstance(indices, (tuple, list))
        listed = [[a] if one else a for a in (indices, weights, grads, states)]
        arrays = [a for group in listed[1:] for a in group if a is not None]
        if multi_precision or not _is_faster("sgd", self, SGD, arrays):
            original(self, indices, weights, grads, states, multi_precision)
            return
        self._update_count(listed[0])
        rates, decays = self._get_lrs(listed[0]), self._get_wds(listed[0])
        for weight, grad, state, rate, decay in zip(*listed[1:], rates, decays):
            _sgd(self, weight, grad, state if self.momentum > 0 else None, rate, decay)

    return _update_impl


def build_adam(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `Adam.update` that updates in NumPy where that is faster."""

    @functools.wraps(original)
    def update(self: Adam, index: Any, weight: Any, grad: Any, state: Any) -> None:
        if not _is_faster("adam", self, Adam, (weight, grad, *state)):
            original(self, index, weight, grad, state)
            return
        self._update_count(index)
        count = self._index_update_count[index]
        rate = self._get_lr(index)
        rate *= math.sqrt(1.0 - self.beta2**count) / (1.0 - self.beta1**count)
        _adam(self, weight, grad, state, rate, self._get_wd(index))

    return update


def _is_faster(name: str, optimizer: Any, exactly: type, arrays: Sequence[Any]) -> bool:
    """Tell whether the policy in force wants the step `name`, and it can be done here."""
    policy = current_policy()
    return (
        policy is not None
        and name in policy.substitutions
        # A subclass may mean something else.
        and type(optimizer) is exactly
        and machine.threads() <= _MOST_CORES[name]
        and all(map(_fits, arrays))
    )


def _fits(array: Any) -> bool:
    return (
        isinstance(array, NDArray)
        and array.stype == "default"
        and array.dtype is np.float32
        and machine.device_kind(array.context) == "cpu"
        and array.size > 0
    )


def _blocks(*arrays: Any) -> Iterator[List[Any]]:
    """Yield the arrays block by block, each with two blocks of the same size to work in."""
    buffers = [np.empty(min(_BLOCK, arrays[0].size), _float) for _ in range(2)]
    for start in range(0, arrays[0].size, _BLOCK):
        parts = [array[start : start + _BLOCK] for array in arrays]
        yield [*parts, *(buffer[: parts[0].size] for buffer in buffers)]


def _sgd(
    optimizer: SGD,
    weight: NDArray,
    grad: NDArray,
    momentum: Optional[NDArray],
    rate: float,
    decay: float,
) -> None:
    """Change w by [m * momentum] - (lr * wd) * w - (lr * rescale) * g, which is m's next value."""
    # MXNet takes rates and decays as lists of numbers, all else as text.
    lr, rescale = _float(rate), _parsed(optimizer.rescale_grad)
    lr_wd, lr_rescale = lr * _float(decay), lr * rescale
    factor, clip = _parsed(optimizer.momentum), _clip_of(optimizer)
    arrays = [flat_view(weight, _float, write=True), flat_view(grad, _float)]
    if momentum is not None:
        arrays.append(flat_view(momentum, _float, write=True))
    with np.errstate(all="ignore"):
        for w, g, change, *_rest, term in _blocks(*arrays):
            np.multiply(w, lr_wd, out=term)
            if momentum is not None:
                np.multiply(change, factor, out=change)
                np.subtract(change, term, out=change)
            else:
                np.subtract(_float(0), term, out=change)
            if clip is None:
                np.multiply(g, lr_rescale, out=term)
            else:
                np.multiply(g, rescale, out=term)
                np.clip(term, -clip, clip, out=term)
                np.multiply(term, lr, out=term)
            np.subtract(change, term, out=change)
            np.add(w, change, out=w)


def _adam(
    optimizer: Adam,
    weight: NDArray,
    grad: NDArray,
    state: Tuple[NDArray, NDArray],
    rate: float,
    decay: float,
) -> None:
    """Change w by -lr * m / (sqrt(v) + epsilon), with m and v of clip(g * rescale + wd * w)."""
    lr, wd, rescale = _parsed(rate), _parsed(decay), _parsed(optimizer.rescale_grad)
    beta1, beta2 = _parsed(optimizer.beta1), _parsed(optimizer.beta2)
    rest1, rest2 = _float(1) - beta1, _float(1) - beta2
    epsilon, clip = _parsed(optimizer.epsilon), _clip_of(optimizer)
    written = [flat_view(array, _float, write=True) for array in (weight, *state)]
    with np.errstate(all="ignore"):
        for w, m, v, g, scaled, term in _blocks(*written, flat_view(grad, _float)):
            np.multiply(g, rescale, out=scaled)
            np.multiply(w, wd, out=term)
            np.add(scaled, term, out=scaled)
            if clip is not None:
                np.clip(scaled, -clip, clip, out=scaled)
            np.multiply(m, beta1, out=m)
            np.multiply(scaled, rest1, out=term)
            np.add(m, term, out=m)
            np.multiply(v, beta2, out=v)
            np.multiply(scaled, rest2, out=term)
            np.multiply(term, scaled, out=term)
            np.add(v, term, out=v)
            np.sqrt(v, out=term)
            np.add(term, epsilon, out=term)
            np.multiply(m, lr, out=scaled)
            np.divide(scaled, term, out=scaled)
            np.subtract(w, scaled, out=w)


def _clip_of(optimizer: Any) -> Any:
    # MXNet's kernels take a negative bound for none.
    bound = optimizer.clip_gradient
    return _parsed(bound) if bound and bound > 0 else None


def _parsed(value: Any) -> Any:
    """Return a number as MXNet's operators get it: they parse its text, and miss the last bit."""
    return _read_by_mxnet(as_float(value))  # `trainer.step(batch_size)` takes arrays of one element


@functools.lru_cache(maxsize=256)
def _read_by_mxnet(value: float) -> Any:
    """Ask an operator (30 us): sgd_update makes of 0 - value * -1 what it has read."""
    zero = mx.nd.zeros((1,), ctx=mx.cpu())
    minus_one = mx.nd.full((1,), -1, ctx=mx.cpu())
    return _float(mx.nd.sgd_update(zero, minus_one, lr=value).asscalar())
