"""The Symbol-level patch: rewrites graphs when they are bound, and again when they are reshaped.

Only when a symbol is bound are its dtypes and device known. The graphs that users hold and save
stay the plain ones. An executor whose graph was rewritten keeps how, since a rewrite may have read
shapes: for others it is made again.

An executor's own backward pass scales no loss, and can skip no update: what it would train in
float16 stays in float32, but where the caller scales (`scaled_executors`).
"""

import ctypes
import functools
import inspect
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import (
    AbstractSet,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
)

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.context import Context
from mxnet.executor import Executor
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..framework.arrays import dtypes_of
from ..framework.machine import device_kind
from ..framework.patching import Patch
from ..graph.casts.insert import own_marks, rewritten_graph, runnable_symbol
from ..graph.gradients import trained_graph
from ..graph.ir import LOOPS, Graph, Shape, Usage, argument_dtypes
from ..graph.recognise import recognised, warn_of_way
from ..graph.speed.fusible import with_barriers
from ..graph.speed.shape_rules import Choices, choose
from ..policy.active import current_policy
from ..policy.policy import Policy
from ..policy.regions import policy_outside
from .announcements import announce_unscaled_executors

__all__ = ["patches", "scaled_executors"]

#: Whether whoever binds scales the losses of what is bound.
_scaled: "ContextVar[bool]" = ContextVar("mxamp_scaled_executors", default=False)

UP_SIZED = (
    "reshape to {new} needs more memory for {name!r} than its {old}: bind the largest shape first, "
    "or give allow_up_sizing=True"
)
UNSPECIFIED = (
    "reshape changes the shape of {name!r}, which is not among its arguments, from {old} to {new}: "
    "give its shape, or partial_shaping=True"
)
INCOMPLETE = "reshape can't infer the shapes of all arguments from {given}: give more of them"


def patches() -> List[Patch]:
    """Return the patches that make bound graphs follow the policy in force."""
    return [
        Patch(Symbol, "bind", _build_bind),
        Patch(Symbol, "simple_bind", _build_simple_bind),
    ]


def _build_bind(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bind(
        self: Symbol,
        ctx: Context,
        args: Any,
        args_grad: Any = None,
        grad_req: Any = "write",
        *rest: Any,
        **options: Any,
    ) -> Any:
        names = self.list_arguments()
        frozen = _without_gradients(names, grad_req, args_grad)
        policy = _policy_for(self, ctx, frozen)
        if policy is None:
            return original(self, ctx, args, args_grad, grad_req, *rest, **options)
        arrays = dict(zip(names, args)) if isinstance(args, (list, tuple)) else dict(args)
        usage = Usage(
            dtypes=_named_dtypes(arrays),
            accumulated=_accumulated(names, grad_req),
            training=len(frozen) < len(names),
        )
        binding = _Binding(self, policy, usage, frozen)
        symbol = binding.symbol_for({name: array.shape for name, array in arrays.items()})
        return binding.bound(original(symbol, ctx, args, args_grad, grad_req, *rest, **options))

    return bind


def _build_simple_bind(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def simple_bind(
        self: Symbol,
        ctx: Context,
        grad_req: Any = "write",
        type_dict: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        names = self.list_arguments()
        frozen = _without_gradients(names, grad_req)
        policy = _policy_for(self, ctx, frozen)
        if policy is None:
            return original(self, ctx, grad_req, type_dict, *rest, **options)
        usage = Usage(
            dtypes=argument_dtypes(self, type_dict),
            accumulated=_accumulated(names, grad_req),
            training=len(frozen) < len(names),
        )
        binding = _Binding(self, policy, usage, frozen)
        shapes = {name: options[name] for name in names if name in options}
        symbol = binding.symbol_for(shapes)
        if symbol is not self:
            # Behind a cast MXNet can't infer an argument's dtype any more. It takes no bfloat16
            # here, which variables say themselves.
            named = {name: one for name, one in usage.dtypes.items() if one != "bfloat16"}
            type_dict = {**named, **(type_dict or {})}
            options = {**_inferred_shapes(self, shapes), **options}
        return binding.bound(original(symbol, ctx, grad_req, type_dict, *rest, **options))

    return simple_bind


class _Binding:
    """How a symbol is rewritten for an executor: for its own shapes, and for those of a reshape."""

    def __init__(
        self, symbol: Symbol, policy: Policy, usage: Usage, frozen: AbstractSet[str]
    ) -> None:
        read = Graph.from_symbol(symbol)
        warn_of_way(policy)
        self._symbol = symbol
        self._usage = replace(usage, off=current_policy() is None)
        self._graph = trained_graph(read, frozen) if usage.training else read
        self._is_plain = self._graph is read
        self._policy = recognised(policy, self._graph)
        self._symbols: Dict[Choices, Symbol] = {}
        self.has_loops = not LOOPS.isdisjoint(self._graph.operators)

    def symbol_for(self, shapes: Mapping[str, Shape]) -> Symbol:
        """Return the symbol rewritten for arguments of these shapes; itself if nothing changes."""
        usage = replace(self._usage, shapes=dict(shapes))
        choices = choose(self._graph, self._policy, usage)
        if choices not in self._symbols:
            self._symbols[choices] = self._rewritten(usage, choices)
        return self._symbols[choices]

    def _rewritten(self, usage: Usage, choices: Choices) -> Symbol:
        graph = rewritten_graph(self._graph, self._policy, usage, choices)
        if not usage.training:
            graph = with_barriers(graph)[0]  # MXNet fuses operators in executors without gradients
        if graph is self._graph and self._is_plain:
            return self._symbol
        return runnable_symbol(graph, type(self._symbol), self._graph.input_names)

    def bound(self, executor: Executor) -> Executor:
        """Return an executor of a rewritten symbol as one of the user's symbol."""
        executor._symbol = self._symbol
        executor.__class__ = _RewrittenExecutor
        executor._binding = self
        return executor


class _RewrittenExecutor(Executor):  # type: ignore[misc]
    """An executor of a rewritten graph, also after mixed precision was switched off."""

    _binding: _Binding

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any
    ) -> Executor:
        """Return an executor for other shapes, as MXNet's does: its graph is rewritten for them."""
        names, states = self._symbol.list_arguments(), self._symbol.list_auxiliary_states()
        # As MXNet's, which takes no notice of names that the symbol lacks.
        given = {name: shape for name, shape in kwargs.items() if name in names}
        shapes, _, state_shapes = self._symbol.infer_shape(**given)
        if shapes is None:
            raise ArgumentError(INCOMPLETE.format(given=given))
        new = dict(zip(names, shapes))

        def fitting(name: str, array: NDArray, shape: Shape) -> NDArray:
            if array.shape == shape:
                return array
            words = {"name": name, "old": array.shape, "new": shape}
            if name not in given and not partial_shaping:
                raise ArgumentError(UNSPECIFIED.format(**words))
            size = math.prod(shape)
            if size <= array.size:
                # A view: what is held, or is added to, stays, as with MXNet's.
                return array.reshape((-1,))[:size].reshape(shape)
            if not allow_up_sizing:
                raise ArgumentError(UP_SIZED.format(**words))
            return mx.nd.zeros_like(mx.nd.empty(shape, self._ctx, array.dtype))

        arrays = [fitting(name, self.arg_dict[name], new[name]) for name in names]
        gradients = {
            name: fitting(name, array, new[name])
            for name, array in zip(names, self.grad_arrays or ())
            if array is not None
        }
        states_now = [
            fitting(name, self.aux_dict[name], shape) for name, shape in zip(states, state_shapes)
        ]
        symbol = self._binding.symbol_for(new)
        executor = inspect.unwrap(type(symbol).bind)(  # MXNet's own: the symbol is rewritten
            symbol,
            self._ctx,
            arrays,
            gradients or None,
            self._grad_req,
            states_now,
            group2ctx=self._group2ctx,
            # Loops in executors that share memory read what the other one has left there.
            shared_exec=None if self._binding.has_loops else self,
        )
        executor.grad_arrays = [gradients.get(name) for name in names]
        if self._monitor_callback is not None and self._monitor_all is not None:
            executor._monitor_callback, executor._monitor_all = (
                self._monitor_callback,
                self._monitor_all,
            )
            monitor_all = ctypes.c_int(self._monitor_all)
            set_callback = _LIB.MXExecutorSetMonitorCallbackEX
            check_call(set_callback(executor.handle, self._monitor_callback, None, monitor_all))
        return self._binding.bound(executor)


@contextmanager
def scaled_executors() -> Iterator[None]:
    """Lower executors that are bound inside in float16 too: the caller scales their losses."""
    before = _scaled.set(True)
    try:
        yield
    finally:
        _scaled.reset(before)


def _policy_for(symbol: Symbol, ctx: Any, frozen: AbstractSet[str]) -> Optional[Policy]:
    """Return the policy in force, if it is for the kind of device that a symbol is bound to.

    Where mixed precision is off, it is that of the symbol's own regions. None too for a symbol that
    is trained, all but the variables `frozen`, in float16 unscaled.
    """
    policy = current_policy() or policy_outside(own_marks(symbol))
    if policy is None or not isinstance(ctx, Context) or device_kind(ctx) != policy.device:
        return None
    trained = policy.target_dtype == "float16" and not frozen >= set(symbol.list_arguments())
    if trained and policy.lowers and not _scaled.get():
        announce_unscaled_executors()
        return None
    return policy


def _inferred_shapes(symbol: Symbol, known: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the shapes of a symbol's arguments, as far as they follow from those `known`."""
    inferred, _, _ = symbol.infer_shape_partial(**known)
    return {name: shape for name, shape in zip(symbol.list_arguments(), inferred or ()) if shape}


def _named_dtypes(arrays: Mapping[str, Any]) -> Dict[str, str]:
    given = {name: array for name, array in arrays.items() if isinstance(array, NDArray)}
    return dict(zip(given, dtypes_of(list(given.values()))))


def _accumulated(names: Sequence[str], grad_req: Any) -> FrozenSet[str]:
    """Return the arguments whose gradients are added up."""
    return frozenset(name for name, req in _requests(names, grad_req).items() if req == "add")


def _without_gradients(names: Sequence[str], grad_req: Any, args_grad: Any = ()) -> FrozenSet[str]:
    """Return the arguments that get no gradients: all where `args_grad` is None."""
    if args_grad is None:
        return frozenset(names)
    requests = _requests(names, grad_req)
    given = args_grad if isinstance(args_grad, Mapping) else dict(zip(names, args_grad or ()))
    return frozenset(
        name
        for name in names
        if requests.get(name, "null") == "null" or (given and given.get(name) is None)
    )


def _requests(names: Sequence[str], grad_req: Any) -> Mapping[str, str]:
    """Return what is asked for each argument's gradient, by name."""
    if isinstance(grad_req, str):
        return dict.fromkeys(names, grad_req)
    return grad_req if isinstance(grad_req, Mapping) else dict(zip(names, grad_req))
