"""Histograms of gradients by exponent: how many of them float16 keeps, and at which loss scale."""

import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.context import Context
from mxnet.gluon import Block, Parameter, Trainer
from mxnet.ndarray.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray

from ...errors import ArgumentError, StateError
from ...framework.arrays import dtypes_of, flat_view, plain_array
from ...framework.machine import device_kind
from ...framework.wording import counted, shown
from ...graph.edit import Edit, View
from ...graph.inspect import FLOATS, Tensor
from ...graph.ir import Graph, Node, Output
from ...patches.autocast import autocast
from ...policy.active import suspended
from ...scaling.hook import Stage, TrainerHook
from ...scaling.passes import fresh_gradients
from ...scaling.scaler import positive_number
from ..tables import html_table, text_table
from .batches import Batch, batches_of
from .figures import new_figure, png_html, save_figure
from .isolated import (
    IsolatedRun,
    Seeds,
    copied,
    gradients_of,
    loss_of,
    tensors_in,
    trained_arrays,
    unchanged,
)
from .observing import Call, Run

__all__ = ["MARGIN", "ExponentCounts", "GradientHistogram", "gradient_histogram"]

#: float16 rounds magnitudes up to 2**-25 to zero, those below 2**-14 are subnormal, and the
#: exponent of its largest number, 65504, is 15.
_VANISHES, _NORMAL, _TOP = -25, -14, 15
#: float16 rounds magnitudes from 65520 on to infinity: this mantissa at the exponent 15.
_OVERFLOWING = 65520 / 2**_TOP
#: The exponents of all float64 numbers lie from here up, and below _LOWEST + _EXPONENTS.
_LOWEST, _EXPONENTS = -1080, 2120
#: Values that are counted at once: they fit into a core's cache.
_CHUNK = 2**16

#: The recommended scale leaves the largest gradient this factor below float16's largest number.
MARGIN = 8.0

NOTHING = "all gradients that were counted are zero: no scale keeps more of them"
KEEP = "keep must be a share above 0 and at most 1, not {keep}"
NO_GRADIENTS = (
    "there are no gradients: call gradient_histogram after backward and before trainer.step(), or "
    "give it data and a loss"
)
NOT_COUNTED = "gradient_histogram takes a Block or a gluon.Trainer, not {given}"
NO_LOSS = "with data, gradient_histogram needs a loss: a function of the net's output and the label"
NO_DATA = "a loss is given without data: give the batches to run as well"
NEEDS_BLOCK = "a trainer does not know its net: give the Block, to run it on data"
NO_RUN = "activations=True needs data and a loss: MXNet does not keep gradients of activations"

_HEADINGS = ("name", "values", "zero", "vanishing", "subnormal", "overflowing", "not finite")
_SHOWN = 10
_VIEWS = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}


class ExponentCounts:
    """How many values have each exponent: floor(log2(magnitude)).

    Exact powers of two, and values that float16 would round up to the next power of two at the top
    of its range, are counted in rows of their own: they decide what the range's ends round to.
    """

    def __init__(self) -> None:
        #: Values by exponent; of these, the powers of two; and those from _OVERFLOWING on.
        self._all, self._powers, self._tops = np.zeros((3, _EXPONENTS), np.int64)
        self.zero = self.nonfinite = 0
        self.largest = 0.0

    @classmethod
    def total(cls, parts: Iterable["ExponentCounts"]) -> "ExponentCounts":
        """Return the sum of several counts."""
        total = cls()
        for part in parts:
            total._all += part._all
            total._powers += part._powers
            total._tops += part._tops
            total.zero += part.zero
            total.nonfinite += part.nonfinite
            total.largest = max(total.largest, part.largest)
        return total

    def count(self, values: Any, scale: float = 1.0) -> None:
        """Add a flat float array whose values carry `scale`; bfloat16 comes as uint16 bits."""
        for start in range(0, values.size, _CHUNK):
            chunk = values[start : start + _CHUNK]
            if chunk.dtype == np.uint16:
                chunk = (chunk.astype(np.uint32) << 16).view(np.float32)
            elif chunk.dtype == np.float16:
                chunk = chunk.astype(np.float32)
            if scale != 1:
                chunk = chunk.astype("float64") / scale  # float32 could underflow
            self._count(chunk)

    def _count(self, values: Any) -> None:
        finite = values[np.isfinite(values)] if not np.isfinite(values).all() else values
        self.nonfinite += values.size - finite.size
        # np.frexp gives mantissas from 0.5 up to 1, and 0 for zero.
        mantissas, exponents = np.frexp(np.abs(finite))
        used = mantissas != 0
        if not used.all():
            self.zero += int(finite.size - used.sum())
            mantissas, exponents = mantissas[used], exponents[used]
        if not mantissas.size:
            return
        self.largest = max(self.largest, float(np.abs(finite).max()))
        places = exponents - (1 + _LOWEST)
        for row, which in (
            (self._all, slice(None)),
            (self._powers, mantissas == 0.5),  # noqa: PLR2004
            (self._tops, mantissas >= _OVERFLOWING / 2),
        ):
            np.add(row, np.bincount(places[which], minlength=_EXPONENTS), out=row)

    @property
    def by_exponent(self) -> Dict[int, int]:
        """How many values have each exponent, from the smallest to the largest, without gaps."""
        found = self._all.nonzero()[0]
        places = range(found[0], found[-1] + 1) if found.size else ()
        return {place + _LOWEST: int(self._all[place]) for place in places}

    @property
    def nonzero(self) -> int:
        """How many values are neither zero nor Inf nor NaN."""
        return int(self._all.sum())

    def below(self, exponent: float, inclusive: bool) -> float:
        """Count the values below 2**exponent, with those equal to it if `inclusive`.

        Exact for whole exponents. Otherwise the values of one power of two are taken to be spread
        evenly over its logarithm.
        """
        whole = _place(math.floor(exponent))
        total, values, powers = self._all[:whole].sum(), self._all[whole], self._powers[whole]
        if exponent == math.floor(exponent):
            return float(total + (powers if inclusive else 0))
        return float(total + powers + (values - powers) * (exponent % 1))

    def overflowing(self, shift: float) -> float:
        """Count the values that float16 rounds to infinity when 2**shift multiplies them."""
        limit = _TOP - shift
        whole = _place(math.floor(limit))
        above = self._all[whole + 1 :].sum()
        if limit == math.floor(limit):
            return float(above + self._tops[whole])
        return float(above - self._all[whole + 1] * (limit % 1))


def _place(exponent: int) -> int:
    return min(max(exponent - _LOWEST, 0), _EXPONENTS - 2)


class GradientHistogram:
    """Gradients counted by exponent, which `gradient_histogram` returns; printing gives a table.

    Gradients are counted without a loss scale. `scale` is the loss scale in use, which the table
    and the figure judge float16 at. Shares are of the values that are neither zero nor Inf nor NaN.
    They are exact for scales that are powers of two. For other scales, the values of one power of
    two are taken to be spread evenly over its logarithm. Histograms of several batches add up:
    `histogram += another`.
    """

    def __init__(
        self,
        parameters: Mapping[str, ExponentCounts],
        activations: Optional[Mapping[str, ExponentCounts]] = None,
        scale: float = 1.0,
        batches: int = 1,
    ) -> None:
        self._parameters, self._activations = dict(parameters), dict(activations or {})
        self.scale = scale
        self.batches = batches
        self._counts = ExponentCounts.total(
            (*self._parameters.values(), *self._activations.values())
        )

    @property
    def exponents(self) -> Tuple[int, ...]:
        """The exponents that occur, from the smallest to the largest, without gaps."""
        return tuple(self._counts.by_exponent)

    @property
    def counts(self) -> Tuple[int, ...]:
        """How many values lie from 2**exponent up to 2**(exponent + 1), for each exponent."""
        return tuple(self._counts.by_exponent.values())

    @property
    def size(self) -> int:
        """How many values were counted."""
        return self._counts.nonzero + self._counts.zero + self._counts.nonfinite

    @property
    def zero(self) -> int:
        """How many values are zero."""
        return self._counts.zero

    @property
    def nonfinite(self) -> int:
        """How many values are Inf or NaN."""
        return self._counts.nonfinite

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return self._counts.largest

    @property
    def by_parameter(self) -> Dict[str, "GradientHistogram"]:
        """A histogram for each parameter, by name."""
        return {n: GradientHistogram({n: c}, {}, self.scale) for n, c in self._parameters.items()}

    @property
    def by_activation(self) -> Dict[str, "GradientHistogram"]:
        """A histogram for the gradient of each layer's output, by the layer's name."""
        return {n: GradientHistogram({}, {n: c}, self.scale) for n, c in self._activations.items()}

    def share_vanishing(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 rounds to zero at a scale: up to 2**-25."""
        return self._share(self._counts.below(_VANISHES - self._shift(scale), inclusive=True))

    def share_subnormal(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 keeps with fewer bits: below 2**-14, and not vanishing.

        Values that round up to 2**-14 count as subnormal.
        """
        shift = self._shift(scale)
        below = self._counts.below(_NORMAL - shift, inclusive=False)
        return self._share(below - self._counts.below(_VANISHES - shift, inclusive=True))

    def share_overflowing(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 rounds to infinity at a scale: from 65520 on."""
        return self._share(self._counts.overflowing(self._shift(scale)))

    def recommended_scale(self, keep: float = 0.999) -> float:
        """Return the smallest power of two at which float16 keeps the share `keep` of gradients.

        A gradient is kept if it rounds neither to zero nor to infinity. The scale never lifts the
        largest gradient above an eighth of 65504, float16's largest number, even if fewer gradients
        are kept then: that leaves room for batches with larger ones. Raises `StateError` if all
        gradients are zero.
        """
        if not (isinstance(keep, (int, float)) and 0 < keep <= 1):
            raise ArgumentError(KEEP.format(keep=shown(keep)))
        if not self._counts.nonzero:
            raise StateError(NOTHING)
        most = math.floor(math.log2(65504 / MARGIN) - math.log2(self.largest))
        for power in range(min(most, 0), most):
            if self.share_vanishing(2.0**power) <= 1 - keep:
                return 2.0**power
        return 2.0**most

    def __add__(self, other: "GradientHistogram") -> "GradientHistogram":
        return GradientHistogram(
            _merged(self._parameters, other._parameters),
            _merged(self._activations, other._activations),
            other.scale,
            self.batches + other.batches,
        )

    def to_dict(self) -> Dict[str, Any]:
        """Return the histogram as plain values; `share` and `zero` are of all values."""
        size = max(self.size, 1)
        return {
            "exponents": list(self.exponents),
            "share": [count / size for count in self.counts],
            "zero": self.zero / size,
            "scale": self.scale,
            "dtype": "float16",
            "values": self.size,
            "nonfinite": self.nonfinite,
            "vanishing": self.share_vanishing(),
            "subnormal": self.share_subnormal(),
            "overflowing": self.share_overflowing(),
            "recommended_scale": self._recommended(),
        }

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: Union[None, str, Path] = None) -> Any:
        """Draw the share of gradients by exponent, over float16's range; needs matplotlib.

        Returns the matplotlib figure, and writes it to `path` in the format of its suffix.
        Raises `InstallError` without matplotlib.
        """
        return save_figure(_figure(self.to_dict()), path)

    def summary(self) -> str:
        """Return one line: what float16 loses at the scale in use, and the recommended scale."""
        recommended = self._recommended()
        better = f"; recommended scale {recommended:g}" if recommended is not None else ""
        zero = self.zero / max(self.size, 1)
        return (
            f"{counted(self.size, 'gradient')} of {counted(self.batches, 'batch', 'batches')}, "
            f"{zero:.2%} zero, {self.nonfinite:,} not finite. float16 at scale {self.scale:g}: "
            f"{self.share_vanishing():.2%} vanish, {self.share_subnormal():.2%} are subnormal, "
            f"{self.share_overflowing():.2%} overflow{better}"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary(), "", text_table(_HEADINGS, self._rows())])

    def _repr_html_(self) -> str:
        figure = png_html(lambda: _figure(self.to_dict()))
        return f"<p>{self.summary()}</p>{figure}{html_table(_HEADINGS, self._rows())}"

    def __repr__(self) -> str:
        return f"<GradientHistogram: {self.summary()}>"

    def _rows(self) -> List[Tuple[Any, ...]]:
        """Return the rows of the table, worst losses first."""
        rows = []
        for name, one in {**self.by_parameter, **self.by_activation}.items():
            shares = one.share_vanishing(), one.share_subnormal(), one.share_overflowing()
            zero = one.zero / max(one.size, 1)
            rows.append((name, one.size, zero, *shares, one.nonfinite))
        rows.sort(key=lambda row: (-row[5], -row[3], -row[4]))
        return rows[:_SHOWN]

    def _recommended(self) -> Optional[float]:
        return self.recommended_scale() if self._counts.nonzero else None

    def _shift(self, scale: Optional[float]) -> float:
        return math.log2(self.scale if scale is None else positive_number("scale", scale))

    def _share(self, count: float) -> float:
        return count / self._counts.nonzero if self._counts.nonzero else 0.0


def _merged(
    one: Mapping[str, ExponentCounts], other: Mapping[str, ExponentCounts]
) -> Dict[str, ExponentCounts]:
    names = dict.fromkeys((*one, *other))
    return {
        name: ExponentCounts.total(counts[name] for counts in (one, other) if name in counts)
        for name in names
    }


def _figure(histogram: Mapping[str, Any]) -> Any:
    """Draw bars of the shares by exponent over float16's range, from a histogram's dict."""
    figure = new_figure(height=4.6)
    axes = figure.subplots()
    exponents, scale = histogram["exponents"], histogram["scale"]
    bars = {"color": "#1b6ca8", "edgecolor": "black", "linewidth": 0.4, "zorder": 2}
    axes.bar(exponents, histogram["share"], width=1.0, align="edge", **bars)
    normal, least, top = (edge - math.log2(scale) for edge in (_NORMAL, _VANISHES, _TOP + 1))
    axes.axvspan(normal, top, color="#cfe8cf", zorder=0, label="float16, all bits")
    hatched = {"facecolor": "#eef5e0", "edgecolor": "#9aa58a", "hatch": "///", "linewidth": 0}
    axes.axvspan(least, normal, zorder=0, label="float16, fewer bits (subnormal)", **hatched)
    axes.axvline(least, color="black", linewidth=1, linestyle=":", label="zero below")
    if histogram["recommended_scale"] is not None:
        power = math.log2(histogram["recommended_scale"])
        label = f"zero below, at the recommended scale, $2^{{{power:.0f}}}$"
        axes.axvline(_VANISHES - power, color="#b03030", linewidth=1, linestyle="--", label=label)
    axes.set_xlim(min((*exponents, least)) - 2, max((*exponents, top)) + 2)
    axes.set_xlabel("exponent of the gradient: floor of log2(|gradient|), without loss scale")
    axes.set_ylabel("share of all gradients")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.3g}")
    axes.set_title(
        f"Gradients and float16 at loss scale {scale:g}; {histogram['zero']:.1%} are zero"
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


# ---------------------------------------------------------------------- counting


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

    `histogram.plot()` draws figure 2b of Micikevicius et al., "Mixed Precision Training", ICLR
    2018.

    Parameters
    ----------
    net_or_trainer : Block or gluon.Trainer
        Left unchanged.
    data, loss : optional
        Batches and a loss, as for `compare`: the net runs on them in float32, so that no gradient
        has vanished before it is counted. Without them, the gradients of the last backward pass
        are counted, on all devices.
    activations : bool, default False
        Count the gradients of layer outputs too; needs data. For nets that can't be traced, these
        are the gradients of the outputs of eager operator calls.
    loss_scale : float, optional
        The scale to judge float16 at, and the one that existing gradients carry. By default the
        trainer's, which knows whether its gradients are scaled now; else 1.

    Raises
    ------
    ArgumentError
        Arguments that don't go together.
    StateError
        There are no gradients to count.

    Waits for the gradients, and takes 10 to 30 ns for each value.
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
    """Count the gradients that the last backward pass has written."""
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
    """Run the net on each batch and count its gradients."""
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
    """Record the net and its loss on a batch; return the loss."""
    with run.opened(), autograd.record():
        output = block(*batch.inputs)
        run.tapping = False
        return loss_of(loss, output, batch.label)


def _count(
    counts: Dict[str, ExponentCounts], name: str, gradient: NDArray, scale: float = 1.0
) -> None:
    array = plain_array(gradient.data if isinstance(gradient, RowSparseNDArray) else gradient)
    found = counts.setdefault(name, ExponentCounts())
    if array.size:
        array = array.as_in_context(mx.cpu()) if device_kind(array.context) == "gpu" else array
        found.count(flat_view(array, _VIEWS[dtypes_of([array])[0]]), scale)


class _TappedRun(IsolatedRun):
    """Adds a zero to each layer's output: its gradient is the gradient of that output."""

    def __init__(self, seeds: Seeds, tapping: bool) -> None:
        super().__init__(seeds)
        self.tapping = tapping
        self.names: List[str] = []
        self.arrays: List[NDArray] = []

    def on_call(self, call: Call, run: Run) -> Any:
        """Make an eager call and tap its output."""
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
        if self.tapping:
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
    """Return the graph with an input added to each node's output, and each input's layer and kind.

    Nodes of which several outputs are read get no tap.
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
