"""Running a net for measurements: nothing that its owner holds is changed by it.

A block that can be traced is run as a copy, with parameters of its own. Others run themselves, and
their parameters' values are put back. Graphs run in cached ops made for the one call: those of the
block, which may hold on to arrays, are not touched.
"""

import contextlib
import threading
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context, current_context
from mxnet.gluon import Block, HybridBlock
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ....convert.blocks import rebuilt, trace
from ....errors import StateError
from ....framework.arrays import as_list, cast, dtypes_of, map_arrays
from ....graph.inspect import Tensor, tensors_of
from ....graph.ir import Graph, Output
from ....policy.active import suspended
from ..observing import Call, Observer, Run
from .randomness import Seeds, any_draws, draws, drops, mask_of, with_masks

__all__ = [
    "IsolatedRun",
    "arrays_in",
    "copied",
    "dense_values",
    "outputs_of",
    "tensors_in",
    "unchanged",
]

#: Where a hybrid block keeps its graph. Before MXNet 1.9.1 `_cached_op_args` comes with the first.
_GRAPH = ("_cached_graph", "_cached_op", "_cached_op_args", "_in_format", "_out_format")


class IsolatedRun(Observer):
    """Runs what is called in it, in the thread that opened it, as a measurement.

    `Dropout` takes its masks from a generator of its own, so that all runs drop the same elements,
    whatever their dtype. Other random operators find MXNet's generator seeded alike.
    """

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds
        self._thread = threading.get_ident()
        self._masks = 0

    def sees(self) -> bool:
        """Tell whether what is called now is a part of the run."""
        return threading.get_ident() == self._thread

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Make calls that are none."""
        thread, self._thread = self._thread, -1
        try:
            yield
        finally:
            self._thread = thread

    def on_call(self, call: Call, run: Run) -> Any:
        """Make an eager call; one of `Dropout` by multiplication with a mask."""
        if not self.sees():
            return run(call.inputs)
        attrs = dict(zip(call.keys, map(str, call.values)))
        if call.operator.name == "Dropout" and drops(attrs):
            self._masks += 1
            data = call.inputs[0]
            values = mask_of(f"call {self._masks}", attrs, data.shape)
            with suspended(), self.unseen():
                dtype = dtypes_of([data])[0]
                mask = cast(mx.nd.array(values, ctx=data.context), dtype)
                mask = mask.as_np_ndarray() if isinstance(data, mx.np.ndarray) else mask
                return data * mask
        if draws(call.operator.name, attrs):
            self._seeds.seed()
        return run(call.inputs)

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Run a graph in a cached op of its own; auxiliary states are copied."""
        if not self.sees():
            return run()
        graph = Graph.from_symbol(symbol)
        values = dict(zip(symbol.list_inputs(), inputs))
        for name in symbol.list_auxiliary_states():
            values[name] = values[name].copy()
        if any_draws(graph):
            self._seeds.seed()
        tensors = tensors_in(graph, type(symbol), values)
        context = inputs[0].context if inputs else current_context()
        return self.run_graph(graph, type(symbol), tensors, values, context)

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph, whose outputs are `tensors`, on values of its inputs."""
        masked, masks = with_masks(graph, tensors)
        made = {name: mx.nd.array(mask, ctx=context) for name, mask in masks.items()}
        return outputs_of(masked, symbol_class, {**values, **made})


def copied(net: Block, inputs: Sequence[Any]) -> Block:
    """Return a block that computes as `net` does, with parameters of its own.

    Where `net` can't be traced it is `net` itself. Parameters whose shape waits for a first input
    get one, as in any first call.
    """
    if any(param._data is None for param in net.collect_params().values()):
        try:
            net(*inputs)
        except (DeferredInitializationError, RuntimeError) as error:
            raise StateError(f"block {net.name!r} does not run: {error}") from None
    if not isinstance(net, HybridBlock):
        return net
    try:
        traced = trace(net, inputs)
    except Exception:  # what a block's own Python code raises where it can't be traced
        return net
    arrays = arrays_in(inputs)
    context = arrays[0].context if arrays else current_context()
    return rebuilt(net, traced, traced.symbol, traced.values(), [context], {}, None, {})


@contextlib.contextmanager
def unchanged(*blocks: Any) -> Iterator[None]:
    """Put back what runs of blocks change: parameters, their gradients, and cached graphs."""
    found = [block for block in blocks if isinstance(block, Block)]
    hybrid = [child for block in found for child in descendants(block) if _is_hybrid(child)]
    graphs = [(block, {name: getattr(block, name, []) for name in _GRAPH}) for block in hybrid]
    data = [
        array
        for block in found
        for param in block.collect_params().values()
        if param._data is not None
        for array in param.list_data()
    ]
    gradients = [array.grad for array in data if array.grad is not None]
    values = [(array, array.copy()) for array in (*data, *gradients)]
    fresh = [(array, array._fresh_grad) for array in data if array.grad is not None]
    try:
        yield
    finally:
        for block, kept in graphs:
            for name, value in kept.items():
                setattr(block, name, value)
        with autograd.pause(), suspended():
            for array, value in values:
                value.copyto(array)
            for array, was_fresh in fresh:
                array._fresh_grad = was_fresh


def descendants(block: Block) -> List[Block]:
    """Return a block and all blocks in it, once each."""
    found: Dict[int, Block] = {}

    def visit(one: Block) -> None:
        found[id(one)] = one

    block.apply(visit)
    return list(found.values())


def _is_hybrid(block: Block) -> bool:
    return isinstance(block, HybridBlock)


def arrays_in(value: Any) -> List[NDArray]:
    """Return all arrays in lists, tuples and dicts."""
    arrays: List[NDArray] = []
    map_arrays(value, arrays.append, lambda other: other)
    return arrays


def outputs_of(graph: Graph, symbol_class: Any, values: Mapping[str, NDArray]) -> List[NDArray]:
    """Run a graph on values of its inputs, recorded by autograd."""
    symbol = graph.to_symbol(symbol_class)
    outputs = CachedOp(symbol)(*(values[name] for name in symbol.list_inputs()))
    return list(as_list(outputs))


def tensors_in(
    graph: Graph, symbol_class: Any, values: Mapping[str, NDArray]
) -> Dict[Output, Tensor]:
    """Return dtype and shape of every output of every node of a graph that runs on these values.

    Where a shape depends on values, the graph is run in inference mode to find it.
    """
    shapes = {name: array.shape for name, array in values.items()}
    tensors = tensors_of(graph, dict(zip(values, dtypes_of(list(values.values())))), shapes)
    unknown = [entry for entry, tensor in tensors.items() if tensor.shape is None]
    if unknown:
        with suspended(), autograd.pause(train_mode=False):
            arrays = outputs_of(replace(graph, heads=unknown), symbol_class, values)
        found = zip(unknown, dtypes_of(arrays), arrays)
        tensors.update({entry: Tensor(dtype, array.shape) for entry, dtype, array in found})
    return tensors


def dense_values(array: NDArray) -> Any:
    """Return an array's values in float32, as an array of NumPy's."""
    with suspended():
        dense = array if array.stype == "default" else array.tostype("default")
        return cast(dense, "float32").asnumpy()
