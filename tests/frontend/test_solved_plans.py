"""Plans that were found before: used again without a search, and never trusted."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import checkmate.frontend.plan_store as plan_store
from checkmate import Graph, InfeasibleBudgetError, Limits, Problem, Reason, Termination
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.plan_store import SolvedPlans
from checkmate.frontend.planner import cheapest, planner_for
from checkmate.solvers.session import Session

TWO_PROCESSES = """
import json, logging, sys, time
from dataclasses import dataclass
from checkmate import Graph, Reason, Termination
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import planner_for

searches = []

@dataclass(frozen=True)
class Slow:
    def run(self, problem, session):
        searches.append(1)
        session.offer([0, 1, 2, 0, 3])
        time.sleep(0.03)
        return Termination(Reason.FEASIBLE)

logging.basicConfig(stream=sys.stderr, level=logging.INFO)
edges = [(0, 1), (1, 2), (0, 3), (2, 3)]
graph = Graph.from_dag(cost=[1, 1, 1, 1], size_bytes=[4, 4, 4, 1], edges=edges, kept=[3])
result = planner_for(PlanningOptions.of(budget="9B", solver=Slow(), time_limit_s=5))(graph)
print(json.dumps([len(searches), result.plan.order, result.bound, result.gap, result.peak_bytes]))
"""


@pytest.fixture(autouse=True)
def folder(own_cache: Path) -> Path:
    """An empty store."""
    return own_cache


def graph(last_cost: int = 1, resident_bytes: int = 0) -> Graph:
    """Op 3 reads op 0 again after ops 1 and 2: keeping everything peaks at 12 bytes, and computing op 0 again at 9."""
    edges = [(0, 1), (1, 2), (0, 3), (2, 3)]
    costs = [1, 1, 1, last_cost]
    return Graph.from_dag(cost=costs, size_bytes=[4, 4, 4, 1], edges=edges, kept=[3], resident_bytes=resident_bytes)


SEARCHES: list[int] = []


@dataclass(frozen=True)
class Finds:
    """A solver that finds one plan, and proves nothing or all."""

    order: tuple[int, ...] = (0, 1, 2, 0, 3)
    bound: float = 0.0

    def run(self, problem: Problem, session: Session) -> Termination:
        """Offer the plan, and take long enough to be worth a row."""
        time.sleep(0.025)
        SEARCHES.append(problem.budget_bytes)
        session.offer(self.order)
        session.prove(self.bound)
        return Termination(Reason.FEASIBLE)


def searches_of(*calls: tuple[Problem, Any, float | None]) -> list[int]:
    """Which of the calls search: index of each."""
    found: list[int] = []
    for i, (problem, solver, time_s) in enumerate(calls):
        SEARCHES.clear()
        cheapest(problem, solver, Limits(time_s=time_s))
        found += [i] * bool(SEARCHES)
    return found


def test_a_second_process_plans_nothing(tmp_path: Path) -> None:
    """The plan, its bound and its figures are those of the first, and the log says that it was planned before."""
    runs = [subprocess.run([sys.executable, "-c", TWO_PROCESSES], capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (json.loads(run.stdout) for run in runs)
    assert (first[0], second[0]) == (1, 0)
    assert first[1:] == second[1:] == [[0, 1, 2, 0, 3], 4.0, 0.2, 9]
    assert "planned 4 ops" in runs[0].stderr
    assert "planned before: 4 ops" in runs[1].stderr


def test_what_decides_on_a_plan_is_in_its_key() -> None:
    """Costs, the budget above resident bytes, what a plan may do, and the solver; two graphs may differ in costs alone."""
    problem, solver = Problem(graph(), 9), Finds()
    others = [
        (Problem(graph(last_cost=5), 9), solver),
        (Problem(graph(resident_bytes=1), 12), solver),
        (Problem(graph(), 10), solver),
        (Problem(graph(), 9, reorder=False), solver),
        (problem, Finds(bound=4.5)),
    ]
    assert searches_of(*((p, s, 5.0) for p, s in [(problem, solver), *others, (problem, solver)])) == [0, 1, 2, 3, 4, 5]
    beside_more = Problem(graph(resident_bytes=1), 10)
    assert searches_of((beside_more, solver, 5.0)) == []
    assert cheapest(beside_more, solver, Limits(time_s=5.0)).peak_bytes == 10


def test_another_version_of_checkmate_plans_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its solvers may find better plans."""
    calls = [(Problem(graph(), 9), Finds(), 5.0)]
    assert searches_of(*calls) == [0]
    monkeypatch.setattr(plan_store, "__version__", "0.0.0")
    assert searches_of(*calls) == [0]


def test_a_plan_found_in_less_time_is_where_a_longer_search_starts() -> None:
    """It must not stand in the way of a better one; a search with as much time or less would find no better one."""
    problem = Problem(graph(), 10)
    costly = Finds(order=(0, 1, 0, 2, 0, 3))
    assert searches_of(*((problem, costly, time_s) for time_s in (5, 5, 2, 6, 5, None, 1000, None))) == [0, 3, 5]

    starts: list[Any] = []

    @dataclass(frozen=True)
    class Other:
        def __repr__(self) -> str:
            return repr(costly)

        def run(self, problem: Problem, session: Session) -> Termination:
            time.sleep(0.025)
            starts.append(session.plan)
            return Termination(Reason.FEASIBLE)

    store = SolvedPlans()
    known = store.get(problem, repr(costly), Limits(time_s=None))
    assert known is not None
    store.add(problem, Limits(time_s=1), msgspec.structs.replace(known[0], elapsed_s=1.0))
    again = cheapest(problem, Other(), Limits(time_s=2))
    assert [plan.order for plan in starts] == [again.plan.order] == [known[0].plan.order]


def test_a_proven_plan_is_used_whatever_the_time_limit() -> None:
    """No search finds a cheaper one; and one within the gap that is asked for ends a search too."""
    problem = Problem(graph(), 9)
    assert searches_of(*((problem, Finds(bound=5.0), time_s) for time_s in (1, 1000, None))) == [0]
    result = cheapest(problem, Finds(bound=5.0), Limits(time_s=1000))
    assert (result.termination.reason, result.bound, result.gap) == (Reason.OPTIMAL, 5.0, 0.0)
    near = Finds(order=(0, 1, 2, 0, 3), bound=1004.0)
    costly = Problem(graph(last_cost=1001), 9)
    assert searches_of((costly, near, 1), (costly, near, 2)) == [0]
    assert cheapest(costly, near, Limits(time_s=2)).gap == pytest.approx(1 / 1005)
    stored = [SolvedPlans().get(costly, repr(near), Limits(time_s=2, gap=gap)) for gap in (0.005, 0.0)]
    assert [found is not None and found[1] for found in stored] == [True, False]


def damage(folder: Path, row: bytes, checksum: str | None = None) -> None:
    with sqlite3.connect(folder / "store.sqlite") as connection:
        key = connection.execute("SELECT key FROM entries").fetchone()[0]
        checksum = SolvedPlans()._store._checksum(key, row) if checksum is None else checksum
        connection.execute("UPDATE entries SET value = ?, checksum = ?", (row, checksum))
    connection.close()


def row(order: tuple[int, ...], bound: float) -> bytes:
    return msgspec.msgpack.encode(plan_store._Solved(order, bound, Termination(Reason.OPTIMAL), math.inf, 0.0))


@pytest.mark.parametrize(
    ("content", "checksum", "says"),
    [
        (b"\xc1nonsense", None, "has a damaged entry"),
        (row((0, 1, 2, 0, 3), 5.0), "0" * 64, "has a damaged entry"),
        (row((0, 1, 2, 3), 4.0), None, "does not keep its budget"),
        (row((0, 1, 2, 0, 3), 6.0), None, "costs less than its bound"),
        (row((0, 2, 1, 3), 4.0), None, "does not hold for its graph"),
        (row((0, 1, 2, 0, 99), 4.0), None, "does not hold for its graph"),
        (row((0, 1), 2.0), None, "does not hold for its graph"),
    ],
    ids=["no-row", "checksum", "over-the-budget", "below-its-bound", "bad-order", "no-such-op", "incomplete"],
)
def test_a_wrong_row_is_not_trusted(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes, checksum: str | None, says: str
) -> None:
    """Damaged, over the budget, cheaper than its bound or no plan at all: it is planned again, and the row replaced."""
    problem = Problem(graph(), 9)
    calls = [(problem, Finds(), 5.0)]
    searches_of(*calls)
    damage(folder, content, checksum)
    with caplog.at_level(logging.WARNING):
        assert searches_of(*calls) == [0]
    assert says in caplog.text
    assert searches_of(*calls) == []


def test_a_damaged_file_is_named_and_planning_goes_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache is never a reason to fail."""
    (folder / "store.sqlite").write_bytes(b"this is no database" * 100)
    assert searches_of((Problem(graph(), 9), Finds(), 5.0)) == [0]
    assert str(folder / "store.sqlite") in caplog.text
    assert "remove the file" in caplog.text


def test_the_environment_switches_it_off(folder: Path, environ: dict[str, str]) -> None:
    """To time a solver, or to see what it finds now."""
    calls = [(Problem(graph(), 9), Finds(), 5.0)]
    searches_of(*calls)
    environ["CHECKMATE_PLAN_CACHE"] = "0"
    assert searches_of(*calls, *calls) == [0, 1]


def test_quick_solves_and_those_that_met_a_target_leave_no_row(folder: Path) -> None:
    """Reading a row takes as long as a quick solve, and a target says nothing of the time a search had."""
    problem = Problem(graph(), 9)
    result = cheapest(problem, Finds(), Limits(time_s=5))
    store = SolvedPlans(folder / "other.sqlite")
    store.add(problem, Limits(), msgspec.structs.replace(result, termination=Termination(Reason.FEASIBLE, limit="target")))
    store.add(problem, Limits(), msgspec.structs.replace(result, elapsed_s=0.019))
    assert store.get(problem, result.solver, Limits()) is None
    store.add(problem, Limits(), msgspec.structs.replace(result, elapsed_s=0.021))
    assert store.get(problem, result.solver, Limits()) is not None


def test_a_refusal_is_not_stored() -> None:
    """It is quick, and its message names what a plan was found for."""
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError):
            planner_for(PlanningOptions.of(budget="5B", solver=Finds()))(graph())


def test_a_stored_plan_is_read_back_in_a_moment() -> None:
    """The check of a plan of 2,000 ops takes less than a tenth of what its search took at least."""
    count = 2000
    chain = Graph.from_dag(
        cost=[1] * count, size_bytes=[4] * count, edges=[(i, i + 1) for i in range(count - 1)], kept=[count - 1]
    )
    problem = Problem(chain, "100%")
    cheapest(problem, Finds(order=tuple(range(count))), Limits(time_s=5))
    began = time.process_time()
    SEARCHES.clear()
    cheapest(problem, Finds(order=tuple(range(count))), Limits(time_s=5))
    assert not SEARCHES
    assert time.process_time() - began < 2
