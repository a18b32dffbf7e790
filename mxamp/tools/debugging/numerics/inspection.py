"""Judging one operator's values: whether they are worse than what it was given.

An operator is at fault where its inputs are fine and its outputs are not. Values that are not
finite are followed: what only passes them on is not at fault. Infinities that a program writes on
purpose, as `-inf` into a mask, are no fault until something makes NaN of them.
"""

import math
from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ....framework.arrays import dtypes_of
from ....framework.operators import Operator
from ....framework.wording import counted
from ....graph.casts.builder import HALVES
from ....graph.inspect import FLOATS
from ....graph.ir import CASTS
from ....policy.policy import Policy
from ....policy.values import INFINITE_FROM, RANGES
from .findings import Finding, Statistics, values_of

__all__ = ["Inspection", "Site", "finding_at", "is_float", "is_nonfinite"]

#: Operators that make a layer's output: all zero from inputs that are not is a dead layer.
_LAYERS = frozenset({
    "Activation", "BatchNorm", "Convolution", "Deconvolution", "FullyConnected", "LayerNorm",
    "LeakyReLU", "Pooling", "RNN", "relu", "_npx_relu",
})  # fmt: skip
#: Operators that only move values; `while_loop` pads its results with memory that nobody has set.
_MOVES = frozenset({
    "Concat", "Flatten", "Reshape", "SliceChannel", "SwapAxis", "_copy", "_copyto",
    "_npi_concatenate", "_npi_stack", "expand_dims", "repeat", "slice", "slice_axis", "squeeze",
    "stack", "tile", "transpose",
})  # fmt: skip
_SHIFTS = frozenset({"bias", "beta", "moving_mean", "running_mean"})  # may well be all zero
_A_LAYER = 8  # fewer values can all be zero by chance

# An array that is not finite: because of a fault that was found, or on purpose.
_FAULT, _ON_PURPOSE = "fault", "on purpose"
_FOLLOWED = 1024


class Site(NamedTuple):
    """Where an operator was called."""

    block: str
    node: str
    operator: Operator
    attributes: Mapping[str, Any]
    names: Sequence[str]  #: what its inputs are called: of parameters, their names
    output: str = "output"


class Inspection:
    """Judges operators one after the other, and remembers arrays that are not finite."""

    def __init__(self, would_be: Optional[Policy] = None) -> None:
        self.step = 0
        self._would_be = would_be
        # By handle; the arrays are kept, so that no other gets the handle of one.
        self._followed: Dict[int, Tuple[NDArray, str]] = {}

    def follow(self, array: NDArray, status: str = _FAULT) -> None:
        """Remember that an array is not finite, and why."""
        if len(self._followed) >= _FOLLOWED:
            del self._followed[next(iter(self._followed))]
        self._followed[array.handle.value] = (array, status)

    def is_unknown(self, array: NDArray) -> bool:
        """Tell whether an array is not finite for a reason that nothing here has seen."""
        return is_nonfinite(array) and self._reason(array) is None

    def accept(self, arrays: Sequence[NDArray]) -> None:
        """Take values that are not finite as meant to be so."""
        for array in arrays:
            if is_nonfinite(array):
                self.follow(array, _ON_PURPOSE)

    # ------------------------------------------------------------------ forward

    def judge(
        self, site: Site, inputs: Sequence[NDArray], outputs: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Return what is wrong with an operator's outputs, None where nothing is, or not by it."""
        results = [(array, values_of(array)) for array in outputs if is_float(array)]
        bad = [array for array, values in results if not np.isfinite(values).all()]
        if bad:
            return self._judge_nonfinite(site, inputs, bad)
        for k, (array, values) in enumerate(results):
            found = self._judge_small(site, inputs, k, array, values)
            if found is not None:
                return found
        return self._judge_would_be(site, inputs, outputs)

    def _judge_nonfinite(
        self, site: Site, inputs: Sequence[NDArray], bad: Sequence[NDArray]
    ) -> Optional[Finding]:
        sources = [(site.names[i], array) for i, array in enumerate(inputs) if is_nonfinite(array)]
        reasons = {self._reason(array) for _, array in sources}
        if None in reasons:
            return self._judge_unknown(site, sources, bad)
        if sources:
            on_purpose = reasons == {_ON_PURPOSE}
            had_nan = _has_nan([array for _, array in sources])
            made = on_purpose and _has_nan(bad) and not had_nan
        else:
            on_purpose = not inputs or any(map(_is_infinite, site.attributes.values()))
            made = not on_purpose
        if made:
            return self._made(site, bad)
        self._pass_on(bad, _ON_PURPOSE if on_purpose else _FAULT)
        return None

    def _judge_unknown(
        self, site: Site, sources: Sequence[Tuple[str, NDArray]], bad: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Judge inputs that are not finite for a reason that nothing here has seen."""
        if site.operator.name in _MOVES and not any(self._reason(array) for _, array in sources):
            return None  # whoever computes with what was moved is judged
        name, array = next(pair for pair in sources if self._reason(pair[1]) is None)
        self._pass_on([array, *bad], _FAULT)
        return self._finding("input", site, name, array)

    def _reason(self, array: NDArray) -> Optional[str]:
        """Return why an array is not finite, None where that is not known."""
        return self._followed.get(array.handle.value, (None, None))[1]

    def _made(self, site: Site, bad: Sequence[NDArray]) -> Finding:
        self._pass_on(bad, _FAULT)
        found = self._finding("nonfinite", site, site.output, bad[0])
        statistics = found.statistics
        if statistics.nan or not (site.operator.name in CASTS or statistics.dtype in HALVES):
            return found
        detail = f"the largest {statistics.dtype} is {RANGES[statistics.dtype].largest:.6g}"
        return replace(found, kind="overflow", detail=detail)

    def _pass_on(self, arrays: Iterable[NDArray], status: str) -> None:
        for array in arrays:
            self.follow(array, status)

    def _judge_small(
        self, site: Site, inputs: Sequence[NDArray], k: int, array: NDArray, values: Any
    ) -> Optional[Finding]:
        """Judge a finite output: values lost to zero by a cast, and layers that give only zeros."""
        nonzero = np.count_nonzero(values)
        if site.operator.name in CASTS and inputs and is_float(inputs[0]):
            before = np.count_nonzero(values_of(inputs[0]))
            if nonzero < before / 2:
                return self._finding("vanish", site, site.output, array, _lost(before, nonzero))
        if k == 0 and not nonzero and values.size >= _A_LAYER and site.operator.name in _LAYERS:
            read = [
                values_of(source)
                for name, source in zip(site.operator.inputs, inputs)
                if name not in _SHIFTS and is_float(source)
            ]
            # A relu makes zeros of NaN: that is no fault of its own.
            if all(values.any() and np.isfinite(values).all() for values in read):
                return self._finding("dead", site, site.output, array)
        return None

    def _judge_would_be(
        self, site: Site, inputs: Sequence[NDArray], outputs: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Judge values that are fine as they are by what they would be in the low dtype."""
        if self._would_be is None:
            return None
        op_class, dtype = (
            self._would_be.rule(site.operator.name).op_class,
            self._would_be.target_dtype,
        )
        if op_class in ("fp32", "untouched"):
            return None
        read = list(zip(site.names, inputs)) if op_class == "low" else []
        for name, array in [*read, *((site.output, array) for array in outputs)]:
            if not is_float(array) or dtypes_of([array])[0] in HALVES:
                continue
            size = np.abs(values_of(array))
            above = size >= INFINITE_FROM[dtype]
            below = (size > 0) & (size <= _ROUNDED_TO_ZERO[dtype])
            if (above & np.isfinite(size)).any():
                detail = f"{int(above.sum())} would be infinite in {dtype}"
                return self._finding("overflow", site, name, array, detail)
            if below.sum() > np.count_nonzero(size) / 2:
                detail = f"{int(below.sum())} would be zero in {dtype}"
                return self._finding("vanish", site, name, array, detail)
        return None

    def _finding(
        self, kind: str, site: Site, tensor: str, array: NDArray, detail: str = ""
    ) -> Finding:
        found = Statistics.of(array)
        return finding_at(site, kind, "forward", self.step, tensor, found, detail)


#: Numbers up to this are zero in the dtype: half of its smallest one.
_ROUNDED_TO_ZERO = {"float16": 2.0**-25, "bfloat16": 2.0**-134}


def finding_at(
    site: Site, kind: str, phase: str, step: int, tensor: str, found: Statistics, detail: str = ""
) -> Finding:
    """Return the finding on one of an operator's tensors."""
    place = (site.block, site.node, site.operator.name)
    return Finding(kind, phase, step, *place, tensor, found.dtype, found, detail)


def _lost(before: int, after: int) -> str:
    return f"of {counted(before, 'value')} other than zero, {after} are left"


def is_float(array: NDArray) -> bool:
    """Tell whether an array has values to judge: dense and floating-point."""
    return dtypes_of([array])[0] in FLOATS and array.size > 0


def is_nonfinite(array: NDArray) -> bool:
    """Tell whether an array has values to judge, and some are NaN or infinity."""
    return is_float(array) and not np.isfinite(values_of(array)).all()


def _has_nan(arrays: Iterable[NDArray]) -> bool:
    return any(np.isnan(values_of(array)).any() for array in arrays)


def _is_infinite(attribute: Any) -> bool:
    """Tell whether an operator's attribute is a number that is not finite."""
    try:
        return not math.isfinite(float(attribute))
    except (TypeError, ValueError):
        return False
