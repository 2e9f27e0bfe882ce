"""Predicts the peak of a plan in TensorFlow's allocator: buffer forwarding between ops, and chunks that are not split.

`simulate` counts every output as a new buffer and every byte once. TensorFlow needs fewer bytes where an op writes its
output into an input that has no later reader (buffer forwarding, ``OpKernelContext::forward_input`` in
tensorflow/core/framework/op_kernel.cc). It needs more where the allocator returns a free chunk that is less than twice the
requested size, which it does not split (xla/tsl/framework/bfc_allocator.cc). Both are determined by the plan, since its
order is total.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from checkmate.allocators import Bfc, Chunk
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.tf2.graph.capture import Capture
from checkmate.tf2.graph.op_properties import FORWARDS, FORWARDS_TO_SECOND, FORWARDS_TO_WORKSPACE, tensor_bytes


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """The peak of a plan by three accounts, each with resident bytes included.

    Attributes:
        live_bytes: Every output counts as a new buffer and every byte once, as in `simulate` and `validate`.
        forwarded_bytes: The same with forwarded buffers: an output can reuse the buffer of an input without later readers.
        chunk_bytes: Bytes of the chunks that the allocator returns for these requests.
    """

    live_bytes: int
    forwarded_bytes: int
    chunk_bytes: int


def allocator_peaks(capture: Capture, plan: Plan) -> AllocatorPeaks:
    """Predict the peak of a plan in TensorFlow's allocator.

    The simulated allocator has only the resident bytes allocated at first. The step runs in it twice, because the second run
    finds the free chunks that the first has left; the larger peak counts.

    Args:
        capture: The captured step.
        plan: A plan of its graph.
    """
    resident = capture.graph.resident_bytes
    heap = Bfc()
    replay = _AllocationReplay(capture, plan)
    chunks = 0
    for _ in range(2):
        chunks = max(chunks, replay.run(heap))
    return AllocatorPeaks(simulate(capture.graph, plan).peak_bytes, resident + replay.requested_peak, resident + chunks)


class _AllocationReplay:
    """Runs the allocations and deallocations of a plan in a simulated allocator."""

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        self.graph = capture.graph
        self.steps = self._grouped(plan)
        self.requested_peak = 0  # bytes, forwarding included
        self.size = {v: tensor_bytes(t) for op in capture.members for t in op.outputs if (v := capture.value_of(t)) is not None}

    def run(self, heap: Bfc) -> int:
        """Replay the plan once.

        Args:
            heap: The allocator; its free chunks change.

        Returns:
            Peak bytes of allocated chunks above those allocated before.
        """
        base, heap.peak = heap.in_use, heap.in_use
        held: dict[int, tuple[Chunk, int]] = {}  # value -> its chunk and the requested bytes
        requested = 0
        for o, dying in self.steps:
            op = self.graph.ops[o]
            forwarded = self._forwarded(o, dying, held)
            fresh: dict[int, tuple[Chunk, int]] = {}
            for v in op.outputs:
                size = self.graph.values[v].size_bytes
                if forwarded is not None and v == forwarded[1]:
                    fresh[v] = held.pop(forwarded[0])
                elif size:
                    fresh[v] = heap.allocate(size), size
                    requested += size
            workspace_bytes = self._workspace_bytes(o, dying, held)
            workspace = heap.allocate(workspace_bytes) if workspace_bytes else None
            self.requested_peak = max(self.requested_peak, requested + workspace_bytes)
            if workspace is not None:
                heap.release(workspace)
            for v, entry in fresh.items():
                if v in held:  # the earlier instance, which this one replaces
                    requested -= self._release(heap, held, v)
                held[v] = entry
            for v in dying:
                if v in held:
                    requested -= self._release(heap, held, v)
        most = heap.peak - base
        for v in list(held):
            self._release(heap, held, v)
        return most

    def _grouped(self, plan: Plan) -> list[tuple[int, list[int]]]:
        """Every computation with the values that are freed immediately after it."""
        found: list[tuple[int, list[int]]] = []
        for step in plan.steps:
            if isinstance(step, Compute):
                found.append((step.op, []))
            elif found:
                found[-1][1].append(step.value)
        return found

    def _forwarded(self, o: int, dying: list[int], held: dict[int, tuple[Chunk, int]]) -> tuple[int, int] | None:
        """The input whose buffer an output reuses, and that output, as values; None if every output has a new buffer."""
        op, member = self.graph.ops[o], self.capture.members[o]
        second = member.type in FORWARDS_TO_SECOND
        candidates = (0,) if second else FORWARDS.get(member.type)
        if candidates is None or not op.outputs:
            return None
        out = op.outputs[1 if second else 0]
        size = self.size[out]
        reads = [self.capture.value_of(t) for t in member.inputs]
        times = Counter(r for r in reads if r is not None)
        for i in candidates:
            v = reads[i] if i < len(reads) else None
            if v is None or v not in dying or v not in held or times[v] > 1:
                continue
            if held[v][1] == size and size and member.inputs[i].dtype == member.outputs[1 if second else 0].dtype:
                return v, out
        return None

    def _workspace_bytes(self, o: int, dying: list[int], held: dict[int, tuple[Chunk, int]]) -> int:
        """Workspace that an op requests, less the buffer of a dying input that its kernel uses instead."""
        op, member = self.graph.ops[o], self.capture.members[o]
        position = FORWARDS_TO_WORKSPACE.get(member.type)
        v = None if position is None else self.capture.value_of(member.inputs[position])
        return op.workspace_bytes - (held[v][1] if v is not None and v in dying and v in held else 0)

    def _release(self, heap: Bfc, held: dict[int, tuple[Chunk, int]], v: int) -> int:
        chunk, size = held.pop(v)
        heap.release(chunk)
        return size
