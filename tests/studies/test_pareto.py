"""The curve of cost against budget: monotone, exact where the solver is, the same wherever it is solved."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import pytest

import checkmate
from checkmate import (
    BruteForce,
    Curve,
    FileFormatError,
    Graph,
    Limits,
    OptionError,
    Plan,
    PlanError,
    PlanNotFoundError,
    Problem,
    Reason,
    Termination,
    pareto,
    simulate,
    solve,
    validate,
)
from checkmate.core.budget import keep_all_bytes
from checkmate.core.files import read_as
from tests.solvers.generators import transformer
from tests.strategies import random_graph

ENDLESS = Limits(time_s=None, gap=0.1)
"""Without a limit of time, which no two runs reach at the same plan; a block of a transformer is within a tenth in a second."""


def chain(count: int = 9) -> Graph:
    """A training chain."""
    forward = count // 2
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, count - 1 - i) for i in range(forward)}
    return Graph.from_dag(
        cost=[1] * count, size_bytes=[4] * count, edges=sorted(edges), backward=[i > forward for i in range(count)]
    )


def check(graph: Graph, curve: Curve) -> None:
    """Hold a curve to its laws."""
    budgets = [point.budget_bytes for point in curve.points]
    assert budgets == sorted(set(budgets))
    assert budgets[-1] == keep_all_bytes(graph)
    assert curve.points[-1].cost == graph.cost
    for point in curve.points:
        timeline = simulate(graph, point.plan)
        assert validate(graph, point.plan, point.budget_bytes) == ()
        assert (point.cost, point.peak_bytes) == (timeline.cost, timeline.peak_bytes)
        assert point.bound <= point.cost
    for a, b in pairwise(curve.points):
        assert a.cost >= b.cost
        assert a.bound >= b.bound


def test_with_brute_force_every_point_is_the_optimum():
    """Sharing plans and bounds along the curve never makes a point wrong."""
    compared = 0
    for seed in range(60):
        graph = random_graph(random.Random(seed), max_ops=5)
        curve = pareto(graph, points=4, solver=BruteForce(), limits=Limits(time_s=20.0, gap=0.0))
        check(graph, curve)
        for point in curve.points:
            exact = solve(Problem(graph, point.budget_bytes), BruteForce())
            assert point.cost == exact.cost == point.bound, seed
            compared += 1
    assert compared > 60


def test_heuristic_points_enclose_the_optimum():
    """Plans handed up and bounds handed down stay on their side of the truth."""
    for seed in range(30):
        graph = random_graph(random.Random(seed), max_ops=6)
        curve = pareto(graph, points=4, solver=checkmate.Auto(rounds=1), limits=Limits(time_s=10.0, gap=0.0))
        check(graph, curve)
        for point in curve.points:
            exact = solve(Problem(graph, point.budget_bytes), BruteForce()).cost
            assert point.bound <= exact <= point.cost, seed


@dataclass(frozen=True)
class Lazy:
    """A solver that finds nothing, at every budget."""

    def run(self, problem, session):
        """Give up."""
        return Termination(Reason.NOT_FOUND)


@dataclass(frozen=True)
class Interrupted:
    """A user who waits for no solve."""

    def run(self, problem, session):
        """Ctrl-C."""
        raise KeyboardInterrupt


@pytest.mark.parametrize("solver", [Lazy(), Interrupted()], ids=repr)
def test_every_point_has_a_plan_whatever_the_solver_does(solver):
    """The plan of the smallest budget is a plan for all of them, and Ctrl-C loses nothing."""
    graph = transformer(2)
    curve = pareto(graph, points=5, solver=solver)
    check(graph, curve)
    assert curve.points[0].cost == curve.points[3].cost > graph.cost


@pytest.fixture(scope="module")
def block() -> tuple[Graph, Curve]:
    """A block of a transformer and its curve, solved here."""
    graph = transformer(1)
    return graph, pareto(graph, points=4, limits=ENDLESS)


@pytest.mark.slow
def test_a_curve_is_the_same_in_other_processes(block):
    """What is sent is pickled, and what is solved first does not depend on who is done first."""
    graph, here = block
    check(graph, here)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pareto(graph, points=4, limits=ENDLESS, executor=pool)
    assert shape(here) == shape(there)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_curve_is_the_same_on_a_dask_cluster(block):
    """Dask's executor is one like any other."""
    distributed = pytest.importorskip("distributed")
    graph, here = block
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        there = pareto(graph, points=4, limits=ENDLESS, executor=client.get_executor())
    assert shape(here) == shape(there)


def shape(curve: Curve) -> list[tuple[object, ...]]:
    """All of a curve but its times."""
    return [(p.budget_bytes, p.cost, p.bound, p.peak_bytes, p.plan) for p in curve.points]


def test_plan_within_is_the_cheapest_that_fits(block):
    """Between two points the plan of the lower one fits; below all of them none does."""
    graph, curve = block
    low, high = curve.points[0], curve.points[-1]
    assert simulate(graph, curve.plan_within(high.budget_bytes)).cost == graph.cost
    for point in curve.points:
        assert simulate(graph, curve.plan_within(point.budget_bytes)).cost == point.cost
    assert curve.plan_within(low.peak_bytes) == low.plan
    with pytest.raises(PlanNotFoundError, match="the smallest peaks at"):
        curve.plan_within(low.peak_bytes - 1)


def test_fewer_than_two_points_are_no_curve():
    """One point is a solve."""
    with pytest.raises(OptionError, match="points=1"):
        pareto(chain(), points=1)


def test_a_curve_round_trips(tmp_path):
    """A curve is a file, plans included."""
    curve = pareto(chain(), points=4, solver=BruteForce(max_ops=9), limits=Limits(gap=0.0))
    checkmate.write(curve, tmp_path / "c.json")
    assert read_as(tmp_path / "c.json", Curve) == curve


def test_a_curve_that_cannot_be_read_is_refused_in_words(tmp_path):
    """Another version, and a curve that goes up."""
    curve = pareto(chain(), points=4, solver=BruteForce(max_ops=9), limits=Limits(gap=0.0))
    assert len(curve.points) > 1
    checkmate.write(curve, tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    (tmp_path / "c.json").write_text(text.replace("checkmate.curve/1", "checkmate.curve/3"))
    with pytest.raises(FileFormatError, match=r"'checkmate\.curve/3' is not read here"):
        checkmate.read(tmp_path / "c.json")
    content = json.loads(text)
    content["points"].reverse()
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match="no part of a curve"):
        checkmate.read(tmp_path / "c.json")


def test_a_solve_starts_from_a_plan_of_a_smaller_budget():
    """It counts as found, and is checked like any other."""
    graph = chain(7)
    small = solve(Problem(graph, 16), BruteForce())
    found = solve(Problem(graph, 20), Lazy(), initial=small.plan)
    assert (found.cost, found.termination.reason) == (small.cost, Reason.FEASIBLE)
    assert solve(Problem(graph, 20), BruteForce(), initial=small.plan).cost <= small.cost
    over = solve(Problem(graph, small.peak_bytes - 1), Lazy(), initial=small.plan, raise_on_failure=False)
    assert over.plan is None


def test_a_solve_refuses_to_start_from_what_is_no_plan_of_the_problem():
    """The caller's mistake, not a bug of the solver."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[])
    swapped = Plan.from_order(graph, [1, 0])
    with pytest.raises(PlanError, match="the initial plan does not hold"):
        solve(Problem(graph, 10, reorder=False), initial=swapped)
    with pytest.raises(PlanError, match="made for another graph"):
        solve(Problem(chain(), 100), initial=swapped)


def test_progress_counts_every_budget_once():
    """Whoever waits sees how much is left: from none to all, never back."""
    seen: list[tuple[int, int]] = []
    curve = pareto(transformer(2), points=5, limits=Limits(time_s=0.5), on_progress=lambda done, of: seen.append((done, of)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (len(curve.points), len(curve.points))


@dataclass(frozen=True)
class Killed:
    """A solve that takes more memory than there is."""

    def run(self, problem, session):
        """What the kernel does to it."""
        assert multiprocessing.parent_process() is not None
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_no_point(caplog):
    """Those that were solved stay, the others have a plan, and the cause is told."""
    graph = chain()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        curve = pareto(graph, points=4, solver=Killed(), executor=pool)
    check(graph, curve)
    assert sum("a process that solves budgets was ended" in message for message in caplog.messages) == 1
