"""Hybridized blocks: their cached op runs the graph rewritten for the policy in force.

The block keeps one `CachedOp` for each policy, dtypes and choices by shape. It exports the original
graph.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import replace
from typing import Any, Hashable, Iterable, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB
from mxnet.gluon.block import HybridBlock
from mxnet.ndarray import CachedOp, NDArray
from mxnet.symbol import Symbol

from ..backends import NONE, backend_of
from ..framework.arrays import dtypes_of, kind_code, on_device, shape_of
from ..framework.patching import Original
from ..graph.casts.builder import is_converted
from ..graph.casts.insert import region_marks, rewritten_graph
from ..graph.gradients import trained_graph, weights_beside_biases, with_scale_input
from ..graph.ir import UNSAFE_LOOPS, Graph, Usage
from ..policy.active import current_policy, nearest_policy, tracing
from ..policy.policy import Policy
from ..policy.regions import policy_for_regions
from ..scaling.loss_outputs import scale_array
from .announcements import record_layers, warn_of_unknown_layers
from .eager import call_library

logger = logging.getLogger("mxamp")

FUSED_ALREADY = (
    "block %r was fused by optimize_for or a backend: its fused layers compute in float32. Call "
    "hybridize() without a backend; for fused inference in bfloat16, convert_hybrid_block(net, "
    '"bfloat16", fuse=True)'
)
_gradients_of = operator.attrgetter("_grad")
#: The most graphs that a block keeps for data of different shapes: each may hold memory.
_MOST_GRAPHS = 32
_ARRAYS = frozenset({NDArray, mx.np.ndarray})
#: The loss scale's index among a call's inputs: the scale follows the block's arguments.
_SCALE = -1


def build_call_cached_op(original: Original) -> Original:
    """Return a `_call_cached_op` that runs the graph rewritten for the policy in force."""

    def _call_cached_op(self: HybridBlock, *args: Any) -> Any:
        op = self._cached_op
        if type(op) is not PolicyCachedOp:
            if current_policy() is not None or _records_under_policy() is not None:
                install_policy_op(self, args)
        elif op.arrays == len(args) and not self._callback and _ARRAYS.issuperset(map(type, args)):
            # What MXNet's function does for arrays alone, in half of its time.
            return op(*[args[i] if is_data else i.data() for is_data, i in self._cached_op_args])
        return original(self, *args)

    return _call_cached_op


def _records_under_policy() -> Policy | None:
    """Return the policy around a region without one, in which autograd records: losses scale."""
    policy = nearest_policy() if autograd.is_recording() else None
    return policy if isinstance(policy, Policy) else None


def patched_get_graph(original: Original, self: HybridBlock, *args: Any) -> Any:
    """Trace a block outside the `autocast` regions around the call."""
    # Regions around the call are in force when the graph runs; only those inside belong to it.
    with tracing():
        return original(self, *args)


def patched_setattr(original: Original, self: HybridBlock, name: str, value: Any) -> None:
    """Install a `PolicyCachedOp` if a traced block has regions."""
    original(self, name, value)
    # A block whose code enters regions needs a rewritten graph even if mixed precision is off
    # outside. The call that traces it has already passed the patch of `_call_cached_op`.
    made = name == "_cached_op" and isinstance(value, CachedOp) and not current_policy()
    if made and vars(self).get("_source") is None and region_marks(self._cached_graph[1]):
        install_policy_op(self, ())


class Source(NamedTuple):
    """The graph that a block runs; for a converted one its policy, and parameters cast offline."""

    graph: Graph
    policy: Policy | None
    stored: frozenset[str]


def install_policy_op(
    block: HybridBlock, args: Sequence[Any], source: Source | None = None
) -> None:
    """Replace a block's cached op with a `PolicyCachedOp`.

    A converted block runs the graph of its `source`. A block not traced yet is traced with `args`.
    """
    if block._cached_op is None:
        block._build_cache(*args)
    if isinstance(block._cached_op, CachedOp):
        block._cached_op = PolicyCachedOp(block, source)


class _Op(NamedTuple):
    """A cached op `run`, the symbol of the graph that it runs, and the order of its inputs.

    The graph reads the block's arguments in this order, in the block's own without one. The index
    `_SCALE` in the order stands for the loss scale of output operators.
    """

    run: Any
    symbol: Symbol
    order: Sequence[int] = ()

    def inputs(self, args: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return the graph's inputs for these arguments of the block."""
        if len(self.order) > len(args):
            args = (*args, scale_array(args[0].context))
        return [args[i] for i in self.order] if self.order else args


class LastGraph(NamedTuple):
    """Policy, mode, and dtypes and shapes by input name, that a block's last graph was made for."""

    policy: Policy
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    training: bool


class _Call(NamedTuple):
    """The properties of a call that select its graph and its choices by shape: a cache key."""

    policy: Policy
    dtypes: tuple[str, ...]
    graph_id: int
    off: bool  #: mixed precision is off outside the graph's regions


class PolicyCachedOp:
    """A block's cached op that runs the graph rewritten for the policy in force at each call.

    It makes one `CachedOp` for each policy, dtypes of inputs and choices by shape, on demand.
    Without a policy it runs the block's own cached op. The constructor reads the block's graph.
    """

    def __init__(self, block: HybridBlock, source: Source | None = None) -> None:
        symbol = block._cached_graph[1]
        self._unchanged = _Op(block._cached_op, symbol)
        self.is_np_sym = block._cached_op.is_np_sym  #: whether outputs are `mx.np` arrays
        self._symbol_class = type(symbol)
        source = source or Source(Graph.from_symbol(symbol), None, frozenset())
        self._graph, self._policy, self._stored = source
        fused = self._graph.has_fused_operators
        if self._policy is None and fused and not is_converted(self._graph):
            logger.warning(FUSED_ALREADY, block.name)
        self._marks = frozenset() if is_converted(self._graph) else self._graph.marks
        names = self._names = symbol.list_inputs()
        args, output = block._in_format, block._out_format
        #: The number of arguments if they and the output are arrays, not lists of arrays.
        self.arrays = len(args) if [*args, output] == [0] * (len(args) + 1) else None
        places = block._cached_op_args
        self._inputs = [i for i, (is_data, _) in enumerate(places) if is_data]
        self._parameters = {i: p for i, (is_data, p) in enumerate(places) if not is_data}
        self._flags = [*block._flags]
        # Without unsafe loops and without changes for training, training runs the inference graph.
        self._loops = not UNSAFE_LOOPS.isdisjoint(self._graph.operators)
        #: The graph with the loss scale among its inputs, in MXNet's order; None if unneeded.
        self._scalable = with_scale_input(self._graph)
        if self._scalable is not None:
            self._scalable = Graph.from_symbol(self._scalable.to_symbol(self._symbol_class))
        weights = weights_beside_biases(self._graph)
        self._weights = [(names[i], p) for i, p in self._parameters.items() if names[i] in weights]
        # Whether a passed-in array needs a gradient is unknown here: treat it as frozen.
        self._passed_in = weights.intersection(names[i] for i in self._inputs)
        self._trained: dict[frozenset[str], Graph] = {}
        self._gradients: Sequence[Any] = ()
        self._ops: dict[Any, _Op] = {}
        self._chosen: dict[Any, Hashable] = {}
        #: What selected a device's last op, the op, and objects whose ids must stay valid: by the
        #: id of the first parameter's array there.
        self._last: dict[int, tuple[Any, _Op, Any]] = {}
        self._hook: tuple[Any, bool] | None = None
        # At exit, graphs have to be freed before the functions that their custom operators call.
        self._callbacks = getattr(mx.operator, "_registry", None)

    def __call__(self, *args: NDArray, out: Any = None) -> Any:
        """Run the graph on these arguments, as MXNet's cached op does."""
        op = self._select_op(args)
        if type(op.run) is not CachedOp:
            return op.run(*op.inputs(args), out=out)
        call, handle = _LIB.MXInvokeCachedOpEx, op.run.handle
        return call_library(call, handle, op.inputs(args), (), self.is_np_sym, False, out)

    def graph_of(self, args: Sequence[NDArray]) -> tuple[Symbol, Sequence[NDArray]]:
        """Return the symbol that a call with these arguments runs, and the symbol's inputs."""
        op = self._select_op(args)
        return op.symbol, op.inputs(args)

    def _select_op(self, args: Sequence[NDArray]) -> _Op:
        """Return the op for the policy in force and these arguments."""
        policy, off = self._policy or current_policy(), False
        if policy is None and self._marks:
            policy, off = policy_for_regions(self._marks), True
        # Custom operators scale their results themselves there.
        if policy is None and self._scalable is not None and "Custom" not in self._graph.operators:
            policy, off = _records_under_policy(), True
        if policy is None:
            return self._unchanged
        training = autograd.is_recording()
        # Most calls take the last op again. An array keeps its dtype and shape: only those of the
        # data are read in every call. New values of `grad_req` make new lists of gradients.
        params = [args[i] for i in self._parameters]
        objects = [policy, *params, *map(_gradients_of, self._parameters.values())]
        values = [(kind_code(args[i]), shape_of(args[i])) for i in self._inputs]
        key = [off, training, values, *map(id, objects)]
        device = id(params[0]) if params else 0
        last = self._last.get(device)
        if last is not None and key == last[0]:
            return last[1]
        if not on_device(args[:1], policy.device):
            return self._unchanged
        op = self._find_op(policy, off, training, args)
        # With `fp32_layers`, each call may have to warn of layers that no block has. Without
        # parameters, a call may be on another device.
        if params and not policy.fp32_layers:
            held = [id(array) for array in next(iter(self._parameters.values()))._data or ()]
            self._last = {i: last for i, last in self._last.items() if i in held}
            self._last[device] = key, op, objects
        return op

    def _find_op(self, policy: Policy, off: bool, training: bool, args: Sequence[NDArray]) -> _Op:
        """Return the op for a policy and these arguments, making it if it is new."""
        added: tuple[int, ...] = ()
        if training:
            self._drop_stale_ops()
            added = tuple([i for i, p in self._parameters.items() if p._grad_req == "add"])
        graph = self._graph_for(training)
        call = _Call(policy, dtypes_of(args), id(graph), off)
        if policy.depends_on_shapes or graph.marks:
            choices = self._choices(call, graph, training, args)
        else:
            choices = self._chosen.setdefault((call, training), NONE)
        differs = training and (self._loops or graph is not self._graph)
        key = (call, added, differs, choices)
        op = self._ops.get(key)
        if op is None:
            # Whether a passed-in array accumulates gradients is unknown: assume that it does.
            accumulated = frozenset(self._names[i] for i in (*self._inputs, *added))
            usage = replace(self._usage(call, differs), accumulated=accumulated)
            op = self._ops[key] = self._build(call, graph, usage, choices)
            if self._policy is None:
                record_layers(policy, self._graph)
        elif policy.fp32_layers:
            warn_of_unknown_layers(policy)
        return op

    def last_graph(self, policy: Policy | None) -> LastGraph | None:
        """Return what the last new graph under a policy, or any, was made for; None without any.

        That is training if the block has trained. Only a policy that depends on shapes has shapes,
        of the inputs that are no parameters.
        """
        made = [key for key in self._chosen if policy in (None, key[0].policy)]
        if not made:
            return None
        made = [key for key in made if key[0].policy == made[-1][0].policy]
        call, training, *sizes = ([key for key in made if key[1]] or made)[-1]
        shapes = dict(zip((self._names[i] for i in self._inputs), sizes))
        return LastGraph(call.policy, dict(zip(self._names, call.dtypes)), shapes, training)

    def _drop_stale_ops(self) -> None:
        """Drop all ops if gradient arrays changed: static ops would write to the old arrays.

        Remake MXNet's own op too, since it has not run the calls that the other ops have run.
        """
        before, self._gradients = self._gradients, [*map(_gradients_of, self._parameters.values())]
        if all(map(operator.is_, self._gradients, before)):
            return
        self._ops.clear()
        symbol = self._unchanged.symbol
        own = self._cached_op(symbol, range(len(self._names)), self._flags)
        self._unchanged = _Op(own, symbol)

    def _graph_for(self, training: bool) -> Graph:
        """Return the block's graph before casts; for training, one with the loss scale as an input.

        For training, biases are also separated from dense layers whose weight needs no gradient.
        """
        if not training:
            return self._graph
        frozen = self._passed_in.union(n for n, p in self._weights if p._grad_req == "null")
        if frozen not in self._trained:
            self._trained[frozen] = trained_graph(self._scalable or self._graph, frozen)
        return self._trained[frozen]

    def _choices(
        self, call: _Call, graph: Graph, training: bool, args: Sequence[NDArray]
    ) -> Hashable:
        """Return the choices by shape for `graph` and the shapes of `args`, cached.

        Once `_MOST_GRAPHS` exist, data of new shapes shares the choices that hold for any shape.
        """
        key: tuple[Any, ...] = (call, training, *[shape_of(args[i]) for i in self._inputs])
        looked_at: Iterable[int] = range(len(args))
        if key not in self._chosen and len(self._ops) >= _MOST_GRAPHS:
            key, looked_at = (call, training), self._parameters
        choices = self._chosen.get(key)
        if choices is None:
            shapes = {self._names[i]: args[i].shape for i in looked_at}
            usage = replace(self._usage(call, training), shapes=shapes)
            choices = backend_of(call.policy.device).choose(graph, call.policy, usage)
            self._chosen[key] = choices
        return choices

    def _usage(self, call: _Call, training: bool) -> Usage:
        """Return the usage of the graph in a call, without shapes."""
        dtypes = {n: d for n, d in zip(self._names, call.dtypes) if n not in self._stored}
        return Usage(dtypes, stored=self._stored, training=training, off=call.off)

    def _build(self, call: _Call, graph: Graph, usage: Usage, choices: Hashable) -> _Op:
        """Return a new op that runs `graph` rewritten for a call; the block's own if unchanged."""
        backend = backend_of(call.policy.device)
        rewritten = rewritten_graph(graph, call.policy, usage, choices)
        if rewritten is not graph:
            rewritten = backend.with_ordered_inputs(rewritten)
        elif graph is self._graph and self._policy is None:
            # The plain op of a converted block has the casts for other dtypes.
            return self._unchanged
        symbol = rewritten.to_symbol(self._symbol_class)
        places = {name: i for i, name in enumerate(self._names)}
        order = [places.get(name, _SCALE) for name in symbol.list_inputs()]
        flags = backend.cached_op_flags(self._flags, self._graph)
        return _Op(self._cached_op(symbol, order, flags), symbol, order)

    def _cached_op(self, symbol: Symbol, order: Sequence[int], flags: Sequence[Any]) -> CachedOp:
        """Return MXNet's cached op of a symbol that reads the block's arguments in this order."""
        data = [place for place, i in enumerate(order) if i not in self._parameters]
        params = [place for place, i in enumerate(order) if i in self._parameters]
        op = CachedOp(symbol, [("data_indices", data), ("param_indices", params), *flags])
        if self._hook is not None:
            op._register_op_hook(*self._hook)
        return op

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._hook = (callback, monitor_all) if callback else None
        for op in (self._unchanged, *self._ops.values()):
            op.run._register_op_hook(callback, monitor_all)
