"""Findings of `check_numerics`, and the judgement whether an operator's output is at fault."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import AmpError
from ...framework.operators import resolve
from ...framework.wording import counted
from ...graph.casts.builder import HALVES
from ...graph.ir import CASTS
from ...policy.values import RANGES
from .observing import Call, Site, Tensor

_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
    "vanish": "loses most of its values to zero",
    "dead": "is all zero",
}


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
    minimum: float | None
    maximum: float | None
    mean: float | None

    @classmethod
    def of(cls, tensor: Tensor) -> Statistics:
        """Return the statistics of a tensor."""
        values = tensor.values
        finite = values[np.isfinite(values)].astype(np.float64)
        nan, some = int(np.isnan(values).sum()), finite.size > 0
        return cls(
            tensor.dtype,
            values.shape,
            values.size,
            nan,
            values.size - nan - finite.size,
            int((finite == 0).sum()),
            float(finite.min()) if some else None,
            float(finite.max()) if some else None,
            float(finite.mean()) if some else None,
        )

    def __str__(self) -> str:
        counts = (self.nan, "NaN"), (self.inf, "Inf"), (self.zero, "zero")
        parts = [f"{n} {what}" for n, what in counts if n]
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
        a cast or in low precision), "vanish" (most became zero there) or "dead" (a layer's
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
_MASKS = frozenset({
    "Activation", "Dropout", "Embedding", "LeakyReLU", "Pooling", "clip", "relu", "where",
    "_npx_relu", "_npi_where", "_maximum", "_minimum", "_maximum_scalar", "_minimum_scalar",
    "broadcast_maximum", "broadcast_minimum", "max", "min", "take", "pick", "gather_nd",
    "_npi_multiply", "broadcast_mul", "elemwise_mul",
})  # fmt: skip
_SHIFTS = frozenset({"bias", "beta", "moving_mean", "running_mean"})  # all zero in healthy layers
_A_LAYER = 8  # fewer values can all be zero by chance

#: Why a value is not finite: a fault that was found, or the program's purpose, such as a mask.
FAULT, PURPOSE = "fault", "purpose"


class Fault(NamedTuple):
    """What is wrong with which tensor of an operator; kinds are those of `Finding`."""

    kind: str
    name: str
    tensor: Tensor
    detail: str = ""


def forward_fault(call: Call) -> tuple[Fault | None, str | None]:
    """Return the fault of an operator's output, and why that output is not finite.

    The facts of tensors that are not finite say why; None if that is unknown.
    """
    site, inputs, output, _ = call
    if not output.is_bad:
        return _zero_fault(call), None
    bad = {name: tensor for name, tensor in inputs.items() if tensor.is_bad}
    why = {tensor.fact for tensor in bad.values()}
    if None in why:
        if site.operator in _MOVES and why == {None}:
            return None, None  # the operator that computes with the moved values is judged
        name = next(name for name, tensor in bad.items() if tensor.fact is None)
        return Fault("input", name, bad[name]), FAULT
    if bad:
        on_purpose = why == {PURPOSE}
        made = on_purpose and output.has_nan and not any(one.has_nan for one in bad.values())
    else:
        on_purpose = not site.names or any(map(_is_infinite_number, site.attributes.values()))
        made = not on_purpose
    fault = _nonfinite(site, "output", output) if made else None
    return fault, PURPOSE if on_purpose and not made else FAULT


def gradient_fault(site: Site, name: str, gradient: Tensor, may_vanish: bool) -> Fault | None:
    """Return the fault of a gradient that an operator makes of sound ones; None without a fault."""
    if gradient.is_bad:
        return _nonfinite(site, name, gradient)
    if may_vanish and not gradient.nonzero and site.operator not in _MASKS:
        return Fault("vanish", name, gradient)
    return None


def _nonfinite(site: Site, name: str, tensor: Tensor) -> Fault:
    """Return the fault of a tensor with Inf or NaN that an operator makes of sound values."""
    if tensor.has_nan or not (site.operator in CASTS or tensor.dtype in HALVES):
        return Fault("nonfinite", name, tensor)
    largest = RANGES[tensor.dtype].largest
    return Fault("overflow", name, tensor, f"the largest {tensor.dtype} is {largest:.6g}")


def _zero_fault(call: Call) -> Fault | None:
    """Return the fault of a finite output whose values vanished, or are all zero in a layer."""
    operator, output, read = call.site.operator, call.output, list(call.inputs.values())
    if not output.is_checkable or not read or not read[0].is_checkable:
        return None
    if operator in CASTS and output.nonzero < read[0].nonzero / 2:
        before = counted(read[0].nonzero, "value")
        return Fault(
            "vanish", "output", output, f"of {before} other than zero, {output.nonzero} are left"
        )
    if operator in _LAYERS and output.values.size >= _A_LAYER and not output.nonzero:
        named = zip(resolve(operator).inputs, read)
        scales = [tensor for name, tensor in named if name not in _SHIFTS and tensor.is_checkable]
        # A relu makes zeros of NaN, which is not its fault.
        if all(tensor.nonzero and not tensor.is_bad for tensor in scales):
            return Fault("dead", "output", output)
    return None


def _is_infinite_number(attribute: Any) -> bool:
    """Return whether an operator's attribute is the number NaN, Inf or -Inf."""
    try:
        return not math.isfinite(float(attribute))
    except (TypeError, ValueError):
        return False
