"""Running a net for measurements: nothing that its owner holds is changed by it.

A block that can be traced is run as a copy, with parameters of its own. Others run themselves, and
their parameters' values are put back. Graphs run in cached ops made for the one call: those of the
block, which may hold on to arrays, are not touched.
"""

import contextlib
import random
import re
import threading
import zlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.context import Context, current_context
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..convert.blocks import rebuilt, trace
from ..framework.arrays import cast, dtypes_of
from ..framework.nested import map_arrays
from ..graph.census import Tensor, tensors_of
from ..graph.graph import Graph, GraphCopy, Node, Output
from ..policy.active import suspended
from ..scaling.loss_outputs import scaled_heads
from ..scaling.trainer import scaled_loss
from .observing import Call, Observer, Run

__all__ = [
    "IsolatedRun",
    "Seeds",
    "arrays_in",
    "copied",
    "dense_values",
    "gradients_of",
    "unchanged",
]

#: As it was before front ends patched it: those scale the losses of scripts.
_backward = autograd.backward

#: Where a hybrid block keeps its graph.
_GRAPH = ("_cached_graph", "_cached_op", "_cached_op_args", "_in_format", "_out_format")
#: Random numbers are the same in each run of a comparison.
_SEED = 20180201
#: Operators that draw from MXNet's generator, by their canonical names.
_RANDOM = re.compile(
    r"_random_(?!pdf)|_sample_|_shuffle|_npi_(uniform|normal|gamma|bernoulli|choice|exponential"
    r"|gumbel|laplace|logistic|multinomial|pareto|powerd|rayleigh|shuffle|weibull)"
)


class IsolatedRun(Observer):
    """Runs what is called in it, in the thread that opened it, as a measurement.

    `Dropout` takes its masks from a generator of its own, so that all runs drop the same elements,
    whatever their dtype. Other random operators find MXNet's generator seeded alike.
    """

    def __init__(self, seeds: "Seeds") -> None:
        super().__init__()
        self._seeds = seeds
        self._thread = threading.get_ident()
        self._masks = 0

    def on_call(self, call: Call, run: Run) -> Any:
        """Make an eager call; one of `Dropout` by multiplication with a mask."""
        if threading.get_ident() != self._thread:
            return run(call.inputs)
        attrs = dict(zip(call.keys, map(str, call.values)))
        if call.operator.name == "Dropout" and _drops(attrs):
            self._masks += 1
            data = call.inputs[0]
            values = _mask(f"call {self._masks}", attrs, data.shape)
            with suspended():
                dtype = dtypes_of([data])[0]
                mask = cast(mx.nd.array(values, ctx=data.context), dtype)
                mask = mask.as_np_ndarray() if isinstance(data, mx.np.ndarray) else mask
                return data * mask
        if _draws(call.operator.name, attrs):
            self._seeds.seed()
        return run(call.inputs)

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Run a graph in a cached op of its own; auxiliary states are copied."""
        if threading.get_ident() != self._thread:
            return run()
        graph = Graph.from_symbol(symbol)
        values = dict(zip(symbol.list_inputs(), inputs))
        for name in symbol.list_auxiliary_states():
            values[name] = values[name].copy()
        shapes = {name: array.shape for name, array in values.items()}
        tensors = tensors_of(graph, dict(zip(values, dtypes_of(list(values.values())))), shapes)
        if _any_draws(graph):
            self._seeds.seed()
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
        masked, masks = _with_masks(graph, tensors)
        made = {name: mx.nd.array(mask, ctx=context) for name, mask in masks.items()}
        return outputs_of(masked, symbol_class, {**values, **made})


class Seeds:
    """MXNet's generator: left alone until something draws from it, and seeded alike from then on.

    MXNet does not tell the state of its generator. Where something has drawn from it, it goes on
    from a number that was drawn before the first seed.
    """

    def __init__(self) -> None:
        self._resume_from: Optional[int] = None
        self._seeded = False

    def seed(self) -> None:
        """Seed it, if that was not done in this run; what has been drawn before does not count."""
        if self._seeded:
            return
        self._seeded = True
        with suspended(), autograd.pause():
            if self._resume_from is None:
                self._resume_from = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())
            mx.random.seed(_SEED)

    def begin_run(self) -> None:
        """Start all generators alike."""
        self._seeded = False
        random.seed(_SEED)
        np.random.seed(_SEED)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put all generators back."""
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if self._resume_from is not None:
                mx.random.seed(self._resume_from)


def copied(net: Block, inputs: Sequence[Any]) -> Block:
    """Return a block that computes as `net` does, with parameters of its own.

    Where `net` can't be traced it is `net` itself.
    """
    if not isinstance(net, HybridBlock):
        return net
    try:
        traced = trace(net, inputs)
    except Exception:  # what a block's own Python code raises where it can't be traced
        return net
    arrays = arrays_in(inputs)
    context = arrays[0].context if arrays else current_context()
    return rebuilt(net, traced, traced.symbol, traced.values(), [context], {})


@contextlib.contextmanager
def unchanged(*blocks: Any) -> Iterator[None]:
    """Put back what runs of blocks change: parameters, their gradients, and cached graphs."""
    found = [block for block in blocks if isinstance(block, Block)]
    hybrid = [child for block in found for child in descendants(block) if _is_hybrid(child)]
    graphs = [(block, {name: getattr(block, name) for name in _GRAPH}) for block in hybrid]
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
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


# ---------------------------------------------------------------------- random numbers


def _drops(attrs: Mapping[str, str]) -> bool:
    active = autograd.is_training() or attrs.get("mode") == "always"
    return active and float(attrs.get("p", 0.5)) > 0


def _draws(operator: str, attrs: Mapping[str, str]) -> bool:
    """Tell whether an operator draws random numbers."""
    if operator == "LeakyReLU":
        return attrs.get("act_type") == "rrelu" and autograd.is_training()
    if operator in ("RNN", "Dropout"):
        default = 0.0 if operator == "RNN" else 0.5
        return autograd.is_training() and float(attrs.get("p", default)) > 0
    return _RANDOM.match(operator) is not None


def _any_draws(graph: Graph, inside: bool = False) -> bool:
    for node in graph.nodes:
        drawn = not node.is_variable and _draws(node.operator, node.attrs)
        if drawn and (inside or node.operator != "Dropout"):
            return True
        if any(_any_draws(body, inside=True) for body in node.subgraphs):
            return True
    return False


def _mask(name: str, attrs: Mapping[str, str], shape: Sequence[int]) -> Any:
    """Return the mask of one `Dropout`: 0 where it drops, and else what makes up for that."""
    keep = 1 - float(attrs.get("p", 0.5))
    axes = [int(axis) for axis in re.findall(r"\d+", attrs.get("axes", ""))]
    sizes = [1 if i in axes else size for i, size in enumerate(shape)]
    generator = np.random.RandomState(zlib.crc32(name.encode()) ^ _SEED)
    kept = generator.random_sample(sizes) < keep
    return (kept / max(keep, np.finfo("float32").tiny)).astype("float32")


def _with_masks(graph: Graph, tensors: Mapping[Output, Tensor]) -> Tuple[Graph, Dict[str, Any]]:
    """Return a graph in which masks are inputs, and the masks by the names of these."""
    masks: Dict[str, Any] = {}
    made = GraphCopy(graph)
    for i, node in enumerate(graph.nodes):
        if node.is_variable or node.operator != "Dropout" or not _drops(node.attrs):
            made.add_copy(i)
            continue
        # By its number among them: two may have one name.
        name = f"_mxamp_mask{len(masks)}"
        data = tensors[node.inputs[0]]
        masks[name] = _mask(f"{node.name} {len(masks)}", node.attrs, data.shape)
        mask = made.add(Node("null", name))
        if data.dtype != "float32":
            mask = made.add(Node("amp_cast", f"{name}_cast", {"dtype": data.dtype}, [mask]))
        reads = [*made.inputs(node), mask]
        made.add_copy(i, op="broadcast_mul", attrs={}, inputs=reads, num_outputs=1)
    return made.finished(), masks


# ---------------------------------------------------------------------- gradients


def gradients_of(loss: Any, arrays: Sequence[NDArray], scale: float) -> List[NDArray]:
    """Return the gradients, times a scale, of a recorded loss; they are held by these arrays.

    It may be called again, and writes to the same gradients then.
    """
    gradients = [array.grad for array in arrays]
    with suspended(), autograd.record():
        heads = [scaled_loss(one, scale) for one in arrays_in(loss)]
    with suspended(), autograd.pause(), scaled_heads(scale):
        for gradient in gradients:
            # Those that the loss does not depend on are not written, others may be added to.
            if gradient.stype == "default":
                gradient[:] = 0
            else:
                mx.nd.zeros(gradient.shape, stype=gradient.stype, out=gradient)
        _backward(heads, retain_graph=True)
    return gradients


def dense_values(array: NDArray) -> Any:
    """Return an array's values in float32, as an array of NumPy's."""
    with suspended():
        dense = array if array.stype == "default" else array.tostype("default")
        return cast(dense, "float32").asnumpy()
