"""How large gradients are: counted as they are now, or by running a net on data."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.context import Context
from mxnet.gluon import Block, Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray

from ....errors import ArgumentError, StateError
from ....framework.arrays import dtypes_of, flat_view, plain_array
from ....framework.machine import device_kind
from ....graph.edit import Edit, View
from ....graph.inspect import FLOATS, Tensor
from ....graph.ir import Graph, Node, Output
from ....patches.autocast import autocast
from ....policy.active import suspended
from ....scaling.hook import Stage, TrainerHook
from ....scaling.passes import fresh_gradients
from ....scaling.scaler import positive_number
from ..observing import Call, Run
from .backward_passes import gradients_of, loss_of, trained_arrays
from .batches import Batch, batches_of
from .exponents import ExponentCounts
from .histogram import GradientHistogram
from .isolated import IsolatedRun, copied, tensors_in, unchanged
from .randomness import Seeds

__all__ = ["gradient_histogram"]

NO_GRADIENTS = (
    "there are no gradients: call gradient_histogram after backward and before trainer.step(), or "
    "give it data and a loss"
)
NOT_COUNTED = "gradient_histogram takes a Block or a gluon.Trainer, not {given}"
NO_LOSS = "with data, gradient_histogram needs a loss: a function of the net's output and the label"
NO_DATA = "a loss without data says nothing: give the batches to run as well"
NEEDS_BLOCK = "a trainer does not know its net: give the Block, to run it on data"
NO_RUN = "activations=True needs data and a loss: gradients of activations are not kept"
_VIEWS = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}


def gradient_histogram(
    net_or_trainer: Union[Block, Trainer],
    data: Any = None,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    activations: bool = False,
    loss_scale: Optional[float] = None,
) -> GradientHistogram:
    """Count gradients by their exponent, to see which of them float16 keeps at which loss scale.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    >>> net.initialize()
    >>> batch = mx.nd.array([[2.0**-20, 2.0**-30]]), mx.nd.zeros((1, 1))
    >>> histogram = amp.debugging.gradient_histogram(net, batch, lambda output, label: output)
    >>> histogram.exponents[0], histogram.exponents[-1], histogram.share_vanishing(1)
    (-30, -20, 0.5)
    >>> histogram.recommended_scale()
    64.0

    The picture, `histogram.plot()`, is figure 2b of Micikevicius et al., "Mixed Precision
    Training", ICLR 2018.

    Parameters
    ----------
    net_or_trainer : Block or gluon.Trainer
        Left as it is.
    data, loss : optional
        Batches and a loss, as of `compare`: the net is run on them in float32, with mixed
        precision off, so that nothing has vanished before it is counted. Without them the
        gradients are counted that backward has written since the last step, on all devices.
    activations : bool, default False
        Count the gradients of the outputs of layers too; with data only. Where a net can't be
        traced, they are those of the operators that it calls.
    loss_scale : float, optional
        The scale to judge float16 at, and the one that gradients carry that are there already. By
        default that of the trainer, which knows whether its gradients are scaled now; else 1.

    Raises
    ------
    ArgumentError
        Arguments that don't go together.
    StateError
        There are no gradients to count.

    Waits for the gradients; takes 10 to 30 ns for each of them.
    """
    scale = None if loss_scale is None else positive_number("loss_scale", loss_scale)
    if not isinstance(net_or_trainer, (Block, Trainer)):
        raise ArgumentError(NOT_COUNTED.format(given=type(net_or_trainer).__name__))
    if data is None:
        if loss is not None or activations:
            raise ArgumentError(NO_DATA if loss is not None else NO_RUN)
        return _of_current(net_or_trainer, scale)
    if isinstance(net_or_trainer, Trainer):
        raise ArgumentError(NEEDS_BLOCK)
    if not callable(loss):
        raise ArgumentError(NO_LOSS)
    return _of_data(net_or_trainer, data, loss, activations, scale or 1.0)


def _of_current(source: Union[Block, Trainer], scale: Optional[float]) -> GradientHistogram:
    """Count the gradients that are there."""
    carried = used = scale or 1.0
    if isinstance(source, Trainer):
        params: Sequence[Parameter] = source._params
        hook = getattr(source, "_amp_loss_scaler", None)
        if scale is None and isinstance(hook, TrainerHook):
            used = hook.loss_scale
            carried = used if hook.stage is Stage.SCALED else 1.0
    else:
        params = list(source.collect_params().values())
    fresh = fresh_gradients(params)
    if not fresh:
        raise StateError(NO_GRADIENTS)
    counts: Dict[str, ExponentCounts] = {}
    for param, gradients in fresh:
        for gradient in gradients:
            _count(counts, param.name, gradient, carried)
    return GradientHistogram(counts, scale=used)


def _of_data(
    net: Block, data: Any, loss: Callable[[Any, Any], Any], activations: bool, scale: float
) -> GradientHistogram:
    """Run a net on batches; count the gradients of each."""
    counts: Dict[str, ExponentCounts] = {}
    of_activations: Dict[str, ExponentCounts] = {}
    seeds, block, number = Seeds(), None, 0
    with seeds.kept(), autocast(enabled=False):
        for batch in batches_of(data, labelled=True):
            block = block or copied(net, batch.inputs)
            number += 1
            seeds.begin_run()
            run = _TappedRun(seeds, activations)
            with unchanged(*([net] if block is net else []), loss):
                recorded = _run(run, block, batch, loss)
                params = trained_arrays(block)
                gradients = gradients_of(recorded, [*params.values(), *run.arrays], 1.0)
                for name, gradient in zip((*params, *run.names), gradients):
                    _count(counts if name in params else of_activations, name, gradient)
    return GradientHistogram(counts, of_activations, scale, number)


def _run(run: "_TappedRun", block: Block, batch: Batch, loss: Callable[[Any, Any], Any]) -> Any:
    """Run a net and its loss, recorded; return the loss."""
    run.open()
    try:
        with autograd.record():
            output = block(*batch.inputs)
            run.tapping = False
            return loss_of(loss, output, batch.label)
    finally:
        run.close()


def _count(
    counts: Dict[str, ExponentCounts], name: str, gradient: NDArray, scale: float = 1.0
) -> None:
    array = plain_array(gradient.data if isinstance(gradient, RowSparseNDArray) else gradient)
    found = counts.setdefault(name, ExponentCounts())
    if array.size:
        array = array.as_in_context(mx.cpu()) if device_kind(array.context) == "gpu" else array
        found.count(flat_view(array, _VIEWS[dtypes_of([array])[0]]), scale)


class _TappedRun(IsolatedRun):
    """Adds a zero to what each layer computes: its gradient is that of the layer's output."""

    def __init__(self, seeds: Seeds, tapping: bool) -> None:
        super().__init__(seeds)
        self.tapping = tapping
        self.names: List[str] = []
        self.arrays: List[NDArray] = []

    def on_call(self, call: Call, run: Run) -> Any:
        """Make an eager call; tap its output."""
        output = super().on_call(call, run)
        if not self._taps(call, output):
            return output
        with suspended(), self.unseen():
            zero = self._tap(f"{call.operator.name} {len(self.names)}", output.zeros_like())
            return output + zero

    def _taps(self, call: Call, output: Any) -> bool:
        recorded = self.tapping and self.sees() and call.out is None and autograd.is_recording()
        return recorded and isinstance(output, NDArray) and dtypes_of([output])[0] in FLOATS

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph with taps."""
        if not self.tapping:
            return super().run_graph(graph, symbol_class, tensors, values, context)
        with self.unseen():
            graph, taps = _with_taps(graph, tensors)
            for name, (layer, tensor) in taps.items():
                zero = mx.nd.zeros(tensor.shape, ctx=context, dtype=tensor.dtype)
                values = {**values, name: self._tap(layer, zero)}
        tensors = tensors_in(graph, symbol_class, values)
        return super().run_graph(graph, symbol_class, tensors, values, context)

    def _tap(self, name: str, zero: NDArray) -> NDArray:
        zero.attach_grad()
        self.names.append(name)
        self.arrays.append(zero)
        return zero


def _with_taps(
    graph: Graph, tensors: Mapping[Output, Tensor]
) -> Tuple[Graph, Dict[str, Tuple[str, Tensor]]]:
    """Return a graph that adds an input to what each node computes; layer and kind of each input.

    Nodes that others read several outputs of are left as they are.
    """
    several, edit = View(graph, {}).several_read, Edit(graph, {})
    taps: Dict[str, Tuple[str, Tensor]] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable or i in several or tensors[i, 0].dtype not in FLOATS:
            continue
        name = f"_mxamp_tap{len(taps)}"
        taps[name] = node.name, tensors[i, 0]
        reads = [(i, 0), edit.add_node(Node("null", name))]
        edit.alias((i, 0), edit.add("elemwise_add", f"{name}_sum", reads))
    return edit.applied(), taps
