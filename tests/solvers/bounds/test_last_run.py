"""The floor of the last run of some ops: what its program states, below every plan, and reached where it should be."""

from __future__ import annotations

import itertools
import logging
import random

import pytest

from checkmate import BruteForce, Graph, InfeasibleBudgetError, Op, Problem, Value, min_budget, solve
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.bounds.last_run import last_run_floor
from checkmate.solvers.clocks import no_alarm
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.strategies import random_graph, with_more_kept


def kept_graph(seed: int) -> Graph:
    """A random tiny graph with its views folded, half of whose values are kept."""
    rng = random.Random(seed)
    graph = random_graph(rng, max_ops=rng.choice([4, 5, 6]), views=rng.random() < 0.5)
    graph = with_more_kept(rng, graph, 0.5)
    return FoldViews.of(graph).apply(Problem(graph, 0)).graph


def stated(graph: Graph, ops: set[int]) -> int:
    """The program of the module for some ops, by trying every set of ops that run after the last of them."""
    above = [set[int]() for _ in graph.ops]
    for o, op in enumerate(graph.ops):
        for p in {graph.producer[v] for v in op.inputs}:
            above[o] |= {p} | above[p]
    over = {p for t in ops for p in above[t] if not graph.ops[p].recomputable}
    free = [o for o in range(len(graph.ops)) if o not in ops and o not in over]
    least = []
    for t in ops - over:
        own = {*graph.ops[t].inputs, *graph.ops[t].outputs}
        for after in itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1)):
            needed = {v for v, x in enumerate(graph.values) if x.kept} | {v for o in after for v in graph.ops[o].inputs}
            live = own | {v for v in needed if graph.producer[v] not in {t, *after}}
            held = sum(graph.values[v].size_bytes for v in live if graph.values[v].base is None)
            least.append(graph.ops[t].workspace_bytes + held)
    return graph.resident_bytes + min(least)


def need(graph: Graph, o: int) -> int:
    """Bytes of an op's inputs, outputs and workspace."""
    op = graph.ops[o]
    own = {v for v in (*op.inputs, *op.outputs) if graph.values[v].base is None}
    return op.workspace_bytes + sum(graph.values[v].size_bytes for v in own)


def test_it_is_the_highest_of_what_its_program_states():
    """For every amount of bytes the ops that need as much; found by trying every set of ops instead of by a cut."""
    compared = higher = 0
    for seed in range(75):
        graph = kept_graph(seed)
        needs = [need(graph, o) for o in range(len(graph.ops))]
        sets = {n: {o for o, needed in enumerate(needs) if needed >= n} for n in needs}
        found = last_run_floor(graph, 0)
        if found is None:
            continue
        compared += 1
        higher += found.peak_bytes > floor(graph).peak_bytes
        assert found.peak_bytes == max(stated(graph, ops) for ops in sets.values()), seed
        assert any(found.op in ops and found.peak_bytes == stated(graph, ops) for ops in sets.values()), seed
    assert compared > 33
    assert higher > 2


def test_no_plan_has_a_lower_peak():
    """Brute force over all schedules, of the graph with its views, has no plan of a byte less."""
    higher = 0
    for seed in range(250):
        rng = random.Random(seed)
        graph = with_more_kept(rng, random_graph(rng, max_ops=5), 0.5)
        folded = FoldViews.of(graph).apply(Problem(graph, 0)).graph
        found = last_run_floor(folded, floor(graph).peak_bytes)
        if found is None:
            continue
        higher += 1
        below = solve(Problem(graph, found.peak_bytes - 1), BruteForce(), raise_on_failure=False)
        assert below.plan is None, seed
    assert higher > 5


def gradients(layers: int, more: int = 1) -> Graph:
    """A chain of states, from each of which an op with a large workspace makes a kept gradient that is larger than it."""
    ops, values = [], []
    for k in range(layers):
        ops.append(Op(f"state{k}", (2 * k - 2,) if k else (), (2 * k,), 1))
        ops.append(Op(f"gradient{k}", (2 * k,), (2 * k + 1,), 1, workspace_bytes=6 + more * k))
        values += [Value(f"s{k}", 1), Value(f"g{k}", 4, kept=True)]
    return Graph(tuple(ops), tuple(values))


def test_the_last_gradient_needs_its_workspace_beside_the_others():
    """The search reaches that floor, by making the gradient of the largest workspace first and its state twice."""
    graph = gradients(4)
    assert floor(graph).peak_bytes == 16
    # The last gradient to be made is one of those, at best the first: four gradients, a state and a workspace of 6.
    found = last_run_floor(graph, 16)
    assert found is not None
    assert (found.peak_bytes, found.op) == (16 + 1 + 6, 1)
    smallest = min_budget(graph)
    assert smallest.peak_bytes == smallest.floor_bytes == 23
    assert smallest.binding_op == "gradient0"
    assert smallest.why == (
        "when the last of the ops that need 11 B or more runs, at best `gradient0`, its 11 B and 12 B for the values kept to the "
        "end must be there"
    )


def test_a_budget_below_it_is_refused_before_any_program_is_solved(caplog):
    """The search for the smallest peak, which is made where no plan is found, proves it in a part of a second."""
    with caplog.at_level(logging.DEBUG, "checkmate.solvers.auto"), pytest.raises(InfeasibleBudgetError) as caught:
        solve(Problem(gradients(12), 52))
    assert floor(gradients(12)).peak_bytes <= 52 < caught.value.floor_bytes
    assert not any("event" in message for message in caplog.messages)


def test_without_kept_values_it_says_nothing():
    """Nothing has to be there at the end, so that the last op needs no more than itself."""
    graph = Graph.from_dag(cost=[1] * 3, size_bytes=[5, 5, 5], edges=[(0, 1), (1, 2)])
    assert last_run_floor(graph, 0) is None


def test_it_ends_with_its_work_and_at_an_alarm():
    """What is found by then is a floor; sets that were not finished are none."""
    graph = gradients(4)
    raised = no_alarm()
    raised[0] = 1
    assert last_run_floor(graph, 16, raised) is None
    assert last_run_floor(graph, 16, work=1) is None
    assert last_run_floor(graph, 16, most_ops=3) is None
