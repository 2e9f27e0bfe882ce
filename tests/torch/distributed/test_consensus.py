"""Ranks decide together or stop together: threads that share a store stand for processes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from checkmate import Graph, InfeasibleBudgetError, Op, Result, Value
from checkmate.frontend.planner import keep_everything
from checkmate.torch.distributed import consensus as ranks_module
from checkmate.torch.distributed.consensus import RankError, Ranks, ranks_of_job, stopping_together
from checkmate.torch.distributed.plan_on_rank0 import plan_together


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Ranks]]:
    """Ranks that meet at one store."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks_module, "store_of_job", lambda: store)
    return lambda count: [Ranks(rank, count) for rank in range(count)]


def at_once(*runs: Callable[[], Any]) -> list[Any]:
    """What several calls return or raise, run at the same time."""

    def caught(run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(caught, runs))


def graph(workspace: int = 8, resident: int = 100, size: int = 16, cost: int = 5) -> Graph:
    ops = (Op("a", (), (0,), cost=cost, workspace_bytes=workspace), Op("b", (0,), (1,), cost=1))
    return Graph(ops, (Value("x", size), Value("y", 4, kept=True)), resident_bytes=resident)


def keep(planned: Graph, in_flight_bytes: int) -> Result:
    return keep_everything(planned)


def test_alone_there_are_no_ranks() -> None:
    """Nothing is asked of anybody where torch.distributed is not in use."""
    assert not dist.is_initialized()
    assert ranks_of_job() is None


def test_everybody_hears_what_rank_0_decides(job: Callable[[int], list[Ranks]]) -> None:
    """From what all said, once for each decision, and nothing but the newest stays in the store."""
    members = job(3)
    for turn in range(3):
        said = at_once(*[lambda r=r, turn=turn: r.decide("t", bytes([turn, r.rank]), b"|".join) for r in members])
        assert said == [b"|".join(bytes([turn, rank]) for rank in range(3))] * 3
    store = ranks_module.store_of_job()
    assert not store.check(["0/answer"])
    assert not store.check(["1/1"])
    assert store.check(["2/answer"])


def test_one_that_fails_stops_all(job: Callable[[int], list[Ranks]]) -> None:
    """Whichever it is, with its reason on every rank; the next decision is as if nothing had been."""
    members = job(3)
    for failing in range(3):

        def run(rank: Ranks, failing: int = failing) -> bytes:
            with stopping_together(rank):
                if rank.rank == failing:
                    raise ZeroDivisionError("no such number\nand more")
                return rank.decide("t", b"", lambda said: b"")

        began = time.monotonic()
        found = at_once(*[lambda r=r: run(r) for r in members])
        assert time.monotonic() - began < 5
        for rank, error in enumerate(found):
            assert isinstance(error, ZeroDivisionError if rank == failing else RankError)
            assert "no such number" in str(error)
            if rank != failing:
                assert f"rank {failing} stops" in str(error)
    assert at_once(*[lambda r=r: r.decide("t", b"", lambda said: b"fine") for r in members]) == [b"fine"] * 3


def test_a_decision_that_cannot_be_made_stops_all(job: Callable[[int], list[Ranks]]) -> None:
    """Rank 0 raises what it found, the others why; the hint goes with it."""
    members = job(2)

    def decide(said: object) -> bytes:
        raise InfeasibleBudgetError("budget 1 B is too small", budget_bytes=1, floor_bytes=2, hint="raise it")

    first, second = at_once(*[lambda r=r: r.decide("t", b"", decide) for r in members])
    assert isinstance(first, InfeasibleBudgetError)
    assert isinstance(second, RankError)
    assert "rank 0 stops: budget 1 B is too small\n\nhint: raise it" in str(second)


def test_ranks_that_decide_on_different_things_stop(job: Callable[[int], list[Ranks]]) -> None:
    """One plans where the other divides: they do not run the same step."""
    found = at_once(*[lambda r=r: r.decide(f"topic {r.rank}", b"", lambda said: b"") for r in job(2)])
    assert all(isinstance(error, RankError) and "topic 1" in str(error) for error in found)


@pytest.mark.parametrize("waiting", [0, 1])
def test_nobody_waits_for_one_that_runs_on(
    job: Callable[[int], list[Ranks]], monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    """A rank that runs the next forward without compiling it does not come to decide on it."""
    monkeypatch.setattr(ranks_module, "_GRACE_S", 0.2)
    monkeypatch.setattr(ranks_module, "_LOOK_S", 0.05)
    members = job(2)
    for member in members:
        member.forward_begins()
    members[1 - waiting].forward_begins()
    with pytest.raises(RankError, match=f"rank {waiting} has to compile a graph, and rank {1 - waiting} runs on without"):
        members[waiting].decide("t", b"", lambda said: b"")


def test_one_that_does_not_come_is_named(job: Callable[[int], list[Ranks]]) -> None:
    """No rank waits longer than its process group would."""
    members = job(2)
    ranks_module.store_of_job().set_timeout(datetime.timedelta(seconds=0.3))
    with pytest.raises(RankError, match="rank 1 did not come to decide on a plan within"):
        members[0].decide("a plan", b"", lambda said: b"")


def test_rank_0_may_think_longer_than_a_collective_may_take(job: Callable[[int], list[Ranks]]) -> None:
    """A search has its own time limit: who has begun it is not gone."""
    members = job(2)
    ranks_module.store_of_job().set_timeout(datetime.timedelta(seconds=0.3))

    def decide(said: object) -> bytes:
        time.sleep(1)
        return b"at last"

    assert at_once(*[lambda r=r: r.decide("t", b"", decide) for r in members]) == [b"at last"] * 2


def test_the_plan_is_for_the_most_that_any_rank_takes(job: Callable[[int], list[Ranks]]) -> None:
    """Workspace and resident bytes may differ from rank to rank; costs are those of rank 0."""
    graphs = [graph(workspace=8, resident=100, cost=5), graph(workspace=20, resident=90, cost=7)]
    in_flight = [10, 30]
    found = at_once(*[lambda r=r: plan_together(r, graphs[r.rank], in_flight[r.rank], "a budget of 70%", keep) for r in job(2)])
    assert found[0].graph == found[1].graph
    assert found[0].result == found[1].result
    assert found[0].graph.resident_bytes == 90 + 30
    assert found[0].graph.ops[0].workspace_bytes == 20
    assert found[0].graph.ops[0].cost == 5
    assert found[1].in_flight_bytes == 30
    assert found[1].result.plan.graph_digest == found[1].graph.digest


def test_different_graphs_are_refused_on_every_rank(job: Callable[[int], list[Ranks]]) -> None:
    """The same plan cannot run both."""
    found = at_once(*[lambda r=r: plan_together(r, graph(size=16 + r.rank), 0, "a budget of 1GiB", keep) for r in job(2)])
    assert all(isinstance(error, RankError) for error in found)
    assert all(
        "rank 0 and rank 1 traced different graphs: 2 ops that write 20 B and 2 ops that write 21 B" in str(e) for e in found
    )


def test_different_budgets_are_refused_on_every_rank(job: Callable[[int], list[Ranks]]) -> None:
    """Which of them is meant, nobody knows."""
    found = at_once(*[lambda r=r: plan_together(r, graph(), 0, f"a budget of {r.rank + 1}GiB", keep) for r in job(2)])
    assert all("rank 0 asks for a budget of 1GiB and rank 1 for a budget of 2GiB" in str(error) for error in found)
