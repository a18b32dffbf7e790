"""Finding the first operator whose values go wrong, forward and backward.

Eager calls are checked one by one. The graph of a hybridized block runs node by node while it is
checked, with its casts, so that the finding names the operator at fault. A bound symbol runs as
usual, and once more node by node.
"""

import contextlib
import fnmatch
import inspect
import logging
import threading
from dataclasses import replace
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from mxnet import autograd
from mxnet.executor import Executor
from mxnet.gluon import Parameter, Trainer
from mxnet.gluon.block import Block
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol
from mxnet.symbol.numpy import _Symbol

from ....convert.options import name_list
from ....errors import ArgumentError, StateError
from ....framework.arrays import as_list
from ....framework.contexts import OnlyWith
from ....framework.keywords import checked_call
from ....framework.operators import resolve
from ....framework.patching import Patch, original
from ....framework.tables import text_table
from ....framework.wording import one_of, shown
from ....graph.inspect import interpret, run_node
from ....graph.ir import Graph, Node
from ....policy.active import suspended
from ....policy.policy import Policy
from ....policy.targets import check_target
from ..blocks import BlockNames
from ..observing import Call, Observer, Run, patch_over
from .findings import Finding, NumericsError
from .gradient_watch import GradientWatch, unobserved_copy
from .inspection import Inspection, Site, input_names, site_of

__all__ = ["NumericsCheck", "check_numerics"]

logger = logging.getLogger("mxamp")

_ON = ("raise", "log", "collect")
_MOST_FINDINGS = 1000
HIGHER_ORDER = (
    "check_numerics watches gradients by functions that can't be differentiated again: use "
    "check_numerics(backward=False) around autograd.grad(create_graph=True)"
)
TAKES_NO_NET = "check_numerics takes no net: write `with check_numerics():` around the code"
WITHOUT_WITH = (
    "check_numerics returns a context, not the check: write `with check_numerics() as check:` "
    "around the code to check"
)

# Below all patches: loss scaling must not see the second run of a bound symbol.
_mark_variables = original(autograd, "mark_variables")
_backward = original(autograd, "backward")


class _EagerCall:
    """An eager call that is running: its site, and the arrays that it was called with."""

    def __init__(self, site: Site, inputs: Sequence[NDArray]) -> None:
        self.site, self.inputs = site, inputs
        self.kernel_inputs = inputs  #: the inputs, or copies of them with probes

    def input_index(self, array: NDArray) -> Optional[int]:
        """Return the position of an array among the kernel's inputs; None for any other array."""
        handles = [one.handle.value for one in self.kernel_inputs]
        return handles.index(array.handle.value) if array.handle.value in handles else None


class _ActiveCalls(threading.local):
    """The blocks and eager calls that each thread is executing, the innermost last."""

    def __init__(self) -> None:
        self.blocks: List[Block] = []
        self.calls: List[_EagerCall] = []


class NumericsCheck(Observer):
    """The findings of a check: `findings`, the first of each pass through the program.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    >>> len(check), check.first.operator
    (1, 'log')

    `str(check)` is a table. Falsy without findings.
    """

    def __init__(
        self,
        on: str,
        operators: Optional[Sequence[str]],
        skip: Sequence[str],
        steps: Optional[int],
        low_policy: Optional[Policy],
        backward: bool,
    ) -> None:
        super().__init__()
        self._findings: List[Finding] = []
        self._on, self._operators, self._skip, self._steps = on, operators, skip, steps
        self._inspection = Inspection(low_policy)
        self._gradient_watch = GradientWatch() if backward else None
        self._active = _ActiveCalls()
        self._reported = 0
        self._parameters: Dict[int, Tuple[NDArray, str]] = {}
        self._reruns: Dict[int, Tuple[Executor, Sequence[NDArray]]] = {}

    @property
    def findings(self) -> List[Finding]:
        """The findings, the first of each pass through the program."""
        return self._findings

    @property
    def first(self) -> Optional[Finding]:
        """The first finding; None without findings."""
        return self.findings[0] if self.findings else None

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return text_table(*self._rows()) if self.findings else "no findings"

    def __repr__(self) -> str:
        return f"<NumericsCheck: {self.first or 'no findings'}>"

    def _rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return the headings and the rows of the table of findings."""
        rows = [
            (f.step, f.phase, f.kind, f.block, f.node, f.operator, f.tensor, str(f.statistics))
            for f in self.findings
        ]
        return ("step", "phase", "kind", "block", "node", "operator", "tensor", "values"), rows

    # ------------------------------------------------------------------ patches

    def patches(self) -> Sequence[Patch]:
        """Return an observer's patches, and those of blocks, parameters, backward and updates."""
        return [
            *super().patches(),
            patch_over(Block, "__call__", self._call_any_block),
            patch_over(Parameter, "data", self._parameter_data),
            patch_over(NDArray, "backward", self._run_backward),
            patch_over(autograd, "backward", self._run_backward),
            patch_over(autograd, "grad", self._run_backward),
            patch_over(Trainer, "_update", self._update),
            patch_over(Module, "update", self._update),
        ]

    def close(self) -> None:
        """Remove the patches, and release the recorded arrays."""
        super().close()
        self._parameters.clear()
        self._reruns.clear()

    def _call_any_block(
        self, original: Callable[..., Any], block: Block, /, *args: Any, **options: Any
    ) -> Any:
        """Call a block; until it returns, it is the block that operators are attributed to."""
        self._active.blocks.append(block)
        try:
            return original(block, *args, **options)
        finally:
            self._active.blocks.pop()

    def _parameter_data(
        self, original: Callable[..., Any], parameter: Parameter, *args: Any, **options: Any
    ) -> NDArray:
        """Return a parameter's array, and record the parameter's name for findings."""
        array: NDArray = original(parameter, *args, **options)
        self._parameters[id(array)] = array, parameter.name
        return array

    def _run_backward(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a backward pass of autograd, then report its first fault."""
        if self._gradient_watch is not None and _creates_graph(original, args, options):
            raise StateError(HIGHER_ORDER)
        results = original(*args, **options)
        self._check_gradients()
        return results

    def _update(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Update the parameters, then count the step."""
        results = original(*args, **options)
        self._inspection.step += 1
        if self._steps is not None and self._inspection.step > self._steps:
            self.close()
        return results

    # ------------------------------------------------------------------ checking

    def _run_checked(
        self,
        site: Site,
        inputs: Sequence[NDArray],
        run: Run,
        probed: bool = True,
        program_inputs: Optional[Sequence[NDArray]] = None,
    ) -> Any:
        """Run an operator, with gradient probes if it is recorded; check and return its outputs.

        `program_inputs` are the program's own arrays, where the inputs are copies of them.
        """
        if self._operators is not None and site.operator.name not in self._operators:
            return run(inputs)
        names = (site.operator.name, site.node, site.block)
        skipped = any(fnmatch.fnmatchcase(one, pattern) for pattern in self._skip for one in names)
        reported = self._reported
        if probed and self._gradient_watch is not None and autograd.is_recording():
            outputs = self._gradient_watch.run_probed(site, inputs, run, skipped)
        else:
            outputs = run(inputs)
        if skipped:
            self._inspection.accept_nonfinite(as_list(outputs))
            return outputs
        if program_inputs is not None:
            inputs = program_inputs
        finding = self._inspection.check(site, inputs, as_list(outputs))
        # A fault of a cast inside was reported there.
        if finding is not None and self._reported == reported:
            self._reported += 1
            self._report(finding)
        return outputs

    def _report(self, finding: Finding) -> None:
        """Record a finding, up to `_MOST_FINDINGS`, and log or raise it if `on` says so."""
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)
        if self._on == "log":
            logger.warning("%s", finding)
        if self._on == "raise":
            raise NumericsError(finding)

    def _check_gradients(self) -> None:
        """Report the first fault of the backward pass that just ran."""
        if self._gradient_watch is not None:
            finding = self._gradient_watch.check(self._inspection.step)
            if finding is not None:
                self._report(finding)

    # ------------------------------------------------------------------ eager calls

    def on_call(self, call: Call, run: Run) -> Any:
        """Check an eager call; its casts are checked while it runs."""
        block = self._active.blocks[-1].name if self._active.blocks else ""
        names = [
            self._parameters.get(id(array), (None, name))[1]
            for array, name in zip(call.inputs, input_names(call.operator, len(call.inputs)))
        ]
        attributes = dict(zip(call.keys, call.values))
        site = Site(block, block or call.operator.name, call.operator, attributes, names)
        eager = _EagerCall(site, call.inputs)

        def run_and_record(given: Sequence[NDArray]) -> Any:
            eager.kernel_inputs = given
            return run(given)

        self._active.calls.append(eager)
        try:
            return self._run_checked(site, call.inputs, run_and_record, probed=call.out is None)
        finally:
            self._active.calls.pop()

    def on_cast(self, call: Call, run: Run) -> Any:
        """Check a cast around an eager call, at the site of that call."""
        if not self._active.calls:
            return run(call.inputs)
        eager, array, what = self._active.calls[-1], call.inputs[0], "its value"
        place = eager.input_index(array)
        if place is not None:
            array, what = eager.inputs[place], eager.site.names[place]
        elif self._inspection.is_unknown(array):
            return run(call.inputs)  # a result of the operator, which is checked with the call
        dtype = dict(zip(call.keys, call.values)).get("dtype", "")
        output = f"{what} cast to {dtype}" if dtype else f"copy of {what}"
        site = eager.site._replace(operator=call.operator, names=[what], output=output)
        return self._run_checked(site, call.inputs, run, program_inputs=[array])

    # ------------------------------------------------------------------ graphs

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Run a hybridized block's graph node by node, and check each node."""
        self.notify_earlier_observers(symbol, inputs)
        named = dict(zip(symbol.list_inputs(), inputs))
        block = self._active.blocks[-1] if self._active.blocks else None
        hook = _hook_caller(self.current.op, symbol)
        is_np = isinstance(symbol, _Symbol)
        outputs = self._run_nodes(Graph.from_symbol(symbol), named, is_np, block, hook)
        return outputs[0] if len(outputs) == 1 else outputs

    def on_forward(self, executor: Executor, training: bool, run: Callable[[], Any]) -> Any:
        """Run a bound symbol, then its graph once more, node by node, to check each node."""
        results = run()
        symbol = executor.get_optimized_symbol()
        named = _rerun_inputs(executor, symbol, training)
        with autograd.record() if training else autograd.pause():
            graph = _without_dropout(Graph.from_symbol(symbol))
            outputs = self._run_nodes(graph, named, False)
        self._reruns[id(executor)] = executor, outputs
        return results

    def on_backward(self, executor: Executor, heads: Any, run: Callable[[], Any]) -> Any:
        """Check the backward pass of a bound symbol's node-by-node run, then run its own."""
        _, outputs = self._reruns.pop(id(executor), (None, None))
        if outputs is not None and self._gradient_watch is not None:
            if isinstance(heads, dict):
                heads = [heads[name] for name in executor._symbol.list_outputs()]
            given = [heads] if isinstance(heads, NDArray) else heads
            _backward(outputs, given or None)
            self._check_gradients()
        return run()

    def _run_nodes(
        self,
        graph: Graph,
        inputs: Mapping[str, NDArray],
        is_np: bool,
        block: Optional[Block] = None,
        hook: Optional[Callable[[Site, Node, Any, Any], None]] = None,
    ) -> List[NDArray]:
        """Return the outputs of a graph of `block`, run and checked node by node.

        `hook` is called with each node, its site, inputs and outputs.
        """
        context = next(iter(inputs.values())).context
        block_names = BlockNames(block)

        def run_checked(node: Node, arrays: Sequence[NDArray]) -> Sequence[NDArray]:
            site = site_of(graph, node, block_names)
            outputs = as_list(
                self._run_checked(site, arrays, lambda given: run_node(node, given, context, is_np))
            )
            if hook is not None:
                hook(site, node, arrays, outputs)
            return outputs

        with suspended():
            return interpret(graph, inputs, run_checked)


@checked_call(ops="write operators=[...]")
def check_numerics(
    on: str = "raise",
    operators: Optional[Iterable[str]] = None,
    skip: Optional[Iterable[str]] = None,
    steps: Optional[int] = None,
    *,
    dtype: Any = None,
    backward: bool = True,
) -> ContextManager[NumericsCheck]:
    """Find the first operator of a region whose values become Inf, NaN or, in low dtypes, zero.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0])) * 2
    >>> check.first.operator, check.first.statistics.nan
    ('log', 1)

    An operator is reported if its inputs are finite and its output is not. Operators that only pass
    on Inf or NaN are not reported. So the first finding is the cause, not a symptom.

    Parameters
    ----------
    on : str, default "raise"
        "raise" a `NumericsError` at the first finding, "log" a warning for each, or "collect"
        them in the `NumericsCheck` that the context yields.
    operators : list of str, optional
        Check these operators only, by any of their names.
    skip : list of str, optional
        Names of operators, blocks or nodes whose values are right by definition; * and ? stand
        for any characters.
    steps : int, optional
        Stop after this many updates of a trainer or module.
    dtype : str or dtype, optional
        Also find float32 values that would overflow, or mostly vanish, in this dtype, in operators
        that its default policy does not keep in float32. Use it on a float32 run.
    backward : bool, default True
        Watch gradients too: of parameters, and between operators.

    The check finds operators that make Inf or NaN, inputs and parameters that hold Inf or NaN,
    casts that make Inf, or zeros of most values, and layers whose outputs are all zero. An infinity
    written on purpose, such as `-inf` into a mask, is reported only if it leads to NaN.

    The graph of a hybridized block runs node by node inside, with its casts; hooks of
    `register_op_hook` are called for its forward pass. A module's graph runs once more, without
    dropout. A loop's body is one node. Steps count from 1, as in a trace; a skipped update ends a
    step too. In training, results may differ in the last bits, because probed arrays have the
    plain memory layout.

    Cost: each value is read back and examined; training steps take a few times as long
    (`scripts/bench/overhead tools`). No cost outside the context.
    """
    if isinstance(on, Block):
        raise ArgumentError(TAKES_NO_NET)
    if on not in _ON:
        raise ArgumentError(f"on must be {one_of(_ON)}, not {shown(on)}")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ArgumentError(f"steps must be a number of updates, at least 1, not {shown(steps)}")
    low_policy = Policy.default(check_target(dtype)) if dtype is not None else None
    named = _as_name_list("operators", operators)
    known = None if operators is None else [resolve(name).name for name in named]
    settings = on, known, _as_name_list("skip", skip), steps, low_policy, backward
    return OnlyWith(_checking(*settings), NumericsCheck, WITHOUT_WITH)


@contextlib.contextmanager
def _checking(*settings: Any) -> Iterator[NumericsCheck]:
    """Yield a new check with these settings, of what runs until the context ends."""
    check = NumericsCheck(*settings)
    with check.opened():
        yield check


def _as_name_list(argument: str, names: Optional[Iterable[str]]) -> Sequence[str]:
    """Return an argument that is one name or several as a list; raise if it is neither."""
    return [names] if isinstance(names, str) else name_list(argument, names)


def _creates_graph(function: Callable[..., Any], args: Any, options: Any) -> bool:
    """Return whether a call of a backward function has `create_graph=True`."""
    try:
        given = inspect.signature(function).bind(*args, **options).arguments
    except TypeError:
        return False  # MXNet says what is wrong with the call
    return bool(given.get("create_graph"))


def _hook_caller(op: Any, symbol: Symbol) -> Optional[Callable[[Site, Node, Any, Any], None]]:
    """Return a function that passes a node's arrays to a cached op's hook as MXNet would.

    Returns None for a cached op without a hook.
    """
    if op is None or op.hook is None:
        return None
    callback, monitor_all = op.hook
    variables = set(symbol.list_inputs())
    outputs = symbol.get_internals().list_outputs()
    names = iter([name for name in outputs if name not in variables])

    def call_callback(name: str, node: Node, array: NDArray) -> None:
        second = array.detach()
        handle, second.handle = second.handle.value, None  # the callback frees the handle
        callback(name.encode(), node.op.encode(), handle)

    def pass_arrays(
        site: Site, node: Node, inputs: Sequence[NDArray], outputs: Sequence[NDArray]
    ) -> None:
        if monitor_all:
            for name, array in zip(input_names(site.operator, len(inputs)), inputs):
                call_callback(f"{node.name}_{name}", node, array)
        for array in outputs:
            call_callback(next(names), node, array)

    return pass_arrays


def _rerun_inputs(executor: Executor, symbol: Symbol, training: bool) -> Dict[str, NDArray]:
    """Return an executor's inputs for a second run that leaves its gradients and states alone."""
    gradients = executor.grad_dict
    held = {name: array.detach() for name, array in executor.arg_dict.items()}
    held.update({name: unobserved_copy(array) for name, array in executor.aux_dict.items()})
    wanted = [name for name, gradient in gradients.items() if gradient is not None]
    if training and wanted:
        buffers = [unobserved_copy(gradients[name]) for name in wanted]
        _mark_variables([held[name] for name in wanted], buffers)
    return {name: held[name] for name in symbol.list_inputs()}


def _without_dropout(graph: Graph) -> Graph:
    """Return a graph without dropout, since a second run would draw the program's numbers."""
    nodes = []
    for node in graph.nodes:
        if node.op == "Dropout":
            node = replace(node, op="_copy", attrs={}, inputs=node.inputs[:1])  # noqa: PLW2901
        elif node.op == "RNN":
            node = replace(node, attrs={**node.attrs, "p": "0"})  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=nodes)
