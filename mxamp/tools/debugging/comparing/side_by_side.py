"""A net in float32 and in mixed precision, side by side: the error of each layer."""

from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray.ndarray import NDArray

from ....convert.outputs import Distance, Model
from ....errors import ArgumentError
from ....framework.wording import shown
from ....patches.autocast import autocast, policy_for
from ....policy.policy import Policy
from ....scaling.finite import all_finite
from ....scaling.scaler import LossScaler, positive_number
from .backward_passes import Recorded, loss_of, trained_arrays
from .batches import Batch, batches_of
from .comparison import Comparison, TensorError
from .isolated import copied, dense_values, unchanged
from .layers import Key, Layer, LayerRun
from .randomness import Seeds
from .saved_models import block_of

__all__ = ["compare"]

#: An error jumps where it is so many times those that come in, and the unit roundoff.
JUMP = 8.0
#: Half the distance from 1 to the next number: what rounding costs at most, relatively.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

NO_LOSS = "a saved model is compared without a loss: import it as a SymbolBlock to give one"
NOT_A_LOSS = "loss must be a function of the net's output and the label, not {given}"


class _Pass(NamedTuple):
    """What one run of a net gives."""

    run: LayerRun
    gradients: Dict[str, Any]


def compare(
    net: Union[Block, Model],
    data: Any,
    loss: Optional[Callable[[Any, Any], Any]] = None,
    *,
    dtype: Any = None,
    policy: Optional[Policy] = None,
    loss_scale: Optional[float] = None,
) -> Comparison:
    """Run a net in float32 and in mixed precision on the same data; return the errors by layer.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(2, in_units=3)
    >>> net.initialize()
    >>> result = amp.debugging.compare(net, mx.nd.ones((4, 3)), dtype="bfloat16")
    >>> [error.operator for error in result.outputs], result.first_jump
    (['FullyConnected'], None)

    A layer is a node of the net's graph, as it runs when the net is hybridized; for nets that
    can't be traced it is a child block. The first jump is the first layer in the order of
    execution whose error is more than 8 times the largest error that comes into it, and more than
    8 times the unit roundoff of the dtype (2**-11 for float16, 2**-8 for bfloat16); or that turns
    finite elements into Inf or NaN, and none came into it.

    Parameters
    ----------
    net : Block, or (symbol, arg_params, aux_params)
        Left as it is: parameters, gradients, statistics, graphs and random number generators. (A
        net that draws random numbers other than for `Dropout` leaves MXNet's generator, which
        can't be read, at another point.)
    data : NDArray, tuple or dict, or an iterable of them
        One batch, or a list or DataLoader of them. With a loss, a batch is a tuple of the net's
        inputs and the label; for a saved model, a dict of inputs by name.
    loss : callable, optional
        Called with the net's output and the label. Gives the errors of gradients too, and runs
        the net in training mode; without it the net runs in inference mode.
    dtype, policy
        As of `autocast`, but for "auto": the errors are those of one dtype.
    loss_scale : float, optional
        Of the backward pass in mixed precision. By default it is found as in training: for
        float16 the first of 2**16, 2**15 and so on at which all gradients are finite; for
        bfloat16 it is 1.

    Raises
    ------
    ArgumentError
        Something else than a float32 net, data without labels, or no data.

    Runs the net twice for each batch, and holds all its layers' outputs in memory.
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


class _Comparing:
    """One comparison, while it runs."""

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
        self.block: Optional[Block] = None  # the one that runs
        self.seeds = Seeds()
        self.outputs: Dict[Key, Distance] = {}
        self.gradients: Dict[str, Distance] = {}
        self.layers: Dict[Key, Layer] = {}
        self.readers: Dict[str, Key] = {}
        self.mixed: Dict[Key, Layer] = {}
        self.shapes: Dict[str, Tuple[int, ...]] = {}

    def run(self, batches: Iterator[Batch]) -> Comparison:
        """Run all batches; return the errors."""
        with self.seeds.kept():
            for batch in batches:
                self._compare(batch)
        return Comparison(
            self.policy.target_dtype,
            self.scale,
            tuple(self._output(key) for key in self.outputs),
            tuple(self._gradient(name) for name in self.gradients),
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
            # Some nodes have others standing in for them under a policy.
            if other is not None and other.values.shape == layer.values.shape:
                self.mixed.setdefault(key, other)
                self.outputs.setdefault(key, Distance()).add(layer.name, layer.values, other.values)
        self.readers.update(plain.run.readers)
        for name, values in plain.gradients.items():
            self.shapes[name] = values.shape
            self.gradients.setdefault(name, Distance()).add(name, values, mixed.gradients[name])

    # ------------------------------------------------------------------ one run

    def _pass(self, block: Block, batch: Batch, policy: Optional[Policy]) -> _Pass:
        self.seeds.begin_run()
        run = LayerRun(self.net, self.seeds, plain=policy is None)
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
                gradients, scale = self._gradients(recorded, arrays), self.scale
        return _Pass(
            run, {name: dense_values(g) / np.float32(scale) for name, g in zip(params, gradients)}
        )

    def _gradients(self, recorded: Recorded, arrays: Sequence[NDArray]) -> List[NDArray]:
        """Return the gradients of a loss, times a scale that keeps them finite where it may."""
        gradients = recorded.gradients(arrays, self.scale)
        while self.searching and self.scale > 1 and not all_finite(gradients):
            self.scale /= 2
            gradients = recorded.gradients(arrays, self.scale)
        return gradients

    # ------------------------------------------------------------------ the results

    def _output(self, key: Key) -> TensorError:
        layer, mixed, distance = self.layers[key], self.mixed[key], self.outputs[key]
        return TensorError(
            layer.name,
            layer.block,
            layer.operator,
            mixed.precision,
            layer.values.shape,
            distance.relative,
            distance.maximum,
            distance.lost,
        )

    def _gradient(self, name: str) -> TensorError:
        distance, reader = self.gradients[name], self.readers.get(name)
        layer = self.layers.get(reader) if reader is not None else None
        mixed = self.mixed.get(reader) if reader is not None else None
        return TensorError(
            name,
            layer.block if layer is not None else "",
            layer.operator if layer is not None else "",
            mixed.precision if mixed is not None else "float32",
            self.shapes[name],
            distance.relative,
            distance.maximum,
            distance.lost,
        )

    def _first_jump(self) -> Optional[TensorError]:
        """Return the first layer that adds more error than rounding its inputs and output does."""
        roundoff = UNIT_ROUNDOFF[self.policy.target_dtype]
        # What each layer passes on; one that was not compared, what it is given.
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
