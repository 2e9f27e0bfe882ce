"""Folding views and inserting them again keeps every byte, every rule and every reader's data."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import AStar, Auto, BruteForce, Compute, Graph, Limits, Op, Plan, Problem, Value, simulate, solve, validate
from checkmate.solvers.reductions.fold_views import FoldViews, may_run_again
from tests.solvers.bounds.proof import strict_ancestors
from tests.strategies import graphs, random_graph


def random_sequence(rng: random.Random, graph: Graph) -> list[int]:
    """Every op of a folded graph once, in any order that the rules allow, and some again where they may run."""
    above = strict_ancestors(Problem(graph, 0))
    sequence: list[int] = []
    while ready := [o for o in range(len(graph.ops)) if o not in sequence and above[o] <= set(sequence)]:
        sequence.append(rng.choice(ready))
        again = [o for o in set(sequence) if graph.ops[o].recomputable and not set(graph.ops[o].clobbered_by) & set(sequence)]
        if again and rng.random() < 0.3:
            sequence.append(rng.choice(sorted(again)))
    return sequence


@given(graphs(max_ops=9), st.randoms())
def test_a_plan_with_its_views_put_back_is_a_plan(graph, rng):
    """Whatever the solver's order: every op is there, every reader reads what is live, every rule holds."""
    fold = FoldViews.of(graph)
    sequence = random_sequence(rng, fold.folded)
    order = fold.invert(iter(sequence))
    assert validate(graph, Plan.from_order(graph, order)) == ()
    assert fold.apply_order(order) == sequence
    assert fold.apply_order(iter(range(len(graph.ops)))) == list(range(len(fold.folded.ops)))


@given(graphs(max_ops=9), st.randoms())
def test_a_reader_never_reads_an_old_instance_through_a_view(graph, rng):
    """A view made before its storage was computed again would hold the old bytes beside the new."""
    fold = FoldViews.of(graph)
    order = fold.invert(random_sequence(rng, fold.folded))
    made: dict[int, int] = {}  # value -> position of the computation of its root that it shows
    newest: dict[int, int] = {}
    for position, o in enumerate(order):
        op = graph.ops[o]
        for v in op.inputs:
            if graph.producer[v] in graph.view_ops:
                assert made[v] == newest[graph.root[v]]
        for v in op.outputs:
            if graph.values[v].base is None:
                newest[v] = position
        for v in op.outputs:
            made[v] = newest[graph.root[v]]
    for v, value in enumerate(graph.values):
        if value.kept and graph.producer[v] in graph.view_ops:
            assert made[v] == newest[graph.root[v]]


@given(graphs(max_ops=9), st.randoms())
def test_a_view_is_made_only_where_it_is_needed(graph, rng):
    """For a reader, for the end, or once because a plan has to compute every op; never twice for one instance."""
    fold = FoldViews.of(graph)
    order = fold.invert(random_sequence(rng, fold.folded))
    fresh: set[int] = set()
    for o in order:
        op = graph.ops[o]
        if o in graph.view_ops:
            assert not fresh & set(op.outputs)
            fresh |= set(op.outputs)
        else:
            roots = set(op.outputs)
            fresh -= {v for v in fresh if graph.root[v] in roots}


def test_a_view_stands_right_before_its_first_reader():
    """Its storage is there anyway; one that nobody reads comes after its storage is first made, and the end's come last."""
    graph = Graph(
        (
            Op("x", (), (0,), 1), Op("view", (0,), (1,), 1), Op("deep", (1,), (2,), 1), Op("unread", (0,), (3,), 1),
            Op("kept", (1,), (4,), 1), Op("y", (), (5,), 1), Op("use", (2, 5), (6,), 1),
        ),
        (Value("x", 4), Value("a", 0, 0), Value("b", 0, 0), Value("c", 0, 0), Value("d", 0, 0, kept=True),
         Value("y", 1), Value("z", 1)),
    )  # fmt: skip
    fold = FoldViews.of(graph)
    assert fold.kept_ops == (0, 5, 6)
    assert fold.invert([0, 1, 2]) == [0, 3, 5, 1, 2, 6, 4]
    assert fold.invert([0, 1, 2, 0, 2]) == [0, 3, 5, 1, 2, 6, 0, 1, 2, 6, 4]
    assert fold.invert([0, 1, 2, 0]) == [0, 3, 5, 1, 2, 6, 0, 1, 4]


def test_views_that_share_an_op_are_made_together():
    """An op with several outputs makes all of them; a chain of views is made from the storage on."""
    graph = Graph(
        (Op("x", (), (0,), 1), Op("split", (0,), (1, 2), 1), Op("deep", (1, 2), (3,), 1), Op("use", (3, 1), (4,), 1)),
        (Value("x", 4), Value("a", 0, 0), Value("b", 0, 0), Value("c", 0, 0), Value("z", 1, kept=True)),
    )
    fold = FoldViews.of(graph)
    assert fold.invert([0, 1]) == [0, 1, 2, 3]
    assert fold.folded.ops[1].inputs == (0,)
    assert fold.invert([0, 1, 0, 1]) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_without_views_nothing_changes():
    """Then the folded graph is the graph, and every order is its own."""
    for seed in range(30):
        graph = random_graph(random.Random(seed), views=False)
        fold = FoldViews.of(graph, priced=True)
        assert fold.folded == graph
        assert fold.cost_offset == 0
        assert fold.invert([0, *range(len(graph.ops))]) == [0, *range(len(graph.ops))]


@given(graphs(max_ops=9))
def test_the_folded_graph_has_the_same_ops_without_views(graph):
    """Ops keep all that is said of them; a view's readers read the owner of its storage."""
    fold = FoldViews.of(graph)
    assert fold.original is graph
    assert fold.kept_ops == tuple(o for o in range(len(graph.ops)) if o not in graph.view_ops)
    folded = fold.folded
    assert (folded.resident_bytes, folded.cost_unit, folded.name) == (graph.resident_bytes, graph.cost_unit, graph.name)
    values = [v for v in range(len(graph.values)) if graph.producer[v] not in graph.view_ops]
    new = {v: i for i, v in enumerate(values)}
    for v in range(len(graph.values)):
        new.setdefault(v, new[graph.root[v]])
    for i, o in enumerate(fold.kept_ops):
        op, other = graph.ops[o], folded.ops[i]
        assert other.inputs == tuple(dict.fromkeys(new[v] for v in op.inputs))
        assert other.outputs == tuple(new[v] for v in op.outputs)
        assert [fold.kept_ops[c] for c in other.clobbered_by] == list(op.clobbered_by)
        for fact in ("name", "cost", "workspace_bytes", "replay_bytes", "recomputable", "phase", "kind", "source"):
            assert getattr(op, fact) == getattr(other, fact)
    assert [(fold.kept_ops[a], fold.kept_ops[b]) for a, b in folded.order] == list(graph.order)
    for i, v in enumerate(values):
        value, other = graph.values[v], folded.values[i]
        assert (other.name, other.size_bytes) == (value.name, value.size_bytes)
        assert other.base == (None if value.base is None else new[graph.root[v]])
        assert other.kept or not value.kept


def test_every_fact_of_an_op_survives():
    """Names, units and sources are for messages about the folded problem."""
    graph = Graph(
        (
            Op("x", (), (0,), 3, 4, 5, True, (2,), "loss", "aten.mm", "model.py:3"),
            Op("view", (0,), (1,), 1),
            Op("y", (), (2,), 1, recomputable=False, phase="optimizer", kind="aten.add_", source="adam.py:9"),
        ),
        (Value("a", 1), Value("b", 0, 0, kept=True), Value("c", 2)),
        order=((0, 2),), resident_bytes=7, cost_unit="FLOP", name="net",
    )  # fmt: skip
    assert FoldViews.of(graph, priced=True).folded == Graph(
        (
            Op("x", (), (0,), 3, 4, 5, True, (1,), "loss", "aten.mm", "model.py:3"),
            Op("y", (), (1,), 1, recomputable=False, phase="optimizer", kind="aten.add_", source="adam.py:9"),
        ),
        (Value("a", 1, kept=True), Value("c", 2)),
        order=((0, 1),), resident_bytes=7, cost_unit="FLOP", name="net",
    )  # fmt: skip


def test_a_kept_view_keeps_its_storage():
    """A free view is made at the end from the newest instance; a view tied to its place shares an instance that may be old."""

    def graph(*, recomputable: bool, tied: bool, kept: int) -> Graph:
        return Graph(
            (Op("x", (), (0,), 1, recomputable=recomputable), Op("view", (0,), (1,), 1), Op("y", (), (2,), 1)),
            tuple(Value(str(v), 0 if v == 1 else 1, 0 if v == 1 else None, v == kept) for v in range(3)),
            order=((1, 2),) if tied else (),
        )

    def kept(**facts: bool | int) -> list[bool]:
        return [value.kept for value in FoldViews.of(graph(**facts)).folded.values]

    assert kept(recomputable=True, tied=False, kept=1) == [True, False]
    assert kept(recomputable=True, tied=False, kept=2) == [False, True]
    assert kept(recomputable=True, tied=True, kept=1) == [False, True, False]
    assert kept(recomputable=False, tied=True, kept=1) == [True, True, False]
    assert kept(recomputable=False, tied=True, kept=2) == [False, False, True]


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


@given(graphs(max_ops=9), st.randoms())
def test_priced_views_cost_no_more_than_they_do_in_a_plan(graph, rng):
    """A bound on the folded problem plus the offset is a bound on the original: it holds for a plan in which every
    computation is read before the next, or at the end."""
    fold = FoldViews.of(graph, priced=True)
    sequence = without_what_nobody_reads(fold.folded, random_sequence(rng, fold.folded))
    outside = simulate(graph, Plan.from_order(graph, fold.invert(sequence))).cost
    inside = sum(fold.folded.ops[o].cost for o in sequence)
    assert inside + fold.cost_offset <= outside
    assert all(a.cost >= b.cost for a, b in zip(fold.folded.ops, FoldViews.of(graph).folded.ops, strict=True))


def without_what_nobody_reads(graph: Graph, sequence: list[int]) -> list[int]:
    """The sequence without the computations whose outputs nobody reads before they are made again, or ever."""
    placed = {a for a, _ in graph.order}  # their first computation may be there for its place
    kept = {graph.producer[v] for v, value in enumerate(graph.values) if value.kept}
    position = 0
    while position < len(sequence):
        o, before, later = sequence[position], sequence[:position], sequence[position + 1 :]
        until = later.index(o) if o in later else len(later)
        read = any(v in graph.ops[reader].inputs for reader in later[:until] for v in graph.ops[o].outputs)
        needed = read or (o not in later and (o in kept or o not in before)) or (o in placed and o not in before)
        sequence, position = (sequence, position + 1) if needed else ([*before, *later], 0)
    return sequence


def step(other_view: int, order: tuple[tuple[int, int], ...] = (), early: int = 1) -> Graph:
    """A value that two ops read, each through a view or both through one."""
    ops = (
        Op("x", (), (0,), 2),
        Op("view", (0,), (1,), 3),
        Op("other view", (0,), (2,), 4),
        Op("early", (early,), (3,), 1),
        Op("wide", (3,), (4,), 1, workspace_bytes=9),
        Op("late", (other_view, 4), (5,), 1),
    )
    bases = {1: 0, 2: 0}
    values = tuple(Value(str(v), 0 if v in bases else 2, bases.get(v), v == 5 or (v == 2 and other_view == 1)) for v in range(6))
    return Graph(ops=ops, values=values, order=order)


def test_a_view_is_priced_where_every_reader_needs_it():
    """Not where each reader has a view of its own, nor where the first computation may have to come for nobody."""

    def price(graph: Graph) -> int:
        return FoldViews.of(graph, priced=True).folded.ops[0].cost - graph.ops[0].cost

    assert price(step(other_view=2)) == 0
    assert price(step(other_view=2, early=2)) == 4
    assert price(step(other_view=2, early=2, order=((0, 4),))) == 0
    assert price(step(other_view=2, early=2, order=((3, 4),))) == 4
    assert FoldViews.of(step(other_view=2, early=2)).folded.ops[0].cost == 2


def test_a_chain_of_views_is_priced_as_a_whole():
    """Whoever reads the last needs all of them; a view beside them that only some read is not among them."""
    graph = Graph(
        (
            Op("x", (), (0, 1), 1), Op("a", (0,), (2,), 10), Op("b", (2,), (3,), 100), Op("c", (2,), (4,), 1000),
            Op("use b", (3,), (5,), 1), Op("use c", (4, 1), (6,), 1),
        ),
        (Value("x", 1), Value("x2", 1), Value("a", 0, 0), Value("b", 0, 0), Value("c", 0, 0),
         Value("y", 1), Value("z", 1, kept=True)),
    )  # fmt: skip
    assert FoldViews.of(graph, priced=True).folded.ops[0].cost == 1
    through = Graph((*graph.ops[:5], Op("use c", (4,), (6,), 1)), graph.values)
    assert FoldViews.of(through, priced=True).folded.ops[0].cost == 11
    alone = Graph((*graph.ops[:5], Op("use b too", (3,), (6,), 1)), graph.values)
    assert FoldViews.of(alone, priced=True).folded.ops[0].cost == 111


def test_what_the_end_keeps_is_a_reader():
    """It reads the kept value as it is: through its views if it is one, directly if it is the owner."""

    def price(kept: int) -> int:
        graph = Graph(
            (Op("x", (), (0,), 1), Op("view", (0,), (1,), 10), Op("deep", (1,), (2,), 100), Op("use", (1,), (3,), 1)),
            tuple(Value(str(v), 0 if v in (1, 2) else 1, 0 if v in (1, 2) else None, v == kept) for v in range(4)),
        )
        return FoldViews.of(graph, priced=True).folded.ops[0].cost

    assert price(kept=3) == 11
    assert price(kept=2) == 11
    assert price(kept=0) == 1


def test_priced_views_leave_the_optimum_what_it_is():
    """Exact solvers, on the folded problem, against brute force on the original."""
    for graph in (step(2), step(2, early=2), step(2, early=2, order=((0, 4),)), step(1)):
        for budget in range(4, 16):
            exact = solve(Problem(graph, budget), BruteForce(), limits=Limits(gap=0.0), raise_on_failure=False)
            for solver in (AStar(), Auto()):
                result = solve(Problem(graph, budget), solver, limits=Limits(time_s=5, gap=0.0), raise_on_failure=False)
                assert result.cost == exact.cost
                assert result.bound <= exact.bound


@pytest.mark.parametrize("recompute", ["all", "forward"])
@pytest.mark.parametrize("reorder", [True, False])
def test_the_folded_problem_asks_the_same_question(recompute, reorder):
    """Budget and rules are those of the original."""
    graph = step(2)
    fold = FoldViews.of(graph)
    assert fold.apply(Problem(graph, 11, recompute, reorder)) == Problem(fold.folded, 11, recompute, reorder)


@given(graphs(views=False), st.sampled_from(["all", "forward"]))
def test_an_op_may_run_again_where_validate_lets_it(graph, recompute):
    """The op's own mark, and the problem's rule about forward ops."""
    assume(not any(op.clobbered_by for op in graph.ops))
    problem = Problem(graph, 2**20, recompute)
    for o in range(len(graph.ops)):
        order = list(range(len(graph.ops)))
        order.insert(o, o)
        plan = Plan.from_order(graph, order)
        broken = {violation.rule for violation in validate(graph, plan, recompute=recompute)} & {"once", "phase"}
        assert may_run_again(problem, o) is (not broken)
        assert Compute(o) in plan.steps
