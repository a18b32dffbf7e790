"""`check_numerics`: find the first operator whose output or gradient is Inf or NaN."""

from __future__ import annotations

import fnmatch
from typing import Any, ContextManager, Iterable, NamedTuple, Sequence

from mxnet import autograd, executor, module
from mxnet.gluon import Block, Trainer
from mxnet.ndarray.ndarray import NDArray

from ...convert.options import name_list
from ...errors import ArgumentError
from ...framework.arrays import has_gradient
from ...framework.keywords import checked_call
from ...framework.patching import Original, Patch
from ...framework.wording import one_of, shortened, shown
from ...graph.ir import CASTS, HALVES
from ...scaling.scaler import scale_of
from .causes import Causes
from .findings import Finding, NumericsError, Statistics
from .observing import Arrays, Inputs, MonitoredGraph, Observed, Place, TensorObserver, patch_over

_ON = ("raise", "collect")
_BACKWARD = (executor.Executor, NDArray, autograd)
#: Operators that only copy: the one that computes with the copy is judged. `while_loop` pads its
#: results with uninitialized memory by Concat.
_COPIES = frozenset({"Concat", "_copy", "_copyto"})


class _Reader(NamedTuple):
    """The last eager operator that read an array with a gradient, and that array."""

    array: NDArray
    site: Place
    name: str


class NumericsCheck(TensorObserver):
    """The result of `check_numerics`: `findings` are the first operators with Inf or NaN.

    `str(check)` has a line for each. Falsy without findings.
    """

    def __init__(self, on: str, skip: Sequence[str]) -> None:
        super().__init__()
        self._on, self._skip, self._step = on, skip, 1
        self._findings: list[Finding] = []
        #: The finding of the running pass through the program.
        self._found: Finding | None = None
        #: The last overflow of a gradient, which a lower loss scale may cure.
        self._overflow: Finding | None = None
        self._causes = Causes()
        #: Values that an operator has made on purpose: "nan", "inf" or "-inf".
        self._purpose: set[str] = set()
        #: In the order of the last reads: the eager readers of arrays with a gradient, by the
        #: array's id, and the first finding in the backward pass of each graph, by the graph's id.
        self._reads: dict[int, _Reader | Finding | None] = {}

    @property
    def findings(self) -> list[Finding]:
        """The first operator with Inf or NaN of each forward and backward pass.

        An overflow of a gradient that a lower loss scale has cured is none. One that it may cure
        stands last.
        """
        return [*self._findings, *([] if self._overflow is None else [self._overflow])]

    @property
    def first(self) -> Finding | None:
        """The first operator with Inf or NaN, as a `Finding`; None if there is none."""
        return next(iter(self.findings), None)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "no findings"

    # ------------------------------------------------------------------ forward

    def on_operator(self, site: Place, inputs: Inputs, output: Observed, number: int) -> None:
        """Report an operator that produces the first Inf or NaN of a forward or backward pass."""
        self._causes.add_output(site, output)
        if not output.bad or self._found is not None:
            return
        if self._overflow is not None and not (autograd.is_recording() or self._blocks()):
            return  # such as clipping: the gradients have overflowed, and the step will be skipped
        if self._is_skipped(site):
            self._purpose |= output.bad
            return
        read = [(name, one) for name, one in zip(site.names, inputs) if one is not None]
        held: set[str] = set().union(*(one.bad for _, one in read))
        for name, one in read:
            # The pass was finite so far, and infinities below 0 are masks.
            if one.bad - self._purpose - {"-inf"} and site.operator not in _COPIES:
                self._report(self._finding(site, name, one, inputs, "input"))
                return
        constants = set(map(str, site.attributes.values()))
        self._purpose |= output.bad & constants
        if not output.bad <= held | constants:
            self._report(self._finding(site, "output", output, inputs))

    def on_begin(self, reader: MonitoredGraph | Place, inputs: Arrays) -> None:
        """Record the start of a graph or an eager call, and the weights and data that it reads."""
        if isinstance(reader, MonitoredGraph):
            if not self._blocks():  # an executor's, whose forward pass begins a pass
                self._end_pass()
            self._note_read(reader, None)
        # An executor keeps its gradients beside the arrays.
        trained = reader.trained if isinstance(reader, MonitoredGraph) else ()
        for name, array in zip(reader.names, inputs):
            if trained or autograd.is_recording() or self._blocks():
                is_weight = name in trained or has_gradient(array)
                self._causes.add_input(self._step, name, array, is_weight)
            if autograd.is_recording() and isinstance(reader, Place) and has_gradient(array):
                self._note_read(array, _Reader(array, reader, name))

    def on_end(self) -> None:
        """With `on="raise"`, raise if the graph or eager call that ends had Inf or NaN."""
        if self._on == "raise":
            self._end_pass()

    def _run_block(self, original: Original, block: Block, /, *args: object, **options: Any) -> Any:
        """Call a Gluon block; in inference, the outermost one begins a new pass."""
        if not self._blocks() and not autograd.is_recording():
            self._end_pass()
        return super()._run_block(original, block, *args, **options)

    def _is_skipped(self, site: Place) -> bool:
        """Return whether the argument `skip` matches an operator, its block or its node."""
        # The names of the block, the node and the operator.
        return any(fnmatch.fnmatchcase(one, text) for text in self._skip for one in site[:3])

    # ------------------------------------------------------------------ backward

    def _note_read(self, key: object, read: _Reader | None) -> None:
        """Record that an eager operator read an array with a gradient, or that a graph ran."""
        self._reads.pop(id(key), None)
        self._reads[id(key)] = read

    def on_gradient(self, graph: MonitoredGraph, site: Place, name: str, made: Observed) -> None:
        """Record a gradient inside a graph if it is the graph's first with Inf or NaN."""
        if self._reads.get(id(graph)) is None:
            self._reads[id(graph)] = self._judge_gradient(site, name, made)

    def _judge_gradient(self, site: Place, name: str, gradient: Observed) -> Finding | None:
        """Return a `Finding` if a gradient has Inf or NaN, unless the user skips its operator."""
        bad = gradient.bad and not self._is_skipped(site)
        return self._finding(site, f"gradient of {name}", gradient, None) if bad else None

    def _first_fault(self) -> Finding | None:
        """Return the `Finding` of the first gradient with Inf or NaN in a backward pass."""
        faults = []
        for key, read in reversed(list(self._reads.items())):
            if not isinstance(read, _Reader):
                faults.append(read)
                self._reads[key] = None
            elif read.array._fresh_grad and read.array.grad is not None:
                faults.append(self._judge_gradient(read.site, read.name, Observed(read.array.grad)))
                del self._reads[key]
        return next((one for one in faults if one is not None), None)

    def _run_backward(self, original: Original, *args: object, **options: object) -> object:
        """Run a backward pass, and report its first gradient with Inf or NaN."""
        results = original(*args, **options)
        fault = self._first_fault()
        if self._found is None and "nan" not in self._purpose and fault is not None:
            if fault.kind == "overflow":
                self._overflow = fault  # a lower loss scale may cure it
            else:
                self._report(fault)
        self._causes.at_zero = ""
        self._end_pass()
        return results

    def _update(self, original: Original, owner: Any, *args: object, **options: object) -> Any:
        """Update parameters; report an overflow that a lower loss scale would not cure."""
        # With loss scaling, a step that overflows is skipped, and lowers the scale.
        scaling = getattr(owner, "_amp_loss_scaler", None) or scale_of(owner._optimizer)
        can_lower = not getattr(getattr(scaling, "scaler", None), "is_lowest", True)
        found = self._overflow
        if found is not None and not (can_lower and found.step == self._step):
            self._overflow = None
            if found.step == self._step:
                self._report(found)  # before the update spreads it
        results = original(owner, *args, **options)
        self._end_pass()
        self._step += 1
        return results

    # ------------------------------------------------------------------ reports

    def _finding(
        self, site: Place, name: str, tensor: Observed, inputs: Inputs | None, kind: str = ""
    ) -> Finding:
        """Return a `Finding` for an operator's tensor, with statistics and advice."""
        overflows = "nan" not in tensor.bad and (site.operator in CASTS or tensor.dtype in HALVES)
        # The gradient of an eager leaf: casts behind it may have overflown.
        overflows |= inputs is None and not site.layers and self._causes.has_float16
        if kind:
            is_weight = name in self._causes.weights or has_gradient(tensor.array)
            cure = "restore a checkpoint" if is_weight else "clean the data"
        else:
            cure = self._causes.cure(site, inputs, overflows)
        layers = () if cure else site.layers
        phase, scaled = ("forward", "its input") if inputs is not None else ("backward", "the loss")
        keep = f"keep {shortened(layers or [site.node])} in float32, or scale {scaled} down"
        read = zip(site.names, inputs or ())
        known = tuple((n, Statistics.of(one)) for n, one in read if one and one.is_checkable)
        place = (site.block, site.node, site.operator, name, Statistics.of(tensor), known)
        kind = kind or ("overflow" if overflows else "nonfinite")
        return Finding(kind, phase, self._step, *place, cure or keep, layers)

    def _report(self, finding: Finding) -> None:
        """Add a finding to the results of this check."""
        self._found = finding
        self._findings.append(finding)

    def _end_pass(self) -> None:
        """End the forward or backward pass; with `on="raise"`, raise its finding."""
        found, self._found = self._found, None
        if found is not None and self._on == "raise":
            raise NumericsError(found)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._reads.clear()
        if error[0] is None:
            # The overflow of a gradient that no later step has shown to be harmless.
            found, self._overflow = self._overflow, None
            if found is not None:
                self._report(found)
            self._end_pass()

    # ------------------------------------------------------------------ patches

    def patches(self) -> Sequence[Patch]:
        """Return the patches that run the check after operators, backward passes and updates."""
        return [
            *super().patches(),
            *(patch_over(one, "backward", self._run_backward) for one in _BACKWARD),
            patch_over(autograd, "grad", self._run_backward),
            patch_over(Trainer, "_update", self._update),
            patch_over(module.Module, "update", self._update),
        ]


@checked_call
def check_numerics(
    on: str = "raise", skip: str | Iterable[str] | None = None
) -> ContextManager[NumericsCheck]:
    """Find the first operator in a `with` block whose values become Inf or NaN.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0])) * 2
    >>> check.first.operator, check.first.statistics.nan
    ('log', 1)

    An operator is reported if its inputs are finite and its output is not. Operators that only pass
    on Inf or NaN are not reported. A finding hides all later findings of the same pass, so name the
    operators of harmless findings in `skip`.

    Parameters
    ----------
    on : str, default "raise"
        "raise" raises a `NumericsError` at the first finding. "collect" only collects the findings
        in the check that the context yields.
    skip : str or list of str, optional
        Names of operators, blocks or nodes whose values are right by definition; * and ? stand
        for any characters.

    The context yields the check. Its `findings` are the first finding of each pass through the
    program, and `first` is the first of all findings, or None. Printing the check gives a line for
    each finding. A check without findings is false. A finding has `kind`, `phase` ("forward" or
    "backward"), `step`, `block`, `node`, `operator`, `tensor`, the `statistics` of the tensor
    (`dtype`, `shape`, the numbers of `nan` and `inf`, how many of these are `negative`, and
    `minimum`, `maximum` and `mean` of the finite values), `inputs`: names and statistics of the
    operator's inputs, `cure`: what to change, and `fp32_layers`: if the precision is the cause in a
    graph, the operators to keep in float32, as the argument of that name of `Policy.override` takes
    them.

    The cure is one of precision if the operator computes finite values from the same inputs in
    float32. The check runs it again for that, outside of autograd's record. It does not run loops,
    custom operators and Dropout again: their cure says how to find out. The learning rate is the
    cause if a weight has grown more than eightfold in at most 100 steps.

    The check finds operators and casts that compute Inf or NaN, and inputs and parameters that
    contain Inf or NaN. The check takes an infinity for a mask if the infinity is an argument of
    the operator, or if an input contains -Inf. A mask is reported only if it leads to NaN.

    After a backward pass the check names the first operator in a graph whose gradient is not
    finite. In eager code the check looks at parameters and arrays with `attach_grad` whose gradient
    is not finite. Of these arrays the check names the one that the forward pass read last, and the
    operator that read it. If a gradient overflows in a 16-bit dtype, the check waits until the end
    of the step. The check does not report the overflow if the loss scale can fall and a later step
    is finite, as in the first steps of a run.

    A pass through the program ends with its backward pass, and in inference with the next call of a
    block. Results of `autograd.grad` in eager code are not checked.

    Inside the context, hybridized blocks run under MXNet's monitor, without `static_alloc` and
    without hooks of `register_op_hook`. The check's monitor replaces the monitor of a module's
    executor, and the executor stays a little slower afterwards. A loop's body is one node. Steps
    count from 1, and a skipped update ends a step too. In training, results may differ in the last
    bits.

    Cost: the check reads each value back. A training step of ResNet-18 takes 1.1 to 1.3 times as
    long, a step of a small net longer. Outside the context there is no cost.
    """
    if on not in _ON:
        raise ArgumentError(f"on must be {one_of(_ON)}, not {shown(on)}")
    return NumericsCheck(on, [skip] if isinstance(skip, str) else name_list("skip", skip))
