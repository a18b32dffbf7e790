"""The errors of a net's tensors in mixed precision: each layer's output against float32's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

from ...convert.outputs import Distance
from ...errors import ArgumentError
from ...framework.keywords import checked_call
from ...framework.machine import dtype_name
from ...framework.wording import counted, shown
from ...graph.casts.builder import HALVES
from ...graph.casts.insert import PRECISION
from ...graph.ir import CASTS
from ...patches.autocast import autocast, policy_for
from ...policy.policy import Policy
from ...scaling.scaler import LossScaler
from . import measured
from .observing import Call, Tensor, TensorObserver
from .results import Result, Table

#: An error jumps if it is this many times the errors of the inputs, and the unit roundoff.
JUMP = 8.0
#: The largest relative error of rounding one number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

NOT_A_NET = "compare takes a Block, not {given}: import a saved model as a gluon.SymbolBlock"
NOT_FLOAT32 = (
    "{name!r} is in {precision} with mixed precision off: compare takes a float32 net, "
    "not one that was converted or cast"
)

_ERRORS = ("relative", "maximum", "lost")
_HEADINGS = ("name", "block", "operator", "precision", *_ERRORS)
_SHOWN = 10  #: rows of each table


#: An output of a layer: the layer's name, the number of calls before under that name, the output.
Key = Tuple[str, int, int]


class _Layer(NamedTuple):
    """One output of a layer in one run, with the values of the layer's inputs."""

    block: str
    operator: str
    precision: str
    values: Any  #: a float32 NumPy array
    inputs: Sequence[Any]  #: float32 NumPy arrays; None where an input is not known


class TensorError(Distance):
    """The error of a layer's output, or of a parameter's gradient, against float32.

    `relative` is the L2 norm of the difference over that of float32's values, the largest of all
    batches; `maximum` the largest absolute difference; `lost` the number of elements that are
    finite in float32 only. `precision` is the dtype that the operator computes in. `block`,
    `operator` and `precision` are empty for a gradient.
    """

    def __init__(self, name: str, block: str = "", operator: str = "", precision: str = "") -> None:
        super().__init__()
        self.name, self.block, self.operator, self.precision = name, block, operator, precision
        self._inputs = Distance()

    def include(self, plain: _Layer, mixed: _Layer) -> None:
        """Include a batch of a layer's output."""
        self.add(self.name, plain.values, mixed.values)
        for one, other in zip(plain.inputs, mixed.inputs):
            if one is not None and other is not None and one.shape == other.shape:
                self._inputs.add(self.name, one, other)

    def is_jump(self, roundoff: float) -> bool:
        """Return whether the error is larger than rounding and those of the inputs explain."""
        explained = max(self._inputs.relative, roundoff)
        return self.relative > JUMP * explained or (self.lost > 0 and self._inputs.lost == 0)


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The errors that mixed precision adds to a net; printing gives a table, worst first.

    ::

        result = amp.debugging.compare(net, (data, label), loss_function, dtype="bfloat16")
        print(result)
        print(result.first_jump, result.gradients[0].relative)

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
        kinds = (
            ("outputs of layers", self.outputs, _HEADINGS),
            ("gradients of parameters", self.gradients, ("name", *_ERRORS)),
        )
        for kind, errors, headings in kinds:
            worst = sorted(errors, key=lambda error: (-error.lost, -error.relative))[:_SHOWN]
            rows = [tuple(getattr(error, heading) for heading in headings) for error in worst]
            if rows:
                yield f"{kind}, the worst {len(rows)} of {len(errors)}", headings, rows


# ---------------------------------------------------------------------- two runs of a net


@checked_call
def compare(
    net: Block,
    data: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    dtype: Any = None,
    policy: Policy | None = None,
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
    net : Block
        Not changed: a deep copy runs, hybridized where it can be traced. MXNet's random number
        generator continues from a number drawn before.
    data : NDArray or tuple, or an iterable of them
        One batch, or a list or DataLoader of batches. With a loss, a batch is a tuple of the net's
        inputs and the label.
    loss : callable, optional
        Called with the net's output and the label. With a loss, the net runs in training mode, and
        the result has the errors of gradients. Without one, it runs in inference mode.
    dtype, policy
        As for `autocast`, except "auto".

    Raises
    ------
    ArgumentError
        The net is not in float32, the data has no labels or no batch.

    The result has `outputs`, the errors of layers in the order of execution, and `gradients`, those
    of parameters, with `name`, `block`, `operator`, `precision`, `relative`, `maximum` and `lost`;
    `first_jump`, or None; `loss_scale`, that of the backward pass: for float16 the first of 2**16,
    2**15, ... at which all gradients are finite. Printing it gives a table, worst first.

    Runs the net twice for each batch, and holds all layer outputs in memory.
    """
    measured.check_loss(loss)
    chosen = policy_for(dtype, policy)
    if not isinstance(net, Block):
        raise ArgumentError(NOT_A_NET.format(given=shown(net)))
    return _Comparer(net, loss, chosen).run(measured.batches_of(data, labeled=loss is not None))


class _Layers(TensorObserver):
    """The outputs of a net's layers in one run, in the order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()
        self.layers: dict[Key, _Layer] = {}
        self._keys: dict[Tensor, Key] = {}
        #: The inputs of casts, by their outputs: the layer that reads a cast is judged with it.
        self._before_cast: dict[Tensor, Tensor] = {}

    def on_operator(self, call: Call) -> None:
        """Record an output of a layer."""
        site, inputs, output, number = call
        if not output.is_checkable:
            return
        values = _in_float32(output)
        if site.operator in CASTS and inputs[0] is not None:
            key = self._keys.get(inputs[0])
            if key is not None and self.layers[key].precision == output.dtype:
                # The cast rounds an output that a kernel has computed in float32.
                self.layers[key] = self.layers[key]._replace(values=values)
                return
            self._before_cast[output] = self._before_cast.get(inputs[0], inputs[0])
        # Operators that an eager block calls itself have no names.
        name = f"{site.block}_{site.operator}" if site.node == site.block else site.node
        self._calls[name] += number == 0
        key = self._keys[output] = name, self._calls[name], number
        precision = site.attributes.get(PRECISION) or output.dtype
        read = [one and _in_float32(self._before_cast.get(one, one)) for one in inputs]
        self.layers[key] = _Layer(site.block, site.operator, precision, values, read)


def _in_float32(tensor: Tensor) -> Any:
    """Return a tensor's values in float32; None if it holds no floating-point numbers."""
    return tensor.values.astype(np.float32, copy=False) if tensor.is_checkable else None


class _Comparer:
    """Runs a copy of a net in both precisions, and collects the errors of all batches."""

    def __init__(self, net: Block, loss: Any, policy: Policy) -> None:
        self.net, self.loss, self.policy = net, loss, policy
        self.scale = LossScaler().loss_scale if policy.target_dtype == "float16" else 1.0
        self.outputs: dict[Key, TensorError] = {}
        self.gradients: dict[str, TensorError] = {}

    def run(self, batches: Iterator[measured.Batch]) -> Comparison:
        """Run all batches in both precisions; return the comparison."""
        net = None
        for param in self.net.collect_params().values():
            _require_float32(param.name, dtype_name(param.dtype))
        with measured.alike_numbers() as restart:
            for batch in batches:
                with measured.explained_errors(self.net, batch.inputs):
                    net = net or measured.copied(self.net, batch.inputs)
                self._add_batch(net, batch, restart)
        outputs, gradients = tuple(self.outputs.values()), tuple(self.gradients.values())
        roundoff = UNIT_ROUNDOFF[self.policy.target_dtype]
        jump = next((error for error in outputs if error.is_jump(roundoff)), None)
        return Comparison(self.policy.target_dtype, self.scale, outputs, gradients, jump)

    def _add_batch(self, net: Block, batch: measured.Batch, restart: Callable[[], None]) -> None:
        """Run a batch in both precisions, and add the errors of its outputs and gradients."""
        plain, gradients = self._run_batch(net, batch, restart, None)
        for key, layer in plain.layers.items():
            _require_float32(key[0], layer.precision)
        # Dropout draws the same elements in one dtype alone.
        policy = self.policy.override(fp32=["Dropout"])
        mixed, scaled = self._run_batch(net, batch, restart, policy)
        for key, layer in plain.layers.items():
            other = mixed.layers.get(key)
            # A policy may replace nodes by faster equivalents.
            if other is not None and other.values.shape == layer.values.shape:
                name = f"{key[0]}[{key[2]}]" if key[2] else key[0]
                place = layer.block, layer.operator, other.precision
                self.outputs.setdefault(key, TensorError(name, *place)).include(layer, other)
        for name, values in gradients.items():
            error = self.gradients.setdefault(name, TensorError(name))
            error.add(name, values, scaled[name])

    def _run_batch(
        self, net: Block, batch: measured.Batch, restart: Callable[[], None], policy: Policy | None
    ) -> tuple[_Layers, dict[str, Any]]:
        """Run a batch under a policy, or in float32; return its layers and unscaled gradients."""
        training = self.loss is not None
        scale = 1.0 if policy is None else self.scale
        while True:
            layers = _Layers()
            restart()
            with autocast(enabled=policy is not None, policy=policy):
                with autograd.record() if training else autograd.pause(train_mode=False):
                    with measured.explained_errors(self.net, batch.inputs), layers.opened():
                        output = net(*batch.inputs)
                    found = measured.loss_of(self.loss, output, batch.label) if training else None
                if not training:
                    return layers, {}
                gradients = measured.gradients_of(found, net, scale)
            if scale == 1 or all(np.isfinite(values).all() for values in gradients.values()):
                return layers, gradients
            self.scale = scale = scale / 2  # as in training


def _require_float32(name: str, precision: str) -> None:
    """Raise `ArgumentError` for a layer or parameter in half precision."""
    if precision in HALVES:
        raise ArgumentError(NOT_FLOAT32.format(name=name, precision=precision))
