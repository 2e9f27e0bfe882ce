"""The random graphs of the tests depend on their seed alone."""

from __future__ import annotations

import random

from tests.strategies import random_graph, random_order


def test_random_plans_are_reproducible():
    """A failure that names a seed can be looked at again."""
    assert random_graph(random.Random(3)) == random_graph(random.Random(3))
    graph = random_graph(random.Random(3))
    assert random_order(random.Random(4), graph) == random_order(random.Random(4), graph)
