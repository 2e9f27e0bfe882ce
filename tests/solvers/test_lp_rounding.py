"""Rounding of the stage program's relaxation."""

from __future__ import annotations

import random

import numpy as np
import pytest

from checkmate import Limits, LpRounding, Milp, OptionError, Plan, Problem, Reason, simulate, solve, validate
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.milp import StageProgram
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.solvers.chains import unit_chain
from tests.solvers.generators import transformer
from tests.solvers.instances import check, draw
from tests.strategies import random_graph


def test_rounding_beats_no_brute_force_and_keeps_the_budget():
    """On graphs with views, random, pinned and overwritten ops, too."""
    feasible = [instance for instance in map(draw, range(60)) if instance.optimum is not None]
    found = sum(check(instance, LpRounding(samples=4)).plan is not None for instance in feasible)
    assert found >= 0.5 * len(feasible)


def test_whatever_is_held_can_be_run():
    """The second phase computes what is missing for any choice of S; only the peak depends on it."""
    rng = random.Random(0)
    for seed in range(75):
        graph = random_graph(rng)
        fold = FoldViews.of(graph)
        stages = StageProgram(fold.apply(Problem(graph, 10**6)))
        stages.build()
        held = np.random.default_rng(seed).random(stages.S.shape) < rng.random()
        plan = Plan.from_order(graph, fold.invert(stages.rounded(held)))
        assert validate(graph, plan, reorder=False) == (), seed


def test_holding_everything_is_keep_all():
    """S of ones recomputes nothing."""
    graph = unit_chain(5)
    stages = StageProgram(Problem(graph, 20))
    stages.build()
    assert stages.rounded(np.ones(stages.S.shape, dtype=np.bool_)) == list(range(len(graph.ops)))


def test_the_sweep_is_no_worse_than_the_papers_one_rounding():
    """Threshold a half at nine tenths of the budget is one of the settings."""
    for graph, budget in ((unit_chain(8), 6), (transformer(1), "70%")):
        problem = Problem(graph, budget)
        paper = solve(problem, LpRounding(threshold=0.5, samples=0, shares=(0.9,)), raise_on_failure=False)
        swept = solve(problem, LpRounding())
        assert paper.cost is None or swept.cost <= paper.cost
        exact = solve(problem, Milp(), limits=Limits(gap=0.0))
        assert simulate(graph, exact.plan).cost <= swept.cost


def test_the_same_seed_gives_the_same_plan():
    """Random roundings come from the seed of the limits."""
    problem = Problem(unit_chain(6), 5)
    plans = [solve(problem, LpRounding(), limits=Limits(seed=3)).plan for _ in range(2)]
    assert plans[0] == plans[1]


def test_it_says_what_it_cannot_do():
    """Too many ops, or no rounding that fits."""
    large = solve(Problem(unit_chain(8), 6), LpRounding(max_ops=10), raise_on_failure=False)
    assert large.termination.detail == "17 ops, and rounding stops at 10"
    graph = unit_chain(8)
    assert keep_all_bytes(graph) > 3
    small = solve(Problem(graph, 3), LpRounding(threshold=0.9, samples=0, shares=(1.0,)), raise_on_failure=False)
    assert small.plan is None or small.peak_bytes <= 3
    assert small.termination.reason in (Reason.NOT_FOUND, Reason.FEASIBLE)


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 1.0}, {"samples": -1}, {"shares": ()}, {"shares": (1.1,)}])
def test_options_that_mean_nothing_are_refused(options):
    """An unusable value is an error at once."""
    with pytest.raises(OptionError):
        LpRounding(**options)
