"""Ranks decide together or stop together: threads that share a store stand for processes."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from checkmate import InfeasibleBudgetError
from checkmate.torch.distributed.consensus import RankError, Ranks, broadcasting_failures, job_ranks
from tests.torch.distributed.jobs import at_once


def test_alone_there_are_no_ranks() -> None:
    """Nothing is asked of anybody where torch.distributed is not in use."""
    assert not dist.is_initialized()
    assert job_ranks() is None


def test_everybody_hears_what_rank_0_decides(job: Callable[..., list[Ranks]], store: dist.Store) -> None:
    """From what all said, once for each decision, and nothing but the newest stays in the store."""
    members = job(3)
    for turn in range(3):
        said = at_once(*[lambda r=r, turn=turn: r.decide("t", bytes([turn, r.rank]), b"|".join) for r in members])
        assert said == [b"|".join(bytes([turn, rank]) for rank in range(3))] * 3
    assert not store.check(["0/answer"])
    assert not store.check(["1/1"])
    assert store.check(["2/answer"])


def test_one_that_fails_stops_all(job: Callable[[int], list[Ranks]]) -> None:
    """Whichever it is, with its reason on every rank; the next decision is as if nothing had been."""
    members = job(3)
    for failing in range(3):

        def run(rank: Ranks, failing: int = failing) -> bytes:
            with broadcasting_failures(rank):
                if rank.rank == failing:
                    raise ZeroDivisionError("no such number\nand more")
                return rank.decide("t", b"", lambda said: b"")

        found = at_once(*[lambda r=r: run(r) for r in members])
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
def test_nobody_waits_for_one_that_runs_on(job: Callable[..., list[Ranks]], waiting: int) -> None:
    """A rank that runs the next forward without compiling it does not come to decide on it."""
    members = job(2, grace_s=0.2)
    for member in members:
        member.record_forward()
    members[1 - waiting].record_forward()
    with pytest.raises(RankError, match=f"rank {waiting} has to compile a graph, and rank {1 - waiting} runs on without"):
        members[waiting].decide("t", b"", lambda said: b"")


def test_one_that_does_not_come_is_named(job: Callable[..., list[Ranks]], store: dist.Store) -> None:
    """No rank waits longer than its process group would."""
    members = job(2)
    store.set_timeout(datetime.timedelta(seconds=0.3))
    with pytest.raises(RankError, match="rank 1 did not come to decide on a plan within"):
        members[0].decide("a plan", b"", lambda said: b"")


@pytest.mark.parametrize("call", ["check", "get", "set"])
def test_no_rank_waits_for_a_store_that_is_stopped(call: str) -> None:
    """It is held by rank 0 as a rule, and a call of a stopped one has no limit."""
    over = threading.Event()

    class Stopped:
        """A store that never returns from a call."""

        timeout = datetime.timedelta(seconds=0.3)

        def __init__(self) -> None:
            self.content = {"0/answer": b"1"}

        def check(self, keys: list[str]) -> bool:
            self.called("check")
            return keys[0] in self.content

        def get(self, key: str) -> bytes:
            self.called("get")
            return self.content[key]

        def set(self, key: str, value: bytes) -> None:
            self.called("set")

        def called(self, name: str) -> None:
            if name == call:
                over.wait()

    store: Any = Stopped()
    try:
        with pytest.raises(RankError, match="the store at which the ranks met has not answered"):
            Ranks(1, 2, lambda: store).decide("a plan", b"", lambda said: b"")
    finally:
        over.set()
