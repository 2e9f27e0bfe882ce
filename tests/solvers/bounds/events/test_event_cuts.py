"""Event cuts: the program is that of the proof, and its optimum is below the cost of every plan."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from checkmate import BruteForce, Graph, Op, Plan, Problem, Value, simulate, solve
from checkmate.solvers.backends.highs import solve_integer, solve_linear
from checkmate.solvers.backends.program import Program
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import BUDGET_SLACK, CutBuilder, CutProgram, NoColumn, build_cuts, memory_units
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.solvers.bounds.proof import event_sides, least_share, stated_rows, strict_ancestors
from tests.solvers.chains import uneven_chain
from tests.solvers.instances import draw
from tests.strategies import random_graph


def tight_problem(rng: random.Random, *, training: float = 0.8, most_ops: tuple[int, ...] = (6, 9, 12)) -> Problem:
    """A folded problem whose budget is little more than the floor, where events prove most; other graphs have more ops
    that float than training graphs."""
    graph = random_graph(rng, max_ops=rng.choice(most_ops), training=rng.random() < training)
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    low = min(floor(graph).peak_bytes, own)
    budget = rng.randint(low, (3 * low + own) // 4)
    return FoldViews.of(graph).apply(Problem(graph, budget, recompute=rng.choice(["all", "forward"])))


def some_targets(rng: random.Random, problem: Problem) -> tuple[int, ...] | None:
    """No targets, all ops, or some of them."""
    share = rng.choice([0.0, 0.0, 0.0, 0.6, 1.0])
    return tuple(o for o in range(len(problem.graph.ops)) if rng.random() < share) or None


def some_chain(rng: random.Random, model: CutModel) -> list[int]:
    """Events that come one after another in every plan, from first to last."""
    chain = [rng.randrange(model.end)]
    for o in range(model.end):
        if o not in chain and rng.random() < 0.6 and all(model.comparable(c, o) for c in chain):
            chain.append(o)
    return sorted(chain, key=lambda o: sum(bool(model.sides(o)[0][c]) for c in chain))


def linear_bound(cut: CutProgram) -> float:
    """What a program proves without integers."""
    return math.inf if cut.impossible else solve_linear(cut.program).bound


def in_bytes(cut: CutProgram) -> CutProgram:
    """A program without its rows in whole units: they are for integers, and not among those that the proof states."""
    first = dict(reversed(cut.memory_rows))
    kept = np.ones(len(cut.implied), dtype=bool)
    kept[[row for e, row in cut.memory_rows if row != first[e]]] = False
    return replace(cut, program=cut.program.with_rows(kept), implied=cut.implied[kept])


def least_cost(program: Program, **options: float) -> float:
    """The cost of the solution in integers; infinite without one."""
    solution = solve_integer(program, **options).solution
    return math.inf if solution is None else float(program.cost @ solution)


def test_the_program_is_that_of_the_proof():
    """Columns that cannot matter are left out and constants are folded: the least cost of the relaxation stays what it is."""
    sharp = impossible = 0
    for seed in range(60):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        targets = some_targets(rng, problem)
        model = CutModel(problem, targets)
        chain = some_chain(rng, model)
        for floating, longer in itertools.product((False, True), repeat=2):
            stated = least_share(problem, chain, floating=floating, targets=targets, all_segments=longer)
            bound = linear_bound(in_bytes(build_cuts(model, chain, floating=floating, all_segments=longer)))
            assert bound == pytest.approx(stated, abs=1e-5), (seed, chain, floating, longer)
            sharp += 1e-6 < stated < math.inf
            impossible += math.isinf(stated)
    assert sharp > 10
    assert impossible > 1


def test_the_program_allows_the_points_that_the_proof_allows():
    """Whatever is minimised over them, not recomputation alone: no row is missing, and none is too strict."""
    finite = 0
    for seed in range(40):
        rng = random.Random(seed)
        problem = tight_problem(rng, training=0.2)
        # With targets among other ops the program is the looser one: what the DAG says of those others is left out there.
        targets = tuple(range(len(problem.graph.ops))) if rng.random() < 0.2 else None
        model = CutModel(problem, targets)
        chain = some_chain(rng, model)
        for floating, longer in itertools.product((False, True), repeat=2):
            builder = CutBuilder(model, tuple(chain), floating, all_segments=longer)
            program = in_bytes(builder.build()).program
            if builder.impossible or not len(program.cost):
                continue
            stated = stated_rows(problem, chain, floating=floating, targets=targets, all_segments=longer)
            tables = [(("S", e), live) for e, live in enumerate(builder.live)]
            tables += [(("X", e), computed) for e, computed in enumerate(builder.computed[:-1])]
            tables += [(("y", *segment), again) for segment, again in builder.recomputed.items()]
            names = {int(table[i]): (*kind, i) for kind, table in tables for i in np.flatnonzero(table >= 0).tolist()}
            assert sorted(names) == list(range(len(program.cost)))
            again = set(names.values())

            def left_out(name: tuple[object, ...], again: set[tuple[object, ...]] = again) -> bool:
                return name[0] == "y" and name not in again  # useless, so that it may stay at zero

            for _ in range(3):
                weights = np.array([rng.choice([-1.0, 0.0, 1.0]) for _ in names])
                least = stated.least({name: weights[column] for column, name in names.items()}, zero=left_out)
                bound = solve_linear(replace(program, cost=weights)).bound
                assert bound == pytest.approx(least, abs=1e-4), (seed, chain, floating, longer)
                finite += math.isfinite(bound)
    assert finite > 26


def test_in_integers_the_program_is_that_of_the_proof():
    """Every column is 0 or 1 in a plan, so the bound may be taken over such points only."""
    above_the_relaxation = 0
    for seed in range(40):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        model = CutModel(problem)
        chain = some_chain(rng, model)
        cut = in_bytes(build_cuts(model, chain))
        if not len(cut.program.cost):
            continue
        stated = least_share(problem, chain, integral=True)
        bound = math.inf if cut.impossible else least_cost(cut.program)
        assert bound == pytest.approx(stated, abs=1e-5), (seed, chain)
        above_the_relaxation += bound > linear_bound(cut) + 1e-5
    assert above_the_relaxation > 0


@pytest.mark.parametrize(
    ("sizes", "room", "units"),
    [
        ([4, 4, 8], 15, {4}),  # 8 leaves 7 of 15 bytes of room, and half of the values
        ([4, 4, 8], 16, set()),
        ([4, 4, 8], 3, {4, 8}),
        ([4, 9, 9], 10, {4}),
        ([1, 9, 9], 10, {9}),
        ([5, 7, 9, 11], 12, {7}),
        ([5, 7, 9, 11], 35, set()),
        ([0, 0], 12, set()),
        ([], 12, set()),
        ([4, 4], 0, set()),
        ([10_000, 10_000], 20_003, {10_000}),
        ([10_000, 10_000], 20_001, set()),  # a byte of so many is not worth a row
    ],
)
def test_a_unit_is_a_size_that_takes_more_from_the_room_than_from_the_values(sizes, room, units):
    """Where both are rounded down to multiples of it."""
    assert set(memory_units(np.array(sizes, dtype=np.int64), room)) == units


@pytest.mark.slow
def test_rows_in_whole_units_change_the_relaxation_and_not_the_integers():
    """Sizes are multiples of four bytes but for some small ones, and the budget is not."""
    sharper = with_units = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = uneven_chain(rng, rng.randint(3, 8))
        small = {v for v in range(len(graph.values)) if rng.random() < 0.1}
        values = [structs.replace(v, size_bytes=1 if k in small else 4 * v.size_bytes) for k, v in enumerate(graph.values)]
        graph = Graph(graph.ops, tuple(values))
        model = CutModel(Problem(graph, floor(graph).peak_bytes + rng.randint(0, 20)))
        chain = some_chain(rng, model)
        cut = build_cuts(model, chain, all_segments=True)
        if cut.impossible or not len(cut.program.cost):
            continue
        plain = in_bytes(cut)
        of_all, of_plain = (least_cost(each.program, absolute_gap=1e-7) for each in (cut, plain))
        assert of_all == pytest.approx(of_plain, abs=1e-5), seed
        relaxed = solve_linear(cut.program)
        assert relaxed.bound >= linear_bound(plain) - 1e-7
        with_units += len(cut.memory_rows) > len(chain)
        sharper += relaxed.bound > linear_bound(plain) + 1e-4
        if relaxed.row_prices is not None:
            rows = [row for _, row in cut.memory_rows]
            assert cut.memory_prices(relaxed.row_prices).sum() == pytest.approx(-relaxed.row_prices[rows].sum())
    assert with_units > 8
    assert sharper > 1


def test_every_cut_bounds_every_plan():
    """Single events, chains of events, with and without floating ops, relaxed and in integers."""
    sharp = checked = 0
    for seed in range(75):
        instance = draw(seed)
        if instance.optimum is None or not instance.problem.reorder:
            continue
        fold = FoldViews.of(instance.problem.graph, priced=True)
        folded = fold.apply(instance.problem)
        once = max(1, folded.graph.cost)
        model = CutModel(folded)
        for cuts in chains(model, random.Random(seed)):
            for floating in (False, True):
                cut = build_cuts(model, cuts, floating=floating)
                assert not cut.impossible, (seed, cuts)
                for solved in (solve_linear(cut.program), solve_integer(cut.program)):
                    bound = instance.problem.graph.cost + solved.bound * once
                    assert bound <= instance.optimum + 1e-4, (seed, cuts, floating, bound, instance.optimum)
                checked += 1
                sharp += math.isclose(bound, instance.optimum, abs_tol=1e-4)
    assert checked > 66
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
        solve_linear(build_cuts(model, [3], floating=floating).program).bound * graph.cost + graph.cost
        for floating in (False, True)
    )
    assert without < with_them <= optimum + 1e-6
    assert linear_bound(build_cuts(model, [3])) == linear_bound(build_cuts(model, [3], floating=True))


def test_the_sides_of_an_event_are_its_ancestors_and_descendants():
    """By data, order and clobbers; where targets have an order, all earlier ones are sure and no later one has run."""
    for seed in range(60):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        targets = some_targets(rng, problem)
        model = CutModel(problem, targets)
        assert model.end == len(problem.graph.ops)
        for o in range(model.end):
            before, after = (set(np.flatnonzero(side).tolist()) for side in model.sides(o))
            assert (before, after) == event_sides(problem, o, targets), (seed, o)
            assert model.end in after


def test_parents_and_children_are_the_same_edges():
    """END comes after every op."""
    for seed in range(40):
        problem = tight_problem(random.Random(seed))
        model = CutModel(problem)
        edges = {(p, o) for o, parents in enumerate(model.parents) for p in parents}
        assert edges == {(o, c) for o, children in enumerate(model.children) for c in children}
        assert {o for o, c in edges if c == model.end} == set(range(model.end))
        assert model.parents == [sorted(parents) for parents in model.parents]


def test_ops_are_comparable_where_one_surely_comes_first():
    """Either may be the first; an op is comparable with itself, since an event is one event."""
    for seed in range(40):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        targets = some_targets(rng, problem)
        model = CutModel(problem, targets)
        for a in range(model.end):
            before, after = event_sides(problem, a, targets)
            assert [model.comparable(a, b) for b in range(model.end)] == [b in before | after | {a} for b in range(model.end)]


def test_a_bound_holds_for_any_order_where_the_dag_leaves_none_open():
    """Only then are the sides of an event the same in every order."""
    seen = set()
    for seed in range(40):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        above = strict_ancestors(problem)
        model = CutModel(problem, tuple(range(len(problem.graph.ops))))
        for cuts in ([], *([o] for o in range(model.end)), some_chain(rng, model)):
            fixed = all(b in above[c] or c in above[b] or b == c for c in cuts for b in range(model.end))
            assert model.any_order(cuts) is fixed, (seed, cuts)
            assert CutModel(problem).any_order(cuts) is True
            seen.add(fixed)
    assert seen == {True, False}


def test_implied_rows_add_nothing_in_integers_and_those_without_a_price_nothing_to_the_relaxation():
    """Any of them may be left out, and the program for integers leaves out those whose price in the relaxation is 0."""
    sharper = dropped = 0
    for seed in range(50):
        rng = random.Random(seed)
        model = CutModel(tight_problem(rng))
        cut = in_bytes(build_cuts(model, some_chain(rng, model), floating=rng.random() < 0.5, all_segments=True))
        relaxed = solve_linear(cut.program)
        if cut.impossible or relaxed.row_prices is None:
            continue
        optimum = least_cost(cut.program, absolute_gap=0.0)
        slim = cut.without_slack(relaxed.row_prices)
        none = cut.program.with_rows(~cut.implied)
        for program in (slim, none):
            assert least_cost(program, absolute_gap=0.0) == pytest.approx(optimum, abs=1e-6), seed
        assert linear_bound(replace(cut, program=slim)) == pytest.approx(relaxed.bound, abs=1e-6), seed
        assert len(slim.row_low) == len(cut.program.row_low) - (cut.implied & (relaxed.row_prices == 0)).sum()
        assert cut.without_slack(None) is cut.program
        dropped += len(slim.row_low) < len(cut.program.row_low)
        sharper += linear_bound(replace(cut, program=none)) < relaxed.bound - 1e-6
    assert dropped > 6
    assert sharper > 0


def test_rows_of_segments_of_several_events_are_implied():
    """All of them; but the columns up to the end count replay states in the rows of memory, and where there are any stay tied."""
    values = (*(Value(f"v{i}", 1) for i in range(3)), Value("w", 1, kept=True))
    for replay in (0, 3):
        ops = (Op("f0", (), (0,), 1), Op("f1", (0,), (1,), 1, replay_bytes=replay), Op("f2", (1,), (2,), 1))
        graph = Graph((*ops, Op("b", (0, 1, 2), (3,), 1)), values)
        builder = CutBuilder(CutModel(Problem(graph, 100)), (1, 2, 3), False, all_segments=True)
        cut = builder.build()
        of_pair = {pair: {int(c) for c in columns if c >= 0} for pair, columns in builder.recomputed.items()}
        longer = {c for (e, f), columns in of_pair.items() if f > e + 1 for c in columns}
        tied = {c for (e, f), columns in of_pair.items() if f == 3 for c in columns} if replay else set[int]()
        kinds = set[tuple[bool, bool]]()
        for k, implied in enumerate(cut.implied):
            row = set(cut.program.matrix[k].indices.tolist())
            if k in {row for _, row in cut.memory_rows}:
                assert not implied
                continue
            assert row & longer or not implied
            assert implied or not row & longer or row & tied
            kinds.add((bool(row & tied & longer), bool(implied)))
        assert ((True, False) in kinds) == (replay > 0)
        assert {implied for _, implied in kinds} == {True, False}


def test_what_is_surely_live_is_a_constant_and_the_rest_that_can_be_read_a_column():
    """The inputs of the event, and what cannot be made again and has a reader that surely comes later; columns of the rest
    exist where the value may be there and some op or the end may still read it."""
    for seed in range(60):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        graph = problem.graph
        model = CutModel(problem)
        chain = some_chain(rng, model)
        floating = rng.random() < 0.5
        cut = build_cuts(model, chain, floating=floating)
        assert cut.cuts == tuple(chain)
        assert cut.live.shape == (len(chain), len(graph.values))
        columns: list[int] = []
        for e, t in enumerate(chain):
            before, after = event_sides(problem, t, None)
            again = {
                o
                for o, op in enumerate(graph.ops)
                if op.recomputable
                and (problem.recompute == "all" or op.phase == "forward")
                and not set(op.clobbered_by) & (before | {t})
            }
            readable: set[int] = {v for v, value in enumerate(graph.values) if value.kept}
            for o in reversed(range(len(graph.ops))):
                if o not in before or (o in again and set(graph.ops[o].outputs) & readable):
                    readable |= set(graph.ops[o].inputs)
            for v in range(len(graph.values)):
                p = graph.producer[v]
                later = any(reader in after for reader in graph.readers[v]) or graph.values[v].kept
                beside = p not in before | after | {t}
                if v in graph.ops[t].inputs or (p in before and p not in again and later):
                    assert cut.live[e, v] == NoColumn.ALWAYS_LIVE, (seed, e, v)
                elif v in readable and (p in before or (floating and beside)):
                    assert cut.live[e, v] >= 0, (seed, e, v)
                    columns.append(int(cut.live[e, v]))
                else:
                    assert cut.live[e, v] == NoColumn.UNMODELLED, (seed, e, v)
        assert len(set(columns)) == len(columns)
        assert all(column < len(cut.program.cost) and cut.program.cost[column] == 0 for column in columns)


def test_an_event_that_alone_exceeds_the_budget_is_impossible():
    """Compared in exact bytes, without the slack that an engine's tolerance needs."""
    graph = Graph.from_dag(cost=[1, 1, 1], size_bytes=[2**40, 2**40, 1], edges=[(0, 1), (1, 2)], resident_bytes=7)
    for budget, impossible in ((2**41 + 7, False), (2**41 + 6, True)):
        cut = build_cuts(CutModel(Problem(graph, budget)), [0, 1, 2])
        assert cut.impossible is impossible
    assert build_cuts(CutModel(Problem(graph, 0)), [2]).impossible


def test_no_op_is_computed_again_for_nothing():
    """Where everything fits nothing is recomputed, whatever ops cost; a graph without costs has a bound of zero."""
    for cost in ([3, 4, 5], [0, 0, 0]):
        graph = Graph.from_dag(cost=cost, size_bytes=[1, 1, 1], edges=[(0, 1), (0, 2), (1, 2)], kept=[2])
        assert linear_bound(build_cuts(CutModel(Problem(graph, 3)), [0, 1, 2])) == pytest.approx(0.0)


def test_ops_without_values_need_nothing():
    """A graph may have effects alone: there is nothing to hold and nothing to compute again."""
    graph = Graph((Op("a", (), (), 1), Op("b", (), (), 1)), (), order=((0, 1),))
    for cuts in ([0], [0, 1]):
        assert linear_bound(build_cuts(CutModel(Problem(graph, 9)), cuts)) == 0.0


def test_ops_that_float_without_values_follow_the_dag_too():
    """An op computed before an event is computed before the next, and so are its parents; `order` alone makes one."""
    graph = Graph(tuple(Op(name, (), (), 1) for name in "abst"), (), order=((0, 1), (2, 3)))
    builder = CutBuilder(CutModel(Problem(graph, 9)), (2, 3), True)
    program = builder.build().program
    (a0, b0), (a1, b1) = (computed[:2] for computed in builder.computed[:2])
    for early, late in ((b0, a0), (b1, a1), (a0, a1), (b0, b1)):
        weights = np.zeros(4)
        weights[late], weights[early] = 1.0, -1.0
        assert solve_linear(replace(program, cost=weights)).bound == pytest.approx(0.0)


def test_a_budget_of_a_byte_is_a_budget():
    """Rows are scaled to the budget: of two values of a byte that are both read later one fits, and one alone does."""

    def graph(count: int) -> Graph:
        values = [Value(f"v{v}", int(v < count)) for v in range(2 * count + 1)]
        made = [Op(f"make{v}", (), (v,), 1) for v in range(count)]
        read = [Op(f"read{v}", (v, count), (count + 1 + v,), 1) for v in range(count)]
        order = tuple((o, count) for o in range(count))
        return Graph((*made, Op("event", (), (count,), 1), *read), tuple(values), order)

    assert linear_bound(build_cuts(CutModel(Problem(graph(1), 1)), [1])) == pytest.approx(0.0)
    assert linear_bound(build_cuts(CutModel(Problem(graph(2), 1)), [2])) == pytest.approx(1 / 5, abs=1e-5)
    empty = Graph.from_dag(cost=[1, 1], size_bytes=[0, 0], edges=[(0, 1)])
    assert linear_bound(build_cuts(CutModel(Problem(empty, 0)), [0, 1])) == pytest.approx(0.0)


def test_the_bound_is_a_share_of_the_cost_of_computing_all_ops_once():
    """The first op has to run twice: its cost over the cost of all of them, but for the slack of the budget's row."""
    tight = Graph(
        (Op("a", (), (0,), 30), Op("b", (0,), (1,), 5), Op("wide", (1,), (2,), 15, workspace_bytes=6), Op("c", (0, 2), (3,), 0)),
        (Value("x", 4), Value("y", 1), Value("w", 1), Value("z", 1, kept=True)),
    )
    assert linear_bound(build_cuts(CutModel(Problem(tight, 8)), [2])) == pytest.approx(30 / 50 * (1 - 2 * BUDGET_SLACK), rel=1e-8)
    assert solve(Problem(tight, 8), BruteForce()).cost == 50 + 30
    cheap = Graph(
        tuple(Op(op.name, op.inputs, op.outputs, int(not o), op.workspace_bytes) for o, op in enumerate(tight.ops)), tight.values
    )
    assert linear_bound(build_cuts(CutModel(Problem(cheap, 8)), [2])) == pytest.approx(1.0, abs=1e-4)
    assert linear_bound(build_cuts(CutModel(Problem(tight, 12)), [2])) == pytest.approx(0.0)
