"""Observers of operator calls: eager ones, and those in graphs of blocks and executors.

An `Observer` sees calls and graphs as a whole. A `TensorObserver` sees each operator in them, with
the values of its inputs and outputs: MXNet's monitor names the outputs inside of graphs.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections import Counter
from ctypes import CFUNCTYPE, c_char_p, c_void_p
from functools import cached_property
from typing import Any, Callable, ContextManager, Iterator, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.executor import Executor
from mxnet.gluon.block import Block, HybridBlock
from mxnet.ndarray import CachedOp, NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.symbol import Symbol

from ...framework.arrays import as_list, dtypes_of
from ...framework.machine import BFLOAT16, Values
from ...framework.operators import by_handle, handle_of, resolve, with_trait
from ...framework.patching import Original, Patch, PatchSet, original, wrapping
from ...graph.gradients import SCALE_INPUT
from ...graph.inspect import FLOATS
from ...graph.ir import CASTS, HALVES, Graph, Node, Output, emulated_dtype
from ...patches import cached_op
from ...patches.cached_op import install_policy_op
from ...patches.eager import INVOKE_MODULES
from ...policy.active import current_policy, is_suspended
from .measured import blocks_in

Arrays = Sequence[NDArray]

_TENSORDOT = handle_of("_npi_tensordot")
# Below all patches: mxamp's asnumpy() casts bfloat16 to float32.
_asnumpy: Callable[[NDArray], Values] = original(NDArray, "asnumpy")
#: An output as the monitor names it: node, whether in the backward pass, and the output's number.
#: Operators name hidden outputs in other ways, whose values may be anything.
_OUTPUT = re.compile(r"(.+?)(_backward)?_(?:output)?(\d*)")
#: Operators that read the shape of their input alone.
_SHAPES = frozenset({"ones_like", "shape_array", "size_array", "zeros_like"})
#: A monitor that does nothing, since MXNet can't remove one.
_IGNORE = CFUNCTYPE(None, c_char_p, c_char_p, c_void_p, c_void_p)(lambda *_: None)


def patch_over(owner: object, name: str, function: Callable[..., Any]) -> Patch:
    """Return a patch outside all others, which calls `function(original, *args)`."""
    return Patch(owner, name, wrapping(function), on_top=True)


class Observer(PatchSet, contextlib.ContextDecorator):
    """Context that observes eager calls and runs of graphs, in all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._symbols: weakref.WeakKeyDictionary[Executor, Symbol] = weakref.WeakKeyDictionary()

    def patches(self) -> Sequence[Patch]:
        """Return the patches through which this observer sees calls and graphs.

        They are on eager calls, hybridized blocks and executors.
        """
        return [
            *(patch_over(module, "_imperative_invoke", self.on_call) for module in INVOKE_MODULES),
            patch_over(_api_internal, "tensordot", self._tensordot),
            Patch(cached_op, "graph_listeners", lambda others: (*others, self.on_block)),
            patch_over(HybridBlock, "_call_cached_op", self._call_block),
            patch_over(Executor, "forward", self._forward),
        ]

    def __enter__(self) -> Any:
        """Begin to observe: install the patches of this observer."""
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop observing: remove the patches of this observer."""
        self.close()

    def on_call(self, original: Original, handle: int, inputs: Arrays, *rest: object) -> object:
        """Run an eager call and return its result; subclasses observe it here."""

    def on_graph(self, symbol: Symbol, inputs: Arrays, executor: Executor) -> ContextManager[None]:
        """Return a context that observes an executor's forward pass; subclasses implement it."""
        raise NotImplementedError

    def on_block(self, symbol: Symbol, inputs: Arrays, run: object) -> object:
        """Return a callable that runs a block's graph; subclasses observe the run here."""

    def _tensordot(self, original: Original, a: NDArray, b: NDArray, axes: object) -> object:
        """Observe a call of `mx.np.tensordot`, which bypasses the patched `_imperative_invoke`."""
        return self.on_call(
            lambda _, given, *rest: original(*given, axes), _TENSORDOT, [a, b], (), (), None
        )

    def _call_block(self, original: Original, block: HybridBlock, *args: object) -> object:
        """Call a hybridized block so that `on_block` gets its graph."""
        if current_policy() is None:
            install_policy_op(block, args)
        return original(block, *args)

    def _forward(self, original: Original, executor: Executor, *args: object, **inputs: Any) -> Any:
        """Call `Executor.forward` inside the context that `on_graph` returns."""
        if executor not in self._symbols:
            # The graph as it runs: with casts, and with operators that oneDNN has fused.
            self._symbols[executor] = executor.get_optimized_symbol()
        symbol, held = self._symbols[executor], {**executor.arg_dict, **executor.aux_dict}
        with self.on_graph(symbol, [held[name] for name in symbol.list_inputs()], executor):
            return original(executor, *args, **inputs)


# ---------------------------------------------------------------------- operators and tensors


class Place(NamedTuple):
    """Location of an operator call in reports: block, node, operator, attributes, input names."""

    block: str
    node: str
    operator: str
    attributes: Mapping[str, Any]
    names: Sequence[str]  #: names of its inputs: of the parameter, or as the operator has them
    layers: tuple[str, ...] = ()  #: in a graph, what to keep in float32 if the operator overflows


class Observed:
    """An array in an observed run, whose values are copied to NumPy on first use."""

    def __init__(self, array: NDArray) -> None:
        self.array, self.dtype = array, dtypes_of([array])[0]
        self.is_checkable = self.dtype in FLOATS and array.size > 0 and array.stype == "default"
        # Not in a cached property: until Python 3.12 one thread at a time computes it, and the
        # array may wait for that of a custom operator.
        array.wait_to_read()

    @cached_property
    def values(self) -> Values:
        """The values of the array as a NumPy array, bfloat16 as float32."""
        values = _asnumpy(self.array)
        if values.dtype != BFLOAT16:
            return values
        return np.left_shift(values.view(np.uint16), 16, dtype=np.uint32).view(np.float32)

    @cached_property
    def bad(self) -> frozenset[str]:
        """The kinds of non-finite values in the array: "nan", "inf" and "-inf"."""
        if not self.is_checkable or np.isfinite(self.values).all():
            return frozenset()
        return frozenset(map(str, np.unique(self.values[~np.isfinite(self.values)])))

    @cached_property
    def largest(self) -> float:
        """The largest finite magnitude in the array, 0 if there is none."""
        values = self.values[np.isfinite(self.values)] if self.is_checkable else ()
        return float(np.max(np.abs(values), initial=0))


#: The inputs of an operator; None for an input that is not known.
Inputs = Sequence[Optional[Observed]]


class TensorObserver(Observer):
    """Context that observes each operator, with the values of its inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self._active = threading.local()
        self._graphs: dict[int, MonitoredGraph] = {}

    def patches(self) -> Sequence[Patch]:
        """Return the patches of `Observer`, and one that follows which block is running."""
        return [*super().patches(), patch_over(Block, "__call__", self._run_block)]

    def close(self) -> None:
        """Remove the patches, and the monitors of graphs and executors."""
        super().close()
        for graph in self._graphs.values():
            graph.release()
        for executor in self._symbols:
            executor.set_monitor_callback(lambda *_: None)  # MXNet can't remove a monitor
        self._graphs.clear()

    def on_operator(self, site: Place, inputs: Inputs, output: Observed, number: int) -> None:
        """Observe one output of an operator, in an eager call or a graph; a no-op to override."""

    def on_begin(self, reader: MonitoredGraph | Place, inputs: Arrays) -> None:
        """Observe the start of a graph's forward pass or an eager call; a no-op to override."""

    def on_end(self) -> None:
        """Observe the end of a graph's forward pass or an eager call; a no-op to override."""

    def on_gradient(self, graph: MonitoredGraph, site: Place, name: str, made: Observed) -> None:
        """Observe the gradient of an operator's input `name` in a graph; a no-op to override."""

    def _blocks(self) -> list[Block]:
        """Return the Gluon blocks that this thread runs now, the innermost last."""
        blocks: list[Block] = vars(self._active).setdefault("blocks", [])
        return blocks

    def _run_block(self, original: Original, block: Block, /, *args: object, **options: Any) -> Any:
        """Call a Gluon block, which is the current block until it returns."""
        self._blocks().append(block)
        try:
            return original(block, *args, **options)
        finally:
            self._blocks().pop()

    def _site_of_call(self, handle: int, inputs: Arrays, rest: Sequence[Any]) -> Place:
        """Return an eager call's location for reports: its block, operator and input names."""
        operator, block, params = by_handle()[handle].name, "", {}
        if self._blocks():
            block = self._blocks()[-1].name
            held = self._blocks()[-1]._reg_params.values()
            params = {id(array): one.name for one in held for array in one._data or ()}
        named = zip(inputs, _input_names(operator, len(inputs)))
        names = [params.get(id(array), name) for array, name in named]
        return Place(block, block or operator, operator, dict(zip(*rest[:2])), names)

    def on_call(self, original: Original, handle: int, inputs: Arrays, *rest: object) -> object:
        """Run an eager call, and pass its outputs to `on_operator`."""
        if is_suspended():
            return original(handle, inputs, *rest)
        read = list(map(Observed, inputs))
        if rest[2] is not None:
            # Read them before the call, which may write over them.
            for tensor in read:
                tensor.bad  # noqa: B018
        site = self._site_of_call(handle, inputs, rest)
        self.on_begin(site, inputs)
        outputs = original(handle, inputs, *rest)
        for number, array in enumerate(as_list(outputs)):
            self.on_operator(site, read, Observed(array), number)
        self.on_end()
        return outputs

    def on_block(self, symbol: Symbol, inputs: Arrays, run: object) -> object:
        """Return a `MonitoredGraph` to run in place of a block's graph."""
        return self._graph_of(symbol)

    def on_graph(self, symbol: Symbol, inputs: Arrays, executor: Executor) -> ContextManager[None]:
        """Return a context that observes an executor's forward pass by a monitor on its graph."""
        graph = self._graph_of(symbol)
        executor.set_monitor_callback(graph.on_output)
        names = zip(symbol.list_arguments(), executor.grad_arrays or ())
        graph.trained = {name for name, gradient in names if gradient is not None}
        return graph.observed(inputs)

    def _graph_of(self, symbol: Symbol) -> MonitoredGraph:
        """Return the graph that runs a symbol under a monitor (`MonitoredGraph`), cached."""
        if id(symbol) not in self._graphs:
            blocks = [inner for block in self._blocks()[-1:] for inner in blocks_in(block)]
            self._graphs[id(symbol)] = MonitoredGraph(self, symbol, blocks)
        return self._graphs[id(symbol)]


class MonitoredGraph:
    """A graph that runs under MXNet's monitor and passes operator outputs to an observer."""

    def __init__(self, observer: TensorObserver, symbol: Symbol, blocks: list[Block]) -> None:
        self._observer, self._symbol = observer, symbol  # its id is a key
        self._graph = Graph.from_symbol(symbol)
        # Static graphs don't call the monitor, nor do inlined ones.
        self._op = CachedOp(symbol, [("inline_limit", "0")])
        self._op._register_op_hook(self.on_output)
        self._blocks = sorted(blocks, key=lambda one: -len(one.prefix))
        nodes = self._graph.nodes
        self._inputs = [(i, 0) for i, node in enumerate(nodes) if node.is_variable]
        self.names = [nodes[i].name for i, _ in self._inputs]
        self.trained: set[str] = set()  #: variables that an executor computes the gradients of
        #: The nodes of each name: Gluon gives those of a block that is called twice one name.
        self._places: dict[str, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for i, node in enumerate(nodes):
            if not node.is_variable:
                self._places.setdefault(node.name, []).append(i)
            for source, _ in node.inputs:
                self._readers.setdefault(source, []).append(i)
        # MXNet does not compute what nobody reads: its memory may hold anything.
        self._unread = {i for i, r in self._readers.items() if {nodes[k].op for k in r} <= _SHAPES}
        self._unread.difference_update(i for i, _ in self._graph.heads)

    def release(self) -> None:
        """Replace the monitor, which MXNet can't remove, with a no-op."""
        check_call(_LIB.MXCachedOpRegisterOpHook(self._op.handle, _IGNORE, 0))

    def __call__(self, *inputs: NDArray, **options: object) -> object:
        """Run the graph, and pass the outputs of its operators to the observer."""
        with self.observed(inputs):
            return self._op(*inputs, **options)

    @contextlib.contextmanager
    def observed(self, inputs: Arrays) -> Iterator[None]:
        """Return a context in which a forward pass on `inputs` is reported to the observer."""
        #: The tensors of the running forward pass.
        self._seen: dict[Output, Observed] = dict(zip(self._inputs, map(Observed, inputs)))
        self._calls: Counter[str] = Counter()
        self._observer.on_begin(self, inputs)
        yield
        self._seen = {}
        self._observer.on_end()

    def on_output(self, name: Any, *operator_and_handle: object) -> None:
        """Pass an output or a gradient to the observer; MXNet's monitor calls this."""
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)
        found = _OUTPUT.fullmatch(name.decode() if isinstance(name, bytes) else name)
        if found is None:
            return
        node, number = found[1], int(found[3] or 0)
        places = self._places.get(node, [])
        if found[2] or not places:
            if places and self._is_unwritten(self._graph.nodes[places[0]], number):
                return
            site = self._site(places[0], True) if places else Place("", node, "add_n", {}, ())
            of = dict(enumerate(site.names)).get(number, f"input {number}")
            self._observer.on_gradient(self, site, of, Observed(array))
            return
        self._calls[node] += number == 0
        i = places[min(self._calls[node], len(places)) - 1]
        if i in self._unread:
            return
        output = self._seen[i, number] = Observed(array)
        inputs = [self._seen.get(entry) for entry in self._graph.nodes[i].inputs]
        output.bad  # noqa: B018 reads the values at once, as another operator may write over them
        self._observer.on_operator(self._site(i), inputs, output, number)

    def _is_unwritten(self, node: Node, number: int) -> bool:
        """Return whether MXNet computes no gradient for an input, such as a label."""
        if number and node.operator in with_trait("starts_backward"):
            return True
        nodes = self._graph.nodes
        source = nodes[node.inputs[number][0]] if number < len(node.inputs) else node
        while source.op in CASTS:
            source = nodes[source.inputs[0][0]]
        is_frozen = source.is_variable and self.trained and source.name not in self.trained
        return bool(is_frozen) or source.op == "BlockGrad" or source.name == SCALE_INPUT

    def _layers(self, i: int, backward: bool) -> list[str]:
        """Return the names of layers to keep in float32 if node i overflows in 16 bits."""
        node = self._graph.nodes[i]
        if node.op not in CASTS:
            return [node.name] * (not node.is_variable)
        sides = [k for k, _ in node.inputs], self._readers.get(i, [])
        near, far = sides if backward else sides[::-1]
        # An operator with that attribute is in 16 bits, and computes in float32 between casts.
        nodes = self._graph.nodes
        found = [k for k in far if emulated_dtype(nodes[k].attrs) in HALVES] or near
        return [name for k in found if node.is_inserted_cast for name in self._layers(k, backward)]

    def _site(self, i: int, backward: bool = False) -> Place:
        """Return node i's location for reports: its block, operator and input names."""
        node = self._graph.nodes[i]
        sources = [self._graph.nodes[k] for k, _ in node.inputs]
        known = zip(sources, _input_names(node.operator, len(sources)))
        names = [source.name if source.is_variable else name for source, name in known]
        inner = (block.name for block in self._blocks if node.name.startswith(block.prefix))
        layers = tuple(dict.fromkeys(self._layers(i, backward)))
        return Place(next(inner, ""), node.name, node.operator, node.attrs, names, layers=layers)


def _input_names(operator: str, count: int) -> Sequence[str]:
    """Return the names of an operator's inputs, or "input 0", "input 1" and so on."""
    names = resolve(operator).inputs
    return names[:count] if len(names) >= count else [f"input {i}" for i in range(count)]
