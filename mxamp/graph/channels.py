"""The channels of tensors, those that were added among them, and which operators keep them apart.

What is added is zero at first. A weight of zero makes it harmless whatever it becomes, if it stays
finite: so operators are told by how large their output is where their input has some bound.
"""

import math
from typing import Any, Callable, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..policy.values import integers
from .graph import Node

__all__ = ["SAME_CHANNELS", "Channels", "Runs", "elementwise", "joined", "with_added"]

#: Channels in their order: so many of the tensor's own, so many added behind them; and so on.
Runs = Tuple[Tuple[int, int], ...]

_LARGEST = 1e4


class Channels(NamedTuple):
    """The channels of a tensor, on its axis 1."""

    runs: Runs
    added_by: FrozenSet[int] = frozenset()  #: the convolutions whose outputs have added ones
    bound: float = 0.0  #: of the magnitude of an added one

    @property
    def own(self) -> int:
        """How many the tensor has, without added ones."""
        return sum(own for own, _ in self.runs)

    @property
    def added(self) -> int:
        """How many were added."""
        return sum(added for _, added in self.runs)

    @property
    def total(self) -> int:
        """How many there are."""
        return self.own + self.added

    def times(self, count: int) -> "Channels":
        """Return them with so many in the place of each."""
        return self._replace(runs=tuple((own * count, added * count) for own, added in self.runs))


def joined(parts: Sequence[Channels]) -> Channels:
    """Return the channels of tensors in a row."""
    runs = [parts[0].runs[0]]
    for own, added in [run for part in parts for run in part.runs][1:]:
        before, between = runs[-1]
        if between:
            runs.append((own, added))
        else:
            runs[-1] = (before + own, added)
    added_by: FrozenSet[int] = frozenset().union(*(part.added_by for part in parts))
    return Channels(tuple(runs), added_by, max(part.bound for part in parts))


def with_added(values: Any, axis: int, runs: Runs, fill: float) -> Any:
    """Return a weight with places for added channels on an axis, where each has equally many."""
    sizes = [own + added for own, added in runs]
    starts = np.cumsum([0, *sizes[:-1]])
    own = np.concatenate([start + np.arange(count) for (count, _), start in zip(runs, starts)])
    each = values.shape[axis] // len(own)
    places = (own[:, None] * each + np.arange(each)).ravel()
    shape = list(values.shape)
    shape[axis] = sum(sizes) * each
    result = np.full(shape, fill, values.dtype)
    result[(slice(None),) * axis + (places,)] = values
    return result


# ---------------------------------------------------------------------- operators

_Bound = Callable[[Mapping[str, str], float], float]


def _scalar(attrs: Mapping[str, str]) -> float:
    return abs(float(attrs.get("scalar", "1")))


def _activation(attrs: Mapping[str, str], bound: float) -> float:
    kind = attrs["act_type"]
    if kind in ("sigmoid", "softrelu", "log_sigmoid"):
        return bound + 1
    return bound if kind in ("relu", "tanh", "softsign", "mish") else math.inf


def _dropout(attrs: Mapping[str, str], bound: float) -> float:
    # With other channels beside them, a random mask of the same seed is another one.
    return math.inf if attrs.get("mode", "training") == "always" else bound


def _leaky(attrs: Mapping[str, str], bound: float) -> float:
    kind, slope = attrs.get("act_type", "leaky"), abs(float(attrs.get("slope", "0.25")))
    return bound * max(1, slope) if kind in ("leaky", "elu", "gelu") else math.inf


def _clip(attrs: Mapping[str, str], bound: float) -> float:
    low, high = float(attrs["a_min"]), float(attrs["a_max"])
    return bound if low <= 0 <= high else max(abs(low), abs(high))


def _pad(attrs: Mapping[str, str], bound: float) -> float:
    if attrs["mode"] != "constant" or any(integers(attrs["pad_width"])[:4]):
        return math.inf
    return max(bound, abs(float(attrs.get("constant_value", "0"))))


def _pooling(attrs: Mapping[str, str], bound: float) -> float:
    if attrs.get("layout", "None") not in ("None", "NCHW"):
        return math.inf
    return bound if not bound or attrs.get("pool_type", "max") in ("max", "avg") else math.inf


def _same(_attrs: Mapping[str, str], bound: float) -> float:
    return bound


#: Operators that treat each channel alike: how large their output is for an input of a bound.
_ELEMENTWISE: Mapping[str, _Bound] = {
    "Activation": _activation, "LeakyReLU": _leaky, "clip": _clip, "Pooling": _pooling,
    "Dropout": _dropout, "Pad": _pad,
    **dict.fromkeys(("relu", "_npx_relu", "tanh", "_npi_tanh"), _same),
    **dict.fromkeys(("_copy", "BlockGrad", "amp_cast", "Cast"), _same),
    **dict.fromkeys(("sigmoid", "_npx_sigmoid", "hard_sigmoid"), lambda _attrs, _bound: 1.0),
    **dict.fromkeys(
        ("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_maximum_scalar", "_minimum_scalar"),
        lambda attrs, bound: bound + _scalar(attrs),
    ),
    "_mul_scalar": lambda attrs, bound: bound * _scalar(attrs),
    "_div_scalar": lambda attrs, bound: bound / _scalar(attrs) if _scalar(attrs) else math.inf,
}  # fmt: skip

_SUMS = frozenset(
    {"elemwise_add", "elemwise_sub", "broadcast_add", "broadcast_sub", "add_n", "_npi_add"}
)
_PRODUCTS = frozenset({"elemwise_mul", "broadcast_mul", "_npi_multiply"})

#: Operators of several tensors that all have the same channels.
SAME_CHANNELS = _SUMS | _PRODUCTS


def elementwise(node: Node, given: Sequence[Channels]) -> Optional[Channels]:
    """Return the channels behind an operator that treats each alike; None for other operators."""
    operator, first = node.operator, given[0]
    bounds = [one.bound for one in given]
    if operator in SAME_CHANNELS:
        bound = math.prod(bounds) if operator in _PRODUCTS else sum(bounds)
    elif operator in _ELEMENTWISE and len(given) == 1:
        bound = _ELEMENTWISE[operator](node.attrs, bounds[0])
    else:
        return None
    if not bound <= _LARGEST or any(one.runs != first.runs for one in given):
        return None
    return joined(given)._replace(runs=first.runs, bound=bound)
