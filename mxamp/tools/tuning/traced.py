"""The graph of a run in float32, and all that it read: what layers are looked for in."""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from mxnet.context import Context
from mxnet.ndarray.ndarray import NDArray

from ...framework.arrays import dtypes_of
from ...graph.inspect import Tensor
from ...graph.ir import Graph, Output, Usage
from ..debugging.isolated import IsolatedRun, Seeds

__all__ = ["Traced", "TracedRun"]


class Traced(NamedTuple):
    """The graph of a run in float32, and all that it read."""

    graph: Graph
    symbol_class: Any
    tensors: Mapping[Output, Tensor]
    values: Dict[str, NDArray]
    context: Context

    def usage(self, training: bool) -> Usage:
        """Return how the graph is used."""
        dtypes = dict(zip(self.values, dtypes_of(list(self.values.values()))))
        shapes = {name: array.shape for name, array in self.values.items()}
        accumulated = frozenset(self.values)
        return Usage(dtypes, shapes, accumulated=accumulated, training=training)


class TracedRun(IsolatedRun):
    """Notes the graph of the block that is run."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__(seeds)
        self.traced: Optional[Traced] = None

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph, and note it."""
        self.traced = Traced(graph, symbol_class, tensors, dict(values), context)
        return super().run_graph(graph, symbol_class, tensors, values, context)
