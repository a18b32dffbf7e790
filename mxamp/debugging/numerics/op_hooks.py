"""Hooks of the user's own (`register_op_hook`), called for graphs that are run node by node."""

from typing import Any, Optional, Sequence, Tuple

from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...graph.graph import Node

__all__ = ["OpHook"]


class OpHook:
    """Calls a hook for one run of a graph, with the names and handles that MXNet gives it."""

    def __init__(self, symbol: Symbol, hook: Tuple[Any, bool]) -> None:
        self._callback, self._monitor_all = hook
        inputs = set(symbol.list_inputs())
        names = symbol.get_internals().list_outputs()
        self._names = iter([name for name in names if name not in inputs])

    @classmethod
    def of(cls, op: Any, symbol: Symbol) -> "Optional[OpHook]":
        """Return the hook of a cached op; None where it has none."""
        return cls(symbol, op.hook) if op is not None and op.hook is not None else None

    def __call__(
        self,
        node: Node,
        names: Sequence[str],
        inputs: Sequence[NDArray],
        outputs: Sequence[NDArray],
    ) -> None:
        """Tell of a node that was run; nodes come in the order of the graph."""
        if self._monitor_all:
            for name, array in zip(names, inputs):
                self._tell(f"{node.name}_{name}", node.op, array)
        for array in outputs:
            self._tell(next(self._names), node.op, array)

    def _tell(self, name: str, op: str, array: NDArray) -> None:
        own = array.detach()
        handle, own.handle = own.handle.value, None  # whoever is called frees it
        self._callback(name.encode(), op.encode(), handle)
