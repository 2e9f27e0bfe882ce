"""Copies and recomputations planned jointly: against brute force, never worse than without copies, and a bound that holds."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

import checkmate
from checkmate import Auto, Fetch, Graph, HostMemory, Limits, Offload, OptionError, Problem, simulate, solve, validate
from checkmate.solvers.backends.highs import solve_integer, solve_linear
from checkmate.solvers.bounds.events.copy_cuts import build_with_host
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.offload import run_with_host
from checkmate.solvers.offload.placement import Reference, place
from checkmate.solvers.offload.streams import prefetch
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from tests.solvers.generators import layers, weighted
from tests.solvers.joint_brute_force import least_time
from tests.strategies import random_copies, random_graph, random_host, with_host_values, with_more_kept, with_views_of_views

QUICK = Limits(time_s=8, gap=0)


def tiny(seed: int, *, on_host: bool = False) -> Problem | None:
    """A problem for brute force with a budget that keeping everything does not fit, or None."""
    rng = random.Random(seed)
    most_ops = rng.choice([3, 4, 5] if on_host else [4, 5, 6])
    graph = random_graph(rng, max_ops=most_ops, views=False, training=True if rng.random() < 0.8 else None)
    graph = with_host_values(rng, graph, views=False) if on_host else graph
    graph = msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(op, replay_bytes=0) for op in graph.ops))
    most, least = checkmate.core.budget.keep_all_bytes(graph), floor(graph, copies=True).peak_bytes
    return None if least >= most else Problem(graph, rng.randint(least, most - 1), host=random_host(rng))


def bounds_hold(problem: Problem, most_states: int = 40_000) -> tuple[int, float] | None:
    """Compare every event's bounds with the best step; returns its time and the best bound."""
    try:
        found = least_time(problem, most_states)
    except MemoryError:
        return None
    fold = FoldViews.of(problem.graph)
    model = CutModel(fold.apply(problem))
    once = max(1.0, float(model.cost.sum()))
    best = float(problem.graph.cost)
    assert problem.host is not None
    for event, op in enumerate(fold.folded.ops):
        if any(fold.folded.values[v].on_host for v in op.outputs):
            continue
        cut = build_with_host(model, event, problem.host, problem.graph.cost)
        if cut.impossible:
            assert found is None
            continue
        bounds = [solve_linear(cut.program).bound, solve_integer(cut.program, absolute_gap=1e-7).bound]
        if found is not None:
            assert max(bounds) * once + problem.graph.cost <= found[0] * (1 + 1e-5)
            best = max(best, max(bounds) * once + problem.graph.cost)
    if found is None:
        return None
    time, plan = found
    assert validate(problem.graph, plan, problem.budget_bytes, host=problem.host, cost=time) == ()
    return time, best


@pytest.mark.parametrize("on_host", [False, True])
def test_the_joint_bound_is_below_every_step(on_host):
    """Linear and integer programs of every event, against every order, recomputation and copy of tiny graphs."""
    problems = (tiny(seed, on_host=on_host) for seed in range(40))
    checked = [found for problem in problems if problem and (found := bounds_hold(problem, 3000))]
    assert len(checked) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_the_joint_bound_is_below_every_step_of_many_graphs(on_host):
    """The same for more seeds; the bound is met by the best step in half of them."""
    problems = (tiny(seed, on_host=on_host) for seed in range(100, 500))
    checked = [found for problem in problems if problem and (found := bounds_hold(problem, 10_000))]
    assert len(checked) >= 50
    assert sum(best >= time - 0.5 for time, best in checked) > len(checked) / 2


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_the_joint_search_comes_near_the_best_step(on_host):
    """On tiny graphs it finds the best step in most cases, and never one that is better than the best."""
    exact = missed = 0
    for seed in range(120):
        problem = tiny(seed, on_host=on_host)
        try:
            found = None if problem is None else least_time(problem, 10_000)
        except MemoryError:
            continue
        if problem is None or found is None:
            continue
        result = solve(problem, limits=QUICK, raise_on_failure=False)
        missed += result.plan is None
        if result.cost is not None:
            assert result.cost >= found[0]
            assert result.bound <= found[0]
            exact += result.cost == found[0]
    assert exact >= 10
    assert missed <= 2


@pytest.mark.parametrize("rate", [10**9, 2 * 10**8])
def test_a_budget_below_the_smallest_without_copies_is_kept(rate):
    """Values that cannot be made again go to the host, whatever the bus takes for them."""
    graph = layers(6, masks=True)
    budget = floor(graph).peak_bytes - 200
    host = HostMemory(10_000, rate, rate)
    result = solve(Problem(graph, budget, host=host), limits=QUICK)
    assert result.peak_bytes <= budget
    assert {Offload, Fetch} <= {type(step) for step in result.plan.steps}
    assert simulate(graph, result.plan).host_peak_bytes <= host.bytes
    with pytest.raises(checkmate.InfeasibleBudgetError):
        solve(Problem(graph, budget), limits=QUICK)


def test_the_first_plan_with_copies_comes_before_any_bound():
    """Where none without copies keeps the budget: who has little time wants a plan."""
    graph = layers(6, masks=True)
    result = solve(Problem(graph, floor(graph).peak_bytes - 200, host=HostMemory(10_000, 10**7, 10**7)), limits=QUICK)
    first = result.history[0]
    assert first.cost is not None
    assert first.bound == graph.cost < result.bound


def test_what_a_plan_with_copies_takes_is_kept_back():
    """It is checked once more at the end, as a plan without copies is."""
    problem = Problem(layers(8), 600, host=HostMemory(10_000, 4 * 10**9, 4 * 10**9))
    session = Session(problem, Limits(time_s=1000.0))
    run_with_host(problem, session, Auto())
    assert session.plan is not None
    assert session.plan.host is not None
    assert session.left_s() < 1000.0 - session.elapsed_s()


def test_hidden_copies_replace_recomputation():
    """On a fast bus the step takes as long as its ops; on one without copies some are computed again."""
    graph = layers(8)
    alone = solve(Problem(graph, 600), limits=QUICK)
    fast = solve(Problem(graph, 600, host=HostMemory(10_000, 4 * 10**9, 4 * 10**9)), limits=QUICK)
    assert alone.overhead > 1
    assert (fast.overhead, simulate(graph, fast.plan).waited) == (1.0, 0)


@pytest.mark.parametrize("rate", [1, 10**7])
def test_offload_that_does_not_pay_is_not_used(rate):
    """On a bus that is too slow the plan is that without copies, and the result says so."""
    graph = layers(8)
    alone = solve(Problem(graph, 600), limits=QUICK)
    slow = solve(Problem(graph, 600, host=HostMemory(10_000, rate, rate)), limits=QUICK)
    assert (slow.cost, slow.plan.host) == (alone.cost, None)
    assert any("does not pay" in remark for remark in slow.remarks)


def test_a_budget_that_holds_everything_makes_no_copies():
    """Nothing is gained."""
    result = solve(Problem(layers(4), "100%", host=HostMemory(10_000, 10**9, 10**9)), limits=QUICK)
    assert (result.overhead, result.plan.host) == (1.0, None)
    assert any("does not pay" in remark for remark in result.remarks)


@pytest.mark.parametrize("room", [0, 150, 300])
def test_the_limit_of_the_host_is_kept(room):
    """Pinned memory is limited as well."""
    graph = layers(8)
    result = solve(Problem(graph, 600, host=HostMemory(room, 10**9, 10**9)), limits=QUICK)
    assert simulate(graph, result.plan).host_peak_bytes <= room


@pytest.mark.parametrize("solver", [checkmate.Milp(), checkmate.LocalSearch(), checkmate.BruteForce()])
def test_solvers_that_plan_no_copies_refuse_a_host(solver):
    """Their bounds hold only without copies."""
    with pytest.raises(OptionError, match="plans no copies"):
        solve(Problem(layers(3), 500, host=HostMemory(10, 1, 1)), solver)


def test_a_plan_with_copies_is_a_start():
    """And is refused where nothing may be copied."""
    graph, host = layers(6, masks=True), HostMemory(10_000, 10**9, 10**9)
    budget = floor(graph).peak_bytes - 200
    first = solve(Problem(graph, budget, host=host), limits=QUICK)
    again = solve(Problem(graph, budget, host=host), initial=first.plan, limits=Limits(time_s=0.01))
    assert again.cost <= first.cost
    with pytest.raises(checkmate.PlanError, match="has copies"):
        solve(Problem(graph, "90%"), initial=first.plan)


def test_hidden_copies_fit_between_the_uses():
    """A copy out begins when its value is made, one back ends when it is needed; a value away for no stage is left out."""
    graph = layers(4)
    reference = Reference.of(graph, range(8))
    host = HostMemory(1000, 10**9, 10**9)
    size = [v.size_bytes for v in graph.values]
    placed = place(reference, range(4), host, size, 1.0)
    assert [(p.value, p.gone_at, p.fetch_at) for p in placed] == [(1, 3, 5), (0, 2, 6)]
    assert place(reference, range(4), HostMemory(1000, 10**8, 10**8), size, 1.0) == []
    assert len(place(reference, range(4), HostMemory(1000, 10**8, 10**8), size, math.inf)) == 3


def test_auto_plans_views_around_copies():
    """A view of a fetched value is made again from its new storage."""
    ops = [checkmate.Op("f", (), (0,), 100, recomputable=False), checkmate.Op("t", (0,), (1,), 0)]
    values = [checkmate.Value("a", 100), checkmate.Value("a.T", 0, base=0)]
    for k in range(2, 8):
        ops.append(checkmate.Op(f"g{k}", (k - 1,), (k,), 100))
        values.append(checkmate.Value(f"b{k}", 100))
    ops.append(checkmate.Op("h", (1, 7), (8,), 100))
    values.append(checkmate.Value("c", 100, kept=True))
    graph = Graph(tuple(ops), tuple(values))
    result = solve(Problem(graph, 300, host=HostMemory(1000, 10**9, 10**9)), Auto(), limits=QUICK)
    assert result.overhead == 1.0
    tight = Graph((*graph.ops[:4], msgspec.structs.replace(graph.ops[4], workspace_bytes=100), *graph.ops[5:]), graph.values)
    copied = solve(Problem(tight, 300, host=HostMemory(1000, 10**9, 10**9)), Auto(), limits=QUICK)
    assert copied.plan.order.count(1) == 2
    assert copied.overhead == 1.0


FAST = HostMemory(10_000, 10**9, 10**10)
"""A weight takes 30 ns, an op 100."""


@pytest.mark.parametrize("views", [False, True])
def test_values_on_the_host_are_fetched_beside_the_ops(views):
    """Room for two of eight weights and all activations: each fetch is hidden, nothing is computed again, and none goes out."""
    graph = weighted(8, views=views)
    result = solve(Problem(graph, 1700, host=FAST), limits=QUICK)
    timeline = simulate(graph, result.plan)
    assert (result.overhead, result.bound, timeline.waited) == (1.0, 1600, 0)
    assert not any(isinstance(step, Offload) for step in result.plan.steps)
    moved = sum(graph.values[copy.value].size_bytes for copy in timeline.copies)
    assert 300 * 7 <= moved < 300 * 16  # what fits stays, where it is used first, or last and first again
    assert timeline.host_peak_bytes == 300 * len({copy.value for copy in timeline.copies})


def test_values_on_the_host_are_not_copied_where_all_of_them_fit():
    """All are on the device from the beginning to the end, and the host holds nothing."""
    result = solve(Problem(weighted(6), "100%", host=FAST), limits=QUICK)
    assert (result.overhead, result.plan.host) == (1.0, None)
    assert set(range(6)) <= set(result.plan.order)
    assert any("does not pay" in remark for remark in result.remarks)


def test_a_slow_bus_is_proven_to_be_the_limit():
    """Copies take three times as long as all ops: the bound counts what must come twice, and plans hold what they can."""
    slow = HostMemory(10_000, 10**9, 10**9)
    result = solve(Problem(weighted(8), 1300, host=slow), limits=QUICK)
    assert result.bound > 1.5 * 1600
    assert result.gap < 0.3


@pytest.mark.parametrize("room", [600, 1500])
def test_the_host_need_not_hold_every_value_that_is_on_it(room):
    """Values that are never fetched take none of it: so many are on the device all the time."""
    graph, budget = weighted(8), 2400 - room + 1100
    result = solve(Problem(graph, budget, host=HostMemory(room, 10**9, 10**10)), limits=QUICK)
    timeline = simulate(graph, result.plan)
    assert 0 < timeline.host_peak_bytes <= room
    assert result.peak_bytes <= budget


def test_activations_are_copied_beside_fetched_weights():
    """The host holds all weights and a third of the activations: the copies take the place of the dearest recomputations."""
    graph, host = weighted(60, weight=50), HostMemory(60 * 50 + 2500, 10**9, 10**9)
    result = solve(Problem(graph, 2500, host=host), limits=Limits(time_s=15, gap=0.02))
    timeline = simulate(graph, result.plan)
    assert result.gap <= 0.02
    assert 0 < timeline.copied_bytes("out") <= timeline.host_peak_bytes <= host.bytes


def test_a_refusal_names_a_budget_that_fetches_keep():
    """It is below the bytes of all weights, and a plan keeps it."""
    graph = weighted(8)
    with pytest.raises(checkmate.InfeasibleBudgetError) as caught:
        solve(Problem(graph, 100, host=FAST), limits=QUICK)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    assert smallest < 8 * 300
    assert solve(Problem(graph, smallest, host=FAST), limits=QUICK).peak_bytes <= smallest


def test_earlier_fetches_keep_the_budget_and_the_order():
    """Of random plans: valid, within the bytes given, and no later where the bus has nothing else to do."""
    gained = 0
    for seed in range(300):
        rng = random.Random(seed)
        graph, host = with_host_values(rng, random_graph(rng, max_ops=6)), random_host(rng)
        plan = random_copies(rng, graph, host)
        before = simulate(graph, plan)
        budget = before.peak_bytes + rng.randint(0, 6)
        after = simulate(graph, prefetch(graph, plan, budget))
        roomy = HostMemory(before.host_peak_bytes, host.out_bytes_per_s, host.in_bytes_per_s)
        assert validate(graph, after.plan, budget, host=roomy, cost=after.cost) == ()
        assert [c.value for c in after.copies if graph.values[c.value].on_host] == [
            c.value for c in before.copies if graph.values[c.value].on_host
        ]
        if all(graph.values[c.value].on_host for c in before.copies):
            assert after.cost <= before.cost
            gained += after.cost < before.cost
    assert gained >= 10


@pytest.mark.parametrize("seed", [3, 39, 106])
def test_every_rule_of_a_graph_holds_around_values_on_the_host(seed):
    """Views that no op reads, values that are dropped as soon as the step begins, fixed orders: the solution is validated."""
    rng = random.Random(seed)
    graph = random_graph(rng, max_ops=rng.choice([4, 8, 14]))
    graph = with_views_of_views(rng, graph) if rng.random() < 0.3 else graph
    graph = with_host_values(rng, with_more_kept(rng, graph, 0.3) if rng.random() < 0.3 else graph)
    least, most = floor(graph, copies=True).peak_bytes, checkmate.core.budget.keep_all_bytes(graph)
    host, budget = random_host(rng), rng.randint(least, max(least, most))
    problem = Problem(graph, budget, rng.choice(["all", "forward"]), rng.random() < 0.5, host=host)
    result = solve(problem, limits=Limits(time_s=0.6, seed=seed), raise_on_failure=False)
    assert isinstance(result, checkmate.NoPlan) or result.peak_bytes <= budget
