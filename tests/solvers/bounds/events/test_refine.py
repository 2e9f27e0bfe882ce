"""Refinement: what it proves holds, its solutions become plans, and its events are one chain."""

from __future__ import annotations

import math
import random

from checkmate import AStar, BruteForce, Graph, Limits, Plan, Problem, simulate, solve, validate
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import Chain, Refinement
from checkmate.solvers.evict.search import Search
from tests.solvers.bounds.events.test_event_choice import chain_graph
from tests.solvers.bounds.events.test_event_cuts import some_chain, tight_problem
from tests.solvers.chains import unit_chain


class Refined:
    """A refinement of a problem from some events, with all that it proves and offers."""

    def __init__(
        self,
        problem: Problem,
        chain: Chain,
        *,
        targets: tuple[int, ...] | None = None,
        enough: float = math.inf,
        left_s: float = 20,
    ) -> None:
        self.proven: list[tuple[float, bool]] = []
        self.offered: list[list[int]] = []
        self.model = CutModel(problem, targets)
        refinement = Refinement(
            model=self.model,
            search=Search(problem, frozenset(), 0, targets),
            prove=lambda *proof: self.proven.append(proof),
            offer=lambda order: bool(self.offered.append(order)),
            enough=lambda: enough,
            left_s=lambda: left_s,
            gap=1e-6,
            threads=1,
        )
        self.cuts = refinement.run(chain, floating=True)


def share(problem: Problem, reorder: bool) -> float:
    """Least recomputation, as a share of computing every op once; infinite if there is no plan."""
    graph = problem.graph
    exact = Problem(graph, problem.budget_bytes, problem.recompute, reorder)
    cost = solve(exact, BruteForce(), raise_on_failure=False).cost
    return math.inf if cost is None else (cost - graph.cost) / max(1, graph.cost)


def test_no_plan_costs_less_than_what_is_proven_and_events_are_one_chain():
    """For any order or for the given one, as it says; and every solution becomes a plan that can be run."""
    added = offered = given = infinite = 0
    for seed in range(120):
        rng = random.Random(seed)
        problem = tight_problem(rng, most_ops=(6, 7))
        graph = problem.graph
        targets = tuple(range(len(graph.ops))) if rng.random() < 0.4 else None
        first = some_chain(rng, CutModel(problem, targets))[:2]
        peaks = [rng.randrange(len(graph.ops)) for _ in range(2)]
        refined = Refined(problem, Chain(first, peaks, {peaks[0]: 1.0}), targets=targets)
        assert set(first) <= set(refined.cuts)
        before = [refined.model.sides(b)[0] for b in refined.cuts]
        assert all(before[k + 1][a] for k, a in enumerate(refined.cuts[:-1])), seed
        for bound, any_order in refined.proven:
            assert bound <= share(problem, any_order) + 1e-5, (seed, bound, any_order)
            given += not any_order
            infinite += math.isinf(bound)
        for order in refined.offered:
            assert validate(graph, Plan.from_order(graph, order)) == (), seed
        added += len(refined.cuts) > len(set(first))
        offered += len(refined.offered)
    assert min(added, offered, given, infinite) > 5


def test_solutions_of_a_chain_lead_to_its_cheapest_plan():
    """Events are added where a plan breaks the budget, until the bound is nearly the cost of the best plan."""
    problem = Problem(unit_chain(6), 5)
    cheapest = solve(problem, AStar(), limits=Limits(gap=0.0)).cost
    refined = Refined(problem, Chain([9]))
    timelines = [simulate(problem.graph, Plan.from_order(problem.graph, order)) for order in refined.offered]
    assert min(t.cost for t in timelines if t.peak_bytes <= 5) == cheapest
    once = problem.graph.cost
    assert once * (1 + max(bound for bound, _ in refined.proven)) > cheapest - 1
    assert len(refined.cuts) > 1


def test_it_ends_without_time_and_where_the_bound_is_enough():
    """The events are those that were given, in the order of the chain."""
    problem = Problem(unit_chain(6), 5)
    late = Refined(problem, Chain([5, 3, 4, 3]), left_s=0.1)
    assert (late.cuts, late.proven, late.offered) == ([3, 4, 5], [], [])
    met = Refined(problem, Chain([7]), enough=0.0)
    assert (met.cuts, len(met.proven)) == ([7], 1)


def test_events_come_in_the_order_of_their_targets():
    """Which need not be that of the indices; an op that is no target stands where its index says."""
    diamond = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)], kept=[3])
    assert Refined(Problem(diamond, 9), Chain([1, 2]), targets=(0, 2, 1, 3), left_s=0.0).cuts == [2, 1]


def test_an_impossible_event_proves_that_there_is_no_plan():
    refined = Refined(Problem(chain_graph([1, 5, 5, 1]), 9), Chain([1, 2]))
    assert (refined.cuts, refined.proven, refined.offered) == ([1, 2], [(math.inf, True)], [])


def test_a_tight_chain_stays_within_five_per_cent():
    """Unit chains are what single cuts are bad at; integer programs over several events do better."""
    graph = unit_chain(8)
    result = solve(Problem(graph, 6), limits=Limits(time_s=30, gap=0.0))
    assert result.gap <= 0.05
    assert simulate(graph, result.plan).peak_bytes <= 6
