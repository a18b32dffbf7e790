"""The errors of a net's tensors in mixed precision: each layer's output against float32's."""

import contextlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
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
from mxnet.context import Context
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ...convert.outputs import Distance, Model
from ...errors import ArgumentError
from ...framework.arrays import dtypes_of
from ...framework.wording import counted, shown
from ...graph.casts.builder import HALVES
from ...graph.casts.insert import PRECISION
from ...graph.inspect import FLOATS, Tensor, precision_at
from ...graph.ir import CASTS, Graph, Output
from ...patches.autocast import autocast, policy_for
from ...policy.policy import Policy
from ...scaling.finite import all_finite
from ...scaling.scaler import LossScaler, positive_number
from ..tables import html_table, text_table
from .batches import Batch, batches_of, block_of
from .figures import new_figure, png_html, save_figure
from .isolated import (
    IsolatedRun,
    Recorded,
    Seeds,
    arrays_in,
    copied,
    dense_values,
    descendants,
    loss_of,
    trained_arrays,
    unchanged,
)

__all__ = ["Comparison", "TensorError", "compare"]

#: An error jumps if it is this many times the errors of the inputs, and the unit roundoff.
JUMP = 8.0
#: The largest relative error of rounding one number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

NO_LOSS = "a saved model is compared without a loss: import it as a SymbolBlock to give one"
NOT_A_LOSS = "loss must be a function of the net's output and the label, not {given}"
NOT_FLOAT32 = (
    "layer {name!r} computes in {precision} with mixed precision off: compare takes a float32 net, "
    "not one that was converted or cast"
)

_HEADINGS = ("name", "block", "operator", "precision", "relative", "maximum", "lost")
_SHOWN = 10  #: rows of each table
#: Color and marker by precision; the colors differ in brightness too.
_STYLES = {"float16": ("#1b6ca8", "o"), "bfloat16": ("#1b6ca8", "o"), "float32": ("#e8a838", "s")}
_OTHER_STYLE = ("#777777", "^")
_NAMED = 24  #: the figure names up to this many layers


@dataclass(frozen=True)
class TensorError:
    """The distance of a layer's output, or a parameter's gradient, from float32's.

    `relative` and `maximum` are those of the batch where they are largest.
    """

    name: str  #: of the layer or the parameter
    block: str  #: that it belongs to; empty if unknown
    operator: str  #: of the layer; for a gradient, of the layer that reads the parameter
    precision: str  #: the dtype that this operator computes in
    shape: Tuple[int, ...]
    relative: float  #: L2 norm of the difference over the L2 norm of float32's values
    maximum: float  #: largest absolute difference
    lost: int  #: elements that are finite in float32 only


@dataclass(frozen=True)
class Comparison:
    """The errors that mixed precision adds to a net; printing gives a table, worst first.

    `outputs` are the layers' outputs in the order of execution, `gradients` those of the
    parameters in their order. `first_jump` is the first layer at which the error jumps, or None.
    """

    dtype: str
    loss_scale: float  #: of the backward pass in mixed precision; divided out of the gradients
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

    def to_json(self) -> str:
        """Return the comparison as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: Union[None, str, Path] = None) -> Any:
        """Draw the error of each layer in the order of execution; needs matplotlib.

        Returns the matplotlib figure, and writes it to `path` in the format of its suffix.
        Raises `InstallError` without matplotlib.
        """
        return save_figure(_figure(self), path)

    def summary(self) -> str:
        """Return one line: where the error jumps first, and how many elements were lost."""
        lost = sum(error.lost for error in (*self.outputs, *self.gradients))
        jump = "no layer at which the error jumps"
        if self.first_jump is not None:
            first = self.first_jump
            jump = f"the error jumps first at {first.name} ({first.operator}, {first.precision})"
        scale = f", loss scale {self.loss_scale:g}" if self.gradients else ""
        return f"{self.dtype} against float32{scale}: {jump}; {counted(lost, 'element')} not finite"

    def __str__(self) -> str:
        parts = [self.summary()]
        for caption, rows in self._tables():
            parts += ["", caption, text_table(_HEADINGS, rows)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        tables = "".join(html_table(_HEADINGS, rows, caption) for caption, rows in self._tables())
        return f"<p>{self.summary()}</p>{png_html(lambda: _figure(self))}{tables}"

    def __repr__(self) -> str:
        return f"<Comparison: {self.summary()}>"

    def _tables(self) -> Iterator[Tuple[str, List[Tuple[Any, ...]]]]:
        """Yield the caption and the rows of each table."""
        kinds = [("outputs of layers", self.worst_outputs)]
        if self.gradients:
            kinds.append(("gradients of parameters", self.worst_gradients))
        for kind, errors in kinds:
            caption = f"{kind}, the worst {min(len(errors), _SHOWN)} of {len(errors)}"
            yield caption, [tuple(getattr(e, h) for h in _HEADINGS) for e in errors[:_SHOWN]]


def _ranked(errors: Sequence[TensorError]) -> Tuple[TensorError, ...]:
    return tuple(sorted(errors, key=lambda error: (-error.lost, -error.relative)))


def _figure(result: Comparison) -> Any:
    """Draw the errors of layers in the order of execution.

    An error of 0 lies at the lower edge. Layers that lost elements get a cross at the upper edge.
    Layers that lost all elements have no error to draw.
    """
    figure = new_figure(height=5.0)
    axes = figure.subplots()
    errors = result.outputs
    drawn = {i: e for i, e in enumerate(errors) if e.lost < max(math.prod(e.shape), 1)}
    least = min((e.relative for e in drawn.values() if e.relative), default=1e-8) / 2
    heights = {i: max(e.relative, least) for i, e in drawn.items()}
    axes.plot(list(heights), list(heights.values()), color="#bbbbbb", linewidth=1, zorder=1)
    for precision in dict.fromkeys(e.precision for e in drawn.values()):
        color, marker = _STYLES.get(precision, _OTHER_STYLE)
        style = {"color": color, "marker": marker, "edgecolors": "black", "linewidths": 0.5}
        places = [i for i, e in drawn.items() if e.precision == precision]
        label = f"computed in {precision}"
        axes.scatter(places, [heights[i] for i in places], zorder=2, label=label, **style)
    axes.set_yscale("log")
    axes.set_xlim(-0.7, len(errors) - 0.3)
    _mark_losses(axes, result, max(heights.values(), default=0.0))
    if result.first_jump is not None:
        place = errors.index(result.first_jump)
        label = f"the error jumps first: {result.first_jump.name}"
        axes.axvline(place, color="#b03030", linestyle="--", linewidth=1, label=label, zorder=0)
    axes.set_xlabel("layer, in the order of execution")
    if len(errors) <= _NAMED:
        axes.set_xticks(range(len(errors)), [e.name for e in errors], rotation=60, ha="right")
        axes.tick_params(axis="x", labelsize="small")
    axes.set_ylabel("relative error of the output (L2)")
    axes.set_title(f"{result.dtype} against float32")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _mark_losses(axes: Any, result: Comparison, highest: float) -> None:
    """Draw a cross at the upper edge for each layer that lost elements."""
    lost = [i for i, error in enumerate(result.outputs) if error.lost]
    if not lost:
        return
    if highest:
        axes.set_ylim(top=highest * 4)  # room for the crosses
    style = {"color": "black", "marker": "x", "s": 60, "zorder": 3}
    style["transform"] = axes.get_xaxis_transform()
    label = "elements not finite in mixed precision"
    axes.scatter(lost, [0.97] * len(lost), label=label, **style)


# ---------------------------------------------------------------------- two runs of a net


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
        Left unchanged: parameters, gradients, statistics, graphs and random number generators.
        (MXNet's generator can't be read. A net that draws random numbers, other than for `Dropout`,
        leaves it at another point.)
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
    if loss is not None and not callable(loss):
        raise ArgumentError(NOT_A_LOSS.format(given=shown(loss)))
    chosen = policy_for(dtype, policy)
    batches = batches_of(data, labelled=loss is not None)
    if not isinstance(net, Block):
        if loss is not None:
            raise ArgumentError(NO_LOSS)
        net, batches = block_of(net, batches)
    return _Comparing(net, loss, chosen, loss_scale).run(batches)


#: An output of a layer: the layer's name, the number of calls before under that name, the output.
Key = Tuple[str, int, int]


@dataclass(frozen=True)
class _Layer:
    """One output of a layer, and the keys that it was computed from."""

    key: Key
    block: str
    operator: str
    precision: str
    values: Any  #: a float32 NumPy array
    sources: FrozenSet[Key]

    @property
    def name(self) -> str:
        """The layer's name, with the number of the output if it is not the first."""
        name, _, output = self.key
        return f"{name}[{output}]" if output else name


class _Pass(NamedTuple):
    """The layers and gradients of one run."""

    run: "_LayerRun"
    gradients: Dict[str, Any]


class _Comparing:
    """A comparison in progress."""

    def __init__(
        self,
        net: Block,
        loss: Optional[Callable[[Any, Any], Any]],
        policy: Policy,
        loss_scale: Optional[float],
    ) -> None:
        self.net, self.loss, self.policy = net, loss, policy
        #: The scale is lowered as in training, unless it was given.
        self.searching = loss_scale is None and policy.target_dtype == "float16"
        self.scale = loss_scale or (LossScaler().loss_scale if self.searching else 1.0)
        self.block: Optional[Block] = None  # the net, or its copy
        self.seeds = Seeds()
        self.outputs: Dict[Key, Distance] = {}
        self.gradients: Dict[str, Distance] = {}
        self.layers: Dict[Key, _Layer] = {}  # in float32
        self.mixed: Dict[Key, _Layer] = {}
        self.readers: Dict[str, Key] = {}
        self.shapes: Dict[str, Tuple[int, ...]] = {}

    def run(self, batches: Iterator[Batch]) -> Comparison:
        """Run all batches; return the errors."""
        with self.seeds.kept():
            for batch in batches:
                self._compare(batch)
        return Comparison(
            self.policy.target_dtype,
            self.scale,
            tuple(map(self._output, self.outputs)),
            tuple(map(self._gradient, self.gradients)),
            self._first_jump(),
        )

    def _compare(self, batch: Batch) -> None:
        if self.block is None:
            self.block = copied(self.net, batch.inputs)
        block = self.block
        kept = [block] if block is self.net else []
        with unchanged(*kept, self.loss):
            plain = self._pass(block, batch, None)
        with unchanged(*kept, self.loss):
            mixed = self._pass(block, batch, self.policy)
        for key, layer in plain.run.layers.items():
            self.layers.setdefault(key, layer)
            other = mixed.run.layers.get(key)
            # A policy may replace nodes by faster equivalents.
            if other is not None and other.values.shape == layer.values.shape:
                self.mixed.setdefault(key, other)
                self.outputs.setdefault(key, Distance()).add(layer.name, layer.values, other.values)
        self.readers.update(plain.run.readers)
        for name, values in plain.gradients.items():
            self.shapes[name] = values.shape
            self.gradients.setdefault(name, Distance()).add(name, values, mixed.gradients[name])

    def _pass(self, block: Block, batch: Batch, policy: Optional[Policy]) -> _Pass:
        self.seeds.begin_run()
        run = _LayerRun(self.net, self.seeds, plain=policy is None)
        training = self.loss is not None
        recording = autograd.record() if training else autograd.pause(train_mode=False)
        with autocast(enabled=policy is not None, policy=policy), run.opened():
            with recording, run.watching(block, batch.inputs):
                output = block(*batch.inputs)
            if self.loss is None:
                return _Pass(run, {})
            loss, first = self.loss, [output]

            def record() -> Any:
                with autograd.record():
                    found = first.pop() if first else block(*batch.inputs)
                    return loss_of(loss, found, batch.label)

            recorded = Recorded(block, record)
            params = trained_arrays(block)
            arrays = list(params.values())
            scale = 1.0
            if policy is None:
                gradients = recorded.gradients(arrays, scale)
            else:
                gradients, scale = self._scaled_gradients(recorded, arrays), self.scale
        return _Pass(
            run, {name: dense_values(g) / np.float32(scale) for name, g in zip(params, gradients)}
        )

    def _scaled_gradients(self, recorded: Recorded, arrays: Sequence[NDArray]) -> List[NDArray]:
        """Return the gradients times `self.scale`, which is halved until they are finite."""
        gradients = recorded.gradients(arrays, self.scale)
        while self.searching and self.scale > 1 and not all_finite(gradients):
            self.scale /= 2
            gradients = recorded.gradients(arrays, self.scale)
        return gradients

    def _output(self, key: Key) -> TensorError:
        layer = self.layers[key]
        shape, distance = layer.values.shape, self.outputs[key]
        return _error(layer.name, layer, self.mixed[key], shape, distance)

    def _gradient(self, name: str) -> TensorError:
        reader = self.readers.get(name, ("", 0, 0))
        layer, mixed = self.layers.get(reader), self.mixed.get(reader)
        return _error(name, layer, mixed, self.shapes[name], self.gradients[name])

    def _first_jump(self) -> Optional[TensorError]:
        """Return the first layer whose error is larger than rounding explains."""
        roundoff = UNIT_ROUNDOFF[self.policy.target_dtype]
        # The relative error and the lost elements of each output. An output that was not compared
        # has those of its inputs.
        errors: Dict[Key, Tuple[float, int]] = {}
        for key, layer in self.layers.items():
            given = [errors[source] for source in layer.sources if source in errors]
            error = max((one[0] for one in given), default=0.0)
            lost = max((one[1] for one in given), default=0)
            distance = self.outputs.get(key)
            if distance is None:
                errors[key] = error, lost
                continue
            if distance.relative > JUMP * max(error, roundoff) or (distance.lost and not lost):
                return self._output(key)
            errors[key] = distance.relative, distance.lost
        return None


def _error(
    name: str,
    layer: Optional[_Layer],
    mixed: Optional[_Layer],
    shape: Tuple[int, ...],
    distance: Distance,
) -> TensorError:
    return TensorError(
        name,
        layer.block if layer is not None else "",
        layer.operator if layer is not None else "",
        mixed.precision if mixed is not None else "float32",
        shape,
        distance.relative,
        distance.maximum,
        distance.lost,
    )


# ---------------------------------------------------------------------- one run, layer by layer


class _LayerRun(IsolatedRun):
    """Records the layers of `net` that run while `watching`.

    In a `plain` run, a layer that computes in half precision raises `ArgumentError`.
    """

    def __init__(self, net: Block, seeds: Seeds, plain: bool) -> None:
        super().__init__(seeds)
        self._plain = plain
        self._watching = False
        self._seen: "Counter[str]" = Counter()
        #: The keys that an array was computed from, by its `id`; `_kept` keeps ids from reuse.
        self._producers: Dict[int, FrozenSet[Key]] = {}
        self._kept: List[NDArray] = []
        #: The layers, in the order of execution.
        self.layers: Dict[Key, _Layer] = {}
        #: The first layer that reads a parameter, by the parameter's name.
        self.readers: Dict[str, Key] = {}
        names = [(block.prefix, block.name) for block in descendants(net)]
        self._prefixes = sorted(names, key=lambda pair: -len(pair[0]))

    @contextlib.contextmanager
    def watching(self, block: Block, inputs: Sequence[Any]) -> Iterator[None]:
        """Record the layers of a block that is called with these inputs."""
        self._produced(arrays_in(inputs), frozenset())
        hooks = [
            one.register_forward_hook(self._record_block)
            for one in descendants(block)
            if not (isinstance(one, HybridBlock) and one._active)
        ]
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            for hook in hooks:
                hook.detach()

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph, and record each of its nodes whose output is read."""
        if not self._watching:
            return super().run_graph(graph, symbol_class, tensors, values, context)
        # Before the run: CPUs lack kernels for much of a graph in half precision.
        for i, node in enumerate(graph.nodes):
            if not node.is_variable:
                self._check(node.name, precision_at(graph, i, tensors))
        heads = list(graph.heads)
        graph = replace(graph, heads=[*heads, *_inner_outputs(graph)])
        outputs = super().run_graph(graph, symbol_class, tensors, values, context)
        arrays = dict(zip(graph.heads, outputs))
        keys = self._record_nodes(graph, tensors, values, arrays)
        for head, array in zip(heads, outputs):
            self._produced([array], keys.get(head, frozenset()))
        return outputs[: len(heads)]

    def _record_nodes(
        self,
        graph: Graph,
        tensors: Mapping[Output, Tensor],
        values: Mapping[str, NDArray],
        arrays: Mapping[Output, NDArray],
    ) -> Dict[Output, FrozenSet[Key]]:
        """Record the nodes of a graph; return the keys that each output was computed from."""
        rounded = _rounded(graph)
        keys: Dict[Output, FrozenSet[Key]] = {}
        for i, node in enumerate(graph.nodes):
            if node.is_variable:
                array = values.get(node.name)
                keys[i, 0] = self._producers.get(id(array), frozenset())
                continue
            sources = frozenset().union(*(keys.get(entry, frozenset()) for entry in node.inputs))
            number = self._number(node.name)
            for k in range(node.num_outputs):
                keys[i, k] = sources
                if (i, k) not in arrays or tensors[i, k].dtype not in FLOATS:
                    continue
                key = (node.name, number, k)
                found = dense_values(arrays[rounded.get((i, k), (i, k))])
                precision = precision_at(graph, i, tensors)
                block = self._block_of(node.name)
                self.layers[key] = _Layer(key, block, node.operator, precision, found, sources)
                keys[i, k] = frozenset({key})
                for entry in node.inputs:
                    if graph.nodes[entry[0]].is_variable:
                        self.readers.setdefault(graph.nodes[entry[0]].name, key)
        return keys

    def _block_of(self, name: str) -> str:
        return next((block for prefix, block in self._prefixes if name.startswith(prefix)), "")

    def _record_block(self, block: Block, inputs: Sequence[Any], outputs: Any) -> None:
        """Record the outputs of a block that none of its children has returned."""
        if not self._watching:
            return
        given = arrays_in(inputs)
        known = [self._producers[id(array)] for array in given if id(array) in self._producers]
        if len(known) < len(given) and self.layers:
            # Eager code between blocks has computed an input: take the last layer for its source.
            known.append(frozenset({next(reversed(list(self.layers)))}))
        sources = frozenset().union(*known)
        made = [array for array in arrays_in(outputs) if id(array) not in self._producers]
        number = self._number(block.name) if made else 0
        for k, array in enumerate(made):
            key = (block.name, number, k)
            dtype = dtypes_of([array])[0]
            self._produced([array], frozenset({key}) if dtype in FLOATS else sources)
            if dtype in FLOATS:
                self._check(block.name, dtype)
                kind, found = type(block).__name__, dense_values(array)
                self.layers[key] = _Layer(key, block.name, kind, dtype, found, sources)
                for param in block._reg_params.values():
                    self.readers.setdefault(param.name, key)

    def _check(self, name: str, precision: str) -> None:
        if self._plain and precision in HALVES:
            raise ArgumentError(NOT_FLOAT32.format(name=name, precision=precision))

    def _number(self, name: str) -> int:
        self._seen[name] += 1
        return self._seen[name] - 1

    def _produced(self, arrays: Sequence[NDArray], keys: FrozenSet[Key]) -> None:
        for array in arrays:
            self._producers[id(array)] = keys
            self._kept.append(array)


def _inner_outputs(graph: Graph) -> List[Output]:
    """Return the outputs that other nodes read and that are not heads."""
    heads = set(graph.heads)
    read = dict.fromkeys(entry for node in graph.nodes for entry in node.inputs)
    return [e for e in read if e not in heads and not graph.nodes[e[0]].is_variable]


def _rounded(graph: Graph) -> Dict[Output, Output]:
    """Map outputs that a kernel computed in float32 to the casts that round them."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CASTS:
            source = node.inputs[0]
            precision = graph.nodes[source[0]].attrs.get(PRECISION)
            if precision is not None and precision == node.attrs["dtype"]:
                found[source] = (i, 0)
    return found
