"""One plan for all ranks of a distributed job: rank 0 makes it, with the largest memory figures of all ranks.

Each rank could plan alone from the same figures, but a search with a time limit ends differently on every machine, and ranks with
different plans wait for the slowest in every collective (docs/decisions/0008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.torch.distributed.consensus import RankError, Ranks


class _RankMemory(msgspec.Struct, frozen=True):
    """Figures that may differ between ranks although they traced the same graph."""

    workspace_bytes: tuple[int, ...]  # workspace of each op. Shape ``[op]``
    resident_bytes: int
    recomputable: tuple[bool, ...]  # whether each op may be computed again; tested for custom ops. Shape ``[op]``

    def applied_to(self, graph: Graph, costs: Sequence[int]) -> Graph:
        """The graph with these memory figures and costs."""
        ops = tuple(
            msgspec.structs.replace(op, workspace_bytes=workspace, cost=cost, recomputable=recomputable)
            for op, workspace, recomputable, cost in zip(graph.ops, self.workspace_bytes, self.recomputable, costs, strict=True)
        )
        return msgspec.structs.replace(graph, ops=ops, resident_bytes=self.resident_bytes)


class _Request(msgspec.Struct, frozen=True):
    """Message of a rank: its graph without memory and costs (as digest and summary), its objective and memory figures."""

    digest: str
    objective: str
    summary: str
    memory: _RankMemory


_READ_REQUEST = msgspec.msgpack.Decoder(_Request)
_READ_ANSWER = msgspec.msgpack.Decoder(tuple[_RankMemory, tuple[int, ...], Result])


def plan_on_rank0(ranks: Ranks, graph: Graph, objective: str, plan: Callable[[Graph], Result]) -> tuple[Graph, Result]:
    """Plan, on rank 0, a graph that every rank has traced.

    The objective is the request in words, for example "a budget of 8GiB"; it must be equal on all ranks. The plan is for the
    returned graph: with the costs of rank 0, and the largest workspace and resident bytes of any rank.
    """
    memory = _RankMemory(
        tuple(op.workspace_bytes for op in graph.ops), graph.resident_bytes, tuple(op.recomputable for op in graph.ops)
    )
    none = (0,) * len(graph.ops)
    shape = _RankMemory(none, 0, (False,) * len(graph.ops)).applied_to(graph, none)
    request = _Request(shape.digest, objective, _summary(graph), memory)

    def decide(gathered: Sequence[bytes]) -> bytes:
        requests = [_READ_REQUEST.decode(each) for each in gathered]
        _refuse_different(requests)
        most = _RankMemory(
            tuple(map(max, *(a.memory.workspace_bytes for a in requests))),
            max(a.memory.resident_bytes for a in requests),
            tuple(map(all, zip(*(a.memory.recomputable for a in requests), strict=True))),
        )
        costs = tuple(op.cost for op in graph.ops)
        return msgspec.msgpack.encode((most, costs, plan(most.applied_to(graph, costs))))

    body = ranks.decide("the plan of a graph", msgspec.msgpack.encode(request), decide)
    most, costs, result = _READ_ANSWER.decode(body)
    agreed = most.applied_to(graph, costs)
    evaluate(agreed, result.plan)  # checks digest, validity and both accounts of memory on every rank
    return agreed, result


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
                hint="give every rank batches of the same shape (drop_last=True, padding), or mark the dimension as dynamic: "
                "torch._dynamo.mark_dynamic(x, dim, min=2, max=...); where ranks differ on purpose, as in a pipeline, plan on "
                "each rank separately with the option ranks='alone'",
            )
