"""Running eager calls and graphs one operator at a time, each judged when it has run."""

import functools
import threading
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.executor import Executor
from mxnet.gluon import Parameter
from mxnet.gluon.block import Block
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol
from mxnet.symbol.numpy import _Symbol

from ....framework.arrays import invoke
from ....framework.nested import as_list
from ....framework.operators import Operator, handle_of, resolve
from ....framework.patching import Patch, original
from ....graph.casts.insert import PRECISION
from ....graph.inspect import interpret, run_node
from ....graph.ir import CASTS, Graph, Node
from ....policy.active import suspended
from ..observing import Call, Observer, Run
from .findings import Finding
from .gradient_watch import GradientWatch, is_own_copy
from .inspection import Inspection, Site

__all__ = [
    "NodeByNode",
    "OpHook",
    "input_names",
    "prefixes_of",
    "site_of",
]


def prefixes_of(block: Optional[Block]) -> Mapping[str, str]:
    """Return the names of a block and those in it by the prefix of their nodes, longest first."""
    found: Dict[str, str] = {}

    def visit(one: Block) -> None:
        found.setdefault(one.prefix, one.name)
        for child in one._children.values():
            visit(child)

    if block is not None:
        visit(block)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def site_of(graph: Graph, node: Node, prefixes: Mapping[str, str]) -> Site:
    """Return where a node is; a cast that rounds a result is named after what has computed it."""
    block = next((name for prefix, name in prefixes.items() if node.name.startswith(prefix)), "")
    operator, sources = resolve(node.op), [graph.nodes[i] for i, _ in node.inputs]
    names = [
        source.name if source.is_variable else name
        for source, name in zip(sources, input_names(operator, len(sources)))
    ]
    if node.op not in CASTS:
        return Site(block, node.name, operator, node.attrs, names)
    source, dtype = sources[0], node.attrs.get("dtype", "")
    what = source.name if source.is_variable else f"output of {source.name!r}"
    name = source.name if PRECISION in source.attrs else node.name
    return Site(block, name, operator, node.attrs, names, f"{what} cast to {dtype}")


def input_names(operator: Operator, count: int) -> Sequence[str]:
    """Return what an operator calls its inputs, of which there are so many."""
    names = operator.inputs
    if len(names) < count:
        return [f"input {i}" for i in range(count)]
    return names[:count]


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


# As MXNet made them: a second run is nothing that loss scaling should know of.
_mark_variables = original(autograd, "mark_variables")
_backward = original(autograd, "backward")
_COPY = handle_of("identity")


class _Thread(threading.local):
    """What a thread is in the middle of."""

    def __init__(self) -> None:
        self.blocks: List[Block] = []
        self.calls: List[Tuple[Call, Site]] = []
        #: What the probes' copies that a call reads stand for, by their handles.
        self.originals: List[Dict[int, NDArray]] = []


class NodeByNode(Observer):
    """Has each operator judged when it has run, and each backward pass."""

    def __init__(self, inspection: Inspection, watch: Optional[GradientWatch]) -> None:
        super().__init__()
        self.inspection, self.watch = inspection, watch
        self._thread = _Thread()
        self._reported = 0
        self._parameters: Dict[int, Tuple[NDArray, str]] = {}
        self._replays: Dict[int, Tuple[Executor, Sequence[NDArray]]] = {}

    def patches(self) -> Sequence[Patch]:
        """Return the patches, those that tell which block and parameter is at hand among them."""
        return [
            *super().patches(),
            Patch(Block, "__call__", self._build_block_call, on_top=True),
            Patch(Parameter, "data", self._build_data, on_top=True),
        ]

    def close(self) -> None:
        """Take the patches off, and let go of the arrays."""
        super().close()
        self._parameters.clear()
        self._replays.clear()

    def looks_at(self, site: Site) -> bool:
        """Tell whether an operator is to be checked."""
        raise NotImplementedError

    def skips(self, site: Site) -> bool:
        """Tell whether what an operator makes is meant to be as it is."""
        raise NotImplementedError

    def report(self, finding: Finding) -> None:
        """Take a finding."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Judge the backward pass that was just run."""
        if self.watch is not None:
            finding = self.watch.judge(self.inspection.step)
            if finding is not None:
                self.report(finding)

    # ------------------------------------------------------------------ eager calls

    def on_call(self, call: Call, run: Run) -> Any:
        """See an eager call: its casts are judged while it runs, its outputs after that."""
        if is_own_copy(call.operator.name):
            return run(call.inputs)
        site = self._site(call)
        self._thread.calls.append((call, site))
        try:
            return self._judged(site, call.inputs, run, watched=call.out is None)
        finally:
            self._thread.calls.pop()

    def on_cast(self, call: Call, run: Run) -> Any:
        """See a cast around an eager call: what it breaks is named after that call."""
        if not self._thread.calls:
            return run(call.inputs)
        around, site = self._thread.calls[-1]
        dtype = dict(zip(call.keys, call.values)).get("dtype", "")
        handles = [array.handle.value for array in around.inputs]
        source = self._original(call.inputs[0])
        handle = source.handle.value
        if handle not in handles and self.inspection.is_unknown(source):
            return run(call.inputs)  # the operator's own result: judged with the call
        what = site.names[handles.index(handle)] if handle in handles else "its value"
        told = f"{what} cast to {dtype}" if dtype else f"copy of {what}"
        named = site._replace(operator=call.operator, names=[what], output=told)
        return self._judged(named, call.inputs, run, meant=[source])

    def _original(self, array: NDArray) -> NDArray:
        """Return the array that a probe's copy stands for, or the array itself."""
        for originals in reversed(self._thread.originals):
            array = originals.get(array.handle.value, array)
        return array

    def _site(self, call: Call) -> Site:
        block = self._thread.blocks[-1].name if self._thread.blocks else ""
        names = [
            self._parameters.get(id(array), (None, name))[1]
            for array, name in zip(call.inputs, input_names(call.operator, len(call.inputs)))
        ]
        attributes = dict(zip(call.keys, call.values))
        return Site(block, block or call.operator.name, call.operator, attributes, names)

    def _judged(
        self,
        site: Site,
        inputs: Sequence[NDArray],
        run: Run,
        watched: bool = True,
        meant: Optional[Sequence[NDArray]] = None,
    ) -> Any:
        """Run an operator, with probes where autograd records it, and judge what comes out.

        `meant` are the program's own arrays, where the inputs are copies of them.
        """
        if not self.looks_at(site):
            return run(inputs)
        skipped, before = self.skips(site), self._reported
        if watched and self.watch is not None and autograd.is_recording():
            outputs = self.watch.around(site, inputs, self._remembering(inputs, run), skipped)
        else:
            outputs = run(inputs)
        listed = as_list(outputs)
        if skipped:
            self.inspection.accept(listed)
            return outputs
        finding = self.inspection.judge(site, inputs if meant is None else meant, listed)
        # What a cast inside has broken was reported there.
        if finding is not None and self._reported == before:
            self._reported += 1
            self.report(finding)
        return outputs

    def _remembering(self, inputs: Sequence[NDArray], run: Run) -> Run:
        """Return `run`; while it runs, it is known what the copies that it is given stand for."""

        def remembering(given: Sequence[NDArray]) -> Any:
            pairs = zip(given, inputs)
            self._thread.originals.append({g.handle.value: o for g, o in pairs if g is not o})
            try:
                return run(given)
            finally:
                self._thread.originals.pop()

        return remembering

    def _build_block_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(block: Block, *args: Any, **options: Any) -> Any:  # noqa: N807
            self._thread.blocks.append(block)
            try:
                return original(block, *args, **options)
            finally:
                self._thread.blocks.pop()

        return __call__

    def _build_data(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def data(parameter: Parameter, *args: Any, **options: Any) -> NDArray:
            array = original(parameter, *args, **options)
            self._parameters[id(array)] = array, parameter.name
            return array

        return data

    # ------------------------------------------------------------------ graphs

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Run a hybridized block's graph node by node."""
        self.tell_others(symbol, inputs)
        held = dict(zip(symbol.list_inputs(), inputs))
        block = self._thread.blocks[-1] if self._thread.blocks else None
        graph, hook = Graph.from_symbol(symbol), OpHook.of(self.current.op, symbol)
        outputs = self._interpreted(graph, held, isinstance(symbol, _Symbol), block, hook)
        return outputs[0] if len(outputs) == 1 else outputs

    def on_forward(self, executor: Executor, training: bool, run: Callable[[], Any]) -> Any:
        """Run a bound symbol, and once more node by node."""
        results = run()
        symbol = executor.get_optimized_symbol()
        held = self._variables(executor, symbol, training)
        with autograd.record() if training else autograd.pause():
            graph = _without_draws(Graph.from_symbol(symbol))
            outputs = self._interpreted(graph, held, False, None)
        self._replays[id(executor)] = executor, outputs
        return results

    def on_backward(self, executor: Executor, heads: Any, run: Callable[[], Any]) -> Any:
        """Run a bound symbol's backward pass, after that of its second run."""
        _, outputs = self._replays.pop(id(executor), (None, None))
        if outputs is not None and self.watch is not None:
            if isinstance(heads, dict):
                heads = [heads[name] for name in executor._symbol.list_outputs()]
            given = [heads] if isinstance(heads, NDArray) else heads
            _backward(outputs, given or None)
            self.after_backward()
        return run()

    @staticmethod
    def _variables(executor: Executor, symbol: Symbol, training: bool) -> Dict[str, NDArray]:
        """Return what a bound symbol reads: variables of their own, and copies of its states."""
        gradients = executor.grad_dict
        held = {name: array.detach() for name, array in executor.arg_dict.items()}
        held.update({name: _copied(array) for name, array in executor.aux_dict.items()})
        wanted = [name for name, gradient in gradients.items() if gradient is not None]
        if training and wanted:
            buffers = [_copied(gradients[name]) for name in wanted]
            _mark_variables([held[name] for name in wanted], buffers)
        return {name: held[name] for name in symbol.list_inputs()}

    def _interpreted(
        self,
        graph: Graph,
        inputs: Mapping[str, NDArray],
        is_np: bool,
        block: Optional[Block],
        hook: Optional[OpHook] = None,
    ) -> List[NDArray]:
        context = next(iter(inputs.values())).context
        prefixes = prefixes_of(block)

        def run(node: Node, arrays: Sequence[NDArray]) -> Sequence[NDArray]:
            site = site_of(graph, node, prefixes)
            outputs = self._judged(
                site, arrays, lambda given: run_node(node, given, context, is_np)
            )
            listed = as_list(outputs)
            if hook is not None:
                hook(node, input_names(site.operator, len(arrays)), arrays, listed)
            return listed

        with suspended():
            return interpret(graph, inputs, run)


def _copied(array: NDArray) -> NDArray:
    """Return a copy that is made past all observers."""
    return invoke(_COPY, [array], [], [], None, False, False)


def _without_draws(graph: Graph) -> Graph:
    """Return a graph that drops nothing: a second run would draw the program's random numbers."""
    nodes = []
    for node in graph.nodes:
        if node.op == "Dropout":
            node = replace(node, op="_copy", attrs={}, inputs=node.inputs[:1])  # noqa: PLW2901
        elif node.op == "RNN":
            node = replace(node, attrs={**node.attrs, "p": "0"})  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=nodes)
