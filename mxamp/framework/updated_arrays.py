"""Arrays that a backward pass updates beside gradients: running statistics given to eager calls."""

import sys
from functools import lru_cache
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from mxnet.ndarray.ndarray import NDArray

from .custom import auxiliary_states
from .operators import handle_of, registry

__all__ = ["updated_arrays"]

# References to an array that nobody else holds: the entry's, and that of the call that counts.
_OURS = 2


class _UpdatedArrays:
    """The arrays that recorded eager calls update, between `watch` and `stop`.

    Those of hybridized blocks are parameters of Gluon's, which are found without this.
    """

    def __init__(self) -> None:
        #: The operators to take note of, by handle, with the positions of what they update.
        self.handles: Mapping[int, Tuple[int, ...]] = {}
        self._arrays: Dict[int, NDArray] = {}
        self._most = 1000

    def watch(self) -> None:
        """Have calls noted from now on."""
        self.handles = _updating()

    def note(self, handle: int, arrays: Sequence[NDArray], attributes: Mapping[str, Any]) -> None:
        """Take note of a recorded call of one of these operators."""
        positions = self.handles[handle]
        if not positions:
            count = len(arrays)
            positions = tuple(range(count - auxiliary_states(attributes), count))
        if len(self._arrays) > self._most:
            self._most = 2 * len(self.all()) + 1000
        self._arrays.update((id(arrays[i]), arrays[i]) for i in positions if i < len(arrays))

    def all(self) -> List[NDArray]:
        """Return the arrays that somebody still holds."""
        for key in list(self._arrays):
            if sys.getrefcount(self._arrays[key]) <= _OURS:
                del self._arrays[key]
        return list(self._arrays.values())

    def stop(self) -> None:
        """Watch no more, and forget the arrays."""
        self.handles = {}
        self._arrays.clear()


#: One a process, as the functions that are patched are.
updated_arrays = _UpdatedArrays()


@lru_cache(maxsize=1)
def _updating() -> Mapping[int, Tuple[int, ...]]:
    found = {op.handle: op.mutable_inputs for op in registry().values() if op.mutable_inputs}
    return {**found, handle_of("Custom"): ()}
