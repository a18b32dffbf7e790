"""Patches for executors: add a policy's casts to a symbol when it is bound or reshaped.

Dtypes and device are known only when a symbol is bound. The program's symbol is never changed. A
rewrite may depend on shapes, so a reshaped executor gets a newly rewritten graph.

Executors in training stay in float32 under a float16 policy: their backward pass scales no loss and
skips no update. Callers that scale the losses themselves bind inside `scaled_executors`.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Hashable, Iterator, Mapping, Sequence, Union

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.executor import Executor
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..backends import backend_of
from ..errors import ArgumentError
from ..framework.arrays import dtypes_of
from ..framework.machine import Dtype, device_kind
from ..framework.operators import handle_of, with_trait
from ..framework.patching import Original
from ..graph.casts.insert import region_marks, rewritten_graph, runnable_symbol
from ..graph.gradients import trained_graph
from ..graph.ir import LOOPS, Graph, Shape, Usage, argument_dtypes
from ..policy import active, regions
from ..policy.policy import Policy
from ..policy.rules import custom_classes
from .announcements import UNSCALED_EXECUTORS, record_layers, warn_once

logger = logging.getLogger("mxamp")

#: Arrays and values of `grad_req` of a symbol's arguments, in their order or by name.
Arrays = Union[Sequence[Any], Mapping[str, Any]]
GradReq = Union[str, Sequence[str], Mapping[str, str]]

#: Whether the code that binds scales the losses of its executors.
_scaled: ContextVar[bool] = ContextVar("mxamp_scaled_executors", default=False)

#: The handles of operators whose nodes can't be marked with a region.
_UNMARKED = frozenset(map(handle_of, with_trait("calls_python")))

NOT_REACHED = (
    "autocast(enabled=False) around the custom operator %r only affects eager calls: MXNet "
    "passes the attributes of a node to the operator's constructor, so the node can't be marked. "
    "In graphs it computes in 16 bits, as it was registered"
)
RESHAPED = "reshape changes the shape of {name!r} from {old} to {new}: give {option}=True"


def patched_bind(
    original: Original,
    self: Symbol,
    ctx: mx.Context,
    args: Arrays,
    args_grad: Arrays | None = None,
    grad_req: GradReq = "write",
    *rest: object,
    **options: object,
) -> object:
    """Bind a symbol as `Symbol.bind` does, with the current policy's casts in its graph."""
    names = self.list_arguments()
    grad_reqs = _grad_reqs(names, grad_req, args_grad)
    policy = _policy_to_bind(self, ctx, grad_reqs)
    if policy is None:
        return original(self, ctx, args, args_grad, grad_req, *rest, **options)
    arrays = dict(args if isinstance(args, Mapping) else zip(names, args))
    given = {name: array for name, array in arrays.items() if isinstance(array, NDArray)}
    dtypes = dict(zip(given, dtypes_of(list(given.values()))))
    binding = _Binding(self, policy, grad_reqs, dtypes)
    symbol = binding.symbol_for({name: array.shape for name, array in arrays.items()})
    call = partial(original, symbol, ctx, args, args_grad, grad_req, *rest, **options)
    return binding.bind(call, rest, options)


def patched_simple_bind(
    original: Original,
    self: Symbol,
    ctx: mx.Context,
    grad_req: GradReq = "write",
    type_dict: Mapping[str, Dtype] | None = None,
    *rest: object,
    **options: Any,
) -> object:
    """Bind as `Symbol.simple_bind` does, with the current policy's casts in the graph."""
    names = self.list_arguments()
    grad_reqs = _grad_reqs(names, grad_req)
    policy = _policy_to_bind(self, ctx, grad_reqs)
    if policy is None:
        return original(self, ctx, grad_req, type_dict, *rest, **options)
    dtypes = argument_dtypes(self, type_dict)
    binding = _Binding(self, policy, grad_reqs, dtypes)
    shapes = {name: options[name] for name in names if name in options}
    symbol = binding.symbol_for(shapes)
    if symbol is not self:
        # MXNet can't infer dtypes and shapes of arguments that a cast reads. bfloat16 is left
        # out, since type_dict can't hold it: bfloat16 variables declare their dtype.
        named = {name: one for name, one in dtypes.items() if one != "bfloat16"}
        type_dict = {**named, **(type_dict or {})}
        inferred, _, _ = self.infer_shape_partial(**shapes)
        known = {name: shape for name, shape in zip(names, inferred or ()) if shape}
        options = {**known, **options}
    call = partial(original, symbol, ctx, grad_req, type_dict, *rest, **options)
    return binding.bind(call, rest, options)


class _Binding:
    """A symbol that is bound under a policy, with a cache of its rewritten symbols by shape."""

    def __init__(
        self, symbol: Symbol, policy: Policy, grad_reqs: dict[str, str], dtypes: dict[str, str]
    ) -> None:
        self._read = Graph.from_symbol(symbol)
        frozen = frozenset(name for name, asked in grad_reqs.items() if asked == "null")
        accumulated = frozenset(name for name, asked in grad_reqs.items() if asked == "add")
        training, off = len(frozen) < len(grad_reqs), active.current_policy() is None
        self._symbol, self._policy = symbol, policy
        self._usage = Usage(dtypes, accumulated=accumulated, training=training, regions_only=off)
        self._graph = trained_graph(self._read, frozen) if training else self._read
        record_layers(policy, self._read)
        self._backend = backend_of(policy.device)
        self._symbols: dict[Hashable, Symbol] = {}
        self.has_loops = not LOOPS.isdisjoint(self._graph.operators)

    def symbol_for(self, shapes: Mapping[str, Shape]) -> Symbol:
        """Return the symbol to run for these argument shapes: with casts if it needs any."""
        usage = replace(self._usage, shapes=dict(shapes))
        choices = self._backend.choose(self._graph, self._policy, usage)
        if choices not in self._symbols:
            graph = rewritten_graph(self._graph, self._policy, usage, choices)
            if not usage.training:
                graph = self._backend.without_wrong_fusion(graph)
            symbol = self._symbol
            if graph is not self._read:
                symbol = runnable_symbol(graph, type(symbol), self._graph.input_names)
            self._symbols[choices] = symbol
        return self._symbols[choices]

    def bind(self, call: Callable[[], Executor], rest: Sequence[Any], options: Any) -> Executor:
        """Return the executor that `call` binds; its symbol is the original one, without casts.

        `rest` and `options` are the last arguments of `bind` or `simple_bind`, with `group2ctx`.
        """
        with self._backend.binding(rest[1] if len(rest) > 1 else options.get("group2ctx")):
            executor = call()
        executor.__class__ = _RewrittenExecutor
        vars(executor).update(_symbol=self._symbol, _binding=self)
        return executor


class _RewrittenExecutor(Executor):
    """An executor bound with a policy's casts; they stay when mixed precision is turned off."""

    _binding: _Binding

    def reshape(
        self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: object
    ) -> Executor:
        """Return an executor for other shapes, as `Executor.reshape` does, with new casts."""
        names, states = self._symbol.list_arguments(), self._symbol.list_auxiliary_states()
        # Ignore names that the symbol lacks, as MXNet's `reshape`.
        given = {name: shape for name, shape in kwargs.items() if name in names}
        shapes, _, state_shapes = self._symbol.infer_shape(**given)
        if shapes is None:
            raise ArgumentError(f"reshape can't infer the shapes of all arguments from {given}")
        new = dict(zip(names, shapes))

        def resized(name: str, array: NDArray, shape: Shape) -> NDArray:
            is_free = name in given or partial_shaping
            return _resized(name, array, shape, self._ctx, is_free, allow_up_sizing)

        arrays = [resized(name, self.arg_dict[name], new[name]) for name in names]
        pairs = zip(names, self.grad_arrays or ())
        gradients = {name: resized(name, one, new[name]) for name, one in pairs if one is not None}
        states_now = [resized(n, self.aux_dict[n], shape) for n, shape in zip(states, state_shapes)]
        symbol = self._binding.symbol_for(new)
        bind = inspect.unwrap(type(symbol).bind)  # MXNet's own: the symbol is rewritten
        arguments = symbol, self._ctx, arrays, gradients or None, self._grad_req, states_now
        # Loops in executors that share memory read stale values of the other executor.
        shared = None if self._binding.has_loops else self
        options = {"group2ctx": self._group2ctx, "shared_exec": shared}
        executor = self._binding.bind(partial(bind, *arguments, **options), (), options)
        executor.grad_arrays = [gradients.get(name) for name in names]
        if self._monitor_callback is not None and self._monitor_all is not None:
            callback, monitor_all = self._monitor_callback, self._monitor_all
            executor._monitor_callback, executor._monitor_all = callback, monitor_all
            set_callback = _LIB.MXExecutorSetMonitorCallbackEX
            check_call(set_callback(executor.handle, callback, None, ctypes.c_int(monitor_all)))
        return executor


def _resized(
    name: str, array: NDArray, shape: Shape, ctx: mx.Context, is_free: bool, may_grow: bool
) -> NDArray:
    """Return an executor's array in a new shape: a view, or zeros if larger; raise if forbidden."""
    if array.shape == shape:
        return array
    size, option = math.prod(shape), "allow_up_sizing" if is_free else "partial_shaping"
    if is_free and size <= array.size:
        # A view, as in MXNet's `reshape`: values and accumulated gradients stay.
        return array.reshape((-1,))[:size].reshape(shape)
    if not (is_free and may_grow):
        raise ArgumentError(RESHAPED.format(name=name, old=array.shape, new=shape, option=option))
    return mx.nd.zeros_like(mx.nd.empty(shape, ctx, array.dtype))


@contextmanager
def scaled_executors() -> Iterator[None]:
    """Return a context in which executors may train in float16: the caller scales the loss."""
    before = _scaled.set(True)
    try:
        yield
    finally:
        _scaled.reset(before)


def _policy_to_bind(symbol: Symbol, ctx: object, grad_reqs: Mapping[str, str]) -> Policy | None:
    """Return the policy to bind a symbol under; None if its graph should get no casts.

    This is the policy in force, else the policy of the symbol's regions. None on other devices than
    the policy's, and for training in float16 with unscaled losses.
    """
    policy = active.current_policy() or regions.policy_for_regions(region_marks(symbol))
    if policy is None or not isinstance(ctx, mx.Context) or device_kind(ctx) != policy.device:
        return None
    trained = policy.target_dtype == "float16" and {*grad_reqs.values()} - {"null"}
    if trained and policy.lowers and not _scaled.get():
        warn_once("executors", UNSCALED_EXECUTORS)
        return None
    return policy


def _grad_reqs(names: Sequence[str], grad_req: GradReq, args_grad: Any = ()) -> dict[str, str]:
    """Return the `grad_req` of each argument by name; "null" if it gets no gradient array."""
    if isinstance(grad_req, str):
        asked = dict.fromkeys(names, grad_req)
    else:
        asked = dict(grad_req if isinstance(grad_req, Mapping) else zip(names, grad_req))
    given = args_grad if isinstance(args_grad, Mapping) else dict(zip(names, args_grad or ()))
    without = args_grad is None or bool(given)
    return {n: "null" if without and given.get(n) is None else asked.get(n, "null") for n in names}


# ---------------------------------------------------------------------- symbols made in a region


def patched_symbol_creator(
    original: Original, handle: int, args: object, kwargs: Any, keys: Any, vals: Any, *rest: object
) -> object:
    """Create a symbol's node, with an attribute that records the current `autocast` region."""
    mark = active.current_mark()
    if mark is not None and handle in _UNMARKED:
        # MXNet passes every attribute of such a node to the operator's constructor.
        op_type = dict(zip(keys, vals)).get("op_type", "")
        if mark == active.OFF and dict(custom_classes()).get(op_type) == "low":
            logger.warning(NOT_REACHED, op_type)
    elif mark is not None:
        active.process.has_marked_nodes |= mark != active.OFF
        keys, vals = [*keys, regions.REGION], [*vals, mark]
    return original(handle, args, kwargs, keys, vals, *rest)
