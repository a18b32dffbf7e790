"""Observers of everything that runs: eager calls, mxamp's own casts, graphs and executors.

An `Observer` is a set of patches on top of those of mixed precision. They are in place only while
the observer is open, so they cost nothing otherwise.
"""

import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, ClassVar, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mxnet.executor import Executor
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.symbol import Symbol

from ...framework import arrays
from ...framework.operators import Operator, by_handle, resolve
from ...framework.patching import Patch, PatchSet
from ...patches.cached_op import PolicyCachedOp, follow, unfollow
from ...patches.eager import INVOKE_MODULES, decision_for
from ...policy.active import current_policy
from ...policy.decision import Decision

__all__ = ["Call", "Observer", "probe_copy"]


class _ProbeCopy(threading.local):
    """MXNet's copy of the gradient that a probe's backward returned: no observer sees it."""

    follows = False  #: the probe's backward has just returned
    runs = False


probe_copy = _ProbeCopy()


class Call(NamedTuple):
    """An eager call of an operator, before it is made."""

    operator: Operator
    inputs: Sequence[NDArray]
    keys: Sequence[str] = ()
    values: Sequence[Any] = ()
    out: Any = None

    def decision(self) -> Optional[Decision]:
        """Return the casts that mixed precision adds to the call, or None."""
        return decision_for(self.operator.handle, self.inputs, self.keys, self.values)


#: Makes the observed call on these inputs, and returns its outputs.
Run = Callable[[Sequence[NDArray]], Any]


class Observer(PatchSet):
    """Observes everything that runs between `open` and `close`, in all threads of the process.

    A subclass overrides the `on_` methods that it needs. Each takes `run`, which makes the call,
    and returns the call's result. The defaults only make the call.
    """

    _opened_ones: ClassVar[List["Observer"]] = []

    def __init__(self) -> None:
        super().__init__()
        #: `op`, by thread: the cached op whose graph `on_graph` gets.
        self.current = threading.local()
        # Blocks whose cached op was replaced by a `PolicyCachedOp` for the observation only.
        self._followed: "weakref.WeakSet[HybridBlock]" = weakref.WeakSet()

    def patches(self) -> Sequence[Patch]:
        """Return one patch for each place where calls converge."""
        places: List[Tuple[Any, str, Callable[..., Any]]] = [
            *((module, "_imperative_invoke", self._build_invoke) for module in INVOKE_MODULES),
            (_api_internal, "tensordot", self._build_tensordot),
            (arrays, "invoke", self._build_cast),
            (HybridBlock, "_call_cached_op", self._build_block),
            (PolicyCachedOp, "__call__", self._build_graph),
            (Executor, "forward", self._build_forward),
            (Executor, "backward", self._build_backward),
        ]
        return [Patch(*place, on_top=True) for place in places]

    def open(self) -> None:
        """Install the patches, on top of those of other open observers."""
        with self._lock:
            super().open()
            if self not in self._opened_ones:
                self._opened_ones.append(self)

    def close(self) -> None:
        """Remove the patches, and restore the blocks' cached ops."""
        with self._lock:
            super().close()
            if self in self._opened_ones:
                self._opened_ones.remove(self)
        for block in list(self._followed):
            unfollow(block)
        self._followed.clear()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context that observes the code in it."""
        self.open()
        try:
            yield
        finally:
            self.close()

    # ------------------------------------------------------------------ for subclasses

    def on_call(self, call: Call, run: Run) -> Any:
        """Observe an eager call of the program."""
        return run(call.inputs)

    def on_cast(self, call: Call, run: Run) -> Any:
        """Observe a cast or copy that mxamp adds to such a call."""
        return run(call.inputs)

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Observe a hybridized block's graph, with the casts in it, and all its inputs.

        An observer that runs the graph itself, not by `run`, calls `tell_others`.
        """
        return run()

    def on_forward(self, executor: Executor, training: bool, run: Callable[[], Any]) -> Any:
        """Observe the forward pass of a bound symbol or a module."""
        return run()

    def on_backward(self, executor: Executor, heads: Any, run: Callable[[], Any]) -> Any:
        """Observe its backward pass from the gradients `heads` of its outputs."""
        return run()

    def note_graph(self, symbol: Symbol, inputs: Sequence[NDArray]) -> None:
        """Take note of a graph that another observer runs itself."""

    def tell_others(self, symbol: Symbol, inputs: Sequence[NDArray]) -> None:
        """Call `note_graph` of the observers below this one."""
        with self._lock:
            below = self._opened_ones[: self._opened_ones.index(self)]
        for observer in below:
            observer.note_graph(symbol, inputs)

    # ------------------------------------------------------------------ the patches

    def _build_invoke(
        self, original: Callable[..., Any], see: Optional[Callable[[Call, Run], Any]] = None
    ) -> Callable[..., Any]:
        operators, see = by_handle(), see or self.on_call

        def _imperative_invoke(
            handle: int, inputs: Sequence[NDArray], keys: Any, values: Any, out: Any, *rest: Any
        ) -> Any:
            call = Call(operators[handle], inputs, keys, values, out)
            if probe_copy.follows:
                probe_copy.follows, probe_copy.runs = False, call.operator.name == "_copyto"
                try:
                    return _imperative_invoke(handle, inputs, keys, values, out, *rest)
                finally:
                    probe_copy.runs = False
            if probe_copy.runs:
                return original(handle, inputs, keys, values, out, *rest)
            return see(call, lambda given: original(handle, given, keys, values, out, *rest))

        return _imperative_invoke

    def _build_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._build_invoke(original, self.on_cast)

    def _build_tensordot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tensordot(a: NDArray, b: NDArray, axes: Any) -> NDArray:
            call = Call(resolve("_npi_tensordot"), [a, b])
            return self.on_call(call, lambda given: original(*given, axes))

        return tensordot

    def _build_block(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _call_cached_op(block: HybridBlock, *args: Any) -> Any:
            if current_policy() is None and not isinstance(block._cached_op, PolicyCachedOp):
                follow(block, args)
                self._followed.add(block)
            return original(block, *args)

        return _call_cached_op

    def _build_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(op: PolicyCachedOp, *args: NDArray, **options: Any) -> Any:
            symbol, inputs = op.graph_of(args)
            self.current.op = op
            return self.on_graph(symbol, inputs, lambda: original(op, *args, **options))

        return call

    def _build_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(executor: Executor, is_train: bool = False, **inputs: Any) -> Any:
            return self.on_forward(
                executor, bool(is_train), lambda: original(executor, is_train, **inputs)
            )

        return forward

    def _build_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(executor: Executor, out_grads: Any = None, *args: Any, **options: Any) -> Any:
            return self.on_backward(
                executor, out_grads, lambda: original(executor, out_grads, *args, **options)
            )

        return backward
