"""Findings of `check_numerics`, and the judgement whether an operator's output is at fault."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...errors import AmpError
from ...framework.arrays import dtypes_of
from ...framework.machine import BFLOAT16, dtype_name
from ...framework.operators import resolve
from ...framework.patching import original
from ...framework.wording import counted
from ...graph.casts.builder import HALVES
from ...graph.casts.insert import PRECISION
from ...graph.inspect import FLOATS
from ...graph.ir import CASTS, Graph, Node
from ...policy.policy import Policy
from ...policy.values import INFINITE_FROM, RANGES
from .blocks import BlockNames

_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
    "vanish": "loses most of its values to zero",
    "dead": "is all zero",
}

# Below all patches: mxamp's asnumpy() casts bfloat16 to float32.
_asnumpy = original(NDArray, "asnumpy")


def values_of(array: NDArray) -> Any:
    """Return an array's values as NumPy's; bfloat16 as float32, of the same values."""
    values = _asnumpy(array)
    if values.dtype != BFLOAT16:
        return values
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(array.shape)


@dataclass(frozen=True)
class Statistics:
    """Counts and range of a tensor; `minimum`, `maximum` and `mean` are of its finite values.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 0.5, 1.0]))
    >>> statistics = check.first.statistics
    >>> statistics.nan, statistics.maximum
    (1, 0.0)

    Parameters
    ----------
    dtype : str
        The dtype of the tensor.
    shape : tuple of int
        Its shape.
    size : int
        The number of values.
    nan : int
        The number of values that are NaN.
    inf : int
        The number of infinite values.
    zero : int
        The number of zeros.
    subnormal : int
        The number of values that are subnormal in the dtype.
    minimum : float, optional
        The least finite value; None without any.
    maximum : float, optional
        The largest finite value.
    mean : float, optional
        The mean of the finite values.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    nan: int
    inf: int
    zero: int
    subnormal: int
    minimum: float | None
    maximum: float | None
    mean: float | None

    @classmethod
    def of(cls, array: NDArray) -> Statistics:
        """Return the statistics of an array; waits for it."""
        return cls.of_values(dtype_name(array.dtype), values_of(array))

    @classmethod
    def of_values(cls, dtype: str, values: Any) -> Statistics:
        """Return the statistics of a NumPy array that holds the values of a tensor of `dtype`."""
        finite = values[np.isfinite(values)].astype(np.float64)
        nan = int(np.isnan(values).sum())
        tiny = RANGES[dtype].smallest if dtype in RANGES else float(np.finfo(np.float64).tiny)
        size = np.abs(finite)
        some = finite.size > 0
        return cls(
            dtype,
            values.shape,
            values.size,
            nan,
            values.size - nan - finite.size,
            int((size == 0).sum()),
            int(((size > 0) & (size < tiny)).sum()),
            float(finite.min()) if some else None,
            float(finite.max()) if some else None,
            float(finite.mean()) if some else None,
        )

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nan or self.inf)

    def __str__(self) -> str:
        counts = [(self.nan, "NaN"), (self.inf, "Inf"), (self.zero, "zero")]
        parts = [f"{n} {what}" for n, what in (*counts, (self.subnormal, "subnormal")) if n]
        if self.zero == self.size:
            parts = ["all zero"]
        elif self.minimum is not None:
            parts.append(f"from {self.minimum:.4g} to {self.maximum:.4g}, mean {self.mean:.4g}")
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}: {', '.join(parts)}"


@dataclass(frozen=True)
class Finding:
    """An operator where values went wrong.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    >>> check.first.kind, check.first.operator, check.first.tensor
    ('nonfinite', 'log', 'output')

    Parameters
    ----------
    kind : str
        "nonfinite" (Inf or NaN from finite values), "input" (an input or a parameter was not
        finite before anything was computed with it), "overflow" (finite values became infinite in
        a cast, or would in the low dtype), "vanish" (most became zero there) or "dead" (a layer's
        output is zero everywhere).
    phase : str
        "forward" or "backward".
    step : int
        The training step, from 1 where the check began; an update ends it.
    block : str
        The Gluon block; "" outside of blocks.
    node : str
        The graph node; for an eager call the block, or without one the operator.
    operator : str
        The name of the operator.
    tensor : str
        The operator's tensor that `statistics` describe, such as "output".
    dtype : str
        The dtype of the tensor.
    statistics : Statistics
        The counts and range of the tensor.
    detail : str
        More on the finding, such as the largest value of the dtype; may be "".
    inputs : tuple of (str, Statistics)
        The names and statistics of the operator's inputs, for a forward finding.
    """

    kind: str
    phase: str
    step: int
    block: str
    node: str
    operator: str
    tensor: str
    dtype: str
    statistics: Statistics
    detail: str = ""
    inputs: tuple[tuple[str, Statistics], ...] = ()

    def __str__(self) -> str:
        block = f" in block {self.block!r}" if self.block else ""
        backward = "the backward pass of " if self.phase == "backward" else ""
        detail = f"; {self.detail}" if self.detail else ""
        detail += "".join(f"; {name}: {found}" for name, found in self.inputs)
        return (
            f"step {self.step}: {backward}{self.node!r} ({self.operator}{block}) "
            f"{_KINDS[self.kind]}: {self.tensor} is {self.statistics}{detail}"
        )


class NumericsError(AmpError, ArithmeticError):
    """Raised by `check_numerics`; `finding` describes the operator whose values went wrong.

    >>> import mxnet as mx, mxamp as amp
    >>> try:
    ...     with amp.debugging.check_numerics():
    ...         _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    ... except amp.debugging.NumericsError as error:
    ...     print(error.finding.operator, error.finding.statistics.nan)
    log 1

    Parameters
    ----------
    finding : Finding
        The operator, its block, and the statistics of its values.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


#: Operators that make a layer's output: all zero from inputs that are not is a dead layer.
_LAYERS = frozenset({
    "Activation", "BatchNorm", "Convolution", "Deconvolution", "FullyConnected", "LayerNorm",
    "LeakyReLU", "Pooling", "RNN", "relu", "_npx_relu",
})  # fmt: skip
#: Operators that only move values; `while_loop` pads its results with uninitialized memory.
_MOVES = frozenset({
    "Concat", "Flatten", "Reshape", "SliceChannel", "SwapAxis", "_copy", "_copyto",
    "_npi_concatenate", "_npi_stack", "expand_dims", "repeat", "slice", "slice_axis", "squeeze",
    "stack", "tile", "transpose",
})  # fmt: skip
#: Operators that may rightly stop all of a gradient.
MASKS = frozenset({
    "Activation", "Dropout", "Embedding", "LeakyReLU", "Pooling", "clip", "relu", "where",
    "_npx_relu", "_npi_where", "_maximum", "_minimum", "_maximum_scalar", "_minimum_scalar",
    "broadcast_maximum", "broadcast_minimum", "max", "min", "take", "pick", "gather_nd",
})  # fmt: skip
_SHIFTS = frozenset({"bias", "beta", "moving_mean", "running_mean"})  # all zero in healthy layers
_A_LAYER = 8  # fewer values can all be zero by chance
#: Numbers up to this are zero in the dtype: half of its smallest one.
_ROUNDED_TO_ZERO = {"float16": 2.0**-25, "bfloat16": 2.0**-134}

#: Why a value is not finite: a fault that was found, or the program's purpose, such as a mask.
FAULT, PURPOSE = "fault", "purpose"


class Site(NamedTuple):
    """The place where an operator was called."""

    block: str
    node: str
    operator: str
    attributes: Mapping[str, Any] = {}
    names: Sequence[str] = ()  #: names of its inputs: of the parameter, or as the operator has them
    output: str = "output"


class Tensor:
    """A named tensor, whose values are read when they are needed, or at once."""

    def __init__(self, name: str, array: NDArray, now: bool = False) -> None:
        self.name, self.dtype = name, dtypes_of([array])[0]
        self._array = array
        self.is_checkable = self.dtype in FLOATS and array.size > 0 and array.stype == "default"
        self.variable = ""  #: its name, if it is a variable of a graph
        if now and self.is_checkable:
            self.values = self.values

    def called(self, name: str) -> Tensor:
        """Return the tensor under another name."""
        other = copy.copy(self)
        other.name = name
        return other

    @cached_property
    def values(self) -> Any:
        """The values as a NumPy array."""
        return values_of(self._array)

    @cached_property
    def is_bad(self) -> bool:
        """Whether a value is Inf or NaN."""
        return self.is_checkable and not bool(np.isfinite(self.values).all())

    @property
    def has_nan(self) -> bool:
        """Whether a value is NaN."""
        return self.is_bad and bool(np.isnan(self.values).any())

    @cached_property
    def nonzero(self) -> int:
        """The number of values other than zero; 1 if the values can't be checked."""
        return int(np.count_nonzero(self.values)) if self.is_checkable else 1


class Fault(NamedTuple):
    """What is wrong with which tensor of an operator; kinds are those of `Finding`."""

    kind: str
    tensor: Tensor
    detail: str = ""


def forward_fault(
    site: Site, inputs: Sequence[Tensor], output: Tensor, why: Sequence[str | None]
) -> tuple[Fault | None, str | None]:
    """Return the fault of an operator's output, and why that output is not finite.

    `why` says the same of the inputs that are not finite, in their order; None if unknown.
    """
    if not output.is_bad:
        return _zero_fault(site, inputs, output), None
    bad = [tensor for tensor in inputs if tensor.is_bad]
    if None in why:
        if site.operator in _MOVES and set(why) == {None}:
            return None, None  # the operator that computes with the moved values is judged
        return Fault("input", bad[list(why).index(None)]), FAULT
    if bad:
        on_purpose = set(why) == {PURPOSE}
        made = on_purpose and output.has_nan and not any(tensor.has_nan for tensor in bad)
    else:
        on_purpose = not site.names or any(map(_is_infinite_number, site.attributes.values()))
        made = not on_purpose
    fault = nonfinite(site, output) if made else None
    return fault, PURPOSE if on_purpose and not made else FAULT


def fault_in(policy: Policy, site: Site, tensors: Sequence[Tensor]) -> Fault | None:
    """Return the fault of float32 inputs and outputs that a policy's dtype would round to Inf or 0.

    The output is the last of `tensors`.
    """
    op_class, dtype = policy.rule(site.operator).op_class, policy.target_dtype
    if op_class in ("fp32", "untouched"):
        return None
    for tensor in tensors if op_class == "low" else tensors[-1:]:
        if not tensor.is_checkable or tensor.dtype in HALVES:
            continue
        size = np.abs(tensor.values)
        infinite = int(((size >= INFINITE_FROM[dtype]) & np.isfinite(size)).sum())
        zero = int(((size > 0) & (size <= _ROUNDED_TO_ZERO[dtype])).sum())
        if infinite:
            return Fault("overflow", tensor, f"{infinite} would be infinite in {dtype}")
        if zero > tensor.nonzero / 2:
            return Fault("vanish", tensor, f"{zero} would be zero in {dtype}")
    return None


def gradient_fault(site: Site, gradient: Tensor, is_half: bool) -> Fault | None:
    """Return the fault of a gradient that an operator makes of sound ones; None without a fault."""
    if gradient.is_bad:
        return nonfinite(site, gradient)
    if is_half and not gradient.nonzero and site.operator not in MASKS:
        return Fault("vanish", gradient)
    return None


def nonfinite(site: Site, tensor: Tensor) -> Fault:
    """Return the fault of a tensor with Inf or NaN that an operator makes of sound values."""
    if tensor.has_nan or not (site.operator in CASTS or tensor.dtype in HALVES):
        return Fault("nonfinite", tensor)
    largest = RANGES[tensor.dtype].largest
    return Fault("overflow", tensor, f"the largest {tensor.dtype} is {largest:.6g}")


def _zero_fault(site: Site, inputs: Sequence[Tensor], output: Tensor) -> Fault | None:
    """Return the fault of a finite output whose values vanished, or are all zero in a layer."""
    if not output.is_checkable or not inputs or not inputs[0].is_checkable:
        return None
    if site.operator in CASTS and output.nonzero < inputs[0].nonzero / 2:
        before = counted(inputs[0].nonzero, "value")
        return Fault("vanish", output, f"of {before} other than zero, {output.nonzero} are left")
    if site.operator in _LAYERS and output.values.size >= _A_LAYER and not output.nonzero:
        named = zip(resolve(site.operator).inputs, inputs)
        read = [tensor for name, tensor in named if name not in _SHIFTS and tensor.is_checkable]
        # A relu makes zeros of NaN, which is not its fault.
        if all(tensor.nonzero and not tensor.is_bad for tensor in read):
            return Fault("dead", output)
    return None


def _is_infinite_number(attribute: Any) -> bool:
    """Return whether an operator's attribute is the number NaN, Inf or -Inf."""
    try:
        return not math.isfinite(float(attribute))
    except (TypeError, ValueError):
        return False


def site_of(graph: Graph, node: Node, block_names: BlockNames) -> Site:
    """Return the site of a node; a cast that rounds a result is named after its source."""
    sources = [graph.nodes[i] for i, _ in node.inputs]
    names = [
        source.name if source.is_variable else name
        for source, name in zip(sources, input_names(node.operator, len(sources)))
    ]
    site = Site(block_names.of_node(node.name), node.name, node.operator, node.attrs, names)
    if node.op not in CASTS:
        return site
    source = sources[0]
    what = source.name if source.is_variable else f"output of {source.name!r}"
    name = source.name if PRECISION in source.attrs else node.name
    return site._replace(node=name, output=f"{what} cast to {node.attrs.get('dtype', '')}")


def input_names(operator: str, count: int) -> Sequence[str]:
    """Return the names of an operator's first `count` inputs, or "input 0" and so on."""
    names = resolve(operator).inputs
    return names[:count] if len(names) >= count else [f"input {i}" for i in range(count)]
