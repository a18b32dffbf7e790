"""The Symbol-level patch: rewrites graphs when they are bound.

Only when a symbol is bound are its dtypes and device known. The graphs that users hold and save
stay the plain ones.
"""

import functools
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence

from mxnet.context import Context
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..framework.arrays import dtypes_of
from ..framework.patching import Patch
from ..graph.graph import argument_dtypes
from ..graph.insert_casts import rewrite_symbol
from ..graph.shape_rules import choose
from ..policy.active import current_policy
from ..policy.policy import Policy

__all__ = ["patches"]


def patches() -> List[Patch]:
    """Return the patches that make graphs follow the policy in force."""

    def build_bind(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def bind(
            self: Symbol, ctx: Context, args: Any, args_grad: Any = None,
            grad_req: Any = "write", *rest: Any, **options: Any,
        ) -> Any:  # fmt: skip
            policy = _policy_for(ctx)
            symbol = self
            if policy is not None:
                names = self.list_arguments()
                arrays = dict(zip(names, args)) if isinstance(args, (list, tuple)) else dict(args)
                dtypes = _named_dtypes(arrays)
                guarded, training = _accumulated(names, grad_req), args_grad is not None
                shapes = {name: array.shape for name, array in arrays.items()}
                choices = choose(self, policy, shapes, training)
                symbol = rewrite_symbol(self, policy, dtypes, guarded, training, choices)
            executor = original(symbol, ctx, args, args_grad, grad_req, *rest, **options)
            executor._symbol = self
            return executor

        return bind

    def build_simple_bind(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def simple_bind(
            self: Symbol, ctx: Context, grad_req: Any = "write", type_dict: Any = None,
            *rest: Any, **options: Any,
        ) -> Any:  # fmt: skip
            policy = _policy_for(ctx)
            symbol = self
            if policy is not None:
                names = self.list_arguments()
                dtypes = argument_dtypes(self, type_dict)
                guarded, training = _accumulated(names, grad_req), grad_req != "null"
                shapes = {name: options[name] for name in names if name in options}
                choices = choose(self, policy, shapes, training)
                symbol = rewrite_symbol(self, policy, dtypes, guarded, training, choices)
                if symbol is not self:
                    # Behind a cast MXNet can't infer an argument's dtype any more.
                    type_dict = {**dtypes, **(type_dict or {})}
                    options = {**_inferred_shapes(self, shapes), **options}
            executor = original(symbol, ctx, grad_req, type_dict, *rest, **options)
            executor._symbol = self
            return executor

        return simple_bind

    def _policy_for(ctx: Any) -> Optional[Policy]:
        policy = current_policy()
        if policy is None or not isinstance(ctx, Context):
            return None
        return policy if (ctx.device_type == "gpu") == (policy.device == "gpu") else None

    return [
        Patch(Symbol, "bind", build_bind),
        Patch(Symbol, "simple_bind", build_simple_bind),
    ]


def _inferred_shapes(symbol: Symbol, known: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the shapes of a symbol's arguments, as far as they follow from those `known`."""
    found, _, _ = symbol.infer_shape_partial(**known)
    return {name: shape for name, shape in zip(symbol.list_arguments(), found or ()) if shape}


def _named_dtypes(arrays: Mapping[str, Any]) -> Dict[str, str]:
    given = {name: array for name, array in arrays.items() if isinstance(array, NDArray)}
    return dict(zip(given, dtypes_of(list(given.values()))))


def _accumulated(names: Sequence[str], grad_req: Any) -> FrozenSet[str]:
    """Return the arguments whose gradients are added up."""
    if isinstance(grad_req, str):
        return frozenset(names if grad_req == "add" else ())
    reqs = grad_req.items() if isinstance(grad_req, Mapping) else zip(names, grad_req)
    return frozenset(name for name, req in reqs if req == "add")
