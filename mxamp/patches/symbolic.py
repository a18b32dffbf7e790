"""The Symbol-level patch: rewrites graphs when they are bound.

Only when a symbol is bound are its dtypes and device known. The graphs that users hold and save
stay the plain ones.

An executor's own backward pass scales no loss, and can skip no update: what it would train in
float16 stays in float32, but where the caller scales (`scaled_executors`).
"""

import functools
from contextlib import contextmanager
from contextvars import ContextVar
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

from mxnet.context import Context
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..framework.arrays import dtypes_of
from ..framework.patching import Patch
from ..graph.graph import Graph, argument_dtypes
from ..graph.recognise import recognised, warn_of_way
from ..graph.rewritten_symbol import rewritten_symbol
from ..graph.separate_biases import with_separate_biases
from ..graph.shape_rules import choose
from ..graph.usage import Usage
from ..policy.active import current_policy
from ..policy.policy import Policy
from .announcements import announce_unscaled_executors

__all__ = ["patches", "scaled_executors"]

#: Whether whoever binds scales the losses of what is bound.
_scaled: "ContextVar[bool]" = ContextVar("mxamp_scaled_executors", default=False)


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
        frozen = _without_gradients(self, grad_req, args_grad)
        policy, symbol = _policy_for(ctx, self, frozen), self
        if policy is not None:
            usage = _usage_of_arrays(self, args, args_grad, grad_req)
            symbol = _rewritten(self, policy, usage, frozen)
        executor = original(symbol, ctx, args, args_grad, grad_req, *rest, **options)
        executor._symbol = self
        return executor

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
        frozen = _without_gradients(self, grad_req)
        policy, symbol = _policy_for(ctx, self, frozen), self
        if policy is not None:
            usage = _usage_of_shapes(self, grad_req, type_dict, options)
            symbol = _rewritten(self, policy, usage, frozen)
            if symbol is not self:
                # Behind a cast MXNet can't infer an argument's dtype any more. It takes no bfloat16
                # here, which variables say themselves.
                named = {name: one for name, one in usage.dtypes.items() if one != "bfloat16"}
                type_dict = {**named, **(type_dict or {})}
                options = {**_inferred_shapes(self, usage.shapes), **options}
        executor = original(symbol, ctx, grad_req, type_dict, *rest, **options)
        executor._symbol = self
        return executor

    return simple_bind


@contextmanager
def scaled_executors() -> Iterator[None]:
    """Lower executors that are bound inside in float16 too: the caller scales their losses."""
    before = _scaled.set(True)
    try:
        yield
    finally:
        _scaled.reset(before)


def _policy_for(ctx: Any, symbol: Symbol, frozen: AbstractSet[str]) -> Optional[Policy]:
    """Return the policy in force, if it is for the kind of device that a symbol is bound to.

    None too for a symbol that is trained, all but the variables `frozen`, in float16 unscaled.
    """
    policy = current_policy()
    if policy is None or not isinstance(ctx, Context):
        return None
    if (ctx.device_type == "gpu") != (policy.device == "gpu"):
        return None
    trained = policy.target_dtype == "float16" and not frozen >= set(symbol.list_arguments())
    if trained and policy.lowers and not _scaled.get():
        announce_unscaled_executors()
        return None
    return policy


def _rewritten(symbol: Symbol, policy: Policy, usage: Usage, frozen: AbstractSet[str]) -> Symbol:
    """Return a symbol rewritten for how it is bound; itself where there is nothing to do.

    The variables `frozen` get no gradients.
    """
    read = Graph.from_symbol(symbol)
    graph = with_separate_biases(read, frozen) if usage.training else read
    warn_of_way(policy)
    policy = recognised(policy, graph)
    choices = choose(graph, policy, usage)
    rewritten = rewritten_symbol(graph, type(symbol), policy, usage, choices)
    if rewritten is None:
        return symbol if graph is read else graph.to_symbol(type(symbol))
    return rewritten


def _usage_of_arrays(symbol: Symbol, args: Any, args_grad: Any, grad_req: Any) -> Usage:
    """Return how a symbol is used that is bound to these arrays."""
    names = symbol.list_arguments()
    arrays = dict(zip(names, args)) if isinstance(args, (list, tuple)) else dict(args)
    return Usage(
        dtypes=_named_dtypes(arrays),
        shapes={name: array.shape for name, array in arrays.items()},
        accumulated=_accumulated(names, grad_req),
        training=args_grad is not None,
    )


def _usage_of_shapes(
    symbol: Symbol, grad_req: Any, type_dict: Any, options: Mapping[str, Any]
) -> Usage:
    """Return how a symbol is used whose arrays MXNet makes, of the shapes in `options`."""
    names = symbol.list_arguments()
    return Usage(
        dtypes=argument_dtypes(symbol, type_dict),
        shapes={name: options[name] for name in names if name in options},
        accumulated=_accumulated(names, grad_req),
        training=grad_req != "null",
    )


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


def _without_gradients(symbol: Symbol, grad_req: Any, args_grad: Any = ()) -> FrozenSet[str]:
    """Return the arguments that get no gradients: all where `args_grad` is None."""
    names = symbol.list_arguments()
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
