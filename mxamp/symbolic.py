"""The Symbol-level patch: rewrites graphs where they become executable.

A traced graph becomes executable when a hybrid block calls its cached op, and when a symbol is
bound. Only there dtypes and device are known. The graphs that users hold, export and save stay
the plain ones.
"""

import functools
import logging
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from mxnet import autograd
from mxnet.context import Context
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from .choices import NONE, Choices, choose
from .eager import Active, dtypes_of, on_device
from .graph import infer_types
from .heads import OUTPUTS
from .machine import dtype_name
from .patching import Patch
from .policy import Policy
from .rewrite import UNSAFE_LOOPS, rewrite_symbol

__all__ = ["Source", "follow", "patches"]

logger = logging.getLogger("mxamp")

UNSCALED_OUTPUTS = (
    "%s in a hybridized block ignores the scale of a loss: don't use scale_loss with this block, "
    "or call the operator outside of it, or use a loss such as gluon.loss.SoftmaxCrossEntropyLoss"
)


def patches(active: Active) -> List[Patch]:
    """Return the patches that make graphs follow the policy that `active` returns."""

    def build_call(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _call_cached_op(self: HybridBlock, *args: Any) -> Any:
            if active() is None:
                return original(self, *args)
            follow(self, args, active)
            return original(self, *args)

        return _call_cached_op

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
        policy = active()
        if policy is None or not isinstance(ctx, Context):
            return None
        return policy if (ctx.device_type == "gpu") == (policy.device == "gpu") else None

    return [
        Patch(HybridBlock, "_call_cached_op", build_call),
        Patch(Symbol, "bind", build_bind),
        Patch(Symbol, "simple_bind", build_simple_bind),
    ]


def argument_dtypes(symbol: Symbol, type_dict: Optional[Mapping[str, Any]]) -> Dict[str, str]:
    """Return the dtype of every argument, float32 where neither given nor inferred."""
    known = {name: dtype_name(dtype) for name, dtype in (type_dict or {}).items()}
    found = infer_types(symbol, known)
    names = symbol.list_arguments()
    inferred = dict(zip(names, found[0])) if found is not None else {}
    return {name: known.get(name, inferred.get(name, "float32")) for name in names}


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


class Source(NamedTuple):
    """The graph that a converted block was made of, by what policy, and what was cast then."""

    symbol: Symbol
    policy: Policy
    stored: FrozenSet[str]


def follow(
    block: HybridBlock, args: Sequence[Any], active: Active, source: Optional[Source] = None
) -> None:
    """Let a block that is called with `args` run graphs by the policy that `active` returns.

    They are made of the block's own graph, that of a converted block of its `source`.
    """
    if block._cached_op is None:
        block._build_cache(*args)
    if isinstance(block._cached_op, CachedOp):
        block._cached_op = _PolicyCachedOp(block, active, source)


class _PolicyCachedOp:
    """A block's cached op that runs the graph of whatever policy is active when it is called.

    One `CachedOp` a policy, dtypes of inputs and choices by shape, made when first needed; without
    a policy the block's own.
    """

    def __init__(self, block: HybridBlock, active: Active, source: Optional[Source] = None) -> None:
        self._active = active
        self._plain = block._cached_op
        self._symbol = block._cached_graph[1]
        places = block._cached_op_args
        self._parameters = [(i, p) for i, (is_data, p) in enumerate(places) if not is_data]
        self._names = self._symbol.list_inputs()
        self._stored: FrozenSet[str] = frozenset()
        if source is not None:
            self._symbol, self._stored = source.symbol, source.stored
        self._inputs = [i for i, (is_data, _) in enumerate(places) if is_data]
        self._data = frozenset(self._names[i] for i in self._inputs)
        params = [i for i, _ in self._parameters]
        self._flags = [("data_indices", self._inputs), ("param_indices", params), *block._flags]
        # Only graphs that hold one of these differ in training.
        json = Symbol.tojson(self._symbol)
        self._loops = any(f'"op": "{name}"' in json for name in UNSAFE_LOOPS)
        self._outputs = [name for name in OUTPUTS if f'"op": "{name}"' in json]
        self._ops: Dict[Any, CachedOp] = {}
        self._chosen: Dict[Any, Choices] = {}
        self._hook: Optional[Tuple[Any, bool]] = None

    @property
    def is_np_sym(self) -> bool:
        return bool(self._plain.is_np_sym)

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        return self._choose(args)(*args, **kwargs)

    def _choose(self, args: Sequence[NDArray]) -> CachedOp:
        policy = self._active()
        if policy is None or not on_device(args[:1], policy.device):
            return self._plain
        added = tuple([i for i, p in self._parameters if p._grad_req == "add"])
        training = autograd.is_recording()
        choices = self._choices(policy, args, training) if policy.chooses else NONE
        key = (policy, dtypes_of(args), added, self._loops and training, choices)
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = self._build(*key)
        return op

    def _choices(self, policy: Policy, args: Sequence[NDArray], training: bool) -> Choices:
        """Return what shapes choose: looked for once for each set of the data's shapes."""
        key = (policy, training, *[args[i].shape for i in self._inputs])
        found = self._chosen.get(key)
        if found is None:
            shapes = {name: array.shape for name, array in zip(self._names, args)}
            found = choose(self._symbol, policy, shapes, training, self._stored)
            self._chosen[key] = found
        return found

    def _build(
        self,
        policy: Policy,
        dtypes: Tuple[str, ...],
        added: Tuple[int, ...],
        training: bool,
        choices: Choices,
    ) -> CachedOp:
        # What a caller passes in may be accumulated into as well: that can't be seen from here.
        guarded = self._data | {self._names[i] for i in added}
        named = {n: d for n, d in zip(self._names, dtypes) if n not in self._stored}
        if policy.target_dtype == "float16" and autograd.is_recording() and self._outputs:
            logger.warning(UNSCALED_OUTPUTS, self._outputs[0])
        symbol = rewrite_symbol(
            self._symbol, policy, named, guarded, training, choices, self._stored
        )
        op = self._plain if symbol is self._symbol else CachedOp(symbol, self._flags)
        if self._hook is not None:
            op._register_op_hook(*self._hook)
        return op

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._hook = (callback, monitor_all)
        for op in (self._plain, *self._ops.values()):
            op._register_op_hook(callback, monitor_all)
