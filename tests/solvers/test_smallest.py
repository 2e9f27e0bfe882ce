"""The search for the smallest peak: which plans it begins from, and when it ends."""

from __future__ import annotations

import pytest

from checkmate import Limits, Plan, Problem, min_budget, simulate
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.evict import smallest
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.smallest import SmallestParameters, smallest_peak
from checkmate.solvers.evict.starts import Start
from tests.solvers.chains import unit_chain
from tests.solvers.generators import transformer


def test_a_plan_that_was_found_before_is_kept_if_it_is_lower():
    """One of a higher peak is not, and neither is searched on where it is low enough."""
    graph = unit_chain(20)
    problem = Problem(graph, 0)
    high = keep_all_bytes(graph)
    low = min_budget(graph)
    assert low.peak_bytes < high
    again = smallest_peak(problem, enough=high, known=low.plan)
    assert (again.peak_bytes, again.plan.order) == (low.peak_bytes, low.plan.order)
    held = Plan.from_order(graph, [*range(len(graph.ops)), 0])
    assert smallest_peak(problem, enough=high, known=held).peak_bytes == high


def test_figures_are_those_of_the_plan_on_the_graph_that_was_given():
    """Peaks on the way are those of the search, which knows no views; the last is simulated."""
    graph = transformer(3)
    found = min_budget(graph, limits=Limits(time_s=2))
    timeline = simulate(graph, found.plan)
    assert (found.peak_bytes, found.cost) == (timeline.peak_bytes, timeline.cost)


def test_every_start_is_tried_at_every_budget(monkeypatch: pytest.MonkeyPatch):
    """The floor first; each is made once, when those before it have failed there."""
    graph = transformer(3)
    tried: list[tuple[Search, float]] = []
    given = Start(tuple(range(len(graph.ops) - len(graph.view_ops))), frozenset())

    def fail(search: Search, *args: object, **options: object) -> bool:
        tried.append((search, search._budget))
        return False

    monkeypatch.setattr(Search, "first", fail)
    monkeypatch.setattr(smallest, "starts", lambda *args: iter([given] * 3))
    monkeypatch.setattr(smallest, "PARAMETERS", SmallestParameters(most_ops=0))  # and nothing after it
    found = min_budget(graph, limits=Limits(time_s=5))
    at_floor = [search for search, room in tried if room == found.floor_bytes - graph.resident_bytes]
    assert len(at_floor) == len(set(at_floor)) == 3
    above = {room: {search for search, own in tried if own == room} for _, room in tried}
    assert len(above) > 3
    assert {len(searches) for searches in above.values()} == {3}


def test_a_bisection_that_comes_near_is_enough(monkeypatch: pytest.MonkeyPatch):
    """A refusal wants a budget that works soon, and not the smallest."""
    graph = transformer(3)

    def never(search: object) -> None:
        raise AssertionError("searched on")

    monkeypatch.setattr(smallest._Bisection, "from_the_floor", never)
    near = keep_all_bytes(graph)
    assert smallest_peak(Problem(graph, 0), near=near).peak_bytes < near
    with pytest.raises(AssertionError, match="searched on"):
        smallest_peak(Problem(graph, 0))
