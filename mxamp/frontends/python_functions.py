"""`autograd.Function` inside a backward pass that scales: it computes with gradients as they are.

What a function computes in Python need not be in proportion to the gradient it is given: it may
clip it, or ignore it. So the scale is taken out before, and put in again after it. A backward pass
that it runs itself (to compute a part of the net again) scales and unscales for itself.

`scaling.loss_outputs` does the same for operators written in Python.
"""

import functools
import random
import threading
from typing import Any, Callable, Optional, Set, Tuple

import numpy as np
from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.arrays import cast
from ..framework.machine import dtype_name
from ..framework.patching import Patch
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..scaling.loss_outputs import calls_so_far, in_unscaled_backward

__all__ = ["RunningPass"]


class RunningPass:
    """The scale of the backward pass that runs, and what passes inside it have unscaled."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.written_inside: Set[int] = set()
        self.overflown_inside: Set[int] = set()
        self._random: Optional[Tuple[Any, Any]] = None
        self._calls = self._custom_calls = 0  # of Python, in this try and up to it
        self._thread = threading.local()

    @property
    def in_function(self) -> bool:
        """Whether the calling thread computes the backward of a function that was unscaled."""
        return bool(getattr(self._thread, "depth", 0)) or in_unscaled_backward()

    def begin(self, scale: float) -> None:
        """Take note of a pass, or of another try of it, which draws the same random numbers."""
        self.scale = scale
        self.written_inside.clear()
        self.overflown_inside.clear()
        if self._random is None:
            self._random = random.getstate(), np.random.get_state()
        elif self._calls or calls_so_far() > self._custom_calls:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        self._calls, self._custom_calls = 0, calls_so_far()

    def end(self) -> None:
        """Take note of its end."""
        self.scale, self._random = 1.0, None
        self.written_inside.clear()
        self.overflown_inside.clear()

    def patch(self) -> Patch:
        """Return the patch of `autograd.Function`."""
        return Patch(autograd.Function, "__call__", self._build_call)

    def _build_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(function: autograd.Function, *inputs: Any) -> Any:  # noqa: N807
            backward = function.backward

            @functools.wraps(backward)
            def unscaled_backward(*gradients: Any) -> Any:
                scale = self.scale
                if scale == 1:
                    return backward(*gradients)
                self._calls += 1
                self._thread.depth = getattr(self._thread, "depth", 0) + 1
                try:
                    results = backward(*(_times(gradient, 1 / scale) for gradient in gradients))
                finally:
                    self._thread.depth -= 1
                if isinstance(results, NDArray):
                    return _times(results, scale)
                return [_times(result, scale) for result in results]

            function.backward = unscaled_backward
            return original(function, *inputs)

        return __call__


def _times(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor, in float32: without the scale half precision loses it."""
    if gradient is None:
        return None
    with autograd.pause(), suspended():
        wide = cast(gradient, "float32") if dtype_name(gradient.dtype) in CASTABLE else gradient
        return wide * factor
