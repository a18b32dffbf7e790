"""The patch of hybridized blocks: their cached op runs a graph rewritten for the policy in force.

One `CachedOp` a policy, dtypes and choices by shape, kept with the block. The graph that the block
holds and exports stays the plain one.
"""

import functools
import logging
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..framework.arrays import dtypes_of, on_device
from ..framework.operators import LOSS_OUTPUTS
from ..framework.patching import Patch
from ..graph.insert_casts import UNSAFE_LOOPS, rewrite_symbol
from ..graph.shape_rules import NONE, Choices, choose
from ..policy.active import current_policy
from ..policy.policy import Policy

__all__ = ["Source", "follow", "patches"]

logger = logging.getLogger("mxamp")

UNSCALED_OUTPUTS = (
    "%s in a hybridized block ignores the scale of a loss: don't use scale_loss with this block, "
    "or call the operator outside of it, or use a loss such as gluon.loss.SoftmaxCrossEntropyLoss"
)


def patches() -> List[Patch]:
    """Return the patch that makes hybridized blocks follow the policy in force."""
    return [Patch(HybridBlock, "_call_cached_op", _build_call)]


def _build_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _call_cached_op(self: HybridBlock, *args: Any) -> Any:
        if current_policy() is not None:
            follow(self, args)
        return original(self, *args)

    return _call_cached_op


class Source(NamedTuple):
    """The graph that a converted block was made of, by what policy, and what was cast then."""

    symbol: Symbol
    policy: Policy
    stored: FrozenSet[str]


def follow(block: HybridBlock, args: Sequence[Any], source: Optional[Source] = None) -> None:
    """Let a block that is called with `args` run graphs by the policy in force.

    They are made of the block's own graph; those of a converted block of its `source`, by the
    policy of that.
    """
    if block._cached_op is None:
        block._build_cache(*args)
    if isinstance(block._cached_op, CachedOp):
        block._cached_op = _PolicyCachedOp(block, source)


class _PolicyCachedOp:
    """A block's cached op that runs the graph of whatever policy is active when it is called.

    One `CachedOp` a policy, dtypes of inputs and choices by shape, made when first needed; without
    a policy the block's own.
    """

    def __init__(self, block: HybridBlock, source: Optional[Source] = None) -> None:
        self._policy = source.policy if source is not None else None
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
        self._outputs = [name for name in LOSS_OUTPUTS if f'"op": "{name}"' in json]
        self._ops: Dict[Any, CachedOp] = {}
        self._chosen: Dict[Any, Choices] = {}
        self._hook: Optional[Tuple[Any, bool]] = None

    @property
    def is_np_sym(self) -> bool:
        return bool(self._plain.is_np_sym)

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        return self._choose(args)(*args, **kwargs)

    def _choose(self, args: Sequence[NDArray]) -> CachedOp:
        policy = self._policy or current_policy()
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
