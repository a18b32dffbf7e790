"""`check_numerics`: finds the first operator whose values go wrong, forward and backward."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
from typing import Any, ContextManager, Iterable, Iterator, Sequence

from mxnet import autograd
from mxnet.executor import Executor
from mxnet.gluon import Trainer
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray

from ...convert.options import name_list
from ...errors import ArgumentError
from ...framework.arrays import as_list, dtypes_of
from ...framework.keywords import checked_call
from ...framework.patching import Original, Patch
from ...framework.tables import text_table
from ...framework.wording import one_of, shown
from ...graph.casts.builder import HALVES
from ...patches.cached_op import PolicyCachedOp, _Op
from .eager_gradients import EagerGradients, RecordedCall
from .findings import (
    PURPOSE,
    Fault,
    Finding,
    NumericsError,
    Statistics,
    forward_fault,
    gradient_fault,
)
from .observing import Call, MonitoredGraph, Site, Tensor, TensorObserver, bound_inputs, patch_over

logger = logging.getLogger("mxamp")

_ON = ("raise", "log", "collect")
_COLUMNS = ("step", "phase", "kind", "block", "node", "operator", "tensor", "statistics")


class NumericsCheck(TensorObserver):
    """The findings of a check: `findings`, the first of each pass through the program.

    `str(check)` is a table. Falsy without findings.
    """

    def __init__(self, on: str, skip: Sequence[str], backward: bool) -> None:
        super().__init__()
        self._on, self._skip, self._step = on, skip, 1
        self._findings: list[Finding] = []
        #: Overflows of gradients that a lower loss scale may cure, and those of the current step.
        self._curable: list[Finding] = []
        self._of_step: list[Finding] = []
        #: The first fault of each graph in the running backward pass.
        self._in_graphs: dict[MonitoredGraph, Finding | None] = {}
        self._gradients = EagerGradients() if backward else None
        self._executors: dict[Executor, MonitoredGraph] = {}

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

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        if not self:
            return "no findings"
        return text_table(_COLUMNS, [[getattr(f, n) for n in _COLUMNS] for f in self.findings])

    # ------------------------------------------------------------------ forward

    def on_operator(self, call: Call) -> Finding | None:
        """Judge an output of an operator; return a finding if it is at fault."""
        site, inputs, output, _ = call
        if not output.is_checkable:
            return None
        if self._is_skipped(site):
            output.fact = PURPOSE
            return None
        fault, output.fact = forward_fault(call)
        if fault is None:
            return None
        if fault.kind == "input":
            fault.tensor.fact = output.fact
        return self._finding(site, fault, "forward", inputs.items())

    def on_call(
        self, original: Original, handle: int, inputs: Sequence[NDArray], *rest: Any
    ) -> Any:
        """Check an eager call, and watch the gradients of its inputs."""
        if self._gradients is None or rest[2] is not None or not autograd.is_recording():
            return super().on_call(original, handle, inputs, *rest)
        site = self.site_of_call(handle, inputs, rest)
        call = RecordedCall(site, inputs)
        outputs = original(handle, self._gradients.record(call), *rest)
        made = self.observe(site, inputs, as_list(outputs))
        call.is_half = not HALVES.isdisjoint(dtypes_of([*inputs, *as_list(outputs)]))
        call.is_ignored = self._is_skipped(site) or any(one.is_bad for one in made)
        return outputs

    def _select_op(self, original: Original, op: PolicyCachedOp, args: Sequence[NDArray]) -> _Op:
        """Return the op that a block runs, with a monitor on its graph."""
        found = super()._select_op(original, op, args)
        if self._gradients is not None and autograd.is_recording():
            self._gradients.record(RecordedCall(self._graphs[id(found.symbol)]))
        return found

    def _is_skipped(self, site: Site) -> bool:
        """Return whether `skip` names a call, whose values are right by definition."""
        names = (site.operator, site.node, site.block)
        return any(fnmatch.fnmatchcase(one, pattern) for pattern in self._skip for one in names)

    # ------------------------------------------------------------------ backward

    def on_gradient(self, graph: MonitoredGraph, site: Site, name: str, array: NDArray) -> None:
        """Judge a gradient: the first that is not sound is at fault, if what comes in is sound."""
        gradient, found = Tensor(array), self._in_graphs.setdefault(graph, None)
        if found is not None or not gradient.is_checkable or self._is_skipped(site):
            return
        may_vanish = graph.is_alive and gradient.dtype in HALVES
        fault = gradient_fault(site, name, gradient, may_vanish) if graph.is_sound else None
        graph.is_alive = graph.is_alive and gradient.nonzero > 0
        if fault is not None:
            self._in_graphs[graph] = self._finding(site, fault, "backward")

    def _first_fault(self) -> Finding | None:
        """Return the first finding of the backward pass that has just run."""
        if self._gradients is None:
            return None
        is_alive = True
        for call, gradients in self._gradients.reached(self._in_graphs):
            if isinstance(call.place, MonitoredGraph):
                found = self._in_graphs[call.place]
                if found is not None:
                    return found
                is_alive = is_alive and call.place.is_alive
                continue
            is_zero = not any(gradient.nonzero for gradient in gradients.values())
            for i, gradient in gradients.items():
                name = f"gradient of {call.place.names[i]}"
                may_vanish = is_zero and is_alive and call.is_half
                fault = gradient_fault(call.place, name, gradient, may_vanish)
                if fault is not None and call.is_ignored:
                    return None
                if fault is not None:
                    return self._finding(call.place, fault, "backward")
            is_alive = is_alive and not is_zero
        # That of an executor, or of a graph in a second pass through it.
        return next((one for one in self._in_graphs.values() if one is not None), None)

    def _run_backward(self, original: Original, *args: Any, **options: Any) -> Any:
        """Run a backward pass, of autograd or an executor, then report its first fault."""
        self._in_graphs.clear()
        results = original(*args, **options)
        found = self._first_fault()
        if found is not None and found.kind == "overflow":
            self._of_step.append(found)  # a lower loss scale may cure it
        elif found is not None:
            self.report(found)
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
                self.report(one)
        self._step += 1
        return results

    # ------------------------------------------------------------------ reports

    def _finding(self, site: Site, fault: Fault, phase: str, inputs: Iterable[Any] = ()) -> Finding:
        """Return the finding of a fault, with statistics of its tensor and of the inputs."""
        kind, name, tensor, detail = fault
        read = tuple((n, Statistics.of(one)) for n, one in inputs if one.is_checkable)
        place = (site.block, site.node, site.operator, name)
        found = Statistics.of(tensor)
        return Finding(kind, phase, self._step, *place, found, detail, read)

    def report(self, finding: Finding) -> None:
        """Record a finding, and log or raise it if `on` says so."""
        self._findings.append(finding)
        if self._on == "log":
            logger.warning("%s", finding)
        if self._on == "raise":
            raise NumericsError(finding)

    @contextlib.contextmanager
    def checking(self) -> Iterator[NumericsCheck]:
        """Context of the check; yields it."""
        with self.opened():
            yield self
        # The overflow of a gradient that no later step has shown to be harmless.
        rest, self._curable, self._of_step = [*self._curable, *self._of_step][:1], [], []
        for finding in rest:
            self.report(finding)

    # ------------------------------------------------------------------ patches

    def patches(self) -> Sequence[Patch]:
        """Return the patches of calls, graphs, executors, backward passes and updates."""
        return [
            *super().patches(),
            patch_over(Executor, "forward", self._forward),
            patch_over(Executor, "backward", self._run_backward),
            patch_over(NDArray, "backward", self._run_backward),
            patch_over(autograd, "backward", self._run_backward),
            patch_over(autograd, "grad", self._run_backward),
            patch_over(Trainer, "_update", self._update),
            patch_over(Module, "update", self._update),
        ]

    def close(self) -> None:
        """Remove the patches, and restore the executors' monitors."""
        super().close()
        for executor in self._executors:
            executor.set_monitor_callback(lambda *_: None)  # MXNet can't remove a monitor
        self._executors.clear()

    def _forward(
        self, original: Original, executor: Executor, is_train: bool = False, **inputs: Any
    ) -> Any:
        """Run an executor's forward pass with a monitor on it."""
        if executor not in self._executors:
            # The graph as it runs: with casts, and with operators that oneDNN has fused.
            graph = MonitoredGraph(self, executor.get_optimized_symbol(), None)
            executor.set_monitor_callback(graph.on_output)
            self._executors[executor] = graph
        graph = self._executors[executor]
        read = bound_inputs(executor, graph.input_names)
        graph.begin(read)
        results = original(executor, is_train, **inputs)
        graph.end(read, results)
        return results


def _can_lower_scale(owner: Any) -> bool:
    """Return whether a trainer or module skips a step that overflows, and lowers its loss scale."""
    for name in ("_amp_loss_scaler", "_amp_scaling"):
        scaler = getattr(getattr(owner, name, None), "scaler", None)
        if scaler is not None:
            return not scaler.is_lowest
    return False


@checked_call
def check_numerics(
    on: str = "raise",
    skip: str | Iterable[str] | None = None,
    *,
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
        them in what the context yields.
    skip : str or list of str, optional
        Names of operators, blocks or nodes whose values are right by definition; * and ? stand
        for any characters.
    backward : bool, default True
        Watch gradients too: of parameters, and between operators.

    The context yields the check: `findings`, the first of each pass through the program; `first`,
    the first of them or None. Printing it gives a table, and it is false without findings. A
    finding has `kind`, `phase` ("forward" or "backward"), `step`, `block`, `node`, `operator`,
    `tensor`, `statistics` of that tensor (`dtype`, `shape`, `nan`, `inf` and `zero` values,
    `minimum`, `maximum` and `mean` of the finite ones), `detail`, and `inputs`: names and
    statistics of what the operator has read.

    The check finds operators that make Inf or NaN, inputs and parameters that hold Inf or NaN,
    casts that make Inf, or zeros of most values, and layers whose outputs are all zero. An infinity
    written on purpose, such as `-inf` into a mask, is reported only if it leads to NaN. A gradient
    that overflows in a low dtype is reported at the end of the step, and not at all if the loss
    scale can fall and a later step is finite: the first steps of a run overflow so.

    MXNet's monitor watches the graphs of hybridized blocks, which run without `static_alloc` and
    without hooks of `register_op_hook` meanwhile. It replaces the monitor of a module's executor,
    which is a little slower afterwards. A loop's body is one node. Steps count from 1; a skipped
    update ends a step too. In training, results may differ in the last bits.

    Cost: each value is read back and examined; training steps take a few times as long
    (`scripts/bench/overhead tools`). No cost outside the context.
    """
    if on not in _ON:
        raise ArgumentError(f"on must be {one_of(_ON)}, not {shown(on)}")
    skipped = [skip] if isinstance(skip, str) else name_list("skip", skip)
    return NumericsCheck(on, skipped, backward).checking()
