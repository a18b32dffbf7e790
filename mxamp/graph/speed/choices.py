"""What was chosen for the operators of a graph by their shapes and their neighbours, as a value."""

from typing import FrozenSet, NamedTuple, Tuple

from .equivalents import Detail

__all__ = ["NONE", "Choices", "StandIn"]

StandIn = Tuple[str, Detail]  #: the name of a substitution, and what its parts depend on


class Choices(NamedTuple):
    """By index of node: why it stays in float32, and which substitution is made, with its detail.

    `bodies` hold the choices for bodies of loops, by (index of the loop, position of the body).
    Graphs that are used alike have equal choices, and share a compiled graph.
    """

    kept: FrozenSet[Tuple[int, str]] = frozenset()
    substituted: FrozenSet[Tuple[int, StandIn]] = frozenset()
    bodies: FrozenSet[Tuple[Tuple[int, int], "Choices"]] = frozenset()


NONE = Choices()
