"""What a plan takes of TensorFlow's allocator: buffers that pass from op to op, and chunks that are not split.

The plan's own account counts every output as new and every byte once. TensorFlow takes less where an elementwise
op writes into its dying input, and more where the allocator hands out a free chunk less than twice as large as
what was asked for without splitting it. Both follow from the order, which is total.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from checkmate.allocators.heap import Chunk
from checkmate.allocators.tensorflow import Bfc
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import BORROWS, FORWARDS, FORWARDS_TO_SECOND, tensor_bytes


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """The peak of a plan by three accounts, resident bytes included.

    Attributes:
        live_bytes: Every output new, every byte once: what the plan promises and the checker derives.
        forwarded_bytes: The same with outputs that take over a dying input's buffer.
        chunk_bytes: What the allocator then hands out.
    """

    live_bytes: int
    forwarded_bytes: int
    chunk_bytes: int


def allocator_peaks(capture: Capture, plan: Plan) -> AllocatorPeaks:
    """The peak of a plan as TensorFlow's allocator will see it.

    The allocator is taken to be empty but for what is resident, and the step to run twice: the second finds the chunks
    that the first has left.

    Args:
        capture: The step.
        plan: A plan of it.
    """
    resident = capture.graph.resident_bytes
    heap = Bfc()
    walk = _Walk(capture, plan)
    chunks = 0
    for _ in range(2):
        chunks = max(chunks, walk.run(heap))
    return AllocatorPeaks(simulate(capture.graph, plan).peak_bytes, resident + walk.peak, resident + chunks)


class _Walk:
    """A plan as allocations and releases."""

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        self.graph = capture.graph
        self.steps = self._grouped(plan)
        self.peak = 0  # bytes asked for, forwarding included
        self.size = {v: tensor_bytes(t) for op in capture.members for t in op.outputs if (v := capture.value_of(t)) is not None}

    def run(self, heap: Bfc) -> int:
        """Most bytes in use while the plan runs, over what was in use before."""
        base, heap.peak = heap.in_use, heap.in_use
        held: dict[int, tuple[Chunk, int]] = {}  # value -> its chunk and the bytes asked for
        asked = 0
        for o, dying in self.steps:
            op = self.graph.ops[o]
            taken = self._taken(o, dying, held)
            fresh: dict[int, tuple[Chunk, int]] = {}
            for v in op.outputs:
                size = self.graph.values[v].size_bytes
                if taken is not None and v == taken[1]:
                    fresh[v] = held.pop(taken[0])
                elif size:
                    fresh[v] = heap.allocate(size), size
                    asked += size
            needed = self._workspace_bytes(o, dying, held)
            workspace = heap.allocate(needed) if needed else None
            self.peak = max(self.peak, asked + needed)
            if workspace is not None:
                heap.release(workspace)
            for v, entry in fresh.items():
                if v in held:  # the instance that this one replaces
                    asked -= self._drop(heap, held, v)
                held[v] = entry
            for v in dying:
                if v in held:
                    asked -= self._drop(heap, held, v)
        most = heap.peak - base
        for v in list(held):
            self._drop(heap, held, v)
        return most

    def _grouped(self, plan: Plan) -> list[tuple[int, list[int]]]:
        """Every computation with the values that are freed right after it."""
        found: list[tuple[int, list[int]]] = []
        for step in plan.steps:
            if isinstance(step, Compute):
                found.append((step.op, []))
            elif found:
                found[-1][1].append(step.value)
        return found

    def _taken(self, o: int, dying: list[int], held: dict[int, tuple[Chunk, int]]) -> tuple[int, int] | None:
        """The input whose buffer becomes the first output's, and that output."""
        op, member = self.graph.ops[o], self.capture.members[o]
        second = member.type in FORWARDS_TO_SECOND
        places = (0,) if second else FORWARDS.get(member.type)
        if places is None or not op.outputs:
            return None
        out = op.outputs[1 if second else 0]
        size = self.size[out]
        reads = [self.capture.value_of(t) for t in member.inputs]
        times = Counter(r for r in reads if r is not None)
        for i in places:
            v = reads[i] if i < len(reads) else None
            if v is None or v not in dying or v not in held or times[v] > 1:
                continue
            if held[v][1] == size and size and member.inputs[i].dtype == member.outputs[1 if second else 0].dtype:
                return v, out
        return None

    def _workspace_bytes(self, o: int, dying: list[int], held: dict[int, tuple[Chunk, int]]) -> int:
        op, member = self.graph.ops[o], self.capture.members[o]
        place = BORROWS.get(member.type)
        v = None if place is None else self.capture.value_of(member.inputs[place])
        return op.workspace_bytes - (held[v][1] if v is not None and v in dying and v in held else 0)

    def _drop(self, heap: Bfc, held: dict[int, tuple[Chunk, int]], v: int) -> int:
        chunk, size = held.pop(v)
        heap.release(chunk)
        return size
