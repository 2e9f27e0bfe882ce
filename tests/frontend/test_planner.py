"""Planners: the cheapest within a budget, a plan that is given, and plans of one graph within several budgets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from checkmate import (
    Budget,
    Compute,
    Free,
    Graph,
    InfeasibleBudgetError,
    Limits,
    Plan,
    PlanError,
    Problem,
    Reason,
    Termination,
    WrongGraphError,
    solve,
)
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import (
    GivenPlan,
    Replanner,
    cheapest,
    keep_everything,
    planner_for,
    result_of_order,
)
from checkmate.solvers.session import Session

RECOMPUTED = [0, 1, 2, 0, 3]


@pytest.fixture
def graph() -> Graph:
    """Op 3 reads op 0 again after ops 1 and 2: keeping everything peaks at 12 bytes, and computing op 0 again at 9."""
    return Graph.from_dag(cost=[1, 1, 1, 1], size_bytes=[4, 4, 4, 1], edges=[(0, 1), (1, 2), (0, 3), (2, 3)], kept=[3])


def steps(*ops_and_frees: str) -> Plan:
    """A plan of steps such as "c0" (compute op 0) and "f1" (free value 1)."""
    return Plan(tuple(Compute(int(s[1:])) if s[0] == "c" else Free(int(s[1:])) for s in ops_and_frees))


def options(**given: Any) -> PlanningOptions:
    return PlanningOptions.of(**{"budget": None, "solver": None, "time_limit_s": 5, "plan": None, **given})


def test_options_decide_the_planner(graph: Graph) -> None:
    """A plan counts before a budget, and without either everything is kept."""
    plan = Plan.from_order(graph, RECOMPUTED)
    assert planner_for(options()) is keep_everything
    assert planner_for(options(budget="75%"))(graph).plan == plan
    assert planner_for(options(budget="1KiB", plan=plan)) == GivenPlan(plan, Budget.parse("1KiB"))


def test_keeping_everything_computes_each_op_once(graph: Graph) -> None:
    """It is what every overhead is relative to."""
    result = keep_everything(graph)
    assert (result.plan.order, result.overhead, result.peak_bytes) == ((0, 1, 2, 3), 1.0, 12)


def test_the_cheapest_plan_within_a_budget_keeps_it(graph: Graph) -> None:
    """A share becomes bytes for the graph that the planner is called with."""
    assert planner_for(options(budget="100%"))(graph).overhead == 1.0
    assert planner_for(options(budget="75%"))(graph).plan.order == tuple(RECOMPUTED)
    with pytest.raises(InfeasibleBudgetError):
        planner_for(options(budget="10%"))(graph)


def test_a_given_plan_that_holds_is_returned_as_it_is(graph: Graph) -> None:
    """A better plan is not looked for."""
    plan = Plan.from_order(graph, RECOMPUTED)
    assert GivenPlan(plan)(graph).plan == plan
    assert GivenPlan(plan, Budget.parse(9))(graph).budget_bytes == 9


@pytest.mark.parametrize(
    "given",
    [steps("c0", "c0", "c1", "c2", "f1", "c3", "f0", "f2"), steps("c0", "c1", "c2", "c3", "f0", "f1", "f2")],
    ids=["unread", "freed late"],
)
def test_the_figures_are_those_of_the_plan_that_runs(graph: Graph, given: Plan) -> None:
    """A compiled step drops what is never read, and frees after the last read."""
    assert GivenPlan(given)(graph).plan == Plan.from_order(graph, [0, 1, 2, 3])


def test_a_given_plan_that_reads_a_freed_value_is_refused(graph: Graph) -> None:
    """Nothing could run it."""
    with pytest.raises(PlanError, match="not live"):
        GivenPlan(steps("c0", "c1", "f0", "c2", "f1", "c3", "f2"))(graph)


def test_a_given_plan_over_the_budget_or_of_another_graph_is_refused(graph: Graph) -> None:
    """Neither is replaced by a plan that would hold."""
    plan = Plan.from_order(graph, RECOMPUTED)
    with pytest.raises(PlanError, match="budget"):
        GivenPlan(plan, Budget.parse(8))(graph)
    other = Graph.from_dag(cost=[1], size_bytes=[4], edges=[], kept=[0])
    with pytest.raises(WrongGraphError):
        GivenPlan(plan)(other)


@dataclass(frozen=True)
class Watched:
    """Offers two plans; notes the seconds of each search and the plan that it begins with."""

    share: float = 0.0  # of the time limit that it takes
    least_s: float = 0.0
    seen: list[tuple[float | None, Plan | None]] = field(default_factory=list[tuple[float | None, Plan | None]], repr=False)

    def run(self, problem: Problem, session: Session) -> Termination:
        limit_s = session.limits.time_s
        self.seen.append((limit_s, session.plan))
        for order in (range(4), RECOMPUTED):
            session.offer(order)
        time.sleep(max(self.least_s, self.share * (limit_s or 0.0)))
        return Termination(Reason.FEASIBLE)

    @property
    def limits_s(self) -> list[float | None]:
        return [limit_s for limit_s, _ in self.seen]


@pytest.fixture
def no_store(environ: dict[str, str]) -> None:
    environ["CHECKMATE_PLAN_CACHE"] = "0"


@pytest.mark.usefixtures("no_store")
def test_a_replanner_starts_from_the_cheapest_plan_found_that_keeps_the_budget(graph: Graph) -> None:
    """The search within a smaller budget need not find again what a larger one found."""
    solver = Watched()
    replan = Replanner(graph, options(solver=solver))
    first, second, third = replan(12), replan(9), replan(10)
    assert [r.overhead for r in (first, second, third)] == [1.0, 1.25, 1.25]
    assert [plan for _, plan in solver.seen] == [None, None, second.plan]
    with pytest.raises(InfeasibleBudgetError):
        replan(5)
    assert replan.found == [first, second, third]


@pytest.mark.usefixtures("no_store")
def test_a_replanner_shares_the_time_limit(graph: Graph) -> None:
    """The first solve and those that follow have shares of the limit; no limit stays none."""
    solver = Watched()
    replan = Replanner(graph, options(time_limit_s=8, solver=solver))
    for budget in (12, 10, 9):
        replan(budget)
    Replanner(graph, options(time_limit_s=None, solver=solver))(12)
    assert solver.limits_s == [4, 2, 2, None]


@pytest.mark.usefixtures("own_cache")
def test_a_second_replanner_searches_for_nothing(graph: Graph) -> None:
    """Its plans are those of the first, whose searches started from each other; the time of one process is not the other's."""
    solver = Watched(least_s=0.03)  # what takes less is not stored
    first, second = (Replanner(graph, options(time_limit_s=8, solver=solver)) for _ in range(2))
    found = [first(budget).plan for budget in (12, 10, 9)]
    assert [second(budget).plan for budget in (12, 10, 9)] == found
    assert len(solver.seen) == 3


@pytest.mark.usefixtures("no_store")
def test_all_solves_of_a_replanner_are_within_the_time_limit(graph: Graph) -> None:
    """Up to four compilations ask for a plan each; a limit is one for all, with a moment for each that comes too late."""
    solver = Watched(share=1.0)
    replan = Replanner(graph, options(time_limit_s=0.8, solver=solver))
    for budget in (12, 11, 10, 9, 9):
        replan(budget)
    assert solver.limits_s == pytest.approx([0.4, 0.2, 0.2, 0.04, 0.04])


@pytest.mark.usefixtures("no_store")
def test_a_search_has_what_others_have_left_of_the_time_limit(graph: Graph) -> None:
    """One that comes too late has a moment."""
    solver = Watched()
    for spent_s in (3.0, 20.0):
        cheapest(Problem(graph, 9), solver, Limits(time_s=8), spent_s)
    assert solver.limits_s == [5, 0.4]


@dataclass(frozen=True)
class _Forgetful:
    """Finds nothing by itself."""

    def run(self, problem: Problem, session: Session) -> Termination:
        return Termination(Reason.NOT_FOUND if session.plan is None else Reason.FEASIBLE)


@pytest.mark.usefixtures("no_store")
def test_a_replanner_that_finds_nothing_starts_from_the_smallest_peak(graph: Graph) -> None:
    """The search for the smallest peak finds plans that a search within the budget misses."""
    assert Replanner(graph, options(solver=_Forgetful()))(9).peak_bytes == 9


def test_the_result_of_an_order_leaves_out_what_is_never_read(graph: Graph) -> None:
    """Orders that were found for another graph may hold computations that this one does not need."""
    assert result_of_order(graph, [0, 0, 1, 2, 0, 3]).plan.order == tuple(RECOMPUTED)


@dataclass(frozen=True)
class _Interrupted:
    """Ctrl-C during a search, after a plan was found or before."""

    found: bool

    def run(self, problem: Problem, session: Session) -> Termination:
        if self.found:
            session.offer(RECOMPUTED)
        raise KeyboardInterrupt


@pytest.mark.parametrize("found", [True, False])
def test_ctrl_c_stops_the_script(graph: Graph, found: bool) -> None:
    """Inside a training script Ctrl-C means the script, not only the search."""
    with pytest.raises(KeyboardInterrupt):
        planner_for(options(budget="9B", solver=_Interrupted(found)))(graph)


def test_ctrl_c_returns_the_best_plan_of_a_search(graph: Graph) -> None:
    """`solve`, which the verbs of the command line call, is interrupted to get the plan so far."""
    result = solve(Problem(graph, 9), _Interrupted(found=True))
    assert result.termination.limit == "interrupt"


def test_a_given_plan_runs_where_only_the_process_differs(graph: Graph) -> None:
    """Workspace depends on the number of threads, resident bytes on the optimizer: a plan that names the structure of its graph
    holds where these are others, and its figures are those of the graph at hand. Where it names none it is refused."""
    plan = Plan.from_order(graph, RECOMPUTED)
    named = msgspec.structs.replace(plan, graph_digest=f"{graph.digest}+{graph.structure}")
    assert GivenPlan(named)(graph).peak_bytes == GivenPlan(plan)(graph).peak_bytes
    other = msgspec.structs.replace(
        graph,
        resident_bytes=7,
        ops=tuple(msgspec.structs.replace(op, workspace_bytes=op.workspace_bytes + 1) for op in graph.ops),
    )
    found = GivenPlan(named)(other)
    assert found.peak_bytes == GivenPlan(Plan.from_order(other, RECOMPUTED))(other).peak_bytes > GivenPlan(plan)(graph).peak_bytes
    assert found.plan.graph_digest == other.digest
    with pytest.raises(WrongGraphError):
        GivenPlan(plan)(other)
    resized = Graph.from_dag(cost=[1], size_bytes=[4], edges=[], kept=[0])
    with pytest.raises(WrongGraphError):
        GivenPlan(named)(resized)
