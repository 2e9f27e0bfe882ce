"""Random tiny problems with their exact optimum, and what every solver must satisfy on them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from checkmate import (
    AStar,
    BruteForce,
    ChenGreedy,
    ChenSqrtN,
    Graph,
    Griewank,
    KeepAll,
    Limits,
    LocalSearch,
    LpRounding,
    Milp,
    Plan,
    PlanError,
    Problem,
    Reason,
    Result,
    Termination,
    simulate,
    solve,
    validate,
)
from checkmate.solvers.auto.phases import solve_in_phases
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.session import Session
from tests.strategies import random_graph

LIMITS = Limits(time_s=20.0, gap=0.0)


@dataclass(frozen=True)
class InPhases:
    """`Auto` as on larger graphs: it would solve one of a few ops as the oracle does."""

    rounds: int = 2

    def run(self, problem: Problem, session: Session) -> Termination:
        """All phases."""
        session.offer(range(len(problem.graph.ops)))
        if not session.done:
            solve_in_phases(problem, session, self.rounds)
        return Termination(Reason.NOT_FOUND if session.plan is None else Reason.FEASIBLE)


HEURISTICS = (KeepAll(), LocalSearch(decodes=200), InPhases(), Milp())


METHODS = (
    *(kind(points) for kind in (ChenSqrtN, ChenGreedy, Griewank) for points in ("articulation", "linearized")),
    LpRounding(samples=2, shares=(1.0, 0.8)),
    AStar(max_states=1 << 16),
)
"""Methods to compare with. Most are made for training graphs and find plans of those only."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem and its optimum, None where no plan keeps the budget."""

    seed: int
    problem: Problem
    optimum: int | None


def draw(seed: int) -> Instance:
    """The instance of a seed."""
    rng = random.Random(seed)
    graph = random_graph(rng, max_ops=rng.choice([4, 5, 5, 6]))
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    low = min(floor(graph).peak_bytes, own)
    budget = rng.randint(max(0, low - (rng.random() < 0.1)), max(low, own - 1))
    problem = Problem(graph, budget, recompute=rng.choice(["all", "all", "forward"]), reorder=rng.random() < 0.7)
    exact = solve(problem, BruteForce(), limits=LIMITS, raise_on_failure=False)
    assert exact.termination.reason in (Reason.OPTIMAL, Reason.INFEASIBLE), (seed, exact.termination)
    return Instance(seed, problem, exact.cost)


def check(instance: Instance, solver: object) -> Result:
    """Solve and hold the solver to the laws; returns what it found."""
    problem, seed = instance.problem, instance.seed
    result = solve(problem, solver, limits=LIMITS, raise_on_failure=False)
    if instance.optimum is None:
        assert result.plan is None, (seed, solver, "found a plan where brute force has none")
        return result
    assert result.bound <= instance.optimum, (seed, solver, result.bound, instance.optimum)
    assert result.termination.reason is not Reason.INFEASIBLE, (seed, solver)
    if result.plan is not None:
        assert result.cost >= instance.optimum, (seed, solver, result.cost, instance.optimum)
        assert result.peak_bytes <= problem.budget_bytes
        assert validate(problem.graph, result.plan, problem.budget_bytes) == ()
        if result.termination.reason is Reason.OPTIMAL:
            assert result.cost == instance.optimum, (seed, solver)
    return result


def stage_optimum(problem: Problem) -> int | None:
    """Least cost over all R matrices: stages of the graph's own order, each op at most once a stage.

    A last stage makes kept values again.
    """
    graph = problem.graph
    count = len(graph.ops)
    free = [(t, o) for t in range(count + 1) for o in range(t) if _again(problem, graph, o)]
    best: int | None = None
    for bits in itertools.product((False, True), repeat=len(free)):
        chosen = {cell for cell, bit in zip(free, bits, strict=True) if bit}
        order = [o for t in range(count) for o in [*(o for o in range(t) if (t, o) in chosen), t]]
        order += [o for o in range(count) if (count, o) in chosen]
        try:
            plan = Plan.from_order(graph, order)
        except PlanError:
            continue
        if not validate(graph, plan, problem.budget_bytes):
            cost = simulate(graph, plan).cost
            best = cost if best is None else min(best, cost)
    return best


def _again(problem: Problem, graph: Graph, o: int) -> bool:
    return graph.ops[o].recomputable and (problem.recompute == "all" or graph.ops[o].phase == "forward")
