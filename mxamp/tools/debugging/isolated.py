"""Running a net as a measurement, without side effects on the net.

A block that can be traced runs as a copy with parameters of its own. Other blocks run themselves,
and their parameters are restored afterwards. A graph runs in a cached op made for the one call,
since the block's own may hold on to arrays. Random numbers are the same in each run: `Dropout`
multiplies with a mask that does not depend on the dtype, as MXNet's masks do.
"""

import contextlib
import random
import re
import threading
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Type,
)

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.context import Context, current_context
from mxnet.gluon import Block, HybridBlock
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert.blocks import build_block, trace
from ...convert.outputs import error_reason
from ...errors import AmpError, ArgumentError, StateError
from ...framework.arrays import as_list, cast, dtype_of, dtypes_of, map_arrays
from ...framework.patching import original
from ...framework.wording import counted, shown
from ...graph.edit import Edit
from ...graph.inspect import Tensor, tensors_of
from ...graph.ir import LOOPS, Graph, Node, Output
from ...policy.active import suspended
from ...scaling.loss_outputs import scaled_outputs
from .blocks import blocks_in
from .old_observing import Call, Observer, Run

__all__ = [
    "BoundGraph",
    "IsolatedNet",
    "IsolatedRun",
    "Recorded",
    "Seeds",
    "arrays_in",
    "copied",
    "dense_values",
    "explained_errors",
    "gradients_of",
    "loss_of",
    "restored",
    "trained_arrays",
]

_SEED = 20180201
#: The canonical names of operators that draw from MXNet's generator.
_RANDOM = re.compile(
    r"_random_(?!pdf)|_sample_|_shuffle|_npi_(uniform|normal|gamma|bernoulli|choice|exponential"
    r"|gumbel|laplace|logistic|multinomial|pareto|powerd|rayleigh|shuffle|weibull)"
)
#: The attributes of a hybrid block that say whether it runs hybridized, and hold its graph. MXNet
#: before 1.9.1 sets `_cached_op_args` only with the first graph.
_HYBRID = ("_active", "_cached_graph", "_cached_op", "_cached_op_args", "_in_format", "_out_format")

#: `autograd.backward` without the front ends' patches, which scale losses.
_backward = original(autograd, "backward")

NOT_ON_BATCH = "block {name!r} does not run on this batch of {arrays}: {why}{hint}"
UNLABELED = (
    ". Without {label_by}, a batch holds the net's arguments only; if its last element is the "
    "label, pass {label_by} too"
)
NO_LOSS_VALUE = (
    "the loss must return an NDArray that is computed from the net's output, not {given}"
)
#: MXNet's errors for a loss that was not recorded.
_NOT_RECORDED = "not in a computational graph", "no inputs in computation graph"


# ---------------------------------------------------------------------- random numbers


class Seeds:
    """The random number generators of a measurement: seeded alike for each run, then restored.

    MXNet's generator is left alone until something draws from it, since its state can't be read.
    If something has, it continues from a number that was drawn before the first seed.
    """

    def __init__(self) -> None:
        self._resume_from: Optional[int] = None
        self._seeded = False

    def seed_mxnet(self) -> None:
        """Seed MXNet's generator, unless it was seeded in this run."""
        if self._seeded:
            return
        self._seeded = True
        with suspended(), autograd.pause():
            if self._resume_from is None:
                self._resume_from = int(mx.nd.random.randint(0, 2**31 - 1).asscalar())
            mx.random.seed(_SEED)

    def begin_run(self) -> None:
        """Seed Python's and NumPy's generators, and have `seed_mxnet` seed MXNet's again."""
        self._seeded = False
        random.seed(_SEED)
        np.random.seed(_SEED)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context after which all generators are restored."""
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if self._resume_from is not None:
                mx.random.seed(self._resume_from)


def _drops_elements(attrs: Mapping[str, str]) -> bool:
    """Return whether a `Dropout` with these attributes drops elements in the current mode."""
    active = autograd.is_training() or attrs.get("mode") == "always"
    return active and float(attrs.get("p", 0.5)) > 0


def _draws_numbers(operator: str, attrs: Mapping[str, str]) -> bool:
    """Return whether an operator with these attributes draws random numbers."""
    if operator == "LeakyReLU":
        return attrs.get("act_type") == "rrelu" and autograd.is_training()
    if operator in ("RNN", "Dropout"):
        default = 0.0 if operator == "RNN" else 0.5
        return autograd.is_training() and float(attrs.get("p", default)) > 0
    return _RANDOM.match(operator) is not None


def _graph_draws_numbers(graph: Graph, is_body: bool = False) -> bool:
    """Return whether a graph draws random numbers, other than for `Dropout` outside of subgraphs.

    `is_body`: the graph is the body of a loop or of a condition.
    """
    return any(
        (
            (not node.is_variable and _draws_numbers(node.operator, node.attrs))
            and (is_body or node.operator != "Dropout")
        )
        or any(_graph_draws_numbers(body, is_body=True) for body in node.subgraphs)
        for node in graph.nodes
    )


def _dropout_mask(seed_name: str, attrs: Mapping[str, str], shape: Sequence[int]) -> Any:
    """Return the mask of a `Dropout` as a NumPy array: 0 to drop an element, else 1 / (1 - p)."""
    keep = 1 - float(attrs.get("p", 0.5))
    axes = [int(axis) for axis in re.findall(r"\d+", attrs.get("axes", ""))]
    sizes = [1 if i in axes else size for i, size in enumerate(shape)]
    generator = np.random.RandomState(zlib.crc32(seed_name.encode()) ^ _SEED)
    kept = generator.random_sample(sizes) < keep
    return kept.astype("float32") / np.float32(keep or 1)


# ---------------------------------------------------------------------- graphs


@dataclass(frozen=True)
class BoundGraph:
    """A graph, the class of its symbol, and the values of its inputs by name."""

    graph: Graph
    symbol_class: Type[Symbol]
    values: Mapping[str, NDArray]

    @property
    def context(self) -> Context:
        """The device of the first input."""
        return next((array.context for array in self.values.values()), current_context())

    @cached_property
    def tensors(self) -> Mapping[Output, Tensor]:
        """The dtype and shape of every node's outputs.

        If a shape depends on values, the graph runs once in inference mode.
        """
        shapes = {name: array.shape for name, array in self.values.items()}
        dtypes = dict(zip(self.values, dtypes_of(list(self.values.values()))))
        tensors = tensors_of(self.graph, dtypes, shapes)
        unknown = [entry for entry, tensor in tensors.items() if tensor.shape is None]
        if unknown:
            with suspended(), autograd.pause(train_mode=False):
                arrays = self.with_heads(unknown).run()
            found = zip(unknown, dtypes_of(arrays), arrays)
            tensors.update({entry: Tensor(dtype, array.shape) for entry, dtype, array in found})
        return tensors

    def run(self) -> List[NDArray]:
        """Run the graph and return its outputs; autograd can record it."""
        symbol = self.graph.to_symbol(self.symbol_class)
        outputs = CachedOp(symbol)(*(self.values[name] for name in symbol.list_inputs()))
        return list(as_list(outputs))

    def with_heads(self, heads: Sequence[Output]) -> "BoundGraph":
        """Return the graph with other outputs."""
        return replace(self, graph=replace(self.graph, heads=list(heads)))

    def with_masks(self) -> "BoundGraph":
        """Return the graph with each active `Dropout` as a product with a mask, a new input."""
        edit, values = Edit(self.graph, {}), dict(self.values)
        for i, node in enumerate(self.graph.nodes):
            if node.is_variable or node.operator != "Dropout" or not _drops_elements(node.attrs):
                continue
            number = len(values) - len(self.values)
            name = f"_mxamp_mask{number}"  # by number: two nodes may have one name
            data = self.tensors[node.inputs[0]]
            values[name] = mx.nd.array(
                _dropout_mask(f"{node.name} {number}", node.attrs, data.shape or ()),
                ctx=self.context,
            )
            mask = edit.add_node(Node("null", name))
            if data.dtype != "float32":
                mask = edit.add("amp_cast", f"{name}_cast", [mask], dtype=data.dtype)
            reads = [*node.inputs, mask]
            edit.change(i, op="broadcast_mul", attrs={}, inputs=reads, num_outputs=1)
        return replace(self, graph=edit.applied(), values=values)


# ---------------------------------------------------------------------- forward passes


class IsolatedRun(Observer):
    """Observer that gives the calls of the thread that made it equal random numbers in each run."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds
        self._thread = threading.get_ident()
        self._masks = 0

    def open(self) -> None:
        """Install the patches, and seed the generators."""
        super().open()
        self._seeds.begin_run()

    def is_observing(self) -> bool:
        """Return whether a call made now is part of the run."""
        return threading.get_ident() == self._thread

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which this run observes no calls."""
        thread, self._thread = self._thread, -1
        try:
            yield
        finally:
            self._thread = thread

    def on_call(self, call: Call, run: Run) -> Any:
        """Make an eager call; a `Dropout` becomes a product with a mask."""
        if not self.is_observing():
            return run(call.inputs)
        attrs = dict(zip(call.keys, map(str, call.values)))
        if call.operator.name == "Dropout" and _drops_elements(attrs):
            self._masks += 1
            data = call.inputs[0]
            values = _dropout_mask(f"call {self._masks}", attrs, data.shape)
            with suspended(), self.paused():
                mask = cast(mx.nd.array(values, ctx=data.context), dtypes_of([data])[0])
                return data * (mask.as_np_ndarray() if isinstance(data, mx.np.ndarray) else mask)
        if _draws_numbers(call.operator.name, attrs):
            self._seeds.seed_mxnet()
        return run(call.inputs)

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Run a graph in a new cached op, on copies of its auxiliary states."""
        if not self.is_observing():
            return run()
        graph = Graph.from_symbol(symbol)
        values = dict(zip(symbol.list_inputs(), inputs))
        for name in symbol.list_auxiliary_states():
            values[name] = values[name].copy()
        if _graph_draws_numbers(graph):
            self._seeds.seed_mxnet()
        return self.run_graph(BoundGraph(graph, type(symbol), values))

    def run_graph(self, bound: BoundGraph) -> List[NDArray]:
        """Run a graph and return its outputs; a subclass runs a changed graph."""
        return bound.with_masks().run()


def copied(net: Block, inputs: Sequence[Any]) -> Block:
    """Return a copy of `net` with its own parameters, or `net` itself if it can't be traced.

    `inputs` are the arguments of the traced call. Parameters of deferred shape are initialized by
    a first call of `net`.
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
    except Exception:  # the user's own code runs in the trace
        return net
    arrays = arrays_in(inputs)
    context = arrays[0].context if arrays else current_context()
    return build_block(net, traced, traced.symbol, traced.param_values(), [context])


@contextlib.contextmanager
def explained_errors(
    net: Block, inputs: Sequence[Any], labeled: bool, label_by: str = "loss="
) -> Iterator[None]:
    """Context that raises `ArgumentError` for Python's errors where `net` does not take `inputs`.

    `label_by` names the arguments that make the last element of a batch its label.
    """
    try:
        yield
    except AmpError:
        raise
    except (TypeError, ValueError) as error:  # ValueError: while it infers a deferred shape
        count = len(arrays_in(inputs))
        arrays = counted(count, "array") + (" and a label" if labeled else "")
        hint = "" if labeled or count == 1 else UNLABELED.format(label_by=label_by)
        why = error_reason(error)
        message = NOT_ON_BATCH.format(name=net.name, arrays=arrays, why=why, hint=hint)
        raise ArgumentError(message) from error  # it may be of the user's own code


class IsolatedNet:
    """A net and its loss, which measurements leave unchanged."""

    def __init__(self, net: Block, loss: Optional[Callable[[Any, Any], Any]]) -> None:
        self.net, self.loss = net, loss
        self._copy: Optional[Block] = None

    @contextlib.contextmanager
    def block(self, inputs: Sequence[Any]) -> Iterator[Block]:
        """Context with a copy of the net, or with the net itself, which is restored afterwards."""
        with self.explained_errors(inputs):
            copy = self._copy = self._copy or copied(self.net, inputs)
        used = (copy if copy is self.net else None, self.loss)
        with restored([block for block in used if isinstance(block, Block)]):
            yield copy

    def explained_errors(self, inputs: Sequence[Any]) -> ContextManager[None]:
        """Return the context for a call of the net on `inputs`; see `explained_errors`."""
        return explained_errors(self.net, inputs, labeled=self.loss is not None)


@contextlib.contextmanager
def restored(nets: Sequence[Block]) -> Iterator[None]:
    """Context after which parameters, gradients, trainers and graphs of `nets` are restored."""
    hybrid = [b for net in nets for b in blocks_in(net) if isinstance(b, HybridBlock)]
    graphs = [(block, {name: getattr(block, name, []) for name in _HYBRID}) for block in hybrid]
    params = [param for net in nets for param in net.collect_params().values()]
    data = [array for p in params if p._data is not None for array in p.list_data()]
    trained = [array for array in data if array.grad is not None]
    values = [(array, array.copy()) for array in (*data, *(one.grad for one in trained))]
    fresh = [(array, array._fresh_grad) for array in trained]
    trainers = [(param, param._trainer) for param in params]
    try:
        yield
    finally:
        for param, trainer in trainers:
            param._trainer = trainer
        for block, kept in graphs:
            for name, value in kept.items():
                setattr(block, name, value)
        with autograd.pause(), suspended():
            for array, value in values:
                value.copyto(array)
            for array, was_fresh in fresh:
                array._fresh_grad = was_fresh


def arrays_in(value: Any) -> List[NDArray]:
    """Return all arrays in nested lists, tuples and dicts as a flat list."""
    arrays: List[NDArray] = []
    map_arrays(value, arrays.append, lambda other: other)
    return arrays


def dense_values(array: NDArray) -> Any:
    """Return an array's values as a float32 NumPy array."""
    with suspended():
        dense = array if array.stype == "default" else array.tostype("default")
        return cast(dense, "float32").asnumpy()


# ---------------------------------------------------------------------- backward passes


class Recorded:
    """The loss of a block, which `record` computes, for several backward passes.

    MXNet can't run the backward pass of a loop in a graph twice. For a block with loops, `record`
    runs before each backward pass.
    """

    def __init__(self, block: Block, record: Callable[[], Any]) -> None:
        self._record = record
        self._loss, self._fresh = record(), True
        self._once = any(map(_has_loops, blocks_in(block)))

    def gradients(self, arrays: Sequence[NDArray], scale: float) -> List[NDArray]:
        """Return the gradients of the loss times a scale for `arrays`; see `gradients_of`."""
        if self._once and not self._fresh:
            self._loss = self._record()
        self._fresh = False
        return gradients_of(self._loss, arrays, scale)


def _has_loops(block: Block) -> bool:
    """Return whether the graph of a hybridized block contains loops."""
    graph: Any = block._cached_graph if isinstance(block, HybridBlock) else ()
    return bool(graph) and not LOOPS.isdisjoint(Graph.from_symbol(graph[1]).operators)


def trained_arrays(block: Block) -> Dict[str, NDArray]:
    """Return the parameters that get gradients, by name: their values on the first device."""
    params = block.collect_params().values()
    return {param.name: param.list_data()[0] for param in params if param.grad_req != "null"}


def loss_of(loss: Callable[[Any, Any], Any], output: Any, label: Any) -> Any:
    """Return the loss of an output; raise `ArgumentError` if the function returns no array."""
    found = loss(output, label)
    if not arrays_in(found):
        raise ArgumentError(NO_LOSS_VALUE.format(given=shown(found)))
    return found


def _in_float32(loss: NDArray) -> NDArray:
    return loss if dtype_of(loss) in ("float32", "float64") else loss.astype("float32")


def gradients_of(loss: Any, arrays: Sequence[NDArray], scale: float) -> List[NDArray]:
    """Return the gradients of a recorded loss times a scale for `arrays`, which are their buffers.

    A second call writes to the same buffers.
    """
    if not arrays:
        return []
    with suspended(), autograd.record():
        heads = [_in_float32(one) * scale for one in arrays_in(loss)]
    with suspended(), autograd.pause(), scaled_outputs(scale):
        for gradient in [array.grad for array in arrays]:
            # backward skips arrays that the loss does not depend on, and adds to grad_req="add".
            if gradient.stype == "default":
                gradient[:] = 0
            else:
                mx.nd.sparse.zeros_like(gradient, out=gradient)
        try:
            _backward(heads, retain_graph=True)
        except MXNetError as error:
            if not any(words in str(error) for words in _NOT_RECORDED):
                raise
            raise ArgumentError(NO_LOSS_VALUE.format(given="one of other values")) from None
    # Read again: MXNet may have replaced a gradient's buffer.
    return [array.grad for array in arrays]
