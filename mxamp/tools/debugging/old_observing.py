"""Observers of everything that runs: eager calls, mxamp's own casts, graphs and executors.

An `Observer` is a set of patches on top of those of mixed precision. They are in place only while
the observer is open, so they cost nothing otherwise.
"""

import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, ClassVar, Iterator, List, NamedTuple, Optional, Sequence

from mxnet.executor import Executor
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.numpy import _api_internal
from mxnet.symbol import Symbol

from ...framework import arrays
from ...framework.operators import Operator, by_handle, resolve
from ...framework.patching import Patch, PatchSet, wrapping
from ...patches.cached_op import PolicyCachedOp, install_policy_op, restore_cached_op
from ...patches.eager import INVOKE_MODULES, decision_for
from ...policy.active import current_policy
from ...policy.decision import Decision

__all__ = ["Call", "Observer", "Run", "patch_over", "probe_copy"]


class _ProbeCopy(threading.local):
    """Per thread: MXNet's copy of the gradient that a probe's backward returns, not observed."""

    expected = False  #: the probe's backward has just returned, and the next call is the copy
    running = False


#: Global, because an observer of any kind must skip the copy that `check_numerics` causes.
probe_copy = _ProbeCopy()


class Call(NamedTuple):
    """The operator and arguments of an eager call."""

    operator: Operator
    inputs: Sequence[NDArray]
    keys: Sequence[str] = ()
    values: Sequence[Any] = ()
    out: Any = None

    def decision(self) -> Optional[Decision]:
        """Return the casts that mixed precision adds to this call; None if it adds none."""
        return decision_for(self.operator.handle, self.inputs, self.keys, self.values)


#: Makes the observed call on the given inputs, and returns its outputs.
Run = Callable[[Sequence[NDArray]], Any]


class Observer(PatchSet):
    """Observes everything that runs between `open` and `close`, in all threads of the process.

    A subclass overrides the `on_` methods that it needs. Each takes `run`, which makes the call,
    and returns the call's result. The defaults only make the call.
    """

    #: The open observers of the process, in opening order, for `notify_earlier_observers`.
    _open_observers: ClassVar[List["Observer"]] = []

    def __init__(self) -> None:
        super().__init__()
        #: Its attribute `op` is the cached op whose graph this thread has passed to `on_graph`.
        self.current = threading.local()
        # Blocks whose cached op was replaced by a `PolicyCachedOp` for the observation only.
        self._followed: "weakref.WeakSet[HybridBlock]" = weakref.WeakSet()

    def patches(self) -> Sequence[Patch]:
        """Return one patch for each place where calls converge."""
        invoke = functools.partial(self._invoke, self.on_call)
        return [
            *(patch_over(module, "_imperative_invoke", invoke) for module in INVOKE_MODULES),
            patch_over(_api_internal, "tensordot", self._tensordot),
            patch_over(arrays, "invoke", functools.partial(self._invoke, self.on_cast)),
            patch_over(HybridBlock, "_call_cached_op", self._call_block),
            patch_over(PolicyCachedOp, "__call__", self._call_graph),
            patch_over(Executor, "forward", self._forward),
            patch_over(Executor, "backward", self._backward),
        ]

    def open(self) -> None:
        """Install the patches, on top of those of other open observers."""
        with self._lock:
            super().open()
            if self not in self._open_observers:
                self._open_observers.append(self)

    def close(self) -> None:
        """Remove the patches, and restore the blocks' cached ops."""
        with self._lock:
            super().close()
            if self in self._open_observers:
                self._open_observers.remove(self)
        for block in list(self._followed):
            restore_cached_op(block)
        self._followed.clear()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context in which calls are observed."""
        self.open()
        try:
            yield
        finally:
            self.close()

    # ------------------------------------------------------------------ for subclasses

    def on_call(self, call: Call, run: Run) -> Any:
        """Observe an eager call of the program; return its outputs."""
        return run(call.inputs)

    def on_cast(self, call: Call, run: Run) -> Any:
        """Observe a cast or copy that mxamp adds to an eager call; return its output."""
        return run(call.inputs)

    def on_graph(self, symbol: Symbol, inputs: Sequence[NDArray], run: Callable[[], Any]) -> Any:
        """Observe a call of a hybridized block's graph, casts included; return its outputs.

        An observer that runs the graph itself, not by `run`, calls `notify_earlier_observers`.
        """
        return run()

    def on_forward(self, executor: Executor, training: bool, run: Callable[[], Any]) -> Any:
        """Observe the forward pass of a bound symbol or a module; return its outputs."""
        return run()

    def on_backward(self, executor: Executor, heads: Any, run: Callable[[], Any]) -> Any:
        """Observe a bound symbol's backward pass from `heads`, the gradients of its outputs."""
        return run()

    def note_graph(self, symbol: Symbol, inputs: Sequence[NDArray]) -> None:
        """Observe a graph that a later observer runs itself, so that `on_graph` is not called."""

    def notify_earlier_observers(self, symbol: Symbol, inputs: Sequence[NDArray]) -> None:
        """Call `note_graph` of the observers that were opened before this one."""
        with self._lock:
            earlier = self._open_observers[: self._open_observers.index(self)]
        for observer in earlier:
            observer.note_graph(symbol, inputs)

    # ------------------------------------------------------------------ the patches

    @staticmethod
    def _invoke(
        observe: Callable[[Call, Run], Any],
        original: Callable[..., Any],
        handle: int,
        inputs: Sequence[NDArray],
        keys: Any,
        values: Any,
        out: Any,
        *rest: Any,
    ) -> Any:
        """Make an eager call through `observe`, except MXNet's copy of a probe's gradient."""
        operator = by_handle()[handle]
        if probe_copy.expected:
            probe_copy.expected = False
            if operator.name == "_copyto":
                probe_copy.running = True
                try:
                    return original(handle, inputs, keys, values, out, *rest)
                finally:
                    probe_copy.running = False
        if probe_copy.running:
            return original(handle, inputs, keys, values, out, *rest)
        call = Call(operator, inputs, keys, values, out)
        return observe(call, lambda given: original(handle, given, keys, values, out, *rest))

    def _tensordot(
        self, original: Callable[..., Any], a: NDArray, b: NDArray, axes: Any
    ) -> NDArray:
        """Call `mx.np.tensordot`, which MXNet invokes on its own path, through `on_call`."""
        call = Call(resolve("_npi_tensordot"), [a, b])
        return self.on_call(call, lambda given: original(*given, axes))

    def _call_block(self, original: Callable[..., Any], block: HybridBlock, *args: Any) -> Any:
        """Call a hybridized block with a cached op whose graph `on_graph` gets."""
        if current_policy() is None and not isinstance(block._cached_op, PolicyCachedOp):
            install_policy_op(block, args)
            self._followed.add(block)
        return original(block, *args)

    def _call_graph(
        self, original: Callable[..., Any], op: PolicyCachedOp, *args: NDArray, **options: Any
    ) -> Any:
        """Run a hybridized block's graph through `on_graph`."""
        symbol, inputs = op.graph_of(args)
        self.current.op = op
        return self.on_graph(symbol, inputs, lambda: original(op, *args, **options))

    def _forward(
        self,
        original: Callable[..., Any],
        executor: Executor,
        /,
        is_train: bool = False,
        **inputs: Any,
    ) -> Any:
        """Run an executor's forward pass through `on_forward`."""
        return self.on_forward(
            executor, bool(is_train), lambda: original(executor, is_train, **inputs)
        )

    def _backward(
        self,
        original: Callable[..., Any],
        executor: Executor,
        out_grads: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run an executor's backward pass through `on_backward`."""
        return self.on_backward(
            executor, out_grads, lambda: original(executor, out_grads, *args, **options)
        )


def patch_over(owner: Any, name: str, function: Callable[..., Any]) -> Patch:
    """Return a patch over all others whose `function` gets the original as first argument."""
    return Patch(owner, name, wrapping(function), on_top=True)
