"""BatchNorm's running statistics after a step that overflowed.

In float16 an activation that overflows makes them Inf or NaN, and no later batch makes them finite
again. A skipped step puts back the values of the last finite step.
"""

from __future__ import annotations

import logging
from typing import Callable, Mapping

from mxnet import autograd
from mxnet.ndarray.ndarray import NDArray

from ..framework.wording import shortened
from ..policy.active import suspended
from .finite import all_finite

logger = logging.getLogger("mxamp")

RESTORED = (
    "the skipped step left running statistics that are not finite, and those of the last finite "
    "step were put back: %s"
)
LOST = (
    "running statistics are not finite, and were not before the first step either: set them again, "
    "or evaluation gives NaN: %s"
)


Arrays = Callable[[], Mapping[str, NDArray]]


class RunningStatistics:
    """The running statistics of one trainer or module, as they were after its last finite step.

    Its methods take a function that returns them by name.
    """

    def __init__(self) -> None:
        self._saved: dict[str, NDArray] | None = None
        self._has_logged = False

    def before_pass(self, arrays: Arrays) -> None:
        """Save the statistics before the first backward pass, which updates them."""
        if self._saved is None:
            self._save(arrays)

    def _save(self, arrays: Arrays) -> None:
        with autograd.pause(), suspended():
            self._saved = {name: array.copy() for name, array in arrays().items()}

    def after_step(self, finite: bool, arrays: Arrays) -> None:
        """Save the statistics after a finite step; after another, put back the last finite ones."""
        if finite or not self._saved:
            if self._saved != {}:  # there are none
                self._save(arrays)
            return
        bad = {name: array for name, array in arrays().items() if not all_finite([array])}
        saved = {name: self._saved[name] for name in bad if name in self._saved}
        known = {name for name, array in saved.items() if all_finite([array])}
        for name in known:
            saved[name].copyto(bad[name])
        for message, names in ((RESTORED, known), (LOST, bad.keys() - known)):
            if names and not self._has_logged:
                logger.warning(message, shortened(sorted(names)))
        self._has_logged |= bool(bad)
