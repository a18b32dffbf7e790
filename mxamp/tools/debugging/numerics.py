"""`check_numerics`: finds the first operator whose values go wrong, forward and backward.

MXNet's own monitor watches graphs, a patch eager calls, and zeros that are added to the inputs of
eager calls their gradients.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import threading
from dataclasses import replace
from typing import Any, ContextManager, Iterable, Iterator, Mapping, Sequence

from mxnet import autograd
from mxnet.executor import Executor
from mxnet.gluon import Trainer
from mxnet.gluon.block import Block
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert.options import name_list
from ...errors import ArgumentError
from ...framework.arrays import as_list, dtypes_of, invoke
from ...framework.keywords import checked_call
from ...framework.operators import by_handle, handle_of, resolve
from ...framework.patching import Patch, original
from ...framework.tables import text_table
from ...framework.wording import one_of, shown
from ...graph.casts.builder import HALVES
from ...graph.ir import Graph
from ...patches.cached_op import PolicyCachedOp, _Op, _ReorderedOp
from ...policy.active import suspended
from ...policy.policy import Policy
from ...policy.targets import check_target
from .findings import (
    FAULT,
    PURPOSE,
    Fault,
    Finding,
    NumericsError,
    Site,
    Statistics,
    Tensor,
    fault_in,
    forward_fault,
    gradient_fault,
    input_names,
)
from .monitoring import EagerGradients, GraphMonitor, monitored_op
from .observing import Observer, Original, patch_over

logger = logging.getLogger("mxamp")

_ON = ("raise", "log", "collect")
_MOST_FINDINGS = 1000
_MOST_REASONS = 1024
_COPY_TO, _ZEROS = handle_of("_copyto"), handle_of("zeros_like")


class _Active(threading.local):
    """The blocks that each thread is executing, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []


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
        operators: Sequence[str] | None,
        skip: Sequence[str],
        steps: int | None,
        low_policy: Policy | None,
        backward: bool,
    ) -> None:
        super().__init__()
        self._on, self._operators, self._skip, self._steps = on, operators, skip, steps
        self._low_policy, self._step = low_policy, 1
        self._findings: list[Finding] = []
        #: Overflows of gradients that a lower loss scale may cure, and those of the current step.
        self._curable: list[Finding] = []
        self._of_step: list[Finding] = []
        #: The first fault of each graph in the running backward pass, by the graph's id.
        self._in_graphs: dict[int, Finding] = {}
        self._gradients = EagerGradients() if backward else None
        self._active = _Active()
        # Why arrays are not finite, by handle. The array is kept alive, since a freed handle may
        # become that of another array.
        self._reasons: dict[int, tuple[NDArray, str | None]] = {}
        self._graphs: dict[int, _CheckedGraph] = {}
        self._twins: dict[int, _Twin] = {}

    @property
    def findings(self) -> list[Finding]:
        """The findings, the first of each pass through the program.

        An overflow of a gradient that a lower loss scale has cured is none. One that it may cure
        stands last.
        """
        return [*self._findings, *self._curable[:1], *self._of_step[:1]]

    @property
    def first(self) -> Finding | None:
        """The first finding; None without findings."""
        return next(iter(self.findings), None)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        if not self:
            return "no findings"
        names = ("step", "phase", "kind", "block", "node", "operator", "tensor")
        rows = [(*(getattr(f, n) for n in names), str(f.statistics)) for f in self.findings]
        return text_table((*names, "values"), rows)

    def __repr__(self) -> str:
        return f"<NumericsCheck: {self.first or 'no findings'}>"

    # ------------------------------------------------------------------ patches

    def patches(self) -> Sequence[Patch]:
        """Return the patches of calls, graphs, blocks, parameters, backward passes and updates."""
        return [
            *self.eager_patches(),
            *self.graph_patches(),
            patch_over(PolicyCachedOp, "_select_op", self._select_op),
            patch_over(Executor, "forward", self._forward),
            patch_over(Executor, "backward", self._backward),
            patch_over(Block, "__call__", self._call_any_block),
            patch_over(NDArray, "backward", self._run_backward),
            patch_over(autograd, "backward", self._run_backward),
            patch_over(autograd, "grad", self._run_backward),
            patch_over(Trainer, "_update", self._update),
            patch_over(Module, "update", self._update),
        ]

    def close(self) -> None:
        """Remove the patches, and release the recorded arrays."""
        super().close()
        for held in (self._reasons, self._graphs, self._twins):
            held.clear()

    def _call_any_block(
        self, original: Original, block: Block, /, *args: Any, **options: Any
    ) -> Any:
        """Call a block; until it returns, it is the block that operators are attributed to."""
        self._active.blocks.append(block)
        try:
            return original(block, *args, **options)
        finally:
            self._active.blocks.pop()

    def _run_backward(self, original: Original, *args: Any, **options: Any) -> Any:
        """Run a backward pass of autograd, then report its first fault."""
        self._in_graphs.clear()
        results = original(*args, **options)
        found = next(iter(self._in_graphs.values()), None)
        eager = self._gradients.fault() if self._gradients is not None else None
        if eager is not None:
            call, fault = eager
            found = self._in_graphs.get(id(call.graph))
            if call.graph is None and not call.is_ignored:
                found = self._finding(call.site, fault, "backward")
        if found is not None:
            self._report_gradient(found)
        return results

    def _update(self, original: Original, owner: Any, *args: Any, **options: Any) -> Any:
        """Update the parameters, then count the step."""
        can_lower = _can_lower_scale(owner)
        results = original(owner, *args, **options)
        found, self._of_step = self._of_step, []
        if found and can_lower:
            self._curable += found
        else:
            # Without one, the scale has fallen enough for what was found before.
            self._curable = []
            for one in found:
                self._report(one)
        self._step += 1
        if self._steps is not None and self._step > self._steps:
            self.close()
        return results

    # ------------------------------------------------------------------ reports

    def _finding(
        self, site: Site, fault: Fault, phase: str, inputs: Sequence[Tensor] = ()
    ) -> Finding:
        """Return the finding of a fault, with statistics of its tensor and of the inputs."""
        kind, tensor, detail = fault
        found = Statistics.of_values(tensor.dtype, tensor.values)
        read = tuple(
            (one.name, Statistics.of_values(one.dtype, one.values))
            for one in inputs
            if one.is_checkable
        )
        place = (site.block, site.node, site.operator, tensor.name)
        return Finding(kind, phase, self._step, *place, tensor.dtype, found, detail, read)

    def _report(self, finding: Finding) -> None:
        """Record a finding, up to `_MOST_FINDINGS`, and log or raise it if `on` says so."""
        if len(self._findings) < _MOST_FINDINGS:
            self._findings.append(finding)
        if self._on == "log":
            logger.warning("%s", finding)
        if self._on == "raise":
            raise NumericsError(finding)

    def _report_gradient(self, finding: Finding) -> None:
        """Report a finding of a backward pass; one that a lower loss scale may cure, later."""
        if finding.kind == "overflow":
            self._of_step.append(finding)
        else:
            self._report(finding)

    def report_rest(self) -> None:
        """Report the overflow of a gradient that no later step has shown to be harmless."""
        rest, self._curable, self._of_step = [*self._curable, *self._of_step][:1], [], []
        for finding in rest:
            self._report(finding)

    # ------------------------------------------------------------------ judging

    def _is_skipped(self, site: Site) -> bool:
        """Return whether `skip` names a call, whose values are right, or `operators` does not."""
        names = (site.operator, site.node, site.block)
        skipped = any(fnmatch.fnmatchcase(one, pattern) for pattern in self._skip for one in names)
        return skipped or (self._operators is not None and site.operator not in self._operators)

    def _why(self, array: NDArray) -> str | None:
        """Return why an array is not finite; None if that is unknown."""
        return self._reasons.get(array.handle.value, (None, None))[1]

    def _set_reason(self, array: NDArray, reason: str) -> None:
        """Record why an array is not finite, and forget the oldest array."""
        if len(self._reasons) >= _MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[array.handle.value] = array, reason

    def _judge(
        self, site: Site, inputs: Sequence[Tensor], output: Tensor, why: Sequence[str | None]
    ) -> tuple[Fault | None, str | None]:
        """Return the fault of an output and why it is not finite, after `skip` and `dtype`."""
        if self._operators is not None and site.operator not in self._operators:
            return None, None
        if self._is_skipped(site):
            return None, PURPOSE
        fault, reason = forward_fault(site, inputs, output, why)
        if fault is None and not output.is_bad and self._low_policy is not None:
            fault = fault_in(self._low_policy, site, [*inputs, output])
        return fault, reason

    def _check_call(
        self,
        site: Site,
        inputs: Sequence[NDArray],
        made: Sequence[NDArray],
        outputs: Sequence[Tensor],
    ) -> Finding | None:
        """Judge the outputs of an eager call, which `made` holds too; return the first finding."""
        read = [Tensor(name, array) for name, array in zip(site.names, inputs)]
        first = None
        for array, output in zip(made, outputs):
            if not output.is_checkable:
                continue
            why = [self._why(a) for t, a in zip(read, inputs) if output.is_bad and t.is_bad]
            fault, reason = self._judge(site, read, output, why)
            if output.is_bad and reason is not None:
                self._set_reason(array, reason)
            if fault is not None and fault.kind == "input":
                self._set_reason(inputs[read.index(fault.tensor)], FAULT)
            if fault is not None and first is None:
                first = self._finding(site, fault, "forward", read)
        return first

    # ------------------------------------------------------------------ eager calls

    def on_call(
        self, original: Original, handle: int, inputs: Sequence[NDArray], *rest: Any
    ) -> Any:
        """Check an eager call, its casts included."""
        keys, values, out = rest[:3]
        operator, block, params = by_handle()[handle].name, "", {}
        if self._active.blocks:
            block = self._active.blocks[-1].name
            held = self._active.blocks[-1]._reg_params.values()
            params = {id(array): one.name for one in held for array in one._data or ()}
        named = zip(inputs, input_names(operator, len(inputs)))
        names = [params.get(id(array), name) for array, name in named]
        site = Site(block, block or operator, operator, dict(zip(keys, values)), names)
        call, given = None, inputs
        if self._gradients is not None and out is None and autograd.is_recording():
            call, given = self._gradients.record(site, inputs)
        outputs = original(handle, given, *rest)
        made = as_list(outputs)
        tensors = [Tensor(site.output, array) for array in made]
        finding = self._check_call(site, inputs, made, tensors)
        if call is not None:
            call.outputs = made
            call.is_half = not HALVES.isdisjoint(dtypes_of([*inputs, *made]))
            call.is_ignored = self._is_skipped(site) or any(one.is_bad for one in tensors)
        if finding is not None:
            self._report(finding)
        return outputs

    # ------------------------------------------------------------------ graphs

    def _select_op(self, original: Original, op: PolicyCachedOp, args: Sequence[NDArray]) -> _Op:
        """Return the op that a block runs, with a monitor on its graph."""
        found: _Op = original(op, args)
        if id(found.symbol) not in self._graphs:
            block = self._active.blocks[-1] if self._active.blocks else None
            self._graphs[id(found.symbol)] = _CheckedGraph(self, found.symbol, block)
        run: Any = self._graphs[id(found.symbol)]
        if isinstance(found.run, _ReorderedOp):
            run = _ReorderedOp(run, found.run._order)
        return _Op(run, found.symbol)

    def _forward(
        self, original: Original, executor: Executor, is_train: bool = False, **inputs: Any
    ) -> Any:
        """Run an executor's forward pass, then that of its twin, which is monitored."""
        results = original(executor, is_train, **inputs)
        if id(executor) not in self._twins:
            self._twins[id(executor)] = _Twin(self, executor)
        self._twins[id(executor)].forward(is_train, results)
        return results

    def _backward(
        self,
        original: Original,
        executor: Executor,
        out_grads: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run the backward pass of an executor's twin, then its own."""
        twin = self._twins.get(id(executor))
        if twin is not None and self._gradients is not None:
            self._in_graphs.clear()
            twin.backward(out_grads)
            for found in self._in_graphs.values():
                self._report_gradient(found)
        return original(executor, out_grads, *args, **options)


class _CheckedGraph:
    """The graph of a block, run by a cached op with a monitor, and what the monitor has found."""

    def __init__(self, check: NumericsCheck, symbol: Symbol, block: Block | None) -> None:
        self._check, self._symbol, self._names = check, symbol, symbol.list_inputs()
        self.monitor = GraphMonitor(symbol, block, self._on_output)
        self._op: Any = None
        name = block.name if block is not None else ""
        self._site = Site(name, name, "_CachedOp", {}, self._names)
        self._inputs: Mapping[str, NDArray] = {}
        #: Whether the forward pass was sound, and the backward pass has no gradient of zeros yet.
        self._is_sound = self._is_alive = True
        #: Why values inside the graph are not finite; None for values that were only moved.
        self._inner: str | None = PURPOSE
        self._found: Finding | None = None

    def _register_op_hook(self, *hook: Any) -> None:
        """Take no hook of the user: a cached op has one."""

    def __call__(self, *inputs: NDArray, **options: Any) -> Any:
        """Run the graph and report its first fault."""
        if self._op is None:
            self._op = monitored_op(self._symbol, self.monitor)
        gradients, call = self._check._gradients, None
        given: Sequence[NDArray] = inputs
        if gradients is not None and autograd.is_recording():
            call, given = gradients.record(self._site, inputs)
            call.graph = self
        self.begin(dict(zip(self._names, inputs)))
        outputs = self._op(*given, **options)
        if call is not None:
            call.outputs = as_list(outputs)
        self.end(as_list(outputs))
        return outputs

    def begin(self, inputs: Mapping[str, NDArray]) -> None:
        """Begin a forward pass on these inputs."""
        self._inputs, self._inner, self._found = inputs, PURPOSE, None
        self._is_sound = self._is_alive = True
        self.monitor.begin(inputs)

    def end(self, outputs: Sequence[NDArray]) -> None:
        """End a forward pass with these outputs: report its first fault."""
        self.monitor.begin({})
        for array in outputs:
            if self._inner is not None and Tensor("", array).is_bad:
                self._check._set_reason(array, self._inner)
        if self._found is not None:
            self._check._report(self._found)

    def _on_output(self, site: Site, inputs: Sequence[Tensor] | None, output: Tensor) -> None:
        """Judge an output that MXNet has computed; without inputs, a gradient."""
        check = self._check
        if not output.is_checkable:
            return
        if inputs is None:
            self._check_gradient(site, output)
            return
        why = [self._why(one) for one in inputs if output.is_bad and one.is_bad]
        fault, reason = check._judge(site, inputs, output, why)
        if output.is_bad:
            self._is_sound = False
            self._inner = FAULT if FAULT in (self._inner, reason) else reason
        if fault is not None and fault.kind == "input" and fault.tensor.variable:
            check._set_reason(self._inputs[fault.tensor.variable], FAULT)
        if fault is not None and self._found is None:
            self._found = check._finding(site, fault, "forward", inputs)

    def _why(self, tensor: Tensor) -> str | None:
        """Return why an input of a node is not finite; None if that is unknown."""
        if not tensor.variable:
            return self._inner
        return self._check._why(self._inputs[tensor.variable])

    def _check_gradient(self, site: Site, gradient: Tensor) -> None:
        """Judge a gradient: the first that is not sound is at fault, if what comes in is sound."""
        check, key = self._check, id(self)
        left_out = check._gradients is None or check._is_skipped(site)
        if key in check._in_graphs or left_out or not self._is_sound:
            return
        is_half = self._is_alive and gradient.dtype in HALVES
        fault = gradient_fault(site, gradient, is_half)
        self._is_alive = self._is_alive and gradient.nonzero > 0
        if fault is not None:
            check._in_graphs[key] = check._finding(site, fault, "backward")


class _Twin:
    """A second executor of a bound symbol, with a monitor, that shares its parameters alone.

    It has no dropout, which would draw the program's random numbers.
    """

    def __init__(self, check: NumericsCheck, executor: Executor) -> None:
        self._original = executor
        graph = _without_dropout(Graph.from_symbol(executor.get_optimized_symbol()))
        symbol = graph.to_symbol()
        self._watch = _CheckedGraph(check, symbol, None)
        names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
        wanted = {n: a for n, a in executor.grad_dict.items() if a is not None and n in names}
        with suspended(), autograd.pause():
            gradients, self._states = (
                {name: invoke(_ZEROS, [array], [], [], None, False, False) for name, array in of}
                for of in (wanted.items(), [(name, executor.aux_dict[name]) for name in states])
            )
        self._executor = original(Symbol, "bind")(
            symbol,
            executor._ctx,
            {name: executor.arg_dict[name] for name in names},
            gradients,
            {name: "write" if name in gradients else "null" for name in names},
            self._states,
            group2ctx=executor._group2ctx,
        )
        self._executor.set_monitor_callback(self._watch.monitor)

    def forward(self, is_train: bool, outputs: Sequence[NDArray]) -> None:
        """Run the forward pass; `outputs` are those of the original executor."""
        for name, array in self._states.items():
            invoke(_COPY_TO, [self._original.aux_dict[name]], [], [], array, False, False)
        self._watch.begin({**self._executor.arg_dict, **self._states})
        original(Executor, "forward")(self._executor, is_train)
        self._watch.end(outputs)

    def backward(self, out_grads: Any) -> None:
        """Run the backward pass from the gradients of the outputs."""
        if isinstance(out_grads, dict):
            out_grads = [out_grads[name] for name in self._original._symbol.list_outputs()]
        original(Executor, "backward")(self._executor, out_grads)


def _without_dropout(graph: Graph) -> Graph:
    nodes = []
    for node in graph.nodes:
        if node.op == "Dropout":
            node = replace(node, op="_copy", attrs={}, inputs=node.inputs[:1])  # noqa: PLW2901
        elif node.op == "RNN":
            node = replace(node, attrs={**node.attrs, "p": "0"})  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=nodes)


def _can_lower_scale(owner: Any) -> bool:
    """Return whether a trainer or module skips a step that overflows, and lowers its loss scale."""
    for name in ("_amp_loss_scaler", "_amp_scaling"):
        scaler = getattr(getattr(owner, name, None), "scaler", None)
        if scaler is not None:
            return not scaler.is_lowest
    return False


@contextlib.contextmanager
def _checking(check: NumericsCheck) -> Iterator[NumericsCheck]:
    """Yield a check of what runs until the context ends."""
    with check.opened():
        yield check
    check.report_rest()


@checked_call
def check_numerics(
    on: str = "raise",
    operators: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    steps: int | None = None,
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
    written on purpose, such as `-inf` into a mask, is reported only if it leads to NaN. A gradient
    that overflows in a low dtype is reported at the end of the step, and not at all if the loss
    scale can fall and a later step is finite: the first steps of a run overflow so.

    MXNet's monitor watches the graphs of hybridized blocks, which run without `static_alloc` and
    without hooks of `register_op_hook` meanwhile. A module's graph runs once more, without
    dropout. A loop's body is one node. Steps count from 1; a skipped update ends a step too.
    In training, results may differ in the last bits.

    Cost: each value is read back and examined; training steps take a few times as long
    (`scripts/bench/overhead tools`). No cost outside the context.
    """
    if on not in _ON:
        raise ArgumentError(f"on must be {one_of(_ON)}, not {shown(on)}")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ArgumentError(f"steps must be a number of updates, at least 1, not {shown(steps)}")
    low_policy = Policy.default(check_target(dtype)) if dtype is not None else None
    named = _as_name_list("operators", operators)
    known = None if operators is None else [resolve(name).name for name in named]
    skipped = _as_name_list("skip", skip)
    return _checking(NumericsCheck(on, known, skipped, steps, low_policy, backward))


def _as_name_list(argument: str, names: Iterable[str] | None) -> Sequence[str]:
    """Return an argument that is one name or several as a list; raise if it is neither."""
    return [names] if isinstance(names, str) else name_list(argument, names)
