"""BatchNorm's running statistics after a step that overflowed.

In float16 an activation that overflows makes them Inf or NaN, and no later batch makes them finite
again. A skipped step puts back the values of the last finite step.
"""

from __future__ import annotations

import logging
from typing import Callable, Mapping

from mxnet import autograd
from mxnet.gluon import Constant, Trainer
from mxnet.ndarray.ndarray import NDArray

from ..framework.wording import shortened
from ..policy.active import suspended
from .finite import all_finite

logger = logging.getLogger("mxamp")

RESTORED = "the skipped step left Inf or NaN in running statistics; the last finite are back: %s"

Arrays = Callable[[], Mapping[str, NDArray]]


class RunningStatistics:
    """The running statistics of one trainer or module, as they were after its last finite step.

    Its methods take a function that returns them by name.
    """

    def __init__(self) -> None:
        self._saved: dict[str, NDArray] | None = None
        self._has_logged = False
        self._passes = 0  #: backward passes since the last step

    def before_pass(self, arrays: Arrays) -> None:
        """Save the statistics before the first backward pass, which updates them."""
        self._passes += 1
        if self._saved is None:
            self._save(arrays())

    def _save(self, arrays: Mapping[str, NDArray]) -> None:
        with autograd.pause(), suspended():
            self._saved = {name: array.copy() for name, array in arrays.items()}

    def after_step(self, finite: bool, arrays: Arrays) -> None:
        """Save the statistics after a finite step; after another, put back the last finite ones."""
        if self._saved == {}:
            return  # there are none
        held, saved = arrays(), self._saved or {}
        # The program may have skipped the steps of earlier passes.
        is_good, self._passes = finite and self._passes <= 1, 0
        bad = [] if is_good else [n for n in held if n in saved and not all_finite([held[n]])]
        for name in bad:
            saved[name].copyto(held[name])
        if bad and not self._has_logged:
            logger.warning(RESTORED, shortened(sorted(bad)))
            self._has_logged = True
        if finite:
            self._save(held)


def running_statistics(trainer: Trainer) -> dict[str, NDArray]:
    """Return the running statistics of BatchNorm among a trainer's parameters, on all devices.

    MXNet does not tell them from other parameters without a gradient; vectors are small.
    """
    return {
        f"{param.name} on {data.context}": data
        for param in trainer._params
        if param.grad_req == "null" and param._data is not None
        if not isinstance(param, Constant) and len(param.shape) == 1
        for data in param.list_data()
    }
