"""What `fits` answers, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes, format_cost
from checkmate.cost.device import Device
from checkmate.studies.max_batch import MaxBatch

Verdict = Literal["keeps everything", "fits with recomputation", "does not fit", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Whether a training step fits a device, and how much of everything does.

    Attributes:
        verdict: The answer. ``"does not fit"`` is proven; ``"not known"`` is where no plan was found and none is excluded.
        device: The device's profile.
        memory_bytes: Memory that a process sees on it.
        headroom_bytes: What is left free of it, besides the runtime's context.
        available_bytes: What is left for the step.
        graph: The step as it is traced for the device.
        whole: Whether the optimizer's updates are in the graph, each where its gradient is born.
        parameter_bytes: Parameters and buffers of the model.
        state_bytes: State of the optimizer.
        keep_all_bytes: Peak of keeping everything.
        smallest_bytes: Smallest peak that a plan was found for.
        floor_bytes: Proven: no plan takes less.
        why: What sets the floor, in words.
        result: The best plan found for what is available; None where there is none.
        reserved_bytes: What PyTorch's allocator is predicted to take of the device while that plan runs again and again
            (`checkmate.studies.reserved`); None where there is no plan, or the device has another allocator.
        batch: Size of the example's first dimension; None if its tensors share none.
        largest_batch: The largest batch with a plan, and a proof that none is much larger; None if not looked for.
        sequence: Size of the dimension that was named; None if none was.
        longest_sequence: The same for it.
        remarks: What is not known, or not measured, in words.
        elapsed_s: Wall seconds.
    """

    verdict: Verdict
    device: Device
    memory_bytes: int
    headroom_bytes: int
    available_bytes: int
    graph: Graph
    whole: bool
    parameter_bytes: int
    state_bytes: int
    keep_all_bytes: int
    smallest_bytes: int
    floor_bytes: int
    why: str
    result: Result | None
    reserved_bytes: int | None
    batch: int | None
    largest_batch: MaxBatch | None
    sequence: int | None
    longest_sequence: MaxBatch | None
    remarks: tuple[str, ...]
    elapsed_s: float

    def __bool__(self) -> bool:
        """Whether a plan was found with which the step fits."""
        return self.verdict in ("keeps everything", "fits with recomputation")

    def rows(self) -> list[tuple[str, str]]:
        """Named rows in words, in the order of the questions."""
        shown = format_bytes
        context = shown(self.device.context_bytes)
        taken = f"{shown(self.memory_bytes)} less {context} of context and {shown(self.headroom_bytes)} of headroom"
        rows = [
            ("device", f"{self.device.name}, {self.device.about}"),
            ("available", f"{shown(self.available_bytes)}: {taken}"),
            ("resident", f"{shown(self.graph.resident_bytes)}: parameters {shown(self.parameter_bytes)}, "
             f"optimizer state {shown(self.state_bytes)}"),
            ("keep-all", shown(self.keep_all_bytes)),
            ("smallest", f"{shown(self.smallest_bytes)} found"),
            ("floor", f"{shown(self.floor_bytes)}: {self.why}"),
            ("verdict", self.verdict + self._price()),
        ]  # fmt: skip
        if self.reserved_bytes is not None:
            room = f"the allocator's segments, of {shown(self.memory_bytes - self.device.context_bytes)}"
            rows.append(("reserved", f"{shown(self.reserved_bytes)} predicted: {room}"))
        for name, now, most in (
            ("batch", self.batch, self.largest_batch),
            ("sequence", self.sequence, self.longest_sequence),
        ):
            if most is not None:
                exact = "no larger one fits" if most.batch == most.upper_bound else f"none above {most.upper_bound} fits"
                rows.append((name, f"{now} asked, {most.batch} at most, at {most.result.overhead:.3f}x; {exact}"))
        return rows

    def _price(self) -> str:
        if self.result is None or self.result.cost is None or self.result.peak_bytes is None:
            return ""
        time = format_cost(self.result.cost, self.graph.cost_unit)
        return f": {self.result.overhead:.3f}x of keeping everything, {format_bytes(self.result.peak_bytes)}; at least {time}"

    def render(self) -> str:
        """The rows and remarks as text."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows) + 2
        lines = [f"{name:<{width}}{text}" for name, text in rows]
        return "\n".join([*lines, "", *self.remarks])

    __str__ = render
