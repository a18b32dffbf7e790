"""How a graph is going to be used: the one value that passes over graphs are told."""

from dataclasses import dataclass, field
from typing import FrozenSet, Mapping, Tuple

__all__ = ["Shape", "Usage"]

Shape = Tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """What a graph's variables hold, by name, and whether gradients will be computed.

    Parameters
    ----------
    dtypes : mapping of str to str
        The dtype of each variable, or "sparse"; float32 where unnamed.
    shapes : mapping of str to tuple
        The shapes that are known.
    accumulated : frozenset of str
        Variables whose gradients may be accumulated (`grad_req="add"`).
    stored : frozenset of str
        Variables that were cast to the target dtype before they are passed in.
    offline : frozenset of str
        Variables that a conversion casts to the target dtype, where all that reads them does.
    training : bool
        Gradients will be computed.
    restore : bool
        The graph's outputs get the dtypes that they had; otherwise they stay as computed.
    converting : bool
        The graph is saved, for data of any shape: it keeps its operators, and nothing is chosen
        by the shapes of data.
    off : bool
        Mixed precision is off around the graph: what its own regions ask for alone is cast.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    accumulated: FrozenSet[str] = frozenset()
    stored: FrozenSet[str] = frozenset()
    offline: FrozenSet[str] = frozenset()
    training: bool = False
    restore: bool = True
    converting: bool = False
    off: bool = False
