"""The errors of a net's tensors in mixed precision: each layer's output against float32's."""

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import Distance, Model
from ...errors import ArgumentError
from ...framework.arrays import dtypes_of
from ...framework.keywords import checked_call
from ...framework.wording import counted
from ...graph.casts.builder import HALVES
from ...graph.casts.insert import PRECISION
from ...graph.inspect import FLOATS, precision_of_node
from ...graph.ir import CASTS, Graph, Output
from ...patches.autocast import autocast, policy_for
from ...policy.policy import Policy
from ...scaling.finite import all_finite
from ...scaling.scaler import LossScaler, positive_number
from .batches import Batch, batches_of, block_of, check_loss
from .blocks import BlockNames, blocks_in
from .isolated import (
    BoundGraph,
    IsolatedNet,
    IsolatedRun,
    Recorded,
    Seeds,
    arrays_in,
    dense_values,
    loss_of,
    trained_arrays,
)
from .results import Result, Table

__all__ = ["Comparison", "TensorError", "compare"]

#: An error jumps if it is this many times the errors of the inputs, and the unit roundoff.
JUMP = 8.0
#: The largest relative error of rounding one number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

NO_LOSS = "a saved model is compared without a loss: import it as a SymbolBlock to give one"
NOT_FLOAT32 = (
    "layer {name!r} computes in {precision} with mixed precision off: compare takes a float32 net, "
    "not one that was converted or cast"
)

_HEADINGS = ("name", "block", "operator", "precision", "relative", "maximum", "lost")
_SHOWN = 10  #: rows of each table


@dataclass(frozen=True)
class TensorError:
    """The error of a layer's output, or of a parameter's gradient, against float32.

    ::

        result = amp.debugging.compare(net, data, dtype="bfloat16")
        for error in result.worst_outputs:
            print(error.name, error.relative, error.lost)

    Parameters
    ----------
    name : str
        The name of the layer or the parameter.
    block : str
        The block that it belongs to; "" if unknown.
    operator : str
        The operator of the layer; for a gradient, of the layer that reads the parameter.
    precision : str
        The dtype that this operator computes in.
    shape : tuple of int
        The shape of the output or gradient.
    relative : float
        The L2 norm of the difference over that of float32's values, the largest of all batches.
    maximum : float
        The largest absolute difference in any batch.
    lost : int
        The number of elements that are finite in float32 only.
    """

    name: str
    block: str
    operator: str
    precision: str
    shape: Tuple[int, ...]
    relative: float
    maximum: float
    lost: int


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The errors that mixed precision adds to a net; printing gives a table, worst first.

    ::

        result = amp.debugging.compare(net, (data, label), loss_function, dtype="bfloat16")
        print(result)
        print(result.first_jump, result.worst_gradients[0].relative)

    Parameters
    ----------
    dtype : str
        The low dtype.
    loss_scale : float
        The loss scale of the backward pass in mixed precision; divided out of the gradients.
    outputs : tuple of TensorError
        The error of each layer's output, in the order of execution.
    gradients : tuple of TensorError
        The error of each parameter's gradient; empty without a loss.
    first_jump : TensorError, optional
        The first layer whose error is much larger than the errors of its inputs.
    """

    dtype: str
    loss_scale: float
    outputs: Tuple[TensorError, ...]
    gradients: Tuple[TensorError, ...] = ()
    first_jump: Optional[TensorError] = None

    @property
    def worst_outputs(self) -> Tuple[TensorError, ...]:
        """The outputs of layers, sorted by lost elements, then by relative error."""
        return _ranked(self.outputs)

    @property
    def worst_gradients(self) -> Tuple[TensorError, ...]:
        """The gradients of parameters, sorted by lost elements, then by relative error."""
        return _ranked(self.gradients)

    def to_dict(self) -> Dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)

    def summary(self) -> str:
        """Return one line: where the error jumps first, and how many elements were lost."""
        lost = sum(error.lost for error in (*self.outputs, *self.gradients))
        jump = "no layer at which the error jumps"
        if self.first_jump is not None:
            first = self.first_jump
            jump = f"the error jumps first at {first.name} ({first.operator}, {first.precision})"
        scale = f", loss scale {self.loss_scale:g}" if self.gradients else ""
        return f"{self.dtype} against float32{scale}: {jump}; {counted(lost, 'element')} not finite"

    def _tables(self) -> Iterable[Table]:
        for kind, errors in (
            ("outputs of layers", self.worst_outputs),
            ("gradients of parameters", self.worst_gradients),
        ):
            if errors:
                caption = f"{kind}, the worst {min(len(errors), _SHOWN)} of {len(errors)}"
                rows = [tuple(getattr(e, h) for h in _HEADINGS) for e in errors[:_SHOWN]]
                yield caption, _HEADINGS, rows


def _ranked(errors: Sequence[TensorError]) -> Tuple[TensorError, ...]:
    """Return errors sorted by lost elements, then by relative error, the worst first."""
    return tuple(sorted(errors, key=lambda error: (-error.lost, -error.relative)))


# ---------------------------------------------------------------------- two runs of a net


@checked_call(target_dtype="write dtype='bfloat16'")
def compare(
    net: Union[Block, Model],
    data: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    dtype: Any = None,
    policy: Optional[Policy] = None,
    loss_scale: Optional[float] = None,
) -> Comparison:
    """Run a net in float32 and in mixed precision on the same data; return each layer's error.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(2, in_units=3)
    >>> net.initialize()
    >>> result = amp.debugging.compare(net, mx.nd.ones((4, 3)), dtype="bfloat16")
    >>> [error.operator for error in result.outputs], result.first_jump
    (['FullyConnected'], None)

    A layer is a node of the net's graph, as it runs when the net is hybridized, or a child block
    for nets that can't be traced. The first jump is the first layer in the order of execution whose
    error is more than 8 times the largest error of its inputs, and more than 8 times the unit
    roundoff of the dtype (2**-11 for float16, 2**-8 for bfloat16); or the first layer that turns
    finite elements into Inf or NaN.

    Parameters
    ----------
    net : Block, or (symbol, arg_params, aux_params)
        Not changed: parameters, gradients, statistics, graphs and random number generators stay. If
        the net draws random numbers other than for `Dropout`, the state of MXNet's generator, which
        can't be read, changes.
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or a list or DataLoader of batches. With a loss, a batch is a tuple of the net's
        inputs and the label; for a saved model, a dict of inputs by name.
    loss : callable, optional
        Called with the net's output and the label. With a loss, the net runs in training mode, and
        the result has the errors of gradients. Without one, it runs in inference mode.
    dtype, policy
        As for `autocast`, except "auto".
    loss_scale : float, optional
        The loss scale of the backward pass in mixed precision. By default, as in training: for
        float16 the first of 2**16, 2**15, ... at which all gradients are finite; for bfloat16, 1.

    Raises
    ------
    ArgumentError
        The net is not in float32, the data has no labels or no batch.

    Runs the net twice for each batch, and holds all layer outputs in memory.
    """
    if loss_scale is not None:
        loss_scale = positive_number("loss_scale", loss_scale)
    check_loss(loss)
    chosen = policy_for(dtype, policy)
    batches = batches_of(data, labeled=loss is not None)
    if not isinstance(net, Block):
        if loss is not None:
            raise ArgumentError(NO_LOSS)
        net, batches = block_of(net, batches)
    return _Comparer(net, loss, chosen, loss_scale).run(batches)


#: An output of a layer: the layer's name, the number of calls before under that name, the output.
Key = Tuple[str, int, int]


class _Layer(NamedTuple):
    """One output of a layer in one run, and the keys of the outputs that it was computed from."""

    block: str
    operator: str
    precision: str
    values: Any  #: a float32 NumPy array
    sources: FrozenSet[Key]


class _Errors(Dict[Any, Tuple[TensorError, Distance]]):
    """The errors of tensors over all batches, by key."""

    def add(
        self, key: Any, name: str, plain: Optional[_Layer], mixed: Optional[_Layer], pair: Any
    ) -> None:
        """Add a batch's values of the tensor `key`: `pair` holds float32's and mixed precision's.

        `plain` and `mixed` are its layer in both runs, if known.
        """
        if key not in self:
            block, operator = (plain.block, plain.operator) if plain is not None else ("", "")
            precision = mixed.precision if mixed is not None else "float32"
            error = TensorError(name, block, operator, precision, pair[0].shape, 0.0, 0.0, 0)
            self[key] = error, Distance()
        self[key][1].add(name, *pair)

    def error_of(self, key: Any) -> TensorError:
        """Return the error of a tensor over the batches so far."""
        error, distance = self[key]
        return replace(error, **vars(distance))


class _Comparer:
    """Runs a net in float32 and in mixed precision, and collects the errors of all batches."""

    def __init__(
        self,
        net: Block,
        loss: Optional[Callable[[Any, Any], Any]],
        policy: Policy,
        loss_scale: Optional[float],
    ) -> None:
        self.loss, self.policy = loss, policy
        self.isolated = IsolatedNet(net, loss)
        #: The scale is lowered as in training, unless it was given.
        self.searches_scale = loss_scale is None and policy.target_dtype == "float16"
        self.scale = loss_scale or (LossScaler().loss_scale if self.searches_scale else 1.0)
        self.seeds = Seeds()
        self.outputs, self.gradients = _Errors(), _Errors()
        self.sources: Dict[Key, FrozenSet[Key]] = {}

    def run(self, batches: Iterator[Batch]) -> Comparison:
        """Run all batches in both precisions; return the comparison."""
        with self.seeds.restored():
            for batch in batches:
                self._add_batch(batch)
        return Comparison(
            self.policy.target_dtype,
            self.scale,
            tuple(map(self.outputs.error_of, self.outputs)),
            tuple(map(self.gradients.error_of, self.gradients)),
            self._first_jump(),
        )

    def _add_batch(self, batch: Batch) -> None:
        """Run a batch in both precisions, and add the errors of its outputs and gradients."""
        with self.isolated.block(batch.inputs) as block:
            plain, gradients = self._run_batch(block, batch, None)
        with self.isolated.block(batch.inputs) as block:
            mixed, scaled = self._run_batch(block, batch, self.policy)
        for key, layer in plain.layers.items():
            self.sources.setdefault(key, layer.sources)
            other = mixed.layers.get(key)
            # A policy may replace nodes by faster equivalents.
            if other is not None and other.values.shape == layer.values.shape:
                name = f"{key[0]}[{key[2]}]" if key[2] else key[0]
                self.outputs.add(key, name, layer, other, (layer.values, other.values))
        for name, values in gradients.items():
            reader = plain.readers.get(name, ("", 0, 0))
            layers = plain.layers.get(reader), mixed.layers.get(reader)
            self.gradients.add(name, name, *layers, (values, scaled[name]))

    def _run_batch(
        self, block: Block, batch: Batch, policy: Optional[Policy]
    ) -> Tuple["_LayerRun", Dict[str, Any]]:
        """Run a batch under a policy, or in float32; return its layers and unscaled gradients."""
        run = _LayerRun(self.isolated.net, self.seeds, plain=policy is None)
        training = self.loss is not None
        recording = autograd.record() if training else autograd.pause(train_mode=False)
        with autocast(enabled=policy is not None, policy=policy), run.opened():
            explained = self.isolated.explained_errors(batch.inputs)
            with recording, run.recording(block, batch.inputs), explained:
                first = [block(*batch.inputs)]
            if self.loss is None:
                return run, {}
            loss = self.loss

            def record_loss() -> Any:
                with autograd.record():
                    found = first.pop() if first else block(*batch.inputs)
                    return loss_of(loss, found, batch.label)

            recorded = Recorded(block, record_loss)
            params = trained_arrays(block)
            arrays, scale = list(params.values()), 1.0 if policy is None else self.scale
            gradients = recorded.gradients(arrays, scale)
            while policy and self.searches_scale and scale > 1 and not all_finite(gradients):
                self.scale = scale = scale / 2
                gradients = recorded.gradients(arrays, scale)
        return run, {n: dense_values(g) / np.float32(scale) for n, g in zip(params, gradients)}

    def _first_jump(self) -> Optional[TensorError]:
        """Return the first layer whose error is larger than rounding explains, or None."""
        roundoff = UNIT_ROUNDOFF[self.policy.target_dtype]
        # The relative error and the lost elements of each output. An output that was not compared
        # has those of its inputs.
        errors: Dict[Key, Tuple[float, int]] = {}
        for key, sources in self.sources.items():
            of_inputs = [errors[source] for source in sources if source in errors]
            error = max((error for error, _ in of_inputs), default=0.0)
            lost = max((lost for _, lost in of_inputs), default=0)
            errors[key] = error, lost
            if key in self.outputs:
                found = self.outputs.error_of(key)
                if found.relative > JUMP * max(error, roundoff) or (found.lost and not lost):
                    return found
                errors[key] = found.relative, found.lost
        return None


# ---------------------------------------------------------------------- one run, layer by layer


class _LayerRun(IsolatedRun):
    """Records the outputs of a net's layers, within `recording`.

    In a `plain` run, a layer that computes in half precision raises `ArgumentError`.
    """

    def __init__(self, net: Block, seeds: Seeds, plain: bool) -> None:
        super().__init__(seeds)
        self._plain = plain
        self._records_layers = False
        self._calls: "Counter[str]" = Counter()
        #: By `id`, each array and the keys that it was computed from.
        self._producers: Dict[int, Tuple[NDArray, FrozenSet[Key]]] = {}
        #: The layers, in the order of execution.
        self.layers: Dict[Key, _Layer] = {}
        #: The first layer that reads a parameter, by the parameter's name.
        self.readers: Dict[str, Key] = {}
        self._block_names = BlockNames(net)

    @contextlib.contextmanager
    def recording(self, block: Block, inputs: Sequence[Any]) -> Iterator[None]:
        """Context in which the layers of a block are recorded; it is called on `inputs`."""
        for array in arrays_in(inputs):
            self._producers[id(array)] = array, frozenset()
        hooks = [
            one.register_forward_hook(self._record_block)
            for one in blocks_in(block)
            if not (isinstance(one, HybridBlock) and one._active)
        ]
        self._records_layers = True
        try:
            yield
        finally:
            self._records_layers = False
            for hook in hooks:
                hook.detach()

    def run_graph(self, bound: BoundGraph) -> List[NDArray]:
        """Run a graph, and record the outputs of its nodes that are read."""
        if not self._records_layers:
            return super().run_graph(bound)
        heads = bound.graph.heads
        bound = bound.with_heads([*heads, *_inner_outputs(bound.graph)])
        # Before the run: CPUs lack kernels for much of a graph in half precision.
        for i, node in enumerate(bound.graph.nodes):
            if not node.is_variable:
                self._require_float32(node.name, precision_of_node(bound.graph, i, bound.tensors))
        outputs = super().run_graph(bound)
        keys = self._record_nodes(bound, dict(zip(bound.graph.heads, outputs)))
        for head, array in zip(heads, outputs):
            self._producers[id(array)] = array, keys.get(head, frozenset())
        return outputs[: len(heads)]

    def _record_nodes(
        self, bound: BoundGraph, arrays: Mapping[Output, NDArray]
    ) -> Dict[Output, FrozenSet[Key]]:
        """Record the outputs `arrays` of a graph's nodes.

        Returns for each output its key, or for an output that is not recorded its sources' keys.
        """
        graph, tensors = bound.graph, bound.tensors
        rounded = _rounding_casts(graph)
        keys: Dict[Output, FrozenSet[Key]] = {}
        for i, node in enumerate(graph.nodes):
            if node.is_variable:
                keys[i, 0] = self._sources_of([bound.values.get(node.name)])
                continue
            sources = frozenset().union(*(keys.get(entry, frozenset()) for entry in node.inputs))
            block = self._block_names.of_node(node.name)
            inputs = [graph.nodes[source] for source, _ in node.inputs]
            read = [one.name for one in inputs if one.is_variable]
            precision = precision_of_node(graph, i, tensors)
            for k in range(node.num_outputs):
                keys[i, k] = sources
                if (i, k) in arrays and tensors[i, k].dtype in FLOATS:
                    found = dense_values(arrays[rounded.get((i, k), (i, k))])
                    layer = _Layer(block, node.operator, precision, found, sources)
                    keys[i, k] = frozenset({self._record(node.name, k, layer, read)})
            self._calls[node.name] += 1
        return keys

    def _record_block(self, block: Block, inputs: Sequence[Any], outputs: Any) -> None:
        """Record those outputs of a block that none of its children has returned."""
        if not self._records_layers:
            return
        read_arrays = arrays_in(inputs)
        sources = self._sources_of(read_arrays)
        if self.layers and any(id(array) not in self._producers for array in read_arrays):
            # Eager code between blocks has computed an input: take the last layer for its source.
            sources |= {next(reversed(list(self.layers)))}
        made = [array for array in arrays_in(outputs) if id(array) not in self._producers]
        for k, array in enumerate(made):
            dtype, keys = dtypes_of([array])[0], sources
            if dtype in FLOATS:
                self._require_float32(block.name, dtype)
                kind, read = type(block).__name__, [p.name for p in block._reg_params.values()]
                layer = _Layer(block.name, kind, dtype, dense_values(array), sources)
                keys = frozenset({self._record(block.name, k, layer, read)})
            self._producers[id(array)] = array, keys
        self._calls[block.name] += bool(made)

    def _record(self, name: str, output: int, layer: _Layer, params: Sequence[str]) -> Key:
        """Record an output of a layer that reads these parameters; return the output's key."""
        key = name, self._calls[name], output
        self.layers[key] = layer
        for param in params:
            self.readers.setdefault(param, key)
        return key

    def _sources_of(self, arrays: Sequence[Optional[NDArray]]) -> FrozenSet[Key]:
        """Return the keys of the layers' outputs that arrays were computed from."""
        known = [self._producers[id(array)][1] for array in arrays if id(array) in self._producers]
        return frozenset().union(*known)

    def _require_float32(self, name: str, precision: str) -> None:
        """Raise `ArgumentError` if a layer of a plain run computes in half precision."""
        if self._plain and precision in HALVES:
            raise ArgumentError(NOT_FLOAT32.format(name=name, precision=precision))


def _inner_outputs(graph: Graph) -> List[Output]:
    """Return the outputs of operators that other nodes read and that are not heads."""
    heads = set(graph.heads)
    read = dict.fromkeys(entry for node in graph.nodes for entry in node.inputs)
    return [e for e in read if e not in heads and not graph.nodes[e[0]].is_variable]


def _rounding_casts(graph: Graph) -> Dict[Output, Output]:
    """Return the casts that round outputs which a kernel computed in float32, by those outputs."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CASTS:
            source = node.inputs[0]
            precision = graph.nodes[source[0]].attrs.get(PRECISION)
            if precision is not None and precision == node.attrs["dtype"]:
                found[source] = (i, 0)
    return found
