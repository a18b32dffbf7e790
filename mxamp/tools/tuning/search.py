"""Search for the smallest set of layers that has to stay in float32, with few evaluations.

Layers are numbers, and an evaluation answers one question: does the model work with this set kept?
The search assumes that keeping more layers never hurts. Without that its result may be larger than
needed, but it has always been tried.

Bisection finds, one by one, layers that can't be done without: the last layer of the shortest
prefix that works is one. With layers in the order of what they cost in accuracy, the prefix is
short, and few evaluations are needed. For k layers of n there are at most some 2 log2(n) +
(k - 1) log2(n) + 4k.
"""

import math
from itertools import combinations
from typing import Callable, Dict, FrozenSet, List, Sequence

__all__ = ["EXHAUSTIVE", "Search"]

#: With up to so many layers, all smaller sets are tried.
EXHAUSTIVE = 10
#: With more layers, so many sets of each size are tried, if a smaller set is not ruled out.
_TRIES = 66

Layers = FrozenSet[int]


class Search:
    """A search among the layers of `order`, the most probable ones first.

    `works` returns whether the model is accurate enough with a set of layers in float32; it is with
    all of them. It may raise to end the search: `best` is the smallest set that worked so far.
    """

    def __init__(self, works: Callable[[Layers], bool], order: Sequence[int]) -> None:
        self._works = works
        self._order = list(order)
        self._known: Dict[Layers, bool] = {frozenset(order): True}
        self.best: Layers = frozenset(order)
        self.proven = False  #: whether no smaller set works, if keeping more never hurts

    @property
    def evaluations(self) -> int:
        """The number of evaluations."""
        return len(self._known) - 1

    def run(self) -> Layers:
        """Search to the end; return the smallest set found."""
        if self._try([]):
            self.proven = True
            return self.best
        found: List[int] = []
        rest = self._order
        while not self._try(found):
            length = self._shortest(found, rest, gallop=not found)
            found, rest = [*found, rest[length - 1]], rest[: length - 1]
        self._shrink()
        if len(self.best) == 1 or len(self._order) <= EXHAUSTIVE:
            self._try_smaller(self._order)
            self.proven = True
            return self.best
        everything = set(self._order)
        self.proven = not any(self._try(everything - {one}) for one in self.best)
        if not self.proven:
            self._try_smaller(self._order, most=_TRIES)
        return self.best

    def _try(self, kept: "Sequence[int] | FrozenSet[int] | set[int]") -> bool:
        layers = frozenset(kept)
        if layers not in self._known:
            self._known[layers] = self._works(layers)
        if self._known[layers] and len(layers) < len(self.best):
            self.best = layers
        return self._known[layers]

    def _shortest(self, found: List[int], rest: Sequence[int], gallop: bool) -> int:
        """Return the length of the shortest prefix of `rest` that works together with `found`.

        The empty prefix fails, the full one works. With `gallop`, lengths 1, 2, 4, ... come first.
        """
        fails, works = 0, len(rest)
        while gallop and 2 * fails + 1 < works:
            middle = max(1, 2 * fails)
            if self._try([*found, *rest[:middle]]):
                works = middle
                break
            fails = middle
        while works - fails > 1:
            middle = (fails + works) // 2
            if self._try([*found, *rest[:middle]]):
                works = middle
            else:
                fails = middle
        return works

    def _shrink(self) -> None:
        """Remove the layers that are not needed."""
        for one in sorted(self.best, key=self._order.index, reverse=True):
            if len(self.best) > 1 and one in self.best:
                self._try(self.best - {one})

    def _try_smaller(self, layers: Sequence[int], most: float = math.inf) -> None:
        """Try smaller sets, the smallest first, at most `most` of each size.

        Where errors add up, bisection can end in a set that needs each of its layers.
        """
        for size in range(1, len(self.best)):
            first = next(n for n in range(len(layers), -1, -1) if math.comb(n, size) <= most)
            if any(self._try(some) for some in combinations(layers[:first], size)):
                break
