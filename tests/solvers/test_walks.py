"""Walks of graphs, on graphs of which the answer is plain."""

from __future__ import annotations

import sys

from checkmate.solvers.walks import after_needs, reached

LONG = 2 * sys.getrecursionlimit()


def test_a_walk_goes_only_through_what_is_wanted():
    """0 -> 1 -> 2 -> ...: what lies behind an unwanted item is not reached, and an unwanted start is none."""
    assert reached([3], lambda i: [i + 1], lambda i: i != 6) == {3, 4, 5}
    assert reached([6], lambda i: [i + 1], lambda i: i != 6) == set()


def test_walks_end_on_cycles_and_on_long_chains():
    """A cycle is walked once, and a chain may be longer than Python's limit of recursion."""
    assert reached([0], lambda i: [(i + 1) % LONG]) == set(range(LONG))
    assert after_needs([LONG], lambda i: [i - 1] if i else []) == list(range(LONG + 1))


def test_what_is_missing_comes_right_before_its_reader():
    """Targets keep their order, except those that an earlier target needs."""
    needs = {0: [], 1: [5], 2: [1, 4], 3: [0], 4: [], 5: [3]}
    assert after_needs([0, 1, 2, 3, 4], needs.__getitem__) == [0, 3, 5, 1, 4, 2]
