"""The model under tuning: a copy of the user's model, run in isolation on a few batches."""

import contextlib
import itertools
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.context import Context, current_context
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ...convert.blocks import trace
from ...errors import ArgumentError
from ...framework.arrays import cast, dtypes_of, plain_array
from ...framework.machine import dtype_name
from ...graph.inspect import Tensor
from ...graph.ir import Graph, Output, Usage
from ...patches.autocast import autocast
from ...policy.active import suspended
from ...policy.policy import Policy
from ...scaling.finite import all_finite
from ...scaling.scaler import LossScaler
from ..debugging.batches import Batch, batches_of, block_of
from ..debugging.isolated import (
    IsolatedRun,
    Recorded,
    Seeds,
    arrays_in,
    copied,
    dense_values,
    loss_of,
    trained_arrays,
)

__all__ = [
    "MOST_BATCHES",
    "Results",
    "Subject",
    "Traced",
    "TracedRun",
    "next_numbers",
    "rounded",
]


class Traced(NamedTuple):
    """The graph of a float32 run, and all arrays that it read."""

    graph: Graph
    symbol_class: Any
    tensors: Mapping[Output, Tensor]
    values: Dict[str, NDArray]
    context: Context

    def usage(self, training: bool) -> Usage:
        """Return the graph's usage: dtypes, shapes, and whether it trains."""
        dtypes = dict(zip(self.values, dtypes_of(list(self.values.values()))))
        shapes = {name: array.shape for name, array in self.values.items()}
        accumulated = frozenset(self.values)
        return Usage(dtypes, shapes, accumulated=accumulated, training=training)


class TracedRun(IsolatedRun):
    """A run that records the graph of the block."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__(seeds)
        self.traced: Optional[Traced] = None

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph, and record it."""
        self.traced = Traced(graph, symbol_class, tensors, dict(values), context)
        return super().run_graph(graph, symbol_class, tensors, values, context)


#: The number of batches of `data` that are used.
MOST_BATCHES = 16
#: The number of characters that a message shows of another library's error.
_LONGEST = 200

NO_GRAPH = (
    "tune searches in the model's graph, and block {name!r} can't be traced on this data ({why}): "
    "give a HybridBlock that can be hybridized, and as a batch the arguments of one call"
)
NO_LABEL = (
    "a saved model is tuned without a loss and without a metric, for its data has no labels: "
    "import it as a SymbolBlock to give one"
)
NOT_FLOAT32 = (
    "tune takes a float32 model, and parameter {name!r} is {dtype}: cast the model to float32 first"
)

Loss = Callable[[Any, Any], Any]


class Results(NamedTuple):
    """The results of a run, as float32 NumPy arrays."""

    outputs: List[Any]
    gradients: Dict[str, Any]  #: of the loss, by parameter; none without a loss


class Subject:
    """A copy of the model, `block`, with its own parameters; the user's model does not change.

    It runs in training mode with a `loss`, and in inference without one.
    """

    def __init__(self, model: Any, data: Any, loss: Optional[Loss], labelled: bool) -> None:
        self.loss, self.training = loss, loss is not None
        #: What Gluon puts before the names of the model's layers.
        self.prefix: str = model.prefix if isinstance(model, Block) else ""
        batches = batches_of(data, labelled)
        if not isinstance(model, Block):
            if labelled:
                raise ArgumentError(NO_LABEL)
            model, batches = block_of(model, batches)
        self.batches: List[Batch] = list(itertools.islice(batches, MOST_BATCHES))
        self.more = next(iter(batches), None) is not None
        with suspended():
            self.block = copied(model, self.batches[0].inputs)
        if self.block is model or not isinstance(self.block, HybridBlock):
            raise ArgumentError(NO_GRAPH.format(name=model.name, why=self._why_untraced(model)))
        for param in self.block.collect_params().values():
            dtype = dtype_name(param.dtype)
            if "float" in dtype and dtype != "float32":
                raise ArgumentError(NOT_FLOAT32.format(name=param.name, dtype=dtype))
        self.seeds = Seeds()
        self.scale = LossScaler().loss_scale  #: the last loss scale of a float16 run

    def _why_untraced(self, model: Any) -> str:
        if not isinstance(model, HybridBlock):
            return "it is no HybridBlock"
        try:
            trace(model, self.batches[0].inputs)
        except Exception as error:  # what a block's own Python code raises
            return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
        return "it gives no graph"

    def arrays(self) -> List[NDArray]:
        """Return the arrays of the first batch's inputs."""
        return arrays_in(self.batches[0].inputs)

    @property
    def context(self) -> Context:
        """The device of the first batch."""
        arrays = self.arrays()
        return arrays[0].context if arrays else current_context()

    def inputs(self) -> Tuple[Tuple[str, str, Tuple[int, ...]], ...]:
        """Return name, dtype and shape of each array of the first batch."""
        arrays = self.arrays()
        names = [variable.name for variable in self.block._cached_graph[0]]
        shapes = [tuple(array.shape) for array in arrays]
        return tuple(zip(names, dtypes_of(arrays), shapes))

    def run(
        self, batch: Batch, policy: Optional[Policy], block: Optional[HybridBlock] = None
    ) -> Results:
        """Run a batch under a policy, or in float32, on the model or on a converted `block`.

        Random numbers are the same in each run. In float16 the loss is scaled by the largest
        power of two up to 2**16 at which all gradients are finite.
        """
        run, block = IsolatedRun(self.seeds), block or self.block
        self.seeds.begin_run()
        outputs: List[Any] = []
        loss = self.loss

        def record() -> Any:
            with autograd.record():
                outputs[:] = [block(*batch.inputs)]
                return None if loss is None else loss_of(loss, outputs[0], batch.label)

        with autocast(enabled=policy is not None, policy=policy), run.opened():
            if loss is None:
                with autograd.pause(train_mode=False):
                    outputs = [block(*batch.inputs)]
                gradients: Dict[str, Any] = {}
            else:
                gradients = self._gradients(Recorded(block, record), policy)
        return Results([dense_values(array) for array in arrays_in(outputs)], gradients)

    def trace(self) -> Traced:
        """Run the first batch in float32; return its graph."""
        run = TracedRun(self.seeds)
        self.seeds.begin_run()
        training = self.training
        with autocast(enabled=False), run.opened(), autograd.pause(train_mode=training):
            self.block(*self.batches[0].inputs)
        if run.traced is None:
            raise ArgumentError(NO_GRAPH.format(name=self.block.name, why="it runs no graph"))
        return run.traced

    def _gradients(self, loss: Recorded, policy: Optional[Policy]) -> Dict[str, Any]:
        params = trained_arrays(self.block)
        arrays, scale = list(params.values()), 1.0
        if policy is not None and policy.target_dtype == "float16":
            found, scale = self._scaled_gradients(loss, arrays)
        else:
            found = loss.gradients(arrays, scale)
        return {name: dense_values(g) / np.float32(scale) for name, g in zip(params, found)}

    def _scaled_gradients(
        self, loss: Recorded, arrays: Sequence[NDArray]
    ) -> Tuple[Sequence[NDArray], float]:
        """Return gradients times the largest loss scale that keeps them finite, and the scale.

        The search starts from the last scale, since backward passes are expensive.
        """
        most, scale = LossScaler().loss_scale, self.scale
        if all_finite(loss.gradients(arrays, scale)):
            while scale < most and all_finite(loss.gradients(arrays, scale * 2)):
                scale *= 2
        else:
            while scale > 1:
                scale /= 2
                if all_finite(loss.gradients(arrays, scale)):
                    break
        self.scale = scale
        return loss.gradients(arrays, scale), scale

    @contextlib.contextmanager
    def with_weights(self, change: Callable[[NDArray], NDArray]) -> Iterator[None]:
        """Change the trained parameters inside the context."""
        arrays = [plain_array(array) for array in trained_arrays(self.block).values()]
        with suspended(), autograd.pause():
            kept = [array.copy() for array in arrays]
            for array in arrays:
                change(array).copyto(array)
        try:
            yield
        finally:
            with suspended(), autograd.pause():
                for array, value in zip(arrays, kept):
                    value.copyto(array)


def rounded(dtype: str) -> Callable[[NDArray], NDArray]:
    """Return a change of weights that rounds them to a dtype."""
    return lambda array: cast(cast(array, dtype), "float32")


def next_numbers(seed: int) -> Callable[[NDArray], NDArray]:
    """Return a change of weights that moves each to the next float32, up or down at random."""
    generator = np.random.RandomState(seed)

    def change(array: NDArray) -> NDArray:
        values = array.asnumpy()
        towards = np.where(generator.random_sample(values.shape) < 0.5, -np.inf, np.inf)  # noqa: PLR2004
        moved = np.nextafter(values, towards.astype(values.dtype))
        # Zeros stay: the next number is a denormal, which no rounding gives.
        moved = np.where(values == 0, values, moved)
        return mx.nd.array(moved, ctx=array.context, dtype=array.dtype)

    return change
