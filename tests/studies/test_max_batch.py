"""The largest batch: found where brute force has it, and never above what is proven."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import msgspec
import pytest

from checkmate import (
    AffineGraph,
    Auto,
    BruteForce,
    Graph,
    GraphError,
    HostMemory,
    InfeasibleBudgetError,
    Limits,
    OptionError,
    PlanNotFoundError,
    Problem,
    Reason,
    Termination,
    Value,
    max_batch,
    simulate,
    solve,
    validate,
)
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.session import Session
from tests.solvers.generators import transformer, weighted
from tests.solvers.joint_brute_force import least_time
from tests.strategies import random_graph, random_host, with_host_values

QUICK = Limits(time_s=20.0, gap=0.0)


def chain(count: int = 7, size: int = 4, cost: int = 2) -> Graph:
    """A training chain."""
    forward = count // 2
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, count - 1 - i) for i in range(forward)}
    return Graph.from_dag(
        cost=[cost] * count,
        size_bytes=[size] * count,
        edges=sorted(edges),
        backward=[i > forward for i in range(count)],
        resident_bytes=3,
    )


def at_random(rng: random.Random) -> AffineGraph:
    """A tiny step with costs and sizes that are affine in the batch, not proportional."""
    small = random_graph(rng, max_ops=5) if rng.random() < 0.5 else chain(rng.choice([5, 7]), cost=rng.randint(0, 3))
    large = msgspec.structs.replace(
        small,
        ops=tuple(
            msgspec.structs.replace(op, cost=op.cost + rng.randint(0, 4), workspace_bytes=op.workspace_bytes + rng.randint(0, 1))
            for op in small.ops
        ),
        values=tuple(
            value if value.base is not None else msgspec.structs.replace(value, size_bytes=value.size_bytes + rng.randint(1, 4))
            for value in small.values
        ),
    )
    return AffineGraph(small, 1, large, 2)


def limit(graph: Graph, max_overhead: float | str) -> Fraction:
    """The most that a plan may cost, by the definition."""
    if isinstance(max_overhead, str):
        return Fraction(graph.cost + sum(op.cost for op in graph.ops if op.phase in ("forward", "loss")))
    return Fraction(max_overhead) * graph.cost


def has_plan(graph: Graph, budget: int, max_overhead: float | str) -> bool:
    """Whether brute force has a plan within both limits."""
    exact = solve(Problem(graph, budget), BruteForce(), limits=QUICK, raise_on_failure=False)
    return exact.cost is not None and exact.cost <= limit(graph, max_overhead)


@pytest.mark.parametrize("seeds", [24, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("solver", [BruteForce(), Auto(rounds=1)], ids=repr)
def test_no_batch_above_the_bound_has_a_plan(solver, seeds):
    """A sweep over every batch by brute force: what is found is there, and what is excluded is not."""
    compared = closed = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        graph_at = at_random(rng)
        budget = graph_at(rng.randint(1, 5)).resident_bytes + keep_all_bytes(graph_at(rng.randint(1, 5)))
        max_overhead = rng.choice([1.0, 1.1, 1.5, "one extra forward"])
        true = [b for b in range(1, 25) if has_plan(graph_at(b), budget, max_overhead)]
        try:
            found = max_batch(graph_at, budget_bytes=budget, max_overhead=max_overhead, solver=solver, limits=QUICK)
        except InfeasibleBudgetError:
            assert true == [], seed
            continue
        except PlanNotFoundError:
            continue
        graph = graph_at(found.batch)
        assert validate(graph, found.plan, budget) == ()
        assert simulate(graph, found.plan).cost <= limit(graph, max_overhead)
        assert found.batch <= max(true) <= found.upper_bound, (seed, found.batch, true, found.upper_bound)
        if isinstance(solver, BruteForce) and true == list(range(1, len(true) + 1)):
            assert found.batch == max(true), seed
        compared += 1
        closed += found.batch == found.upper_bound
    assert compared > 2 * seeds // 3
    assert closed > compared // 2


@dataclass(frozen=True)
class Shy:
    """Exact, but finds nothing for graphs whose last value is large."""

    most_bytes: int

    def run(self, problem, session):
        """Search every schedule, or none."""
        if problem.graph.values[-1].size_bytes > self.most_bytes:
            return Termination(Reason.NOT_FOUND)
        return BruteForce().run(problem, session)


def test_a_batch_that_is_too_dear_excludes_only_what_is_dearer():
    """Where the dear part does not grow with the batch, a larger batch has a plan although a small one has none."""
    small = chain()
    last = small.ops[-1]
    large = msgspec.structs.replace(
        small,
        ops=(*small.ops[:-1], msgspec.structs.replace(last, cost=last.cost + 5)),
        values=(*small.values[:-1], msgspec.structs.replace(small.values[-1], size_bytes=5)),
    )
    graph_at, budget = AffineGraph(small, 1, large, 2), keep_all_bytes(small) - 1
    true = [b for b in range(1, 25) if has_plan(graph_at(b), budget, 1.1)]
    assert 1 < true[0] < true[-1]
    found = max_batch(graph_at, budget_bytes=budget, max_overhead=1.1, solver=BruteForce(), limits=QUICK)
    assert found.batch == found.upper_bound == true[-1]
    with pytest.raises(PlanNotFoundError, match=f"any batch from 1 to {true[-1]}"):
        max_batch(graph_at, budget_bytes=budget, max_overhead=1.1, solver=Shy(3 + true[0] - 1), limits=QUICK)


def test_a_transformer_takes_a_larger_batch_with_one_extra_forward():
    """What recomputation is for; and more overhead never means a smaller batch."""
    graph_at = AffineGraph.proportional(transformer(1), batch=4)
    budget = keep_all_bytes(graph_at(4))
    batches = [
        max_batch(graph_at, budget_bytes=budget, max_overhead=most, limits=Limits(time_s=15.0)).batch
        for most in (1.0, 1.1, "one extra forward")
    ]
    assert batches == sorted(batches)
    assert 4 <= batches[0] < batches[-1]


def test_the_result_is_of_the_problem_without_restrictions():
    """A bound for plans that compute only forward ops again is none for the batch's own problem."""
    graph_at = AffineGraph.proportional(chain(9))
    found = max_batch(graph_at, budget_bytes=180, limits=QUICK)
    assert found.result.plan == found.plan
    assert found.result.bound <= solve(Problem(graph_at(found.batch), 180), BruteForce(max_ops=9)).cost


def test_an_affine_graph_goes_through_its_captures():
    """At the two batches it is what was captured."""
    rng = random.Random(3)
    for _ in range(20):
        affine = at_random(rng)
        assert affine(1) == affine.small
        assert affine(2) == affine.large


def test_affine_sizes_and_costs_do_not_fall():
    """What the upper bound rests on."""
    small = chain(5, size=9)
    large = msgspec.structs.replace(chain(5, size=8), ops=tuple(msgspec.structs.replace(op, cost=1) for op in chain(5).ops))
    affine = AffineGraph(small, 2, large, 5)
    graphs = [affine(b) for b in range(1, 12)]
    for a, b in pairwise(graphs):
        assert all(x.size_bytes <= y.size_bytes for x, y in zip(a.values, b.values, strict=True))
        assert all(0 <= x.cost <= y.cost for x, y in zip(a.ops, b.ops, strict=True))


def test_a_proportional_graph_keeps_what_is_resident():
    """Parameters do not grow with the batch."""
    tripled = AffineGraph.proportional(chain(), batch=2)(6)
    assert tripled.resident_bytes == 3
    assert {value.size_bytes for value in tripled.values} == {12}
    assert tripled.cost == 3 * chain().cost


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (chain(9), "have 7 and 9 ops"),
        (Graph.from_dag(cost=[2] * 7, size_bytes=[4] * 7, edges=[(i, i + 1) for i in range(6)]), "differ in op 4"),
        (msgspec.structs.replace(chain(), order=((0, 1),)), "differ in `order`"),
        (Graph(chain().ops, (*chain().values[:-1], Value("last", 4, kept=True))), "base, kept or on_host"),
    ],
)
def test_captures_of_different_steps_are_refused(other, says):
    """Between two structures there is no line."""
    with pytest.raises(GraphError, match=says):
        AffineGraph(chain(), 1, other, 2)


def test_questions_that_mean_nothing_are_refused():
    """Batches, limits and callables that cannot be what was meant."""
    with pytest.raises(OptionError, match="ascending"):
        AffineGraph(chain(), 2, chain(), 2)
    with pytest.raises(OptionError, match="batch=0"):
        AffineGraph.proportional(chain())(0)
    with pytest.raises(OptionError, match="max_overhead='two'"):
        max_batch(AffineGraph.proportional(chain()), budget_bytes=100, max_overhead="two")
    with pytest.raises(OptionError, match=r"max_overhead=0\.5"):
        max_batch(AffineGraph.proportional(chain()), budget_bytes=100, max_overhead=0.5)
    with pytest.raises(GraphError, match="does not grow with the batch"):
        max_batch(lambda _: chain(), budget_bytes=100)
    with pytest.raises(GraphError, match="no size falls"):
        max_batch(lambda batch: chain(size=max(1, 40 // batch)), budget_bytes=1000)
    with pytest.raises(GraphError, match="have 7 and 9 ops"):
        max_batch(lambda batch: chain(7 if batch == 1 else 9, size=4 * batch), budget_bytes=1000)
    with pytest.raises(InfeasibleBudgetError, match="not even a batch of one"):
        max_batch(AffineGraph.proportional(chain()), budget_bytes=8)


class ThenInterrupted:
    """Keeps everything where that fits; then the user presses Ctrl-C."""

    def run(self, problem, session):
        if session.offer(range(len(problem.graph.ops))):
            raise KeyboardInterrupt
        return Termination(Reason.NOT_FOUND)


def test_progress_and_interrupt_keep_the_largest_so_far():
    """Waiting longer is the user's choice; what was found and what was proven stay."""
    seen: list[tuple[int, int]] = []
    graph_at = AffineGraph.proportional(chain())
    whole = max_batch(graph_at, budget_bytes=100, max_overhead=1.0, limits=QUICK, on_progress=lambda b, u: seen.append((b, u)))
    assert seen
    assert all(batch <= whole.batch <= whole.upper_bound <= upper for batch, upper in seen)
    early = max_batch(graph_at, budget_bytes=100, max_overhead=1.0, limits=QUICK, solver=ThenInterrupted())
    assert 1 <= early.batch <= whole.batch
    assert early.upper_bound >= whole.batch
    assert validate(graph_at(early.batch), early.plan, 100) == ()


@dataclass(frozen=True)
class Idle:
    """A solver that finds nothing, as one does whose time is over."""

    def run(self, problem: Problem, session: Session) -> Termination:
        return Termination(Reason.NOT_FOUND)


@pytest.mark.parametrize("budget_bytes", [40, 200, 1000])
def test_what_keeps_everything_is_found_without_a_search(budget_bytes: int) -> None:
    """A search that ends with nothing although a batch of one fits as it is would be no answer."""
    steps = AffineGraph.proportional(chain())
    found = max_batch(steps, budget_bytes=budget_bytes, solver=Idle(), limits=QUICK)
    keeps = [batch for batch in range(1, 100) if keep_all_bytes(steps(batch)) <= budget_bytes]
    assert found.batch >= keeps[-1] and found.result.peak_bytes <= budget_bytes


def test_no_batch_above_the_bound_has_a_plan_with_copies():
    """A sweep over every batch by brute force, of tiny steps whose weights may be fetched."""
    compared = closed = 0
    for seed in range(40):
        rng = random.Random(seed)
        small = with_host_values(rng, random_graph(rng, max_ops=3, views=False), views=False)
        small = msgspec.structs.replace(small, ops=tuple(msgspec.structs.replace(op, replay_bytes=0) for op in small.ops))
        graph_at, host = AffineGraph.proportional(small), random_host(rng)
        budget, max_overhead = keep_all_bytes(graph_at(rng.randint(1, 3))), rng.choice([1.1, 1.5, 3.0])
        try:
            best = {batch: least_time(Problem(graph_at(batch), budget, host=host), 3000) for batch in range(1, 9)}
            found = max_batch(graph_at, budget_bytes=budget, max_overhead=max_overhead, host=host, limits=QUICK)
        except (MemoryError, GraphError, PlanNotFoundError):  # a step may not grow with its batch
            continue
        true = [b for b, plan in best.items() if plan is not None and plan[0] <= limit(graph_at(b), max_overhead)]
        assert max(true) <= found.upper_bound, (seed, found, true)
        assert found.batch > 8 or found.batch in true, (seed, found, true)
        assert validate(graph_at(found.batch), found.plan, budget, host=host) == ()
        compared += 1
        closed += found.batch == max(true)
    assert compared > 15 and closed > compared // 2


def test_weights_are_fetched_and_a_small_batch_may_be_too_slow():
    """Copies of weights take as long at any batch: the ops of four rows hide them, and the step of one row waits."""
    graph_at, host = AffineGraph.proportional(weighted(8, weight=1000)), HostMemory("1GiB", 10**9, 2 * 10**9)
    limits = Limits(time_s=2.0, gap=0.1)
    with pytest.raises(InfeasibleBudgetError):
        max_batch(graph_at, budget_bytes=4000, max_overhead=1.3, limits=limits)
    found = max_batch(graph_at, budget_bytes=4000, max_overhead=1.3, limits=limits, host=host)
    assert found.batch >= 4 and found.plan.host is not None
    assert found.result.overhead <= 1.3 and found.result.peak_bytes <= 4000
    assert solve(Problem(graph_at(1), 4000, host=host), limits=limits).bound > 1.3 * graph_at(1).cost
