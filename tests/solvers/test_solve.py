"""What `solve` promises whatever the solver: checked plans, honest endings, readable refusals."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

import checkmate
from checkmate import (
    Auto,
    Graph,
    InfeasibleBudgetError,
    KeepAll,
    Limits,
    LocalSearch,
    MinBudget,
    Op,
    OptionError,
    PlanNotFoundError,
    Problem,
    Reason,
    SolverError,
    Termination,
    Value,
    solve,
)
from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.registry import GROUP, available, by_name
from tests.solvers.generators import transformer

ROOT = Path(__file__).parents[2]


def chain(count: int = 9) -> Graph:
    """A training chain: forward, then each gradient reads its activation."""
    forward = count // 2
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, count - 1 - i) for i in range(forward)}
    return Graph.from_dag(
        cost=[10] * count,
        size_bytes=[100] * count,
        edges=sorted(edges),
        backward=[i > forward for i in range(count)],
        names=[f"layer{i}" for i in range(count)],
        kept=[count - 1],
    )


@dataclass(frozen=True)
class Claims:
    """A solver that says what it is told to say."""

    order: tuple[int, ...] = ()
    bound: float = 0.0

    def run(self, problem, session):
        """Offer and prove as told."""
        if self.order:
            session.offer(self.order)
        session.prove(self.bound)
        return Termination(Reason.OPTIMAL)


def test_a_bound_above_the_plans_own_cost_is_a_bug_of_the_solver():
    """What a solver says is a claim: a proof against its own plan cannot be one."""
    with pytest.raises(SolverError, match="claims a bound"):
        solve(Problem(chain(), 10_000), Claims(tuple(range(9)), bound=10_000))


def test_a_plan_that_breaks_a_rule_is_a_bug_of_the_solver():
    """A plan of another order is refused where the problem forbids reordering."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[])
    with pytest.raises(SolverError, match="first computed before"):
        solve(Problem(graph, 10, reorder=False), Claims((1, 0)))


def test_an_order_that_reads_nothing_is_a_bug_of_the_solver():
    """An unmade value cannot be read."""
    with pytest.raises(SolverError, match="cannot be run"):
        solve(Problem(chain(), 10_000), Claims((3,)))


def test_a_claim_of_optimality_without_a_bound_is_not_believed():
    """OPTIMAL is what the bound proves, not what a solver says."""
    twice = (*range(8), 0, 8)
    result = solve(Problem(chain(), 10_000), Claims(twice), raise_on_failure=False)
    assert result.termination.reason is Reason.FEASIBLE
    assert result.cost == 100
    assert result.gap == pytest.approx(0.1)


def test_an_impossible_budget_is_refused_with_the_smallest_and_the_op_that_binds():
    """The message has the budget, the floor, the op, and a budget that works."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(chain(), 250))
    error = caught.value
    assert "budget 250 B is below the smallest possible peak" in error.message
    assert error.floor_bytes == 300
    assert error.binding_op in error.message
    assert "raise the budget to at least 300B" in error.hint
    assert solve(Problem(chain(), error.smallest_bytes)).peak_bytes <= error.smallest_bytes


def test_a_share_that_is_too_small_is_refused_with_a_share():
    """Bytes would be those of one step, and a script has several: the share that is named can be pasted for all of them."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(chain(), "20%"))
    share = re.search(r"raise the budget to at least (\S+%) \(300B\)", caught.value.hint)[1]
    assert solve(Problem(chain(), share)).peak_bytes <= Problem(chain(), share).budget_bytes == 300


@dataclass(frozen=True)
class NeverRun:
    """A solver that no search may reach."""

    def run(self, problem, session):
        """Fail."""
        raise AssertionError("a budget below the floor was searched")


@pytest.mark.slow
def test_below_the_floor_no_solver_runs_and_the_refusal_takes_a_moment():
    """The bound is known at once, whatever the solver and its time limit; the smallest budget named is one that works."""
    graph = transformer(12)
    began = time.process_time()
    for budget in (100, floor(graph).peak_bytes - 1):
        with pytest.raises(InfeasibleBudgetError, match="the smallest budget a plan was found for") as caught:
            solve(Problem(graph, budget), NeverRun(), limits=Limits(time_s=600))
        assert checkmate.min_budget(graph, limits=Limits(time_s=1)).floor_bytes == caught.value.floor_bytes > budget
    assert time.process_time() - began < 30  # kernels may be loaded; a search for the smallest peak alone took 20 s each
    # What is named took up to three seconds to find; a solve gives three tenths of its time to a search for it.
    assert solve(Problem(graph, caught.value.smallest_bytes), limits=Limits(time_s=30, gap=0.9)).plan is not None


@pytest.mark.parametrize(
    ("budget", "asks"),
    [
        (60, "60 is 60 bytes; did you mean '60%' or '60MiB'? Otherwise raise"),
        ("0", "0 is 0 bytes; did you mean '50%' or '50MiB'? Otherwise raise"),
        (512, "512 is 512 bytes; did you mean '512MiB'? Otherwise raise"),
        ("1KiB", "raise the budget"),
    ],
)
def test_a_budget_without_a_unit_is_asked_for_one(budget, asks):
    """`--budget 60` reads like per cent or mebibytes, and means bytes."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(transformer(1), budget))
    assert caught.value.hint.startswith(asks)


def test_the_unit_that_is_asked_about_makes_a_budget_that_works():
    """Half a hundred mebibytes are too little for a step of gibibytes."""
    sizes = [2**30, 2**30, 2**30]
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(Graph.from_dag(cost=[1, 1, 1], size_bytes=sizes, edges=[(0, 1), (1, 2)]), 50))
    assert caught.value.hint.startswith("50 is 50 bytes; did you mean '50%' or '50GiB'? Otherwise raise")


@pytest.mark.parametrize("budget", ["1%", "100 B", Budget("1%", total_bytes=100)])
def test_a_budget_with_a_unit_is_not_asked_for_one(budget):
    """The share of a small step is a few bytes, too; it is told as it was written."""
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(chain(), budget))
    assert caught.value.hint.startswith("raise the budget to at least ")
    share = "1% of what can be given up: 10" in caught.value.message
    assert share == (str(budget) == "1%")


@dataclass(frozen=True)
class FindsNothing:
    """A solver that takes its time and finds nothing."""

    limit: str = ""

    def run(self, problem, session):
        """Offer a plan over the budget, and wait."""
        session.offer(range(len(problem.graph.ops)))
        while session.left_s():
            time.sleep(0.01)
        return Termination(Reason.NOT_FOUND, self.limit)


def test_the_time_limit_bounds_the_search_for_the_smallest_peak_too():
    """A search that found nothing is followed by a second at most, and not by the 20 s of `min_budget`."""
    graph = transformer(12)
    quick = floor(graph).peak_bytes + 1
    began = time.process_time()
    with pytest.raises(PlanNotFoundError, match="the smallest budget a plan was found for"):
        solve(Problem(graph, quick), FindsNothing(), limits=Limits(time_s=0.2))
    assert time.process_time() - began < 5


@dataclass(frozen=True)
class FindsTheSmallest(FindsNothing):
    """One that has looked for the smallest peak on its way."""

    found: MinBudget | None = None

    def run(self, problem, session):
        """Note it, and wait."""
        session.smallest = self.found
        return super().run(problem, session)


def test_a_refusal_names_what_a_solver_found_on_its_way():
    """No time is left for another search, and that for a second would find less."""
    graph = transformer(12)
    found = msgspec.structs.replace(checkmate.min_budget(graph, limits=Limits(time_s=1)), peak_bytes=12_345)
    with pytest.raises(PlanNotFoundError, match=r"12\.06 KiB") as caught:
        solve(Problem(graph, floor(graph).peak_bytes), FindsTheSmallest(found=found), limits=Limits(time_s=0.2))
    assert caught.value.hint.endswith("or lower the batch size")


def test_who_had_too_little_time_is_told_so():
    """More memory is not the only way out."""
    graph = transformer(12)
    with pytest.raises(PlanNotFoundError) as caught:
        solve(Problem(graph, floor(graph).peak_bytes), FindsNothing("time"), limits=Limits(time_s=0.1))
    assert caught.value.hint.endswith("lower the batch size, or give the search more time")


def test_not_found_is_no_proof():
    """A budget that only recomputation can keep is not infeasible because keeping everything fails."""
    result = solve(Problem(chain(), 400), KeepAll(), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND
    with pytest.raises(PlanNotFoundError, match="the smallest budget a plan was found for"):
        solve(Problem(chain(), 400), KeepAll())


def test_nothing_is_impossible_with_enough_memory():
    """Keeping everything is optimal where it fits, without any search."""
    result = solve(Problem(chain(), "100%"))
    assert result.overhead == 1.0
    assert result.gap == 0
    assert result.termination.reason is Reason.OPTIMAL


def test_a_graph_of_nothing_has_a_plan():
    """No ops, no cost, no peak but what is resident."""
    result = solve(Problem(Graph((), (), resident_bytes=7), 7))
    assert (result.cost, result.peak_bytes, result.gap) == (0, 7, 0.0)


def test_interrupted_solves_return_the_best_plan_so_far():
    """Ctrl-C ends the search, not the work."""
    graph = chain(41)

    def interrupt(progress):
        if progress.cost is not None:
            raise KeyboardInterrupt

    result = solve(Problem(graph, "50%"), limits=Limits(gap=0.0), on_progress=interrupt)
    assert result.plan is not None
    assert result.termination.limit == "interrupt"


def test_a_real_ctrl_c_is_answered_at_once():
    """SIGINT inside the engine's search ends it within a second or two, plan in hand."""
    script = (
        "import os, signal, threading, time, checkmate; from tests.solvers.generators import transformer;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a job in the background inherits SIGINT ignored
        "problem = checkmate.Problem(transformer(16), '15%');"
        "checkmate.solve(problem, limits=checkmate.Limits(time_s=0.5), raise_on_failure=False);"  # loads the kernels
        "threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start(); began = time.process_time();"
        "r = checkmate.solve(problem, limits=checkmate.Limits(time_s=60, gap=0.0));"
        "print(r.termination.limit, r.plan is not None, time.process_time() - began < 4)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupt", "True", "True"]


def test_history_only_improves():
    """An anytime solve never goes back."""
    result = solve(Problem(transformer(3), "40%"), limits=Limits(time_s=0.7, gap=0.0))
    costs = [point.cost for point in result.history if point.cost is not None]
    bounds = [point.bound for point in result.history]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert result.bound <= result.cost


def test_auto_closes_a_small_transformer():
    """At half of keep-all the bound meets the plan within the default gap."""
    graph = transformer(4)
    result = solve(Problem(graph, graph.resident_bytes + (keep_all_bytes(graph) - graph.resident_bytes) // 2))
    assert result.gap <= 0.005
    assert result.overhead < 1.2


def test_the_plan_keeps_the_budget_and_every_number_is_derived():
    """Peak, cost and overhead are the simulator's."""
    graph = transformer(2)
    for budget in ("80%", "60%", "50%"):
        problem = Problem(graph, budget)
        result = solve(problem)
        timeline = checkmate.simulate(graph, result.plan)
        assert result.peak_bytes == timeline.peak_bytes <= problem.budget_bytes
        assert result.overhead == timeline.cost / graph.cost


def test_local_search_alone_says_that_it_proves_nothing():
    """Its bound is the cost of computing each op once."""
    graph = transformer(2)
    result = solve(Problem(graph, "50%"), LocalSearch(decodes=300))
    assert result.bound == graph.cost
    assert result.termination.reason is Reason.FEASIBLE


def digest_of_a_plan() -> str:
    result = solve(Problem(transformer(3), "45%"), limits=Limits(time_s=None, gap=0.002))
    return hashlib.sha256(repr(result.plan.steps).encode()).hexdigest()


def test_the_same_seed_gives_the_same_plan_whatever_the_hash_seed():
    """Ties break by index: sets and dicts decide nothing."""
    script = "from tests.solvers.test_solve import digest_of_a_plan; print(digest_of_a_plan())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [digest_of_a_plan()]  # of this process, whose hash seed was drawn when it started


def test_the_registry_lists_the_solvers_and_refuses_others():
    """Every solver is found by name, and a wrong name by what there is."""
    assert {"auto", "brute-force", "keep-all", "local-search", "milp"} <= set(available())
    assert by_name("auto") == Auto()
    assert type(by_name("Brute_Force")) is available()["brute-force"]
    with pytest.raises(OptionError, match="no solver 'gurobi'"):
        by_name("gurobi")
    with pytest.raises(OptionError) as caught:
        by_name("autoo")
    assert caught.value.hint.startswith("did you mean 'auto'? choose one of ")


@pytest.fixture
def importable(tmp_path):
    """A folder whose modules can be imported."""
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    "way", ["import no_such_module", "sys.exit()", "raise SystemExit('no licence')", "raise GeneratorExit", "Solver = 3"]
)
def test_a_plug_in_that_cannot_be_imported_is_named_and_spoils_no_other(way, plugged_in, caplog, importable):
    """A program that lists its solvers must not end, in silence, with the code of a plug-in."""
    (importable / "plug_in_that_exits.py").write_text(f"import sys\n{way}\n")
    sys.modules.pop("plug_in_that_exits", None)
    good = EntryPoint("auto", "checkmate.solvers.auto:Auto", GROUP)
    broken = EntryPoint("broken", "plug_in_that_exits:Solver", GROUP)
    plugged_in(broken, good)
    assert available() == {"auto": Auto}
    assert "solver 'broken' cannot be imported from plug_in_that_exits:Solver" in caplog.text
    assert by_name("auto") == Auto()
    with pytest.raises(OptionError, match="cannot be imported from plug_in_that_exits") as caught:
        by_name("broken")
    assert "uninstall the package" in caught.value.hint


class ExitsWhenMade:
    """A plug-in that finds no licence."""

    def __init__(self):
        raise SystemExit("no licence")


class IsNoSolver:
    """A plug-in whose entry point names the wrong class."""


class ExitsWhenRun:
    """A plug-in that was a program before."""

    def run(self, problem, session):
        """End the program."""
        raise SystemExit(0)


@pytest.mark.parametrize(("kind", "said"), [(ExitsWhenMade, "no licence"), (IsNoSolver, "it has no method `run`")])
def test_a_plug_in_that_cannot_be_made_is_named(kind, said, plugged_in):
    """The same as one that cannot be imported."""
    plugged_in(EntryPoint("plug-in", f"{__name__}:{kind.__name__}", GROUP))
    with pytest.raises(OptionError, match=f"solver 'plug-in' cannot be made: .*{said}"):
        by_name("plug-in")


def test_a_plug_in_that_ends_the_program_while_it_solves_is_an_error():
    """The program that called it goes on, and knows that there is no plan."""
    with pytest.raises(SolverError, match=r"ExitsWhenRun.* ended the program: SystemExit\(0\)"):
        solve(Problem(chain(), "100%"), ExitsWhenRun())


@pytest.mark.parametrize("limits", [{"time_s": 0}, {"time_s": -1.0}, {"gap": 1.0}, {"gap": -0.1}, {"threads": 0}])
def test_limits_that_mean_nothing_are_refused(limits):
    """A limit of zero is a mistake, not a wish."""
    with pytest.raises(OptionError):
        Limits(**limits)


def test_problems_that_mean_nothing_are_refused():
    """Unreadable budgets and unknown classes of plans."""
    with pytest.raises(checkmate.UnitError, match="cannot read 'lots'"):
        Problem(chain(), "lots")
    with pytest.raises(OptionError, match="recompute="):
        Problem(chain(), 100, recompute="some")


def test_min_budget_finds_a_plan_at_its_peak_and_names_the_binding_op():
    """The floor is proven, the peak is reached."""
    graph = transformer(1)
    smallest = checkmate.min_budget(graph)
    assert smallest.floor_bytes <= smallest.peak_bytes
    assert checkmate.validate(graph, smallest.plan, smallest.peak_bytes) == ()
    assert smallest.why
    assert solve(Problem(graph, smallest.peak_bytes), limits=Limits(gap=0.1), raise_on_failure=False).plan is not None
    with pytest.raises(InfeasibleBudgetError):
        solve(Problem(graph, smallest.floor_bytes - 1))


@pytest.mark.parametrize("recomputable", [False, True])
@pytest.mark.parametrize("solver", [LocalSearch(decodes=200), Auto(), checkmate.Milp()], ids=repr)
def test_a_kept_view_holds_its_storage_to_the_end(solver, recomputable):
    """A prediction is a view that the caller holds: what else can go still goes."""
    forward = [Op(f"f{i}", (i - 1,) if i else (), (i,), 10) for i in range(6)]
    head = Op("head", (5,), (6,), 10, recomputable=False)
    prediction = Op("prediction", (6,), (7,), 0, recomputable=recomputable)
    loss = Op("loss", (7,), (8,), 0, recomputable=False, phase="loss")
    backward = [Op(f"b{i}", (9 + 4 - i, i), (10 + 4 - i,), 10, phase="backward") for i in reversed(range(5))]
    first = Op("b5", (8,), (9,), 10, phase="backward")
    values = [Value(f"v{i}", 100) for i in range(7)]
    values += [Value("prediction", 0, base=6, kept=True), Value("tangent", 4)]
    values += [Value(f"g{i}", 100, kept=i == 5) for i in range(6)]
    graph = Graph((*forward, head, prediction, loss, first, *backward), tuple(values))
    keep_all = checkmate.core.budget.keep_all_bytes(graph)
    for budget in range(keep_all, 500, -100):
        assert solve(Problem(graph, budget), solver).peak_bytes <= budget


@pytest.mark.parametrize(
    ("name", "share", "searches"),
    [("linear32_b1", "50%", []), ("unet", "75%", [": search, for"] * 2)],
)
def test_a_first_plan_that_is_proven_at_once_is_hardly_searched_any_further(
    name: str, share: str, searches: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A few linear programs take a tenth of a second; a user waits for the rest, and can gain no more than the gap."""
    graph = checkmate.read(ROOT / "benchmarks" / "graphs" / f"{name}.graph.json")
    with caplog.at_level(logging.DEBUG, "checkmate.solvers.auto"):
        result = solve(Problem(graph, share))
    assert result.gap <= Limits().gap
    assert [phase for m in caplog.messages for phase in (": search, for",) if phase in m] == searches
    assert not any("event cuts" in m or "bounds of single events" in m for m in caplog.messages)


class OutOfTime(Auto):
    """A search that has found nothing when its time is up."""

    def run(self, problem, session):
        """Find nothing."""
        return Termination(Reason.NOT_FOUND, limit="time")


def test_a_budget_that_the_smallest_plan_keeps_is_not_refused() -> None:
    """The search for the smallest budget to report may find a plan where `Auto` found none in its time."""
    graph = transformer(2)
    budget = checkmate.min_budget(graph).peak_bytes
    result = solve(Problem(graph, budget), OutOfTime())
    assert result.peak_bytes <= budget
    assert result.termination.reason is Reason.FEASIBLE


@pytest.mark.parametrize("solver", [Auto(), checkmate.AStar(), LocalSearch(decodes=100), checkmate.Milp()], ids=repr)
def test_the_largest_amounts_are_planned(solver):
    """Costs and bytes up to a sum of 2^60: floats round above 2^53, and no bound may be rounded above a plan's cost."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    cost, size = (2**60 - 1) // 5, 2**60 // 5
    graph = Graph.from_dag(cost=[cost] * 5, size_bytes=[size] * 5, edges=edges, backward=[False, False, False, True, True])
    assert float(graph.cost) > graph.cost
    for budget in (3 * size, 5 * size):
        result = solve(Problem(graph, budget), solver, limits=Limits(time_s=20.0), raise_on_failure=False)
        assert result.bound <= graph.cost
        assert result.plan is not None or not isinstance(solver, Auto)  # A* refuses such costs, and says so
        if result.plan is not None:
            assert result.bound <= result.cost
            assert result.peak_bytes <= budget
