"""One plan for all ranks of a distributed job: rank 0 makes it, for the most memory that any of them takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.torch.distributed.consensus import RankError, Ranks


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks run.

    Attributes:
        graph: The graph, with the costs that rank 0 measured and the most memory that any rank takes.
        in_flight_bytes: The most bytes in flight on any rank, among what is resident.
        result: The plan that rank 0 found.
    """

    graph: Graph
    in_flight_bytes: int
    result: Result


class _Memory(msgspec.Struct, frozen=True):
    """What a plan depends on besides the shape of its graph.

    Attributes:
        workspace_bytes: Workspace of each op.
        apart_bytes: What is resident but for what is in flight.
        in_flight_bytes: What is in flight.
    """

    workspace_bytes: tuple[int, ...]
    apart_bytes: int
    in_flight_bytes: int

    def onto(self, graph: Graph, costs: Sequence[int]) -> Graph:
        ops = tuple(
            msgspec.structs.replace(op, workspace_bytes=workspace, cost=cost)
            for op, workspace, cost in zip(graph.ops, self.workspace_bytes, costs, strict=True)
        )
        return msgspec.structs.replace(graph, ops=ops, resident_bytes=self.apart_bytes + self.in_flight_bytes)


class _Ask(msgspec.Struct, frozen=True):
    digest: str
    wanted: str
    shown: str
    memory: _Memory


class _Answer(msgspec.Struct, frozen=True):
    memory: _Memory
    costs: tuple[int, ...]
    result: Result


_READ_ASK = msgspec.msgpack.Decoder(_Ask)
_READ_ANSWER = msgspec.msgpack.Decoder(_Answer)


def plan_together(ranks: Ranks, graph: Graph, in_flight_bytes: int, wanted: str, plan: Callable[[Graph, int], Result]) -> Agreed:
    """The plan of a graph that every rank has traced.

    Args:
        ranks: The ranks.
        graph: The graph as this rank sees it.
        in_flight_bytes: What is in flight among what is resident.
        wanted: What the plan has to keep, in words; the same on every rank.
        plan: Plans a graph beside some bytes in flight; called on rank 0 alone.

    Raises:
        RankError: The ranks traced different graphs or want different plans, or rank 0 found none.
        CheckmateError: No plan, on rank 0.
    """
    memory = _Memory(tuple(op.workspace_bytes for op in graph.ops), graph.resident_bytes - in_flight_bytes, in_flight_bytes)
    shape = _Memory((0,) * len(graph.ops), 0, 0).onto(graph, [0] * len(graph.ops))
    ask = _Ask(shape.digest, wanted, _shown(graph), memory)

    def decide(said: Sequence[bytes]) -> bytes:
        asks = [_READ_ASK.decode(each) for each in said]
        _refuse_different(asks)
        most = _Memory(
            tuple(map(max, *(a.memory.workspace_bytes for a in asks))),
            max(a.memory.apart_bytes for a in asks),
            max(a.memory.in_flight_bytes for a in asks),
        )
        costs = tuple(op.cost for op in graph.ops)
        return msgspec.msgpack.encode(_Answer(most, costs, plan(most.onto(graph, costs), most.in_flight_bytes)))

    body = ranks.decide("the plan of a graph", msgspec.msgpack.encode(ask), decide)
    answer = _READ_ANSWER.decode(body)
    agreed = answer.memory.onto(graph, answer.costs)
    evaluate(agreed, answer.result.plan)  # its digest, and both accounts of memory, on every rank
    return Agreed(agreed, answer.memory.in_flight_bytes, answer.result)


def _shown(graph: Graph) -> str:
    return f"{len(graph.ops)} ops that write {format_bytes(sum(value.size_bytes for value in graph.values))}"


def _refuse_different(asks: Sequence[_Ask]) -> None:
    first = asks[0]
    for rank, ask in enumerate(asks):
        if ask.wanted != first.wanted:
            raise RankError(
                f"rank 0 asks for {first.wanted} and rank {rank} for {ask.wanted}", hint="give every rank the same options"
            )
        if ask.digest != first.digest:
            how = f"{first.shown} and {ask.shown}" if ask.shown != first.shown else f"both {ask.shown}, in other places"
            raise RankError(
                f"rank 0 and rank {rank} traced different graphs: {how}",
                hint="give every rank batches of the same shape (drop_last, padding), or mark the dimension dynamic with a "
                "largest size; where ranks are meant to differ, as in a pipeline, let each plan for itself: ranks='alone'",
            )
