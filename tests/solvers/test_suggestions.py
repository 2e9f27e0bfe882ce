"""Programs for the orders of plans, before plans are crossed: they need a plan, never lose one, and find better ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from checkmate import Limits, Plan, Problem, validate
from checkmate.solvers.auto import phases
from checkmate.solvers.auto.rounds import suggest
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.sequences import resequence
from checkmate.solvers.session import Session
from tests.solvers.chains import uneven_chain, unit_chain


def begun(seed: int, *, reorder: bool = True, plan: bool = True) -> tuple[Run, list[Search]]:
    """A run on a training chain at a budget near its smallest, and two searches in the graph's order."""
    graph = uneven_chain(random.Random(seed), 12)
    problem = Problem(graph, floor(graph).peak_bytes + 3, reorder=reorder)
    run = Run(problem, Session(problem, Limits(time_s=60.0)))
    searches = [Search(run.folded, frozenset(), seed + k, time_up=run.session.time_up) for k in range(2)]
    if plan:
        for search in searches:
            search.first(tries=1, stop_at_first=True)
            if math.isfinite(search.best_cost):
                run.offer(search.order())
    return run, sorted(searches, key=lambda search: search.best_cost)


def test_without_a_plan_there_is_nothing_to_go_on_from():
    """And it ends, as without the right to put ops in another order, or on a large graph."""
    run, searches = begun(1, plan=False)
    suggest(run, searches)
    assert all(math.isinf(search.best_cost) for search in searches)
    run.session.close()


def test_suggestions_are_for_small_graphs_that_may_be_reordered(monkeypatch):
    """Elsewhere the plans stay as they are."""
    for reorder, most_ops in ((False, 3000), (True, 1)):
        monkeypatch.setattr(resequence, "PARAMETERS", replace(resequence.PARAMETERS, most_ops=most_ops))
        for seed in range(5):
            run, searches = begun(seed, reorder=reorder)
            costs = [search.best_cost for search in searches]
            suggest(run, searches)
            assert [search.best_cost for search in searches] == costs
            run.session.close()


def test_plans_get_better_and_stay_plans(monkeypatch):
    """The first search has the best of them, and the session as well."""
    monkeypatch.setattr(phases, "PHASES", {**phases.PHASES, phases.Phase.SUGGESTED_SEARCH: 0.001})
    better = 0
    for seed in range(12):
        run, searches = begun(seed)
        before = searches[0].best_cost
        if math.isinf(before):
            continue
        suggest(run, searches)
        assert searches[0].best_cost == min(search.best_cost for search in searches) <= before
        plan = Plan.from_order(run.graph, searches[0].order())
        assert validate(run.graph, plan, run.folded.budget_bytes) == ()
        assert run.session.cost == searches[0].best_cost
        better += searches[0].best_cost < before
        run.session.close()
    assert better > 2


@pytest.mark.parametrize("gap", [0.0, 1e-6, 0.05])
def test_programs_prove_what_meets_the_gap_and_no_more(gap):
    """A little beyond it, by more than an engine's tolerance, and never beyond the plan."""
    problem = Problem(unit_chain(8), 5)
    session = Session(problem, Limits(time_s=60.0, gap=gap))
    run = Run(problem, session)
    assert run.enough_share() == math.inf
    search = Search(run.folded, frozenset(), 0)
    search.first()
    run.offer(search.order())
    assert session.gap > 0.05
    enough = run.enough_share()
    assert (enough < run.best_share()) == (gap > 1e-5)
    run.prove(search, enough - 1e-6, True)
    assert session.gap <= max(gap, 1e-6)
    session.close()
