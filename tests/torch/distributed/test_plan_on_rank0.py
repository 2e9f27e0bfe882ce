"""Rank 0 plans for all ranks: threads that share a store stand for processes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from checkmate import Graph, Op, Result, Value
from checkmate.frontend.planner import keep_everything
from checkmate.torch.distributed.consensus import RankError, Ranks, plan_on_rank0
from tests.torch.distributed.jobs import at_once


def graph(workspace: int = 8, resident: int = 100, size: int = 16, cost: int = 5) -> Graph:
    ops = (Op("a", (), (0,), cost=cost, workspace_bytes=workspace), Op("b", (0,), (1,), cost=1))
    return Graph(ops, (Value("x", size), Value("y", 4, kept=True)), resident_bytes=resident)


def keep(planned: Graph) -> Result:
    return keep_everything(planned)


def test_the_plan_is_for_the_most_that_any_rank_takes(job: Callable[[int], list[Ranks]]) -> None:
    """Workspace and resident bytes may differ from rank to rank; costs are those of rank 0."""
    graphs = [graph(workspace=8, resident=100, cost=5), graph(workspace=20, resident=90, cost=7)]
    found = at_once(*[lambda r=r: plan_on_rank0(r, graphs[r.rank], "a budget of 70%", keep) for r in job(2)])
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert found[0][0].resident_bytes == 100
    assert found[0][0].ops[0].workspace_bytes == 20
    assert found[0][0].ops[0].cost == 5
    assert found[1][1].plan.graph_digest == found[1][0].digest


def test_an_op_is_computed_again_only_where_it_may_be_on_every_rank(job: Callable[[int], list[Ranks]]) -> None:
    """Whether a custom op repeats its results is tried out, and an op of which that is said may differ once in a while."""
    once = graph()
    once = msgspec.structs.replace(once, ops=(msgspec.structs.replace(once.ops[0], recomputable=False), once.ops[1]))
    graphs = [graph(), once]
    found = at_once(*[lambda r=r: plan_on_rank0(r, graphs[r.rank], "a budget of 70%", keep) for r in job(2)])
    assert [[op.recomputable for op in each[0].ops] for each in found] == [[False, True]] * 2


def test_different_graphs_are_refused_on_every_rank(job: Callable[[int], list[Ranks]]) -> None:
    """The same plan cannot run both."""
    found = at_once(*[lambda r=r: plan_on_rank0(r, graph(size=16 + r.rank), "a budget of 1GiB", keep) for r in job(2)])
    assert all(isinstance(error, RankError) for error in found)
    assert all("rank 0 and rank 1 traced different graphs" in str(error) for error in found)


def test_different_budgets_are_refused_on_every_rank(job: Callable[[int], list[Ranks]]) -> None:
    """Which of them is meant, nobody knows."""
    found = at_once(*[lambda r=r: plan_on_rank0(r, graph(), f"a budget of {r.rank + 1}GiB", keep) for r in job(2)])
    assert all("rank 0 asks for a budget of 1GiB and rank 1 for a budget of 2GiB" in str(error) for error in found)
