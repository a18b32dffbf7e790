"""Checking one operator's values: whether its outputs are worse than its inputs.

An operator is at fault if its inputs are fine and its outputs are not. Values that are not finite
are followed through the program: operators that pass them on are not at fault. Infinities that a
program writes on purpose, such as `-inf` into a mask, are no fault until they make NaN.
"""

import math
from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ....framework.arrays import dtypes_of
from ....framework.operators import Operator, resolve
from ....framework.wording import counted
from ....graph.casts.builder import HALVES
from ....graph.casts.insert import PRECISION
from ....graph.inspect import FLOATS
from ....graph.ir import CASTS, Graph, Node
from ....policy.policy import Policy
from ....policy.values import INFINITE_FROM, RANGES
from ..blocks import BlockNames
from .findings import Finding, Statistics, values_of

__all__ = [
    "Inspection",
    "Site",
    "finding_at",
    "input_names",
    "is_checkable",
    "is_nonfinite",
    "site_of",
]

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
_SHIFTS = frozenset({"bias", "beta", "moving_mean", "running_mean"})  # all zero in healthy layers
_A_LAYER = 8  # fewer values can all be zero by chance
#: Numbers up to this are zero in the dtype: half of its smallest one.
_ROUNDED_TO_ZERO = {"float16": 2.0**-25, "bfloat16": 2.0**-134}

# Why an array is not finite: a fault that was found, or the program's purpose.
_FAULT, _ON_PURPOSE = "fault", "on purpose"
_MOST_REASONS = 1024


class Site(NamedTuple):
    """The place where an operator was called."""

    block: str
    node: str
    operator: Operator
    attributes: Mapping[str, Any]
    names: Sequence[str]  #: names of its inputs: of the parameter, or as the operator calls them
    output: str = "output"


def site_of(graph: Graph, node: Node, block_names: BlockNames) -> Site:
    """Return the site of a node; a cast that rounds a result is named after its source."""
    block = block_names.of_node(node.name)
    operator, sources = resolve(node.op), [graph.nodes[i] for i, _ in node.inputs]
    names = [
        source.name if source.is_variable else name
        for source, name in zip(sources, input_names(operator, len(sources)))
    ]
    if node.op not in CASTS:
        return Site(block, node.name, operator, node.attrs, names)
    source, dtype = sources[0], node.attrs.get("dtype", "")
    what = source.name if source.is_variable else f"output of {source.name!r}"
    name = source.name if PRECISION in source.attrs else node.name
    return Site(block, name, operator, node.attrs, names, f"{what} cast to {dtype}")


def input_names(operator: Operator, count: int) -> Sequence[str]:
    """Return the names of an operator's first `count` inputs, or "input 0" and so on."""
    if len(operator.inputs) < count:
        return [f"input {i}" for i in range(count)]
    return operator.inputs[:count]


class Inspection:
    """Checks operator calls in order, and remembers why arrays are not finite.

    With a policy, float32 values are also checked as if they were in its target dtype.
    """

    def __init__(self, policy: Optional[Policy] = None) -> None:
        self.step = 1
        self._policy = policy
        # Why arrays are not finite, by handle. The array is kept alive, since a freed handle may
        # become that of another array.
        self._reasons: Dict[int, Tuple[NDArray, str]] = {}

    def is_unknown(self, array: NDArray) -> bool:
        """Return whether an array is not finite, and no checked operator has made it so."""
        return is_nonfinite(array) and self._reason_of(array) is None

    def accept_nonfinite(self, arrays: Sequence[NDArray]) -> None:
        """Treat values of arrays that are not finite as written on purpose."""
        self._set_reason(filter(is_nonfinite, arrays), _ON_PURPOSE)

    def _set_reason(self, arrays: Iterable[NDArray], reason: str) -> None:
        """Record why arrays are not finite, `_FAULT` or `_ON_PURPOSE`; forget the oldest array."""
        for array in arrays:
            if len(self._reasons) >= _MOST_REASONS:
                del self._reasons[next(iter(self._reasons))]
            self._reasons[array.handle.value] = (array, reason)

    def _reason_of(self, array: NDArray) -> Optional[str]:
        """Return why an array is not finite; None if that is unknown."""
        return self._reasons.get(array.handle.value, (None, None))[1]

    def check(
        self, site: Site, inputs: Sequence[NDArray], outputs: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Return the finding for a call's outputs; None if they are sound or not its own fault."""
        results = [(array, values_of(array)) for array in outputs if is_checkable(array)]
        bad = [array for array, values in results if not np.isfinite(values).all()]
        if bad:
            return self._check_nonfinite(site, inputs, bad)
        for k, (array, values) in enumerate(results):
            found = self._check_zeros(site, inputs, k, array, values)
            if found is not None:
                return found
        return self._check_in_dtype(site, inputs, outputs)

    def _check_nonfinite(
        self, site: Site, inputs: Sequence[NDArray], bad: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Return the finding for a call whose outputs `bad` hold Inf or NaN; None if on purpose."""
        sources = [(site.names[i], array) for i, array in enumerate(inputs) if is_nonfinite(array)]
        reasons = {self._reason_of(array) for _, array in sources}
        if None in reasons:
            if site.operator.name in _MOVES and reasons == {None}:
                return None  # the operator that computes with the moved values is checked
            name, array = next(pair for pair in sources if self._reason_of(pair[1]) is None)
            self._set_reason([array, *bad], _FAULT)
            return self._make_finding("input", site, name, array)
        if sources:
            on_purpose = reasons == {_ON_PURPOSE}
            made = on_purpose and _has_nan(bad) and not _has_nan([array for _, array in sources])
        else:
            on_purpose = not inputs or any(map(_is_infinite_number, site.attributes.values()))
            made = not on_purpose
        self._set_reason(bad, _ON_PURPOSE if on_purpose and not made else _FAULT)
        return self._nonfinite_finding(site, bad[0]) if made else None

    def _nonfinite_finding(self, site: Site, array: NDArray) -> Finding:
        """Return the finding for an operator that makes NaN or Inf of finite values."""
        found = self._make_finding("nonfinite", site, site.output, array)
        dtype = found.dtype
        if found.statistics.nan or not (site.operator.name in CASTS or dtype in HALVES):
            return found
        detail = f"the largest {dtype} is {RANGES[dtype].largest:.6g}"
        return replace(found, kind="overflow", detail=detail)

    def _check_zeros(
        self, site: Site, inputs: Sequence[NDArray], k: int, array: NDArray, values: Any
    ) -> Optional[Finding]:
        """Return the finding for output k, which is finite, if it vanished or is all zero."""
        nonzero = np.count_nonzero(values)
        if site.operator.name in CASTS and inputs and is_checkable(inputs[0]):
            before = np.count_nonzero(values_of(inputs[0]))
            if nonzero < before / 2:
                detail = f"of {counted(before, 'value')} other than zero, {nonzero} are left"
                return self._make_finding("vanish", site, site.output, array, detail)
        if k == 0 and not nonzero and values.size >= _A_LAYER and site.operator.name in _LAYERS:
            read = [
                values_of(source)
                for name, source in zip(site.operator.inputs, inputs)
                if name not in _SHIFTS and is_checkable(source)
            ]
            # A relu makes zeros of NaN, which is not its fault.
            if all(values.any() and np.isfinite(values).all() for values in read):
                return self._make_finding("dead", site, site.output, array)
        return None

    def _check_in_dtype(
        self, site: Site, inputs: Sequence[NDArray], outputs: Sequence[NDArray]
    ) -> Optional[Finding]:
        """Return the finding for float32 values that the policy's dtype would round to Inf or 0."""
        if self._policy is None:
            return None
        dtype = self._policy.target_dtype
        op_class = self._policy.rule(site.operator.name).op_class
        if op_class in ("fp32", "untouched"):
            return None
        read = list(zip(site.names, inputs)) if op_class == "low" else []
        for name, array in [*read, *((site.output, array) for array in outputs)]:
            if not is_checkable(array) or dtypes_of([array])[0] in HALVES:
                continue
            size = np.abs(values_of(array))
            infinite = (size >= INFINITE_FROM[dtype]) & np.isfinite(size)
            zero = (size > 0) & (size <= _ROUNDED_TO_ZERO[dtype])
            if infinite.any():
                detail = f"{infinite.sum()} would be infinite in {dtype}"
                return self._make_finding("overflow", site, name, array, detail)
            if zero.sum() > np.count_nonzero(size) / 2:
                detail = f"{zero.sum()} would be zero in {dtype}"
                return self._make_finding("vanish", site, name, array, detail)
        return None

    def _make_finding(
        self, kind: str, site: Site, tensor: str, array: NDArray, detail: str = ""
    ) -> Finding:
        """Return a forward finding with the statistics of an array."""
        found = Statistics.of(array)
        return finding_at(site, kind, "forward", self.step, tensor, found, detail)


def finding_at(
    site: Site, kind: str, phase: str, step: int, tensor: str, found: Statistics, detail: str = ""
) -> Finding:
    """Return the finding for a tensor of the operator at a site."""
    place = (site.block, site.node, site.operator.name)
    return Finding(kind, phase, step, *place, tensor, found.dtype, found, detail)


def is_checkable(array: NDArray) -> bool:
    """Return whether an array has values to check: dense, floating-point, not empty."""
    return dtypes_of([array])[0] in FLOATS and array.size > 0


def is_nonfinite(array: NDArray) -> bool:
    """Return whether an array has values to check and holds NaN or Inf."""
    return is_checkable(array) and not np.isfinite(values_of(array)).all()


def _has_nan(arrays: Iterable[NDArray]) -> bool:
    return any(np.isnan(values_of(array)).any() for array in arrays)


def _is_infinite_number(attribute: Any) -> bool:
    """Return whether an operator's attribute is the number NaN, Inf or -Inf."""
    try:
        return not math.isfinite(float(attribute))
    except (TypeError, ValueError):
        return False
