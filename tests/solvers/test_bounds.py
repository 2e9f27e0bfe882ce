"""Bounds and their arithmetic: safe whatever the engine says, and sharp where they should be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import sparse

from checkmate import AStar, Auto, BruteForce, Graph, InfeasibleBudgetError, Limits, Op, Plan, Problem, Value, simulate, solve
from checkmate.solvers.backends.highs import solve_integer, solve_linear
from checkmate.solvers.backends.program import Program, ProgramBuilder, dual_bound, proves_infeasible
from checkmate.solvers.bounds.event_cuts import CutModel
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.solvers.instances import draw
from tests.strategies import random_graph


def knapsack() -> Program:
    """Minimise -3a - 2b - 2c with 2a + b + c <= 2, all in [0, 1]: -4 in integers, -4.0 relaxed."""
    builder = ProgramBuilder()
    columns = builder.add_columns([-3.0, -2.0, -2.0])
    builder.add_row(columns, np.array([2.0, 1.0, 1.0]), high=2.0)
    return builder.build()


def test_any_duals_give_a_bound():
    """Weak duality needs no optimality: garbage duals give a loose bound, never a wrong one."""
    program = knapsack()
    best = solve_integer(program).objective
    assert best == pytest.approx(-4.0)
    rng = np.random.default_rng(0)
    for _ in range(200):
        assert dual_bound(program, rng.normal(scale=5, size=1)) <= best + 1e-9
    assert solve_linear(program).bound == pytest.approx(-4.0)


def test_infeasibility_needs_a_certificate():
    """A ray that proves nothing is refused; the engine's own passes."""
    matrix = sparse.csr_matrix(np.array([[1.0, 1.0], [1.0, 1.0]]))
    program = Program(
        cost=np.zeros(2),
        low=np.zeros(2),
        high=np.ones(2),
        integral=np.ones(2, dtype=bool),
        matrix=matrix,
        row_low=np.array([1.5, -np.inf]),
        row_high=np.array([np.inf, 1.0]),
    )
    assert proves_infeasible(program, np.array([1.0, -1.0]))
    assert not proves_infeasible(program, np.array([1.0, 0.0]))
    assert not proves_infeasible(knapsack(), np.array([1.0]))
    assert math.isinf(solve_integer(program).bound)


def test_every_cut_bounds_every_plan():
    """Single events, chains of events, with and without floating ops, relaxed and in integers."""
    sharp = checked = 0
    for seed in range(150):
        instance = draw(seed)
        if instance.optimum is None or not instance.problem.reorder:
            continue
        fold = FoldViews.of(instance.problem.graph, priced=True)
        folded = fold.apply(instance.problem)
        once = max(1, folded.graph.cost)
        model = CutModel(folded)
        for cuts in chains(model, random.Random(seed)):
            for floating in (False, True):
                cut = model.build(cuts, floating=floating)
                assert not cut.impossible, (seed, cuts)
                for solved in (solve_linear(cut.program), solve_integer(cut.program)):
                    bound = instance.problem.graph.cost + solved.bound * once
                    assert bound <= instance.optimum + 1e-4, (seed, cuts, floating, bound, instance.optimum)
                checked += 1
                sharp += math.isclose(bound, instance.optimum, abs_tol=1e-4)
    assert checked > 200
    assert sharp > checked / 2


def chains(model: CutModel, rng: random.Random) -> list[list[int]]:
    """A single event and a random chain of the DAG."""
    start = rng.randrange(model.end)
    chain = [start]
    while following := [o for o in model.children[chain[-1]] if o != model.end]:
        chain.append(rng.choice(following))
    return [[start], chain]


def test_floating_ops_sharpen_the_bound():
    """A gradient beside the chain weighs at the event by its output or by its inputs."""
    graph = Graph(
        ops=(
            Op("x", (), (0,), 10),
            Op("y", (0,), (1,), 10),
            Op("side", (0,), (2,), 1),
            Op("big", (1,), (3,), 1, workspace_bytes=10),
        ),
        values=(Value("x", 6), Value("y", 1), Value("side", 6, kept=True), Value("big", 1, kept=True)),
    )
    problem = Problem(graph, 14)
    model = CutModel(problem)
    optimum = solve(problem, BruteForce()).cost
    without, with_them = (
        solve_linear(model.build([3], floating=floating).program).bound * graph.cost + graph.cost for floating in (False, True)
    )
    assert without < with_them <= optimum + 1e-6


def test_the_floor_is_below_every_plan_and_reached_by_chains():
    """It is a bound on the peak; where one op sets it, a plan reaches it."""
    for seed in range(200):
        graph = random_graph(random.Random(seed))
        own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
        lowest = floor(graph)
        assert lowest.peak_bytes <= own
        if lowest.peak_bytes > graph.resident_bytes:
            below = solve(Problem(graph, lowest.peak_bytes - 1), BruteForce(), raise_on_failure=False)
            assert below.plan is None, seed


def test_the_floor_counts_what_cannot_be_made_again():
    """A random mask that a later op reads is there at every op between."""
    graph = Graph(
        ops=(
            Op("mask", (), (0,), 1, recomputable=False),
            Op("wide", (0,), (1,), 1),
            Op("narrow", (1,), (2,), 1),
            Op("use", (0, 2), (3,), 1),
        ),
        values=(Value("mask", 5), Value("wide", 20), Value("narrow", 20), Value("out", 1, kept=True)),
    )
    lowest = floor(graph)
    assert lowest.peak_bytes == 45
    assert "that cannot be made again" in lowest.why
    with pytest.raises(InfeasibleBudgetError, match="`narrow` alone needs"):
        solve(Problem(graph, 44))


def test_folding_views_keeps_every_byte():
    """The plan with its views put back holds the same peak, and costs no less than its ops without them."""
    folded_any = 0
    for seed in range(400):
        graph = random_graph(random.Random(seed), rules=False)
        fold = FoldViews.of(graph)
        folded_any += bool(graph.view_ops)
        order = list(range(len(fold.folded.ops)))
        again = [o for o in order if random.Random(seed + o).random() < 0.3]
        sequence = order + again
        inside = simulate(fold.folded, Plan.from_order(fold.folded, sequence))
        outside = simulate(graph, Plan.from_order(graph, fold.invert(sequence)))
        if not any(graph.values[v].base is not None for v in range(len(graph.values)) if graph.producer[v] in fold.kept_ops):
            assert outside.peak_bytes == inside.peak_bytes, seed
        assert outside.cost >= sum(graph.ops[fold.kept_ops[o]].cost for o in sequence)
        assert fold.cost_offset == graph.cost - fold.folded.cost
    assert folded_any > 50


def test_a_view_is_priced_where_every_reader_needs_it():
    """Not where each reader has a view of its own, nor where the first computation may have to come for nobody."""

    def step(other_view: int, order: tuple[tuple[int, int], ...] = (), early: int = 1) -> Graph:
        ops = (
            Op("x", (), (0,), 2),
            Op("view", (0,), (1,), 3),
            Op("other view", (0,), (2,), 4),
            Op("early", (early,), (3,), 1),
            Op("wide", (3,), (4,), 1, workspace_bytes=9),
            Op("late", (other_view, 4), (5,), 1),
        )
        bases = {1: 0, 2: 0}
        values = tuple(
            Value(str(v), 0 if v in bases else 2, bases.get(v), v == 5 or (v == 2 and other_view == 1)) for v in range(6)
        )
        return Graph(ops=ops, values=values, order=order)

    def price(graph: Graph) -> int:
        return FoldViews.of(graph, priced=True).folded.ops[0].cost - graph.ops[0].cost

    assert price(step(other_view=2)) == 0
    assert price(step(other_view=2, early=2)) == 4
    assert price(step(other_view=2, early=2, order=((0, 4),))) == 0
    for graph in (step(2), step(2, early=2), step(2, early=2, order=((0, 4),)), step(1)):
        for budget in range(4, 16):
            exact = solve(Problem(graph, budget), BruteForce(), limits=Limits(gap=0.0), raise_on_failure=False)
            for solver in (AStar(), Auto()):
                result = solve(Problem(graph, budget), solver, limits=Limits(time_s=5, gap=0.0), raise_on_failure=False)
                assert result.cost == exact.cost
                assert result.bound <= exact.bound


def test_a_tight_chain_stays_within_five_per_cent():
    """Unit chains are what single cuts are bad at; integer programs over several events do better."""
    count = 17
    edges = [(i, i + 1) for i in range(count - 1)] + [(i, count - 1 - i) for i in range(count // 2)]
    graph = Graph.from_dag(cost=[1] * count, size_bytes=[1] * count, edges=edges, backward=[i > 8 for i in range(count)])
    result = solve(Problem(graph, 6), limits=Limits(time_s=30, gap=0.0))
    assert result.gap <= 0.05
