"""BatchNorm's running statistics after a step that overflowed.

In float16 an activation that overflows makes them Inf or NaN, and no later batch makes them finite
again. A skipped step puts back the values of the last finite step.
"""

import logging
from typing import Callable, Dict, Mapping, Optional

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


class RunningStatistics:
    """The running statistics of one trainer or module, as they were after its last finite step.

    `arrays` returns them by name.
    """

    def __init__(self, arrays: Callable[[], Mapping[str, NDArray]]) -> None:
        self._arrays = arrays
        self._saved: Optional[Dict[str, NDArray]] = None
        self._has_logged = False

    def before_pass(self) -> None:
        """Save the statistics before the first backward pass, which updates them."""
        if self._saved is None:
            self._saved = self._copied()

    def _copied(self) -> Dict[str, NDArray]:
        with autograd.pause(), suspended():
            return {name: array.copy() for name, array in self._arrays().items()}

    def after_step(self, finite: bool) -> None:
        """Save the statistics after a finite step; after another, put back the last finite ones."""
        if finite or self._saved is None:
            self._saved = self._copied()
            return
        arrays = self._arrays()
        bad = {name for name, array in arrays.items() if not all_finite([array])}
        known = {name for name in bad if name in self._saved and all_finite([self._saved[name]])}
        for name in known:
            self._saved[name].copyto(arrays[name])
        for message, names in ((RESTORED, known), (LOST, bad - known)):
            if names and not self._has_logged:
                logger.warning(message, shortened(sorted(names)))
        self._has_logged |= bool(bad)
