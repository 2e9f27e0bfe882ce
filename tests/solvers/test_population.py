"""Plans crossed with each other: every member is a plan within the budget, and what is alike is one member."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from checkmate import Plan, Problem, simulate
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.evict import population
from checkmate.solvers.evict.instance import Code
from checkmate.solvers.evict.population import Population, PopulationParameters
from checkmate.solvers.evict.search import Search
from tests.solvers.chains import uneven_chain


def start(seed: int, work: int = 800) -> Population | None:
    """A population of a random tight problem with the first plan of a search; None if there is none."""
    rng = random.Random(seed)
    graph = uneven_chain(rng, rng.randint(8, 16))
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    problem = Problem(graph, (2 * floor(graph).peak_bytes + own) // 3)
    search = Search(problem, frozenset(), seed)
    return Population(search, work, seed) if search.first(stop_at_first=True) else None


def started(seeds: int) -> Iterator[tuple[int, Population]]:
    """The populations of the first so many seeds that have one, with their seeds."""
    for seed in range(seeds):
        crossed = start(seed)
        if crossed is not None:
            yield seed, crossed


def absent(code: Code, stages: int) -> np.ndarray:
    """Whether a value is not held in a stage. Shape ``[value, stage]``."""
    table = np.zeros((len(code.used), stages + 1), dtype=bool)
    for v, used in enumerate(code.used.tolist()):
        for k in range(used):
            table[v, code.low[v, k] : code.high[v, k] + 1] = True
    return table


def test_members_are_plans_of_the_cost_they_say():
    gained = compared = 0
    for seed, crossed in started(60):
        search, before = crossed.search, crossed.members[0].cost
        if crossed.grow(lambda: False):
            crossed.evolve(lambda: False)
        assert search.best_cost == crossed.members[0].cost <= before
        gained += search.best_cost < before
        for cost, code in crossed.members:
            assert search.restart_from(code)
            order = search.order()
            graph = search.problem.graph
            assert search.best_cost == cost == sum(graph.ops[o].cost for o in order), seed
            assert simulate(graph, Plan.from_order(graph, order)).peak_bytes <= search.problem.budget_bytes, seed
            compared += 1
    assert gained > 10
    assert compared > 60


def test_a_child_has_the_intervals_of_one_plan_and_for_some_values_or_stages_those_of_another():
    kinds = {"values": 0, "stages": 0}
    for _, crossed in started(40):
        crossed.grow(lambda: False)
        if len(crossed.members) < 2:
            continue
        a, b = crossed.members[0].code, crossed.members[1].code
        stages = len(crossed.search.instance.targets)
        for _ in range(8):
            child = crossed._crossed(a, b)
            tables = [absent(code, stages) for code in (child, a, b)]
            of_a, of_b = tables[0] == tables[1], tables[0] == tables[2]
            by_value = bool((of_a.all(axis=1) | of_b.all(axis=1)).all())
            by_stage = bool((of_a.all(axis=0) | of_b.all(axis=0)).all())
            assert by_value or by_stage
            # Neighbours: what is taken of b is one run of rows or of columns.
            taken = ~of_a.all(axis=1) if by_value else ~of_a.all(axis=0)
            assert by_value or of_b[:, np.flatnonzero(taken).min(initial=stages) : np.flatnonzero(taken).max(initial=0) + 1].all()
            kinds["values"] += by_value and not by_stage
            kinds["stages"] += by_stage and not by_value
    assert min(kinds.values()) > 10


def members(costs: list[float]) -> Population:
    """A population of such costs, whose codes do not matter."""
    crossed = start(1)
    assert crossed is not None
    crossed.members = []
    for cost in costs:
        assert crossed.add(cost, crossed.search.empty_code())
    return crossed


@pytest.mark.parametrize(
    ("cost", "after"),
    [
        (math.inf, [100.0, 110.0, 120.0]),
        (115.0, [100.0, 110.0, 115.0]),
        (121.0, [100.0, 110.0, 120.0]),
        (120.0, [100.0, 110.0, 120.0]),
        (110.0, [100.0, 110.0, 120.0]),
        (110.5, [100.0, 110.0, 120.0]),
        (109.5, [100.0, 109.5, 120.0]),
        (99.5, [99.5, 110.0, 120.0]),
        (90.0, [90.0, 100.0, 110.0]),
    ],
)
def test_members_are_apart_and_the_dearest_leaves(monkeypatch, cost, after):
    """Three have room, and one per cent lies between them."""
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=3, apart=0.01))
    crossed = members([120.0, 100.0, 110.0])
    taken = crossed.add(cost, crossed.search.empty_code())
    assert [member.cost for member in crossed.members] == after
    assert taken == (cost in after and cost not in (110.0, 120.0))


def test_growth_ends_where_plans_agree(monkeypatch):
    """Three of nearly the same cost; dearer ones do not count."""
    crossed = members([100.0])
    made = iter([150.0, 100.001, 120.0, 99.9999, 1.0])
    monkeypatch.setattr(crossed, "_made_anew", lambda _: (next(made), crossed.search.empty_code()))
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=9, apart=0.0))
    assert not crossed.grow(lambda: False)
    assert next(made) == 1.0
    assert [member.cost for member in crossed.members] == [99.9999, 100.0, 100.001, 120.0, 150.0]


def test_growth_ends_with_enough_plans_or_without_time(monkeypatch):
    crossed = members([100.0])
    made = iter(range(101, 120))
    monkeypatch.setattr(crossed, "_made_anew", lambda _: (float(next(made)), crossed.search.empty_code()))
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=4))
    assert crossed.grow(lambda: True)
    assert next(made) == 101
    assert crossed.grow(lambda: False)
    assert next(made) == 105


def replace_kernels(
    monkeypatch: pytest.MonkeyPatch, crossed: Population, children: Iterator[float], made: Iterator[float]
) -> None:
    """Children and new plans of given costs, and a search that keeps the plan it is given."""
    code = crossed.search.empty_code()
    monkeypatch.setattr(crossed, "_child", lambda _: (next(children), code))
    monkeypatch.setattr(crossed, "_made_anew", lambda _: (next(made), code))
    monkeypatch.setattr(crossed.search, "restart_from", lambda _: True)


def test_evolution_ends_without_gain_or_time_or_anything_to_cross(monkeypatch):
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=2, patience=1, renewal=5))
    crossed = members([100.0])
    costs = [200.0, 200.0, 90.0] + [200.0] * 20
    children, made = iter(costs), iter([300.0, 310.0, 320.0, 330.0])
    replace_kernels(monkeypatch, crossed, children, made)
    crossed.evolve(lambda: False)
    assert next(children) == 200.0
    assert crossed.add(110.0, crossed.search.empty_code())
    crossed.evolve(lambda: True)
    assert next(children) == 200.0
    crossed.evolve(lambda: False)
    # One that gains and five that do not; as many of new members, which gain by the first of them alone.
    assert len(costs) - len(list(children)) == 2 + (1 + 5) + (1 + 5)
    assert crossed.members[0].cost == 90.0


def test_where_members_are_stuck_others_are_made_and_then_crossed_with_the_best(monkeypatch):
    """The best is set aside, comes back among the new ones, and the next best is set aside."""
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=2, patience=3, renewal=2))
    crossed = members([100.0, 110.0])
    among: list[list[float]] = []

    def child(_: Any) -> tuple[float, Code]:
        among.append([member.cost for member in crossed.members])
        return 500.0, crossed.search.empty_code()

    replace_kernels(monkeypatch, crossed, iter([]), iter([140.0, 130.0, 160.0, 150.0]))
    monkeypatch.setattr(crossed, "_child", child)
    crossed.evolve(lambda: False)
    assert among == [[100.0, 110.0]] * 2 + [[130.0, 140.0]] * 2 + [[100.0, 130.0]] * 2
    assert [member.cost for member in crossed.members] == [100.0, 150.0]


def test_the_best_adopts_intervals_of_plans_that_cost_nearly_as_little(monkeypatch):
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=3, near=0.1))
    crossed = members([100.0, 120.0])
    given: list[Code] = []
    monkeypatch.setattr(crossed.search, "restart_from", lambda _: True)
    monkeypatch.setattr(crossed.search, "adopt", lambda code: given.append(code) or True)
    monkeypatch.setattr(crossed.search, "best", lambda: (99.0, crossed.search.empty_code()))
    for cost, adopts in ((111.0, False), (100.0, False), (109.0, True), (98.0, False)):
        code, before = crossed.search.empty_code(), len(given)
        crossed._take(cost, code)
        assert (len(given) > before and given[-1] is code) == adopts
    assert [member.cost for member in crossed.members] == [98.0, 99.0, 100.0]


def test_a_plan_adopts_the_intervals_of_some_values_of_another():
    """It gets cheaper and stays within the budget; of the plan itself there is nothing to adopt."""
    gained = 0
    for _, crossed in started(120):
        if not crossed.grow(lambda: False) or len(crossed.members) < 2:
            continue
        search, dear, other = crossed.search, crossed.members[-1], crossed.members[0]
        search.restart_from(dear.code)
        assert not search.adopt(dear.code)
        assert search.best_cost == dear.cost
        adopted = search.adopt(other.code)
        cost, code = search.best()
        assert adopted == (cost < dear.cost)
        order, graph = search.order(), search.problem.graph
        assert cost == sum(graph.ops[o].cost for o in order)
        assert simulate(graph, Plan.from_order(graph, order)).peak_bytes <= search.problem.budget_bytes
        gained += adopted
        search.forget()
        assert not search.adopt(code)
    assert gained > 5


def test_what_a_plan_adopts_are_the_intervals_themselves():
    """Of a plan in which one value is held for longer, or is not dropped at all."""
    longer = more = 0
    for _, crossed in started(60):
        search, (cost, code) = crossed.search, crossed.search.best()
        stages = len(search.instance.targets)
        for v, used in enumerate(code.used.tolist()):
            worse = Code(*(rows.copy() for rows in code))
            first = int(code.high[v, used - 1]) + 1 if used else search.stage[int(search.instance.producer[v])] + 1
            search.evict(worse, v, first, first + 1)
            if not search.restart_from(worse) or search.best_cost <= cost:
                continue
            if (absent(search.best()[1], stages) != absent(worse, stages)).any():  # it was over the budget, and more is not held
                continue
            assert search.adopt(code)
            assert search.best_cost == cost
            np.testing.assert_array_equal(absent(search.best()[1], stages), absent(code, stages))
            longer += bool(used)
            more += not used
    assert min(longer, more) > 10


def test_where_nothing_is_found_anew_members_come_from_the_best(monkeypatch):
    """A tight budget that greedy plans miss: the best plan, annealed, is another all the same."""
    crossed = start(1)
    assert crossed is not None
    cost = crossed.members[0].cost
    monkeypatch.setattr(crossed.search, "first", lambda **_: False)
    made = crossed._made_anew(lambda: False)
    assert made[0] <= cost
    crossed.grow(lambda: False)
    assert math.isfinite(crossed.search.best_cost)


def test_a_code_found_elsewhere_takes_the_place_of_the_dearest(monkeypatch):
    """Whatever it costs: it brings in what the others do not have. Only what is no plan is left out."""
    crossed = members([120.0, 100.0, 110.0])
    search = crossed.search
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=3))
    monkeypatch.setattr(search, "restart_from", lambda _: True)
    monkeypatch.setattr(search, "improve", lambda *_: True)
    for cost, after in ((150.0, [100.0, 110.0, 150.0]), (math.inf, [100.0, 110.0, 150.0]), (90.0, [90.0, 100.0, 110.0])):
        monkeypatch.setattr(search, "best", lambda cost=cost: (cost, search.empty_code()))
        crossed.take_in(search.empty_code(), lambda: False)
        assert [member.cost for member in crossed.members] == after
    monkeypatch.setattr(population, "PARAMETERS", PopulationParameters(size=9))
    monkeypatch.setattr(search, "best", lambda: (400.0, search.empty_code()))
    crossed.take_in(search.empty_code(), lambda: False)
    assert [member.cost for member in crossed.members] == [90.0, 100.0, 110.0, 400.0]


def test_members_move_to_a_search_in_another_order():
    moved = 0
    for seed, crossed in started(80):
        if not crossed.grow(lambda: False):
            continue
        other = crossed.search.in_order_of(crossed.search.order(), seed)
        there = crossed.moved_to(other)
        assert there.search is other
        assert other.best_cost == there.members[0].cost <= crossed.members[0].cost
        for cost, code in there.members:
            assert other.restart_from(code)
            assert other.best_cost == cost
        moved += len(there.members) > 1
    assert moved > 5
