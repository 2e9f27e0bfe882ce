"""One plan for all ranks of a distributed job: rank 0 makes it, for the most memory that any of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.solvers.given import check_given
from checkmate.torch.distributed.consensus import RankError, Ranks


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """What all ranks run.

    Attributes:
        graph: The graph, with the costs that rank 0 measured and the most memory that any rank takes.
        in_flight_bytes: The most bytes in flight on any rank, among what is resident.
        result: The plan that rank 0 found.
    """

    graph: Graph
    in_flight_bytes: int
    result: Result


class _RankMemory(msgspec.Struct, frozen=True):
    """What a plan depends on besides the shape of its graph.

    Attributes:
        workspace_bytes: Workspace of each op.
        other_resident_bytes: What is resident but for what is in flight.
        in_flight_bytes: What is in flight.
    """

    workspace_bytes: tuple[int, ...]
    other_resident_bytes: int
    in_flight_bytes: int

    def applied_to(self, graph: Graph, costs: Sequence[int]) -> Graph:
        ops = tuple(
            msgspec.structs.replace(op, workspace_bytes=workspace, cost=cost)
            for op, workspace, cost in zip(graph.ops, self.workspace_bytes, costs, strict=True)
        )
        return msgspec.structs.replace(graph, ops=ops, resident_bytes=self.other_resident_bytes + self.in_flight_bytes)


class _Request(msgspec.Struct, frozen=True):
    digest: str
    objective: str
    summary: str
    memory: _RankMemory


class _Answer(msgspec.Struct, frozen=True):
    memory: _RankMemory
    costs: tuple[int, ...]
    result: Result


_READ_REQUEST = msgspec.msgpack.Decoder(_Request)
_READ_ANSWER = msgspec.msgpack.Decoder(_Answer)


def plan_on_rank0(
    ranks: Ranks, graph: Graph, in_flight_bytes: int, objective: str, plan: Callable[[Graph, int], Result]
) -> AgreedPlan:
    """The plan of a graph that every rank has traced.

    Args:
        ranks: The ranks.
        graph: The graph as this rank sees it.
        in_flight_bytes: What is in flight among what is resident.
        objective: What the plan has to keep, in words; the same on every rank.
        plan: Plans a graph beside some bytes in flight; called on rank 0 alone.

    Raises:
        RankError: The ranks traced different graphs or want different plans, or rank 0 found none.
        CheckmateError: No plan, on rank 0.
    """
    memory = _RankMemory(tuple(op.workspace_bytes for op in graph.ops), graph.resident_bytes - in_flight_bytes, in_flight_bytes)
    shape = _RankMemory((0,) * len(graph.ops), 0, 0).applied_to(graph, [0] * len(graph.ops))
    request = _Request(shape.digest, objective, _summary(graph), memory)

    def decide(gathered: Sequence[bytes]) -> bytes:
        requests = [_READ_REQUEST.decode(each) for each in gathered]
        _refuse_different(requests)
        most = _RankMemory(
            tuple(map(max, *(a.memory.workspace_bytes for a in requests))),
            max(a.memory.other_resident_bytes for a in requests),
            max(a.memory.in_flight_bytes for a in requests),
        )
        costs = tuple(op.cost for op in graph.ops)
        return msgspec.msgpack.encode(_Answer(most, costs, plan(most.applied_to(graph, costs), most.in_flight_bytes)))

    body = ranks.decide("the plan of a graph", msgspec.msgpack.encode(request), decide)
    answer = _READ_ANSWER.decode(body)
    agreed = answer.memory.applied_to(graph, answer.costs)
    assert answer.result.plan is not None
    check_given(agreed, answer.result.plan, None)  # its digest, and both accounts of memory, on every rank
    return AgreedPlan(agreed, answer.memory.in_flight_bytes, answer.result)


def _summary(graph: Graph) -> str:
    return f"{len(graph.ops)} ops that write {format_bytes(sum(value.size_bytes for value in graph.values))}"


def _refuse_different(requests: Sequence[_Request]) -> None:
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.objective != first.objective:
            raise RankError(
                f"rank 0 asks for {first.objective} and rank {rank} for {request.objective}",
                hint="give every rank the same options",
            )
        if request.digest != first.digest:
            how = (
                f"{first.summary} and {request.summary}"
                if request.summary != first.summary
                else f"both {request.summary}, in other places"
            )
            raise RankError(
                f"rank 0 and rank {rank} traced different graphs: {how}",
                hint="give every rank batches of the same shape (drop_last, padding), or mark the dimension dynamic with a "
                "largest size; where ranks are meant to differ, as in a pipeline, let each plan for itself: ranks='alone'",
            )
