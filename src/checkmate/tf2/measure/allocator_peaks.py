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

from checkmate.allocators.heap import Chunk, Heap
from checkmate.allocators.tensorflow import Bfc
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
    requests = Requests(capture, plan)
    chunks = max(requests.replay(heap) for _ in range(2))
    return AllocatorPeaks(simulate(capture.graph, plan).peak_bytes, resident + requests.peak_bytes, resident + chunks)


class Requests:
    """The allocations and deallocations of a plan, in order. They do not depend on what else is allocated.

    Args:
        capture: The captured step.
        plan: A plan of its graph.

    Attributes:
        peak_bytes: Peak of the requested bytes, forwarding included.
    """

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        self.graph = capture.graph
        self.peak_bytes = 0
        self._requested = 0
        self._sizes: list[int] = []  # of each block, in the order of allocation
        self._events: list[int] = []  # block that is allocated; ~block if it is freed
        self._size = {v: tensor_bytes(t) for op in capture.members for t in op.outputs if (v := capture.value_of(t)) is not None}
        held: dict[int, int] = {}  # value -> its block
        for o, dying in self._grouped(plan):
            self._compute(o, dying, held)
        for block in held.values():
            self._free(block)

    def replay(self, heap: Heap) -> int:
        """Run all requests in a simulated allocator once; its free chunks change.

        Args:
            heap: The allocator.

        Returns:
            Peak bytes of allocated chunks above those allocated before.
        """
        base, heap.peak = heap.in_use, heap.in_use
        chunks: list[Chunk] = []
        for event in self._events:
            if event < 0:
                heap.release(chunks[~event])
            else:
                chunks.append(heap.allocate(self._sizes[event]))
        return heap.peak - base

    def _compute(self, o: int, dying: list[int], held: dict[int, int]) -> None:
        op = self.graph.ops[o]
        forwarded = self._forwarded(o, dying, held)
        fresh: dict[int, int] = {}
        for v in op.outputs:
            size = self.graph.values[v].size_bytes
            if forwarded is not None and v == forwarded[1]:
                fresh[v] = held.pop(forwarded[0])
            elif size:
                fresh[v] = self._allocate(size)
        workspace_bytes = self._workspace_bytes(o, dying, held)
        if workspace_bytes > 0:
            self._free(self._allocate(workspace_bytes))
        for v, block in fresh.items():
            if v in held:  # the earlier instance, which this one replaces
                self._free(held.pop(v))
            held[v] = block
        for v in dying:
            if v in held:
                self._free(held.pop(v))

    def _allocate(self, size: int) -> int:
        self._events.append(len(self._sizes))
        self._sizes.append(size)
        self._requested += size
        self.peak_bytes = max(self.peak_bytes, self._requested)
        return len(self._sizes) - 1

    def _free(self, block: int) -> None:
        self._events.append(~block)
        self._requested -= self._sizes[block]

    def _grouped(self, plan: Plan) -> list[tuple[int, list[int]]]:
        """Every computation with the values that are freed immediately after it."""
        found: list[tuple[int, list[int]]] = []
        for step in plan.steps:
            if isinstance(step, Compute):
                found.append((step.op, []))
            elif found:
                found[-1][1].append(step.value)
        return found

    def _forwarded(self, o: int, dying: list[int], held: dict[int, int]) -> tuple[int, int] | None:
        """The input whose buffer an output reuses, and that output, as values; None if every output has a new buffer."""
        op, member = self.graph.ops[o], self.capture.members[o]
        second = member.type in FORWARDS_TO_SECOND
        candidates = (0,) if second else FORWARDS.get(member.type)
        if candidates is None or not op.outputs:
            return None
        out = op.outputs[1 if second else 0]
        size = self._size[out]
        reads = [self.capture.value_of(t) for t in member.inputs]
        times = Counter(r for r in reads if r is not None)
        for i in candidates:
            v = reads[i] if i < len(reads) else None
            if v is None or v not in dying or v not in held or times[v] > 1:
                continue
            if self._sizes[held[v]] == size and size and member.inputs[i].dtype == member.outputs[1 if second else 0].dtype:
                return v, out
        return None

    def _workspace_bytes(self, o: int, dying: list[int], held: dict[int, int]) -> int:
        """Workspace that an op requests, less the buffer of a dying input that its kernel uses instead."""
        op, member = self.graph.ops[o], self.capture.members[o]
        position = FORWARDS_TO_WORKSPACE.get(member.type)
        v = None if position is None else self.capture.value_of(member.inputs[position])
        return op.workspace_bytes - (self._sizes[held[v]] if v is not None and v in dying and v in held else 0)
