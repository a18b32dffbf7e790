"""Patches for hybridized blocks: each call runs a graph with the current policy's casts.

`PolicyCachedOp` takes a call: it finds the policy, and the op that ran last for such a call.
`Variants` makes the ops: one `CachedOp` for each policy, dtypes and choices by shape. The block
exports the original graph.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray import CachedOp, NDArray
from mxnet.symbol import Symbol

from ..backends import backend_of
from ..framework.arrays import dtypes_of, kind_code, on_device, shape_of
from ..framework.patching import Original
from ..graph.casts.insert import region_marks, rewritten_graph
from ..graph.gradients import trained_graph, weights_beside_biases, with_scale_input
from ..graph.ir import UNSAFE_LOOPS, Graph, Usage
from ..policy.active import current_policy, in_force, nearest_policy
from ..policy.policy import Policy
from ..policy.regions import policy_for_regions
from ..scaling.loss_outputs import scale_array
from .announcements import record_layers, warn_of_unknown_layers
from .eager import MANY, Out, call_library

if TYPE_CHECKING:
    from ..backends.choices import Chosen

logger = logging.getLogger("mxamp")

FUSED_ALREADY = (
    "block %r was fused by optimize_for or a backend: its fused layers compute in float32. Call "
    "hybridize() without a backend; for fused inference in bfloat16, convert_hybrid_block(net, "
    '"bfloat16", fuse=True)'
)
_gradients_of = operator.attrgetter("_grad")
#: The most policies that a block keeps graphs for, and the most graphs of each: they hold memory.
_MOST = 32
_ARRAYS = frozenset({NDArray, mx.np.ndarray})
#: Functions of the symbol of a block's graph that is about to run, its inputs, and a callable that
#: runs it: each returns what to run in its place. For tools that observe.
graph_listeners: tuple[Callable[[Symbol, Sequence[NDArray], Any], Any], ...] = ()
#: The loss scale's index among a call's inputs: the scale follows the block's arguments.
_SCALE = -1


def build_call_cached_op(original: Original) -> Original:
    """Return a `HybridBlock._call_cached_op` that runs graphs with the current policy's casts."""

    def _call_cached_op(self: HybridBlock, *args: object) -> object:
        op = self._cached_op
        if type(op) is not PolicyCachedOp:
            if current_policy() is not None or _loss_scaling_policy() is not None:
                install_policy_op(self, args)
        elif op.arrays == len(args) and not self._callback and _ARRAYS.issuperset(map(type, args)):
            # What MXNet's function does for arrays alone, in half of its time.
            return op(*[args[i] if is_data else i.data() for is_data, i in self._cached_op_args])
        return original(self, *args)

    return _call_cached_op


def _loss_scaling_policy() -> Policy | None:
    """Return the policy for loss scaling if autograd is recording, else None.

    It applies where casts are off too. The loss scale is that of the whole program: losses of
    output operators carry it here too.
    """
    policy = nearest_policy() if autograd.is_recording() else None
    return policy if isinstance(policy, Policy) else None


def patched_get_graph(original: Original, self: HybridBlock, *args: object) -> object:
    """Trace a block as if outside `autocast`, so that its graph runs under any later policy."""
    # Regions around the call are in force when the graph runs; only those inside belong to it.
    with in_force(current_policy()):
        return original(self, *args)


def patched_setattr(original: Original, self: HybridBlock, name: str, value: object) -> None:
    """Set a block's attribute; wrap a new cached op whose graph has `autocast` regions."""
    original(self, name, value)
    # A block whose code enters regions needs a rewritten graph even if mixed precision is off
    # outside. The call that traces it has already passed the patch of `_call_cached_op`.
    made = name == "_cached_op" and isinstance(value, CachedOp) and not current_policy()
    if made and vars(self).get("_source") is None and region_marks(self._cached_graph[1]):
        install_policy_op(self, ())


class Source(NamedTuple):
    """The graph that a block runs, before casts are inserted.

    For a converted block, also its policy and the names of parameters stored in 16 bits (`stored`).
    A `ConvertedBlock` keeps it as its `_source`.
    """

    graph: Graph
    policy: Policy | None = None
    stored: frozenset[str] = frozenset()


def install_policy_op(
    block: HybridBlock, args: Sequence[Any], source: Source | None = None
) -> None:
    """Replace a block's cached op with one that casts (`PolicyCachedOp`); trace it if needed.

    A converted block runs the graph of its `source`. A block not traced yet is traced with `args`.
    """
    if block._cached_op is None:
        block._build_cache(*args)
    if isinstance(block._cached_op, CachedOp):
        block._cached_op = PolicyCachedOp(block, source)


class _Op(NamedTuple):
    """A cached op with its symbol, and the order in which it reads the block's arguments.

    The graph reads the block's arguments in this order, in the block's own without one. The index
    `_SCALE` in the order stands for the loss scale of output operators.
    """

    run: Any
    symbol: Symbol
    order: Sequence[int] = ()

    def inputs(self, args: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return the cached op's inputs, in its own order, from the block's arguments."""
        if len(self.order) > len(args):
            args = (*args, scale_array(args[0].context))
        return [args[i] for i in self.order] if self.order else args


class CallKey(NamedTuple):
    """Cache key of a block's call: whether it trains, and the dtypes of its arguments."""

    regions_only: bool  #: mixed precision is off outside the graph's regions
    training: bool
    dtypes: tuple[str, ...]


class Made:
    """One block's cached ops under one policy, and the nodes kept in float32 or substituted."""

    def __init__(self) -> None:
        #: The ops, by call, graph, accumulated gradients and choices.
        self.ops: dict[Any, _Op] = {}
        #: By call and graph, the choices by shapes of data; those for any other shapes by None.
        self.choices: dict[tuple[CallKey, int], dict[Any, Chosen]] = {}
        #: The same choices, each once: they may be large, and most shapes have equal ones.
        self.distinct: dict[Chosen, Chosen] = {}


class Variants:
    """All cached ops of one block: one for each policy and kind of call, made on demand."""

    def __init__(self, block: HybridBlock, source: Source | None) -> None:
        symbol, op = block._cached_graph[1], block._cached_op
        #: The block's own op, which runs without a policy.
        self.unchanged = _Op(op, symbol)
        source = source or Source(Graph.from_symbol(symbol))
        self.graph, self.own_policy, self._stored = source
        names = self.names = symbol.list_inputs()
        places = block._cached_op_args
        self.inputs = [i for i, (is_data, _) in enumerate(places) if is_data]
        self.parameters = {i: p for i, (is_data, p) in enumerate(places) if not is_data}
        self._flags = [*block._flags]
        self._has_unsafe_loops = not UNSAFE_LOOPS.isdisjoint(self.graph.operators)
        #: The graph with the loss scale among its inputs, in MXNet's order; None if unneeded.
        self.scalable = with_scale_input(self.graph)
        if self.scalable is not None:
            self.scalable = Graph.from_symbol(self.scalable.to_symbol(type(symbol)))
        weights = weights_beside_biases(self.graph)
        self._weights = [(names[i], p) for i, p in self.parameters.items() if names[i] in weights]
        # Whether a passed-in array needs a gradient is unknown here: treat it as frozen.
        self._passed_in = weights.intersection(names[i] for i in self.inputs)
        self._trained: dict[frozenset[str], Graph] = {}
        self._gradients: Sequence[Any] = ()
        #: By policy, the one used last at the end: a program may make new ones all the time.
        self.made: dict[Policy, Made] = {}
        self._hook: tuple[Any, bool] | None = None

    def find(self, policy: Policy, call: CallKey, args: Sequence[NDArray]) -> _Op:
        """Return the cached op for a policy and a call, from the cache if possible."""
        made = self.made[policy] = self.made.pop(policy, Made())
        if len(self.made) > _MOST:
            del self.made[next(iter(self.made))]
        added: tuple[int, ...] = ()
        if call.training:
            self._drop_stale_ops(policy)
            added = tuple([i for i, p in self.parameters.items() if p._grad_req == "add"])
        graph = self._graph_for(call.training)
        choices = self._choose(made, policy, call, graph, args)
        # Without unsafe loops and without changes for training, training runs the inference graph.
        differs = call.training and (self._has_unsafe_loops or graph is not self.graph)
        key = (call._replace(training=differs), id(graph), added, choices)
        op = made.ops.get(key)
        if op is None:
            # Whether a passed-in array accumulates gradients is unknown: assume that it does.
            accumulated = frozenset(self.names[i] for i in (*self.inputs, *added))
            usage = replace(self._usage(call), training=differs, accumulated=accumulated)
            op = made.ops[key] = self._build(policy, graph, usage, choices)
            if self.own_policy is None:
                record_layers(policy, self.graph)
        elif policy.fp32_layers:
            warn_of_unknown_layers(policy)
        return op

    def _drop_stale_ops(self, policy: Policy) -> None:
        """Drop the cached ops if parameters got new gradient arrays: ops may write to the old.

        Remake MXNet's own op too, since it has not run the calls that the other ops have run.
        """
        before, self._gradients = self._gradients, [*map(_gradients_of, self.parameters.values())]
        if all(map(operator.is_, self._gradients, before)):
            return
        for made in self.made.values():
            made.ops.clear()
        symbol = self.unchanged.symbol
        self.unchanged = _Op(self._cached_op(policy, symbol, range(len(self.names))), symbol)

    def _graph_for(self, training: bool) -> Graph:
        """Return the block's graph before casts; in training, with an input for the loss scale.

        For training, biases are also separated from dense layers whose weight needs no gradient.
        """
        if not training:
            return self.graph
        frozen = self._passed_in.union(n for n, p in self._weights if p._grad_req == "null")
        if frozen not in self._trained:
            self._trained[frozen] = trained_graph(self.scalable or self.graph, frozen)
        return self._trained[frozen]

    def _choose(
        self, made: Made, policy: Policy, call: CallKey, graph: Graph, args: Sequence[NDArray]
    ) -> Chosen:
        """Choose the graph's nodes to keep in float32 or to substitute, for one call's shapes.

        Once `_MOST` graphs exist, data of new shapes shares the choices that hold for any shape.
        """
        known = made.choices.setdefault((call, id(graph)), {})
        depends = policy.depends_on_shapes or bool(graph.marks)
        sizes = tuple([shape_of(args[i]) for i in self.inputs]) if depends else None
        if sizes not in known and len(made.ops) >= _MOST:
            sizes = None
        if sizes not in known:
            if len(known) >= MANY:
                known.clear()
            looked_at = self.parameters if sizes is None else range(len(args))
            shapes = {self.names[i]: args[i].shape for i in looked_at}
            usage = replace(self._usage(call), shapes=shapes)
            choices = backend_of(policy.device).choose(graph, policy, usage)
            known[sizes] = made.distinct.setdefault(choices, choices)
        return known[sizes]

    def _usage(self, call: CallKey) -> Usage:
        """Return how a call runs the graph (its `Usage`): dtypes and training mode, no shapes."""
        dtypes = {n: d for n, d in zip(self.names, call.dtypes) if n not in self._stored}
        usage = Usage(dtypes, stored=self._stored, training=call.training)
        return replace(usage, regions_only=call.regions_only)

    def _build(self, policy: Policy, graph: Graph, usage: Usage, choices: Chosen) -> _Op:
        """Return a new cached op for the graph with casts; the block's own op if it needs none.

        The flags change too where MXNet computes wrongly with the block's own.
        """
        rewritten = rewritten_graph(graph, policy, usage, choices)
        same_flags = self._flags == backend_of(policy.device).cached_op_flags(self._flags, graph)
        if rewritten is not graph:
            rewritten = backend_of(policy.device).with_ordered_inputs(rewritten)
        elif graph is self.graph and self.own_policy is None and same_flags:
            # The plain op of a converted block has the casts for other dtypes.
            return self.unchanged
        symbol = rewritten.to_symbol(type(self.unchanged.symbol))
        places = {name: i for i, name in enumerate(self.names)}
        # The loss scale alone is no argument of the block.
        order = [places.get(name, _SCALE) for name in symbol.list_inputs()]
        return _Op(self._cached_op(policy, symbol, order), symbol, order)

    def _cached_op(self, policy: Policy, symbol: Symbol, order: Sequence[int]) -> CachedOp:
        """Return an MXNet cached op of a symbol that reads the block's arguments in `order`."""
        flags = backend_of(policy.device).cached_op_flags(self._flags, self.graph)
        data = [place for place, i in enumerate(order) if i not in self.parameters]
        params = [place for place, i in enumerate(order) if i in self.parameters]
        op = CachedOp(symbol, [("data_indices", data), ("param_indices", params), *flags])
        if self._hook is not None:
            op._register_op_hook(*self._hook)
        return op

    def set_hook(self, callback: Callable[..., object] | None, monitor_all: bool = False) -> None:
        """Register a Gluon op hook with all cached ops, later ones too; None removes the hook."""
        self._hook = (callback, monitor_all) if callback else None
        made = [op for one in self.made.values() for op in one.ops.values()]
        for op in (self.unchanged, *made):
            op.run._register_op_hook(callback, monitor_all)


class PolicyCachedOp:
    """Wrapper of a block's cached op that runs the graph with the current policy's casts.

    Without a policy it runs the block's own cached op. The constructor reads the block's graph.
    """

    def __init__(self, block: HybridBlock, source: Source | None = None) -> None:
        self.is_np_sym = block._cached_op.is_np_sym  #: whether outputs are `mx.np` arrays
        self.variants = Variants(block, source)
        self._register_op_hook = self.variants.set_hook
        graph, self._own_policy = self.variants.graph, self.variants.own_policy
        if self._own_policy is None and graph.has_fused_operators and not graph.is_converted:
            logger.warning(FUSED_ALREADY, block.name)
        self._marks = frozenset() if graph.is_converted else graph.marks
        # Custom operators scale their results themselves where mixed precision is off.
        self._scales = self.variants.scalable is not None and "Custom" not in graph.operators
        args, output = block._in_format, block._out_format
        #: The number of arguments if they and the output are arrays, not lists of arrays.
        self.arrays = len(args) if [*args, output] == [0] * (len(args) + 1) else None
        #: The policy of the last call, and whether it leaves calls without gradients to MXNet.
        self._idle: tuple[Policy | None, bool] = None, False
        #: What selected a device's last op, the op, and objects whose ids must stay valid: by the
        #: id of the first parameter's array there.
        self._last: dict[int, tuple[Any, _Op, Any]] = {}
        # At exit, graphs have to be freed before the functions that their custom operators call.
        self._callbacks = getattr(mx.operator, "_registry", None)

    def __call__(self, *args: NDArray, out: Out = None) -> object:
        """Run the block's graph with the current policy's casts, in place of MXNet's cached op."""
        op = self.select(args)
        inputs, run = op.inputs(args), op.run
        for listener in graph_listeners:
            run = listener(op.symbol, inputs, run)
        if type(run) is not CachedOp:
            return run(*inputs, out=out)
        entry = _LIB.MXInvokeCachedOpEx
        return call_library(entry, run.handle, inputs, (), self.is_np_sym, False, out)

    def select(self, args: Sequence[NDArray]) -> _Op:
        """Return the cached op for the current policy and these arguments of the block."""
        variants = self.variants
        policy, regions_only = self._policy_in_force()
        if policy is None:
            return variants.unchanged
        training = autograd.is_recording()
        # Most calls take the last op again. An array keeps its dtype and shape: only those of the
        # data are read in every call. New values of `grad_req` make new lists of gradients.
        params = [args[i] for i in variants.parameters]
        objects = [policy, *params, *map(_gradients_of, variants.parameters.values())]
        values = [(kind_code(args[i]), shape_of(args[i])) for i in variants.inputs]
        key = [regions_only, training, values, *map(id, objects)]
        device = id(params[0]) if params else 0
        last = self._last.get(device)
        # Without parameters, the next call may be on another device.
        if last is not None and key == last[0] and (params or on_device(args[:1], policy.device)):
            return last[1]
        if not on_device(args[:1], policy.device):
            return variants.unchanged
        op = variants.find(policy, CallKey(regions_only, training, dtypes_of(args)), args)
        # With `fp32_layers`, each call may have to warn of layers that no block has.
        if not policy.fp32_layers:
            first = next(iter(variants.parameters.values()), None)
            held = [0] if first is None else [id(array) for array in first._data or ()]
            self._last = {i: last for i, last in self._last.items() if i in held}
            self._last[device] = key, op, objects
        return op

    def _policy_in_force(self) -> tuple[Policy | None, bool]:
        """Return the call's policy, and whether it is for the graph's `autocast` regions only."""
        policy = self._own_policy or current_policy()
        if policy is not None:
            if policy is not self._idle[0]:
                idle = backend_of(policy.device).leaves_as_is(self.variants.graph, policy)
                self._idle = policy, idle and not self._own_policy
            return (None if self._idle[1] and not autograd.is_recording() else policy), False
        if self._marks:
            policy = policy_for_regions(self._marks)
        return policy or (_loss_scaling_policy() if self._scales else None), True
