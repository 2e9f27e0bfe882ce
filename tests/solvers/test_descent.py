"""Lower peaks step by step: stages at every computation, and kept values left to the end."""

from __future__ import annotations

import itertools
import random

import pytest

from checkmate import Graph, Op, Plan, Problem, Value, min_budget, simulate, validate
from checkmate.core.plan import Compute
from checkmate.solvers.evict.descent import Descent
from checkmate.solvers.evict.search import Ruin, Search
from checkmate.solvers.evict.starts import movable_to_end
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import without_unread
from tests.solvers.bounds.test_last_run import gradients
from tests.strategies import random_graph, with_more_kept

ANY = 10**9


def folded(seed: int, max_ops: int = 9) -> tuple[Graph, FoldViews, Problem]:
    """A random graph of which many values are kept, and its problem with all the room there is, views folded."""
    rng = random.Random(seed)
    graph = with_more_kept(rng, random_graph(rng, max_ops=max_ops), 0.4)
    fold = FoldViews.of(graph)
    return graph, fold, fold.apply(Problem(graph, ANY))


def peak_of(graph: Graph, order: list[int]) -> int:
    return simulate(graph, Plan.from_order(graph, order)).peak_bytes


def above(graph: Graph, order: list[int], budget: int) -> int:
    """Bytes over a budget, summed over the computations of an order."""
    plan = Plan.from_order(graph, order)
    held = simulate(graph, plan).bytes
    return sum(max(0, int(held[k]) - budget) for k, step in enumerate(plan.steps) if isinstance(step, Compute))


def test_an_op_that_is_listed_again_has_a_stage_for_what_is_read_of_it_from_there_on():
    """For the largest of it, and at its last place for all that is kept."""
    values = [Value(name=f"v{v}", size_bytes=s, kept=v in (4, 5, 7)) for v, s in enumerate([4, 1, 2, 8, 5, 3, 1, 9, 1])]
    ops = [
        Op(name="a", cost=1, inputs=(), outputs=(0, 1)),
        Op(name="b", cost=1, inputs=(0,), outputs=(2,)),
        Op(name="c", cost=1, inputs=(1,), outputs=(3,)),
        Op(name="d", cost=1, inputs=(0, 1, 3), outputs=(4, 5)),
        Op(name="e", cost=1, inputs=(), outputs=(6, 7)),
        Op(name="f", cost=1, inputs=(6,), outputs=(8,)),
    ]
    graph = Graph(ops=tuple(ops), values=tuple(values))
    others = [4, 5]

    def stages(order: list[int]) -> list[int | str]:
        search = Search(Problem(graph, ANY), frozenset(), 0, order)
        g = search.flat
        assert search.targets == [o for o in g.targets.tolist() if o < 6]
        return [o if o < 6 else f"v{g.reads[g.reads_from[o]]}" for o in g.targets[:-1].tolist()]

    assert stages([0, 1, 2, 3, *others]) == [0, 1, 2, 3, *others]
    assert stages([0, 1, 0, 2, 3, *others]) == [0, 1, "v0", 2, 3, *others]
    assert stages([0, 1, 0, 2, 0, 3, *others]) == [0, 1, "v1", 2, "v0", 3, *others]
    assert stages([0, 1, 2, 3, 2, 3, *others]) == [0, 1, 2, 3, "v3", "v4", "v5", *others]
    assert stages([0, 1, 2, 0, 1, 3, *others]) == [0, 1, 2, "v0", 3, *others]
    # What is kept is made at the last place, whatever is read of the op before that.
    assert stages([0, 1, 2, 3, 4, 5, 4, 5, 4]) == [0, 1, 2, 3, 4, 5, "v6", "v7"]


def test_a_stage_that_only_reads_comes_after_the_stages_before_it():
    """In a plan that computes ops in other places than those of the stages, or more often."""
    graph = Graph.from_dag(cost=[1] * 4, size_bytes=[4] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    search = Search(Problem(graph, ANY), frozenset(), 0, [0, 1, 0, 2, 3])
    reader = int(search.flat.targets[2])
    assert reader > len(graph.ops)
    for order, placed in (
        ([0, 1, 0, 2, 3], [0, 1, 0, reader, 2, 3]),
        ([0, 1, 2, 3], [0, 1, reader, 2, 3]),
        ([0, 0, 1, 2, 3], [0, 0, 1, reader, 2, 3]),
        ([0, 0, 2, 1, 3], [0, 0, 2, 1, reader, 3]),
    ):
        assert search._with_readers(order) == placed


def test_a_plan_with_a_stage_for_every_computation_is_coded_as_it_is():
    """Whatever it computes again, and in whatever order: the code gives the same sequence."""
    compared = longer = 0
    for seed in range(150):
        _, _, problem = folded(seed)
        rng = random.Random(seed)
        low = peak_of(problem.graph, list(range(len(problem.graph.ops))))
        problem = problem.replace_budget(rng.randint(2 * low // 3, low))
        search = Search(problem, frozenset(), seed)
        if not search.first():
            continue
        order = without_unread(problem, search.order())
        again = Search(problem, frozenset(), seed, order)
        compared += 1
        longer += len(order) > len(problem.graph.ops)
        assert again.order_and_peak(again.code_of(order))[0] == order, seed
    assert compared > 26
    assert longer > 6


def test_excess_is_that_of_the_plan_returned():
    """Bytes over the budget, summed over all computations; the code given is left as it is, and nothing is worse than it."""
    lower = 0
    for seed in range(100):
        _, _, problem = folded(seed)
        if any(value.base is not None for value in problem.graph.values):
            continue  # a view tied to its place holds an instance of which the kernels do not know
        own = list(range(len(problem.graph.ops)))
        search = Search(problem, frozenset(), seed)
        budget = peak_of(problem.graph, own) * 3 // 4
        search.set_budget(budget)
        code = search.empty_code()
        excess, order = search.relieve(code, 0.3, 0.2, 0.5, Ruin())
        assert above(problem.graph, order, budget) == excess, seed
        assert excess <= above(problem.graph, own, budget), seed
        assert not code.any()
        lower += excess < above(problem.graph, own, budget)
    assert lower > 6


def test_stages_are_relieved_beside_one_that_cannot_be():
    """A repair ends where nothing can be evicted at the peak; this leaves that stage as it is and goes on with the others."""
    graph = Graph(
        ops=(
            Op(name="huge", cost=1, inputs=(), outputs=(1,)),
            Op(name="a", cost=1, inputs=(), outputs=(0,)),
            Op(name="b", cost=1, inputs=(), outputs=(2,)),
            Op(name="c", cost=1, inputs=(2,), outputs=(3,)),
            Op(name="d", cost=1, inputs=(0, 3), outputs=(4,)),
        ),
        values=tuple(Value(name=f"v{v}", size_bytes=s, kept=v == 4) for v, s in enumerate([4, 20, 4, 4, 1])),
    )
    problem = Problem(graph, ANY)
    search = Search(problem, frozenset(), 0)
    search.set_budget(9)
    assert not search.start_from(search.empty_code())
    excess, order = search.relieve(search.empty_code(), 0.0, 0.0, 0.0)
    assert order.count(1) == 2
    assert excess == 20 - 9


@pytest.mark.slow
def test_steps_lower_the_peak_and_their_plans_hold_on_any_graph():
    """Views, rules, several outputs, ops that run once; the same seed gives the same plans."""
    lower = 0
    for seed in range(75):
        graph, fold, problem = folded(seed)
        if seed % 3 == 0:
            problem = Problem(problem.graph, ANY, reorder=False)
        if seed % 4 == 0:
            problem = Problem(problem.graph, ANY, "forward", problem.reorder)
        own = list(range(len(problem.graph.ops)))
        descents = [Descent(problem, [own], graph.resident_bytes, seed) for _ in range(2)]
        peak = descents[0].peak_bytes
        assert peak == peak_of(problem.graph, own)
        for _ in range(40):
            fell = descents[0].step()
            assert fell == (descents[0].peak_bytes < peak)
            peak = descents[0].peak_bytes
            assert peak == peak_of(problem.graph, descents[0].order)
        for _ in range(40):
            descents[1].step()
        assert descents[0].order == descents[1].order
        plan = Plan.from_order(graph, fold.invert(descents[0].order))
        assert validate(graph, plan, peak, recompute=problem.recompute, reorder=problem.reorder) == (), seed
        lower += peak < peak_of(problem.graph, own)
    assert lower > 10


def test_the_excess_is_that_of_the_current_plan_and_falls():
    """A plan of more excess is not taken, and one of a lower peak is the plan of the walk."""
    graph = two_passes(4)
    problem = Problem(graph, ANY)
    descent = Descent(problem, [list(range(len(graph.ops)))], graph.resident_bytes, 3)
    for _ in range(75):
        level, excess = descent._level, descent._excess
        descent.step()
        assert descent._excess == above(graph, descent._current, descent._level)
        if descent._level == level:
            assert descent._excess <= excess
        assert descent.peak_bytes <= descent._lowest_bytes == peak_of(graph, descent._lowest)


def test_kept_values_moved_to_the_end_take_nothing_else_along():
    """What was computed again for them alone is left out, and all others stay where they are."""
    graph = two_passes(2)
    own = list(range(len(graph.ops)))
    problem = Problem(graph, ANY)
    movable = movable_to_end(graph)
    assert movable == {o for o, op in enumerate(graph.ops) if op.name.startswith("grad_parameter")}
    descent = Descent(problem, [own], graph.resident_bytes, 0)
    ends = set()
    for _ in range(50):
        order = descent._with_some_at_end()
        assert sorted(order) == own
        stays = [o for o in order if o not in movable]
        assert stays == [o for o in own if o not in movable]
        last = max(order.index(o) for o in stays)
        ends.add(tuple(order[last + 1 :]))
    assert ends == {(11,), (11, 6), (11, 8)}
    changed = [descent._changed() for _ in range(50)]
    assert {6, 8} < {order[-1] for order, _ in changed}
    assert {order is descent._current and cleared is not None for order, cleared in changed} == {True, False}
    assert not Descent(Problem(graph, ANY, reorder=False), [own], graph.resident_bytes, 0)._movable


def test_what_is_computed_again_moves_with_what_is_computed_for_it_alone():
    """A chain that leads to one value, from its second computations on, and never before a first one."""
    chain = Graph.from_dag(cost=[1] * 7, size_bytes=[4] * 7, edges=[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (2, 6), (5, 6)])
    plan = [0, 1, 2, 3, 4, 5, 0, 1, 2, 6]
    descent = Descent(Problem(chain, ANY), [plan], 0, 0)
    places = set()
    for _ in range(100):
        order = descent._with_one_earlier()
        assert sorted(order) == sorted(plan)
        assert list(dict.fromkeys(order)) == list(range(7))
        second = [place for place, o in enumerate(order) if o in (0, 1, 2) and o in order[:place]]
        moved_whole = second[-1] - second[0] == 2
        places.add((second[0], moved_whole))
    assert (3, True) in places
    held = Descent(Problem(chain, ANY), [[0, 1, 2, 3, 4, 5, 2, 6]], 0, 0)  # what it reads is there all the time
    assert {tuple(dict.fromkeys(held._with_one_earlier())) for _ in range(50)} == {tuple(range(7))}


def two_passes(layers: int) -> Graph:
    """A step with a wide outer layer and deep ones inside, whose gradients of parameters take as much as the wide values.

    The gradient of the outer layer needs the gradient of what follows it, and with that and its own values it takes the whole
    floor: no gradient of a deep layer can be there. They come before it, since it depends on the way through them.
    """
    wide, deep, parameters = 20, 1, 4
    values: list[Value] = []
    ops: list[Op] = []

    def make(name: str, size: int, inputs: tuple[int, ...], *, kept: bool = False) -> int:
        phase = "backward" if name.startswith("grad") else "forward"
        values.append(Value(name=name, size_bytes=size, kept=kept))
        ops.append(Op(name=name, cost=1, inputs=inputs, outputs=(len(values) - 1,), phase=phase))
        return len(values) - 1

    outer = make("outer", wide, ())
    inner = [make("inner", deep, (outer,))]
    inner += [make(f"inner{k}", deep, (inner[-1],)) for k in range(layers)]
    top = make("top", wide, (outer, inner[-1]))
    coming = grad = make("grad_top", deep, (top,))
    for k in reversed(range(layers)):
        make(f"grad_parameter{k}", parameters, (grad, inner[k]), kept=True)
        grad = make(f"grad_inner{k}", deep, (grad, inner[k]))
    last = make("grad_outer", wide, (outer, coming, grad))
    make("grad_parameter", deep, (last,), kept=True)
    return Graph(ops=tuple(ops), values=tuple(values))


@pytest.mark.parametrize("layers", [2, 4])
def test_kept_values_are_left_to_a_second_pass_backward(layers: int):
    """The gradients of deep layers are made after that of the outer one, by the way through them once more."""
    graph = two_passes(layers)
    names = [op.name for op in graph.ops]
    found = min_budget(graph)
    assert found.peak_bytes == found.floor_bytes
    assert validate(graph, found.plan, found.peak_bytes) == ()
    order = found.plan.order
    assert order.index(names.index("grad_parameter0")) > order.index(names.index("grad_outer"))
    assert order.count(names.index("inner0")) > 1
    assert names.index("grad_parameter0") in movable_to_end(graph)


def test_walks_begin_from_each_plan_in_turn():
    """A walk that is stuck gives way to the next; the best plan of all stays."""
    graph = gradients(6, 4)
    problem = Problem(graph, ANY)
    own = list(range(len(graph.ops)))
    other = [*own[:2], 0, *own[2:]]
    begun: list[int] = []

    class Noted(Descent):
        def _begin(self) -> tuple[list[int], int]:
            result = super()._begin()
            begun.append(self.peak_bytes if hasattr(self, "peak_bytes") else -1)
            return result

    descent = Noted(problem, [own, other], graph.resident_bytes, 0)
    for _ in itertools.takewhile(lambda _: len(begun) < 4, range(2000)):
        descent.step()
    assert len(begun) == 4
    assert sorted(begun[1:], reverse=True) == begun[1:]
    assert descent.peak_bytes == peak_of(graph, descent.order)
