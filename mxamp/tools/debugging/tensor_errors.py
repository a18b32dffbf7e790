"""`debugging.compare`: errors of each layer's output in mixed precision against float32."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon import Block

from ...convert.outputs import Distance
from ...errors import ArgumentError
from ...framework.keywords import checked_call
from ...framework.machine import Dtype
from ...framework.wording import counted, shown
from ...graph.ir import CASTS, HALVES, emulated_dtype
from ...patches.autocast import autocast, policy_for
from ...policy.policy import Policy
from ..tables import text_table
from . import measured
from .observing import Inputs, Observed, Place, TensorObserver

#: An error jumps if it is this many times the errors of the inputs, and the unit roundoff.
JUMP = 8.0
#: The largest relative error of rounding one number.
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

_HEADINGS = ("name", "block", "operator", "precision", "relative", "maximum", "lost")


#: An output of a layer: the layer's name, the number of calls before under that name, the output.
Key = Tuple[str, int, int]


class _LayerOutput(NamedTuple):
    """One output of a layer in one run of a net, with the layer's inputs."""

    block: str
    operator: str
    precision: str
    values: Any  #: a NumPy array
    inputs: Sequence[Any]  #: NumPy arrays; None where an input is not known


class TensorError(Distance):
    """The error of a layer's output in mixed precision against float32.

    `relative` is the L2 norm of the difference over that of float32's values, the largest of all
    batches; `maximum` the largest absolute difference; `lost` the number of elements that are
    finite in float32 only. `precision` is the dtype that the operator computes in.
    """

    def __init__(self, name: str, block: str, operator: str, precision: str) -> None:
        super().__init__()
        self.name, self.block, self.operator, self.precision = name, block, operator, precision
        self._inputs = Distance()

    def include(self, plain: _LayerOutput, mixed: _LayerOutput) -> None:
        """Add the outputs of one batch, in float32 and mixed precision, to the error."""
        self.add(self.name, plain.values, mixed.values)
        for one, other in zip(plain.inputs, mixed.inputs):
            if one is not None and other is not None and one.shape == other.shape:
                self._inputs.add(self.name, one, other)

    def is_jump(self, roundoff: float) -> bool:
        """Return whether the error is larger than rounding and errors of the inputs explain."""
        explained = max(self._inputs.relative, roundoff)
        return self.relative > JUMP * explained or (self.lost > 0 and self._inputs.lost == 0)

    def __repr__(self) -> str:
        figures = f"relative {self.relative:.4g}, maximum {self.maximum:.4g}, lost {self.lost}"
        return f"<TensorError: {self.name} ({self.operator}, {self.precision}): {figures}>"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `debugging.compare`: each layer's error; prints as a table, worst first.

    ::

        result = amp.debugging.compare(net, data, dtype="bfloat16")
        print(result)
        print(result.first_jump, result.outputs[0].relative)

    Parameters
    ----------
    dtype : str
        The 16-bit dtype.
    outputs : tuple of TensorError
        The error of each layer's output, in the order of execution.
    first_jump : TensorError, optional
        The first layer that turns finite elements into Inf or NaN, else the first whose error is
        much larger than the errors of its inputs.
    """

    dtype: str
    outputs: tuple[TensorError, ...]
    first_jump: TensorError | None

    def summary(self) -> str:
        """Return a line on where the error first jumps, and on elements that became Inf or NaN."""
        first, lost = self.first_jump, sum(error.lost for error in self.outputs)
        jump = "no layer at which the error jumps"
        if first is not None:
            jump = f"the error jumps first at {first.name} ({first.operator}, {first.precision})"
        compared = f"{self.dtype} against float32 in {counted(len(self.outputs), 'output')}"
        return f"{compared}: {jump}; {counted(lost, 'element')} not finite"

    def __str__(self) -> str:
        worst = sorted(self.outputs, key=lambda error: (-error.lost, -error.relative))[:10]
        rows = [[getattr(error, name) for name in _HEADINGS] for error in worst]
        return f"{text_table(_HEADINGS, rows)}\n\n{self.summary()}"

    __repr__ = __str__  # for notebooks


# ---------------------------------------------------------------------- two runs of a net


@checked_call
def compare(
    net: Block,
    data: measured.Data,
    *,
    train_mode: bool = False,
    dtype: Dtype | None = None,
    policy: Policy | None = None,
) -> Comparison:
    """Run a net in float32 and in mixed precision on the same data; return each layer's error.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.gluon.nn.Dense(2, in_units=3)
    >>> net.initialize()
    >>> result = amp.debugging.compare(net, mx.nd.ones((4, 3)), dtype="bfloat16")
    >>> [error.operator for error in result.outputs], result.first_jump
    (['FullyConnected'], None)

    A layer is a node of the hybridized net's graph. If the net can't be traced, a layer is a child
    block. In a net that is not hybridized, code that reads dtypes, such as `x.astype(y.dtype)`, may
    round elsewhere: use `check_numerics` to find NaN in such a net.

    `first_jump` is the first layer, in the order of execution, that turns finite elements into Inf
    or NaN. If no layer does, `first_jump` is the first layer whose error is more than 8 times the
    largest error of the layer's inputs, and more than 8 times the unit roundoff of the dtype
    (2**-11 for float16, 2**-8 for bfloat16).

    Parameters
    ----------
    net : Block
        The net, in float32. The net itself does not run: a deep copy runs, hybridized if it can
        be traced. The state of MXNet's random number generator changes.
    data : NDArray or tuple, or an iterable of them
        One batch, or a list or DataLoader of batches. A batch is a tuple of the net's inputs,
        without the label.
    train_mode : bool, default False
        Run the forward pass of training, as under `autograd.record()`, in place of inference.
    dtype : str or dtype, optional
        "float16" or "bfloat16". The default is the same as for `autocast`.
    policy : Policy, optional
        A whole policy in place of the default one for `dtype`.

    Raises
    ------
    ArgumentError
        The net is not in float32, or the data has no batch.

    The result has `outputs`, the errors of the layers in the order of execution, each with `name`,
    `block`, `operator`, `precision`, `relative`, `maximum` and `lost`. It also has `first_jump`, or
    None. Printing the result gives a table of the 10 worst layers. `tune` measures the error of
    gradients.

    Cost: two runs of the net for each batch, and memory for the outputs of all layers.
    """
    chosen = policy_for(dtype, policy)
    if not isinstance(net, Block):
        raise ArgumentError(f"compare takes a Block (a SymbolBlock for files), not {shown(net)}")
    # Dropout draws the same elements in one dtype alone.
    rounding = chosen.override(fp32=["Dropout"])
    copy: Block | None = None
    errors: dict[Key, TensorError] = {}
    with measured.alike_numbers() as restart:
        for batch in measured.batches_of(data, labeled=False):
            copy = copy or measured.copied(net, batch.inputs, HALVES)
            with measured.explained_errors(net, batch.inputs):
                runs = []
                for region in (autocast(enabled=False), autocast(policy=rounding)):
                    restart()
                    recording = autograd.record() if train_mode else autograd.pause()
                    with region, _LayerOutputs() as seen, recording:
                        copy(*batch.inputs)
                    runs.append(seen.layers)
            plain, mixed = runs
            for key, layer in plain.items():
                measured.require_dtype(key[0], layer.precision, HALVES)
                other = mixed.get(key)
                # A policy may replace nodes by faster equivalents.
                if other is not None and other.values.shape == layer.values.shape:
                    name = f"{key[0]}[{key[2]}]" if key[2] else key[0]
                    error = TensorError(name, layer.block, layer.operator, other.precision)
                    errors.setdefault(key, error).include(layer, other)
    outputs = tuple(errors.values())
    jumps = [one for one in outputs if one.is_jump(UNIT_ROUNDOFF[chosen.target_dtype])]
    jump = min(jumps, key=lambda error: error.lost == 0, default=None)
    return Comparison(chosen.target_dtype, outputs, jump)


class _LayerOutputs(TensorObserver):
    """Observer that collects the outputs of all layers in one run of a net."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()
        self.layers: dict[Key, _LayerOutput] = {}
        self._keys: dict[Observed, Key] = {}
        #: The inputs of casts, by their outputs: the layer that reads a cast is judged with it.
        self._before_cast: dict[Observed, Observed] = {}

    def on_operator(self, site: Place, inputs: Inputs, output: Observed, number: int) -> None:
        """Record the output of an operator as an output of its layer."""
        if not output.is_checkable:
            return
        values = output.values
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
        precision = emulated_dtype(site.attributes) or output.dtype
        read = [one and self._before_cast.get(one, one).values for one in inputs]
        self.layers[key] = _LayerOutput(site.block, site.operator, precision, values, read)
