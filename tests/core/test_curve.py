"""A curve never rises, and gives for a budget the cheapest plan that keeps it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Compute, Curve, CurvePoint, Plan, PlanError, PlanNotFoundError, UnitError


def point(budget: int, cost: int, bound: float, peak: int | None = None) -> CurvePoint:
    """A point whose plan names its budget."""
    return CurvePoint(
        budget_bytes=budget,
        cost=cost,
        overhead=1.0,
        bound=bound,
        gap=0.0,
        peak_bytes=budget if peak is None else peak,
        plan=Plan((Compute(budget),)),
        elapsed_s=0.0,
    )


def curve(*points: CurvePoint, floor: int = 0) -> Curve:
    """A curve of some points."""
    return Curve(points=points, graph_digest="sha256:0", floor_bytes=floor)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((10, 5, 4.0), (10, 4, 3.0)),
        ((11, 5, 4.0), (10, 4, 3.0)),
        ((10, 5, 4.0), (11, 6, 4.0)),
        ((10, 5, 4.0), (11, 5, 4.5)),
    ],
    ids=["the same budget", "a smaller budget", "a higher cost", "a higher bound"],
)
def test_points_that_do_not_descend_are_no_curve(first, second):
    """A plan within a budget is one within every larger budget, and so is what bounds them."""
    with pytest.raises(PlanError) as caught:
        curve(point(*first), point(*second))
    assert str(caught.value) == (
        f"the points at {first[0]} and {second[0]} bytes are no part of a curve"
        "\n\nhint: list the points by ascending budget; neither cost nor bound rises with it"
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 2)), max_size=6))
def test_points_that_descend_are_a_curve(steps):
    """Budgets ascend strictly; cost and bound may stay. The list becomes a tuple, so that a curve can be hashed."""
    budget, cost, bound, points = 0, 100, 50, []
    for more, cheaper, lower in steps:
        budget, cost, bound = budget + more, cost - cheaper, bound - lower
        points.append(point(budget, cost, float(bound)))
    made = Curve(points=points, graph_digest="sha256:0")
    assert made.points == tuple(points)
    assert hash(made) == hash(curve(*points))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 8)), min_size=1, max_size=6), st.integers(0, 60))
def test_the_plan_within_a_budget_is_the_cheapest_that_fits(steps, asked):
    """A point's peak may be below its budget, so a plan fits where its peak does; of two that cost the same the smaller."""
    budget, cost, points = 0, 100, []
    for more, cheaper, less in steps:
        budget, cost = budget + more, cost - cheaper
        points.append(point(budget, cost, 0.0, max(0, budget - less)))
    fitting = [p for p in points if p.peak_bytes <= asked]
    if not fitting:
        with pytest.raises(PlanNotFoundError):
            curve(*points).plan_within(asked)
        return
    best = curve(*points).plan_within(asked)
    cheapest = min(p.cost for p in fitting)
    smallest = min(p.peak_bytes for p in fitting if p.cost == cheapest)
    assert best in [p.plan for p in fitting if (p.cost, p.peak_bytes) == (cheapest, smallest)]


def test_a_budget_below_every_peak_is_refused_with_the_smallest():
    """The message has what was asked for, what is there and what is possible; the hint can be typed."""
    some = curve(point(2048, 7, 1.0, 1536), point(4096, 5, 1.0), floor=1024)
    with pytest.raises(PlanNotFoundError) as caught:
        some.plan_within("1.25KiB")
    assert str(caught.value) == (
        "no plan of the curve keeps 1.25 KiB; the smallest peaks at 1.50 KiB, "
        "and no plan of any order takes less than 1.00 KiB"
        "\n\nhint: raise the budget to at least 1.50KiB, or solve for it"
    )
    assert some.plan_within("1.5KiB") == some.points[0].plan


def test_an_empty_curve_has_no_plan():
    """A curve of a graph on which nothing was found is still a curve."""
    with pytest.raises(PlanNotFoundError, match="the smallest peaks at 0 B"):
        curve().plan_within("1GiB")


def test_a_budget_that_cannot_be_read_is_refused():
    """A share of what, a curve cannot tell."""
    with pytest.raises(UnitError, match="is a share"):
        curve(point(4, 1, 1.0)).plan_within("50%")
