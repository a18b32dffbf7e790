"""The errors of a net's tensors in mixed precision: each layer's output against float32's."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import Distance, Model
from ...errors import ArgumentError
from ...framework.arrays import as_list, dtype_of
from ...framework.keywords import checked_call
from ...framework.machine import dtype_name
from ...framework.patching import Patch
from ...framework.wording import counted
from ...graph.casts.builder import HALVES
from ...graph.casts.insert import PRECISION
from ...graph.inspect import FLOATS, Tensor, precision_of_node
from ...graph.ir import CASTS, Graph, Output
from ...patches.autocast import autocast, policy_for
from ...patches.cached_op import PolicyCachedOp
from ...policy.policy import Policy
from ...scaling.finite import all_finite
from ...scaling.scaler import LossScaler, positive_number
from .batches import Batch, batches_of, block_of, check_loss
from .blocks import BlockNames, blocks_in
from .measured import (
    alike_numbers,
    arrays_in,
    copied,
    dense_values,
    explained_errors,
    gradients_of,
    loss_of,
)
from .observing import Observer, Original, patch_over
from .results import Result, Table

#: An error jumps if it is this many times the errors of the inputs, and the unit roundoff.
JUMP = 8.0
#: The largest relative error of rounding one number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

NO_LOSS = "a saved model is compared without a loss: import it as a SymbolBlock to give one"
NOT_FLOAT32 = (
    "{name!r} is in {precision} with mixed precision off: compare takes a float32 net, "
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
    shape: tuple[int, ...]
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
    outputs: tuple[TensorError, ...]
    gradients: tuple[TensorError, ...] = ()
    first_jump: TensorError | None = None

    @property
    def worst_outputs(self) -> tuple[TensorError, ...]:
        """The outputs of layers, sorted by lost elements, then by relative error."""
        return _ranked(self.outputs)

    @property
    def worst_gradients(self) -> tuple[TensorError, ...]:
        """The gradients of parameters, sorted by lost elements, then by relative error."""
        return _ranked(self.gradients)

    def to_dict(self) -> dict[str, Any]:
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


def _ranked(errors: Sequence[TensorError]) -> tuple[TensorError, ...]:
    """Return errors sorted by lost elements, then by relative error, the worst first."""
    return tuple(sorted(errors, key=lambda error: (-error.lost, -error.relative)))


# ---------------------------------------------------------------------- two runs of a net


@checked_call
def compare(
    net: Block | Model,
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    dtype: Any = None,
    policy: Policy | None = None,
    loss_scale: float | None = None,
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
        Not changed: a deep copy runs, hybridized where it can be traced. MXNet's random number
        generator continues from a number drawn before.
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
    operator: str  #: "" for an input of the net
    precision: str
    values: Any  #: a float32 NumPy array
    sources: frozenset[Key]


class _Errors(Dict[Any, Tuple[TensorError, Distance]]):
    """The errors of tensors over all batches, by key."""

    def add(
        self, key: Any, name: str, plain: _Layer | None, mixed: _Layer | None, pair: Any
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
    """Runs a copy of a net in both precisions, and collects the errors of all batches."""

    def __init__(self, net: Block, loss: Any, policy: Policy, loss_scale: float | None) -> None:
        self.net, self.loss, self.policy = net, loss, policy
        #: The scale is lowered as in training, unless it was given.
        self.searches_scale = loss_scale is None and policy.target_dtype == "float16"
        self.scale = loss_scale or (LossScaler().loss_scale if self.searches_scale else 1.0)
        self.outputs, self.gradients = _Errors(), _Errors()
        self.sources: dict[Key, frozenset[Key]] = {}

    def run(self, batches: Iterator[Batch]) -> Comparison:
        """Run all batches in both precisions; return the comparison."""
        net = None
        for param in self.net.collect_params().values():
            if dtype_name(param.dtype) in HALVES:
                raise ArgumentError(
                    NOT_FLOAT32.format(name=param.name, precision=dtype_name(param.dtype))
                )
        with alike_numbers() as seed:
            for batch in batches:
                if net is None:
                    with self._explained_errors(batch):
                        net = copied(self.net, batch.inputs)
                self._add_batch(net, batch, seed)
        errors = [self.outputs.error_of(key) for key in self.outputs]
        return Comparison(
            self.policy.target_dtype,
            self.scale,
            tuple(error for error in errors if error.operator),
            tuple(map(self.gradients.error_of, self.gradients)),
            self._first_jump(),
        )

    def _explained_errors(self, batch: Batch) -> ContextManager[None]:
        return explained_errors(self.net, batch.inputs, labeled=self.loss is not None)

    def _add_batch(self, net: Block, batch: Batch, seed: Callable[[], None]) -> None:
        """Run a batch in both precisions, and add the errors of its outputs and gradients."""
        # Dropout draws the same elements in one dtype alone.
        policy = self.policy.override(fp32=["Dropout"])
        plain, gradients = self._run_batch(net, batch, seed, None)
        mixed, scaled = self._run_batch(net, batch, seed, policy)
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
        self, net: Block, batch: Batch, seed: Callable[[], None], policy: Policy | None
    ) -> tuple[_LayerRun, dict[str, Any]]:
        """Run a batch under a policy, or in float32; return its layers and unscaled gradients."""
        training = self.loss is not None
        scale = 1.0 if policy is None else self.scale
        while True:
            run = _LayerRun(net, plain=policy is None)
            seed()
            with autocast(enabled=policy is not None, policy=policy), run.opened():
                with autograd.record() if training else autograd.pause(train_mode=False):
                    with run.recording(batch.inputs), self._explained_errors(batch):
                        output = net(*batch.inputs)
                    found = loss_of(self.loss, output, batch.label) if training else None
                if not training:
                    return run, {}
                gradients = gradients_of(found, net, scale)
            searches = policy is not None and self.searches_scale and scale > 1
            if not searches or all_finite(list(gradients.values())):
                return run, {n: dense_values(g) / np.float32(scale) for n, g in gradients.items()}
            self.scale = scale = scale / 2

    def _first_jump(self) -> TensorError | None:
        """Return the first layer whose error is larger than rounding explains, or None."""
        roundoff = UNIT_ROUNDOFF[self.policy.target_dtype]
        # The relative error and the lost elements of each output. An output that was not compared
        # has those of its inputs.
        errors: dict[Key, tuple[float, int]] = {}
        for key, sources in self.sources.items():
            of_inputs = [errors[source] for source in sources if source in errors]
            error = max((error for error, _ in of_inputs), default=0.0)
            lost = max((lost for _, lost in of_inputs), default=0)
            errors[key] = error, lost
            if key in self.outputs:
                found = self.outputs.error_of(key)
                jumps = found.relative > JUMP * max(error, roundoff) or (found.lost and not lost)
                if jumps and found.operator:
                    return found
                errors[key] = found.relative, found.lost
        return None


# ---------------------------------------------------------------------- one run, layer by layer


class _LayerRun(Observer):
    """Records the outputs of a net's layers, within `recording`.

    In a `plain` run, a layer that computes in half precision raises `ArgumentError`.
    """

    def __init__(self, net: Block, plain: bool) -> None:
        super().__init__()
        self._net, self._plain, self._is_recording = net, plain, False
        self._params = frozenset(net.collect_params())
        self._block_names = BlockNames(net)
        self._calls: Counter[str] = Counter()
        #: The arrays that layers have returned, by id.
        self._made: dict[int, NDArray] = {}
        #: The layers, in the order of execution.
        self.layers: dict[Key, _Layer] = {}
        #: The first layer that reads a parameter, by the parameter's name.
        self.readers: dict[str, Key] = {}

    def patches(self) -> Sequence[Patch]:
        """Return the patches of graphs."""
        return [
            *self.graph_patches(),
            patch_over(PolicyCachedOp, "__call__", self._call_graph),
        ]

    @contextlib.contextmanager
    def recording(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Context in which the layers of the net are recorded; it is called on `inputs`."""
        self._made.update((id(array), array) for array in arrays_in(inputs))
        hooks = [
            block.register_forward_hook(self._record_block)
            for block in blocks_in(self._net)
            if not (isinstance(block, HybridBlock) and block._active)
        ]
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False
            for hook in hooks:
                hook.detach()

    def _call_graph(
        self, original: Original, op: PolicyCachedOp, *args: NDArray, **options: Any
    ) -> Any:
        """Run a graph, and record the outputs of its nodes that are read."""
        if not self._is_recording:
            return original(op, *args, **options)
        symbol, inputs = op.graph_of(args)
        values = dict(zip(symbol.list_inputs(), inputs))
        graph = Graph.from_symbol(symbol)
        entries = [*graph.heads, *_inner_outputs(graph)]
        inner = replace(graph, heads=entries).to_symbol(type(symbol))
        outputs = as_list(CachedOp(inner)(*(values[name] for name in inner.list_inputs())))
        self._record_nodes(graph, values, dict(zip(entries, outputs)))
        made = list(outputs[: len(graph.heads)])
        self._made.update((id(array), array) for array in made)
        return made

    def _record_nodes(
        self, graph: Graph, inputs: Mapping[str, NDArray], arrays: Mapping[Output, NDArray]
    ) -> None:
        """Record the outputs `arrays` of a graph's nodes."""
        rounded = _rounding_casts(graph)
        tensors = {entry: Tensor(dtype_of(array), None) for entry, array in arrays.items()}
        keys: dict[Output, frozenset[Key]] = {}
        for i, node in enumerate(graph.nodes):
            sources = frozenset().union(*(keys[entry] for entry in node.inputs))
            if node.is_variable:
                tensors[i, 0] = Tensor(dtype_of(inputs[node.name]), None)
                is_data = node.name not in self._params
                keys[i, 0] = self._record_inputs([inputs[node.name]]) if is_data else sources
                continue
            block = self._block_names.of_node(node.name)
            read = [graph.nodes[j].name for j, _ in node.inputs if graph.nodes[j].is_variable]
            tensors.setdefault((i, 0), Tensor("float32", None))
            precision = precision_of_node(graph, i, tensors)
            self._require_float32(node.name, precision)
            for k in range(node.num_outputs):
                keys[i, k] = sources
                if (i, k) in arrays and tensors[i, k].dtype in FLOATS:
                    found = dense_values(arrays[rounded.get((i, k), (i, k))])
                    layer = _Layer(block, node.operator, precision, found, sources)
                    keys[i, k] = frozenset({self._record(node.name, k, layer, read)})
            self._calls[node.name] += 1

    def _record_inputs(self, arrays: Sequence[NDArray]) -> frozenset[Key]:
        """Record the inputs of a graph or of a block, whose errors are not its own."""
        keys = set()
        for array in arrays:
            dtype = dtype_of(array)
            if dtype in FLOATS:
                layer = _Layer("", "", dtype, dense_values(array), frozenset())
                keys.add(self._record("", 0, layer, ()))
                self._calls[""] += 1
        return frozenset(keys)

    def _record_block(self, block: Block, inputs: Sequence[Any], outputs: Any) -> None:
        """Record those outputs of a block that none of its children has returned."""
        made = [array for array in arrays_in(outputs) if id(array) not in self._made]
        if not made or not self._is_recording:
            return
        sources = self._record_inputs(arrays_in(inputs))
        for k, array in enumerate(made):
            self._made[id(array)] = array
            dtype = dtype_of(array)
            if dtype in FLOATS:
                self._require_float32(block.name, dtype)
                read = [param.name for param in block._reg_params.values()]
                values = dense_values(array)
                layer = _Layer(block.name, type(block).__name__, dtype, values, sources)
                self._record(block.name, k, layer, read)
        self._calls[block.name] += 1

    def _record(self, name: str, output: int, layer: _Layer, params: Sequence[str]) -> Key:
        """Record an output of a layer that reads these parameters; return the output's key."""
        key = name, self._calls[name], output
        self.layers[key] = layer
        for param in params:
            self.readers.setdefault(param, key)
        return key

    def _require_float32(self, name: str, precision: str) -> None:
        """Raise `ArgumentError` if a layer of a plain run computes in half precision."""
        if self._plain and precision in HALVES:
            raise ArgumentError(NOT_FLOAT32.format(name=name, precision=precision))


def _inner_outputs(graph: Graph) -> list[Output]:
    """Return the outputs of operators that other nodes read and that are not heads."""
    heads = set(graph.heads)
    read = dict.fromkeys(entry for node in graph.nodes for entry in node.inputs)
    return [e for e in read if e not in heads and not graph.nodes[e[0]].is_variable]


def _rounding_casts(graph: Graph) -> dict[Output, Output]:
    """Return the casts that round outputs which a kernel computed in float32, by those outputs."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CASTS:
            source = node.inputs[0]
            precision = graph.nodes[source[0]].attrs.get(PRECISION)
            if precision is not None and precision == node.attrs["dtype"]:
                found[source] = (i, 0)
    return found
