"""The search for the smallest set, against brute force."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxamp.tools.tuning.layers import Search


def brute_force(works, n):
    """Return the size of the smallest set that works."""
    for size in range(n + 1):
        if any(works(frozenset(some)) for some in combinations(range(n), size)):
            return size
    raise AssertionError("all of them work")


def bound(n, k):
    return 4 * math.log2(n) + 4 * k


@pytest.mark.parametrize("n", [10, 11, 37, 100, 200])
@pytest.mark.parametrize("ranked", ["first", "last", "anywhere"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_finds_the_bad_ones_alone_within_the_bound(n, k, ranked):
    generator = random.Random(n * k)
    for _ in range(20):
        bad = frozenset(generator.sample(range(n), k))
        order = generator.sample(range(n), n)
        if ranked != "anywhere":
            order.sort(key=lambda one: (one in bad) == (ranked == "last"))
        search = Search(lambda kept, bad=bad: bad <= kept, order)
        assert search.run() == bad
        assert search.proven
        if n > 10 or k < 3:
            assert search.evaluations <= bound(n, k)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.booleans(), min_size=2**n, max_size=2**n))
    )
)
def test_is_as_small_as_brute_force_finds_for_any_predicate(case):
    n, table = case

    def works(kept):
        return len(kept) == n or table[sum(1 << one for one in kept)]

    search = Search(works, range(n))
    found = search.run()
    assert works(found)
    assert len(found) == brute_force(works, n)


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1))
def test_errors_that_add_up(errors, tolerance):
    n = len(errors)

    def works(kept):
        return sum(e for i, e in enumerate(errors) if i not in kept) <= tolerance

    order = sorted(range(n), key=lambda i: -errors[i])
    assert len(Search(works, order).run()) == brute_force(works, n)


@pytest.mark.parametrize("seed", range(20))
def test_smaller_sets_are_tried_where_errors_add_up(seed):
    generator = random.Random(seed)
    n = 13
    errors = [generator.random() ** 3 for _ in range(n)]
    bonus = {(i, j): generator.random() / 4 for i in range(n) for j in range(i)}

    def works(kept):
        low = [i for i in range(n) if i not in kept]
        return sum(errors[i] for i in low) + sum(bonus[i, j] for i in low for j in low if j < i) < 4

    order = sorted(range(n), key=lambda i: -errors[i])
    found = Search(works, order).run()
    assert works(found)
    assert len(found) <= brute_force(works, n) + 1


def test_keeps_the_best_so_far_when_it_is_ended():
    class EndedError(Exception):
        pass

    asked = []

    def works(kept):
        if len(asked) == 12:
            raise EndedError
        asked.append(kept)
        return {30, 70} <= kept

    search = Search(works, range(100))
    with pytest.raises(EndedError):
        search.run()
    assert {30, 70} <= search.best
    assert len(search.best) < 100
    assert not search.proven


def test_asks_nothing_twice():
    asked = []

    def works(kept):
        asked.append(kept)
        return {2, 3} <= kept

    search = Search(works, range(40))
    search.run()
    assert len(asked) == len(set(asked)) == search.evaluations
