"""Predicts the peak of a plan in TensorFlow's allocator: buffer forwarding between ops, and chunks that are not split.

`simulate` counts every output as a new buffer and every byte once. TensorFlow needs fewer bytes if an op writes its
output into an input that has no later reader (buffer forwarding, ``OpKernelContext::forward_input`` in
tensorflow/core/framework/op_kernel.cc). It needs more if the allocator returns a free chunk that is less than twice the
requested size, which it does not split (xla/tsl/framework/bfc_allocator.cc). The plan determines both, since its
order is total.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from checkmate.allocators import Bfc, Chunk
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import FORWARDS, FORWARDS_TO_SECOND, FORWARDS_TO_WORKSPACE, tensor_bytes


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
    """
    replay = _AllocationReplay(capture)
    steps: list[tuple[int, list[int]]] = []  # every computation with the values that are freed immediately after it
    for step in plan.steps:
        if isinstance(step, Compute):
            steps.append((step.op, []))
        elif steps:
            steps[-1][1].append(step.value)
    for _ in range(2):
        for o, dying in steps:
            replay.compute(o, dying)
        for v in list(replay.held):
            replay.release(v)
    resident = capture.graph.resident_bytes
    return AllocatorPeaks(simulate(capture.graph, plan).peak_bytes, resident + replay.requested_peak, resident + replay.heap.peak)


class _AllocationReplay:
    """Repeats the allocations and frees of a plan's computations in a simulated allocator."""

    def __init__(self, capture: Capture) -> None:
        self.capture, self.graph = capture, capture.graph
        self.heap = Bfc()
        self.held: dict[int, tuple[Chunk, int]] = {}  # value -> its chunk and the requested bytes
        self.requested = self.requested_peak = 0  # bytes, forwarding included
        self.size = {v: tensor_bytes(t) for op in capture.members for t in op.outputs if (v := capture.value_of(t)) is not None}

    def compute(self, o: int, dying: list[int]) -> None:
        """Allocate outputs and workspace of an op, and free the values that die with it."""
        op, workspace_bytes = self.graph.ops[o], self._workspace_bytes(o, dying)
        source, reusing = self._forwarded(o, dying) or (None, None)
        made: dict[int, tuple[Chunk, int]] = {}
        for v in op.outputs:
            size = self.graph.values[v].size_bytes
            if source is not None and v == reusing:
                made[v] = self.held.pop(source)
            elif size:
                made[v] = self.heap.allocate(size), size
                self.requested += size
        self.requested_peak = max(self.requested_peak, self.requested + workspace_bytes)
        if workspace_bytes:
            self.heap.release(self.heap.allocate(workspace_bytes))
        for v in made:
            self.release(v)  # the earlier instance, which this one replaces
        self.held.update(made)
        for v in dying:
            self.release(v)

    def release(self, v: int) -> None:
        """Free a value, if it is held."""
        if v in self.held:
            chunk, size = self.held.pop(v)
            self.heap.release(chunk)
            self.requested -= size

    def _forwarded(self, o: int, dying: list[int]) -> tuple[int, int] | None:
        """The input whose buffer an output reuses, and that output, as values; None if every output has a new buffer."""
        op, member = self.graph.ops[o], self.capture.members[o]
        position = int(member.type in FORWARDS_TO_SECOND)
        candidates = (0,) if position else FORWARDS.get(member.type, ())
        if not op.outputs:
            return None
        size, dtype = self.size[op.outputs[position]], member.outputs[position].dtype
        reads = [self.capture.value_of(t) for t in member.inputs]
        times = Counter(reads)
        for i in candidates:
            v = reads[i] if i < len(reads) else None
            if v is None or v not in dying or v not in self.held or times[v] > 1:
                continue
            if self.held[v][1] == size and size and member.inputs[i].dtype == dtype:
                return v, op.outputs[position]
        return None

    def _workspace_bytes(self, o: int, dying: list[int]) -> int:
        """Workspace that an op requests, less the buffer of a dying input that its kernel uses instead."""
        member = self.capture.members[o]
        position = FORWARDS_TO_WORKSPACE.get(member.type)
        v = None if position is None else self.capture.value_of(member.inputs[position])
        reused = self.held[v][1] if v is not None and v in dying and v in self.held else 0
        return self.graph.ops[o].workspace_bytes - reused
