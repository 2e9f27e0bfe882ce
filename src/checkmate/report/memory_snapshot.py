"""Export of a plan as a PyTorch memory snapshot, for the viewer at pytorch.org/memory_viz."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.oom.snapshot import Block, Event, Frame, Segment, Snapshot
from checkmate.studies.reserved import requests

_PLACE = re.compile(r"(?:^|, )([^,]+):(\d+)$")
_BASE = 0x7F0000000000


def memory_snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Convert a plan to the format of `torch.cuda.memory._snapshot`.

    Every storage, workspace and replay state is allocated and freed in the order of the plan. Addresses are never reused:
    the snapshot has the allocated bytes, without rounding and fragmentation. Resident memory is one block that is
    allocated from the start.

    Args:
        graph: The graph.
        plan: A plan of the graph.

    Returns:
        An object to be pickled, made of dictionaries, lists, numbers and text only.

    Raises:
        PlanError: The plan cannot run.
        WrongGraphError: The plan was made for another graph.

    Examples:
        >>> import checkmate
        >>> graph = checkmate.Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> snapshot = memory_snapshot(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> [(event["action"], event["size"]) for event in snapshot["device_traces"][0]]
        [('alloc', 4), ('alloc', 2), ('free_requested', 4), ('free_completed', 4)]
    """
    simulate(graph, plan)
    recorder = _Recorder(graph)
    asked = iter(requests(graph, plan))
    request = next(asked, None)
    for p, step in enumerate(plan.steps):
        op = step.op if isinstance(step, Compute) else None
        while request is not None and request.step == p:
            if request.size_bytes:
                recorder.allocate(request.block, request.size_bytes, request.name, op)
            else:
                recorder.free(request.block)
            request = next(asked, None)
        recorder.clock += 0 if op is None else graph.ops[op].cost
    return recorder.snapshot()


class _Recorder:
    """Blocks and events of a snapshot."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.clock = 0
        self.next = _BASE
        self.blocks: dict[int, Block] = {}
        self.events: list[Event] = []
        self.resident = self._block(graph.resident_bytes, [Frame("resident", "", 0)])

    def allocate(self, number: int, size_bytes: int, name: str, op: int | None) -> None:
        frames = [Frame(name, "", 0)] + ([] if op is None else _frames(self.graph, op))
        self.blocks[number] = self._block(size_bytes, frames)
        self._note("alloc", self.blocks[number])

    def free(self, number: int) -> None:
        block = self.blocks.pop(number)
        self._note("free_requested", block)
        self._note("free_completed", block)

    def snapshot(self) -> dict[str, Any]:
        left = [self.resident, *self.blocks.values()] if self.graph.resident_bytes else list(self.blocks.values())
        segments = [_segment(block) for block in left]
        content = msgspec.to_builtins(Snapshot(segments=segments, device_traces=[self.events]))
        for event in content["device_traces"][0]:
            del event["device_free"]  # only the events of errors have it
        return content

    def _block(self, size_bytes: int, frames: list[Frame]) -> Block:
        address = self.next
        self.next += -(-size_bytes // 512) * 512
        return Block(address=address, size=size_bytes, requested_size=size_bytes, state="active_allocated", frames=frames)

    def _note(self, action: str, block: Block) -> None:
        event = Event(action=action, addr=block.address, size=block.size, time_us=self.clock // 1000, frames=block.frames)
        self.events.append(event)


def _segment(block: Block) -> Segment:
    return Segment(
        address=block.address,
        total_size=block.size,
        allocated_size=block.size,
        active_size=block.size,
        requested_size=block.size,
        blocks=[block],
    )


def _frames(graph: Graph, o: int) -> list[Frame]:
    op = graph.ops[o]
    place = _PLACE.search(op.source)
    file, line = ("", 0) if place is None else (place[1], int(place[2]))
    return [Frame(op.kind or op.name, file, line), Frame(op.source or op.name, file, line)]
