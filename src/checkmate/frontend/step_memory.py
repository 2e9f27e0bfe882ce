"""Memory of one training step, split where the backward begins."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes that a step needs above resident memory, measured or predicted from a plan."""

    forward_peak_bytes: int  # peak of the forward
    saved_bytes: int  # bytes held from the end of the forward to the beginning of the backward
    backward_peak_bytes: int  # peak of the backward
    gradient_bytes: int  # bytes of the gradients that the backward leaves

    @property
    def peak_bytes(self) -> int:
        """Peak of the step."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def plus(self, size_bytes: int) -> StepMemory:
        """The memory with ``size_bytes`` more at every time."""
        return StepMemory(**{name: value + size_bytes for name, value in asdict(self).items()})

    def within(self, other: StepMemory) -> bool:
        """Whether the step never takes more memory than another one."""
        return all(value <= most for value, most in zip(astuple(self), astuple(other), strict=True))

    @classmethod
    def of_whole_step(cls, peak_bytes: int) -> StepMemory:
        """Memory of a step without a separate backward that leaves no gradients."""
        return cls(forward_peak_bytes=peak_bytes, saved_bytes=0, backward_peak_bytes=0, gradient_bytes=0)

    @classmethod
    def of(cls, graph: Graph, plan: Plan, transient_gradient_bytes: int = 0) -> StepMemory:
        """Memory of a plan for a graph with a boundary between forward and backward, by `simulate`."""
        boundary = graph.boundary
        if boundary is None:
            raise ValueError(f"graph {graph.name!r} has no boundary between forward and backward")
        above = simulate(graph, plan).bytes - graph.resident_bytes
        at = plan.steps.index(Compute(boundary))
        made = {v for op in graph.ops if op.phase == "backward" for v in op.outputs if graph.values[v].kept}
        gradients = sum(graph.values[v].size_bytes for v in {graph.root[v] for v in made})
        tangents = sum(graph.values[v].size_bytes for v in graph.ops[boundary].outputs)
        return cls(
            forward_peak_bytes=int(above[: at + 1].max()),
            saved_bytes=int(above[at]) - tangents,
            backward_peak_bytes=int(above[at:].max()),
            gradient_bytes=max(0, gradients - transient_gradient_bytes),
        )
