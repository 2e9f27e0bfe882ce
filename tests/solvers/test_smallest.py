"""The search for the smallest peak: which plans it begins from, and when it ends."""

from __future__ import annotations

from checkmate import Limits, Plan, Problem, min_budget, simulate
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.evict.smallest import smallest_peak
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


def test_a_peak_that_is_near_is_enough():
    """A refusal wants a budget that works soon, and not the smallest."""
    graph = transformer(3)
    near = keep_all_bytes(graph)
    assert smallest_peak(Problem(graph, 0), near=near).peak_bytes < near
