"""A smaller batch of a step that was planned has its plan at once."""

from __future__ import annotations

import msgspec
import pytest

from checkmate import Budget, Graph, Limits, Plan, Problem, evaluate, solve
from checkmate.core.budget import keep_all_bytes
from checkmate.frontend.counted_memory import resolved_budget
from checkmate.studies import larger_step
from checkmate.studies.affine import AffineGraph
from checkmate.studies.larger_step import plan_of_larger, remember

DEEP = 6
LARGE = AffineGraph.proportional(
    Graph.from_dag(
        cost=[2] * 2 * DEEP,
        size_bytes=[40] * DEEP + [8] * DEEP,
        edges=[(i, i + 1) for i in range(2 * DEEP - 1)] + [(i, 2 * DEEP - 1 - i) for i in range(DEEP)],
        kept=[2 * DEEP - 1],
    )
)
SHARE = "50%"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    larger_step._planned.clear()


def planned(budget: Budget, batch: int, *, whole: bool = True) -> int:
    graph = LARGE(batch)
    result = solve(Problem(graph, resolved_budget(budget, graph, None)), limits=Limits(time_s=5.0))
    remember(budget, graph, result, whole=whole)
    return result.budget_bytes


@pytest.mark.parametrize("batch", range(1, 16))
def test_every_smaller_batch_has_a_plan_within_the_bytes_of_the_larger_one(batch: int) -> None:
    """What holds a larger batch in so many bytes holds a smaller one: an epoch's last batch needs no search."""
    budget = Budget.parse(SHARE)
    limit = planned(budget, 16)
    found = plan_of_larger(budget, LARGE(batch))
    assert found is not None and found.peak_bytes <= found.budget_bytes == limit == resolved_budget(budget, LARGE(batch), None)
    assert (found.cost == LARGE(batch).cost) == (keep_all_bytes(LARGE(batch)) <= limit)


def test_the_plan_is_of_the_same_budget_and_a_larger_batch() -> None:
    """Another function's budget, a larger batch and the same one are planned as they were asked for."""
    budget = Budget.parse(SHARE)
    planned(budget, 8)
    assert plan_of_larger(Budget.parse(SHARE), LARGE(4)) is None
    assert plan_of_larger(budget, LARGE(8)) is None
    assert plan_of_larger(budget, LARGE(9)) is None
    assert plan_of_larger(None, LARGE(4)) is None
    other = msgspec.structs.replace(LARGE(4), ops=tuple(msgspec.structs.replace(op, kind="other") for op in LARGE(4).ops))
    assert plan_of_larger(budget, other) is None
    assert resolved_budget(budget, LARGE(9), None) == budget.resolve(LARGE(9))


def test_the_plan_of_a_graph_in_pieces_is_not_one_of_the_whole_graph() -> None:
    """Its order is of other ops: what is left is keeping everything, where that fits."""
    budget = Budget.parse(SHARE)
    limit = planned(budget, 16, whole=False)
    assert plan_of_larger(budget, LARGE(15)) is None
    assert keep_all_bytes(LARGE(2)) <= limit
    assert plan_of_larger(budget, LARGE(2)) is not None


def test_resident_memory_that_came_since_is_added_to_a_share() -> None:
    """A share leaves what is resident alone; the state of an optimizer may exist only since the first step."""
    budget = Budget.parse(SHARE)
    limit = planned(budget, 16)
    grown = msgspec.structs.replace(LARGE(4), resident_bytes=LARGE(16).resident_bytes + 1000)
    assert resolved_budget(budget, grown, None) == limit + 1000
    found = plan_of_larger(budget, grown)
    assert found is not None and found.peak_bytes <= limit + 1000


def test_an_order_that_the_graph_cannot_run_is_left() -> None:
    """The same ops may read other values: the plan is checked on the graph that it is for."""
    budget = Budget.parse("1GiB")
    chain = Graph.from_dag(cost=[1, 1, 1], size_bytes=[8, 8, 8], edges=[(0, 1)], kept=[2])
    result = evaluate(chain, Plan.from_order(chain, [2, 0, 1]))
    remember(budget, chain, msgspec.structs.replace(result, budget_bytes=20), whole=True)
    other = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 30], edges=[(0, 1), (1, 2)], kept=[2])
    smaller = Graph.from_dag(cost=[1, 1, 1], size_bytes=[8, 8, 7], edges=[(0, 1), (1, 2)], kept=[2])
    assert plan_of_larger(budget, other) is None
    found = plan_of_larger(budget, smaller)
    assert found is None or found.plan.order == (0, 1, 2)
