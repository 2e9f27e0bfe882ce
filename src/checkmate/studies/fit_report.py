"""The report of `fits`: whether a step fits a device, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.cost.device import Device
from checkmate.studies.max_batch import MaxBatch

Verdict = Literal["keeps everything", "fits with recomputation", "fits with copies from the host", "does not fit", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Report on whether a training step fits a device, and the largest batch or sequence that does.

    Attributes:
        verdict: The answer. ``"does not fit"`` is proven. ``"not known"`` means that no plan was found, and that it is not
            proven that there is none.
        device: The device's profile.
        memory_bytes: Memory of the device, as a process sees it.
        headroom_bytes: Memory to be left free, in addition to the runtime's context.
        available_bytes: Memory for the step: ``memory_bytes`` less context and headroom.
        graph: The step, traced for the device.
        whole: Whether the optimizer's updates are in the graph, each as soon as its gradient is complete.
        parameter_bytes: Bytes of the model's parameters and buffers.
        state_bytes: Bytes of the optimizer's state.
        keep_all_bytes: Peak without recomputation.
        smallest_bytes: Smallest peak of the plans found.
        floor_bytes: Proven lower bound on the peak of every plan.
        why: The reason for the floor, in words.
        result: The best plan found within ``available_bytes``; None if none was found.
        reserved_bytes: Bytes that PyTorch's caching allocator is predicted to reserve on the device while that plan runs step
            after step (`checkmate.studies.reserved`); None without a plan, or for a device with another allocator.
        batch: Size of the example's first dimension; None if its tensors differ in it.
        largest_batch: The largest batch with a plan, and a proven upper bound; None if it was not searched or not found.
        sequence: Size of the dimension given as ``sequence_dim``; None if none was given.
        longest_sequence: The largest size of that dimension, as for the batch.
        remarks: Sentences on figures that are unknown, estimated or were not searched.
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
        """True if a plan was found that fits."""
        return self.verdict.startswith(("keeps", "fits"))

    def rows(self) -> list[tuple[str, str]]:
        """The report as pairs of a name and a text."""
        shown = format_bytes
        context = shown(self.device.context_bytes)
        taken = f"{shown(self.memory_bytes)} less {context} of context and {shown(self.headroom_bytes)} of headroom"
        there = sum(value.size_bytes for value in self.graph.values if value.on_host)
        frozen = f" of which {shown(there)} can stay on the host," if there else ","
        rows = [
            ("device", f"{self.device.name}, {self.device.about}"),
            ("available", f"{shown(self.available_bytes)}: {taken}"),
            ("resident", f"{shown(self.graph.resident_bytes)}: parameters {shown(self.parameter_bytes)}{frozen} "
             f"optimizer state {shown(self.state_bytes)}"),
            ("keep-all", shown(self.keep_all_bytes)),
            ("smallest", f"{shown(self.smallest_bytes)} found"),
            ("floor", f"{shown(self.floor_bytes)}: {self.why}"),
            ("verdict", self.verdict + self._price()),
        ]  # fmt: skip
        if self.result is not None and self.result.plan.host is not None:
            timeline = simulate(self.graph, self.result.plan)
            held = f"{shown(timeline.host_peak_bytes)} of {shown(self.result.plan.host.bytes)}"
            rows.append(("host", f"{held} at most; {shown(timeline.copied_bytes('in'))} are copied from there in a step"))
        if self.reserved_bytes is not None:
            room = f"the allocator's segments, of {shown(self.memory_bytes - self.device.context_bytes)}"
            rows.append(("reserved", f"{shown(self.reserved_bytes)} predicted: {room}"))
        for name, now, most in (
            ("batch", self.batch, self.largest_batch),
            ("sequence", self.sequence, self.longest_sequence),
        ):
            if most is not None:
                exact = "no larger one fits" if most.batch == most.upper_bound else f"none above {most.upper_bound} fits"
                at_most = f"{now} asked, {most.batch} at most, at {most.result.overhead:.3f}x; {exact}"
                rows.append((name, "; ".join([at_most, *most.result.remarks])))
        return rows

    def _price(self) -> str:
        if self.result is None:
            return ""
        time = format_cost(self.result.cost, self.graph.cost_unit)
        return f": {self.result.overhead:.3f}x of keeping everything, {format_bytes(self.result.peak_bytes)}; at least {time}"

    def render(self) -> str:
        """The rows and remarks as one text."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows) + 2
        lines = [f"{name:<{width}}{text}" for name, text in rows]
        return "\n".join([*lines, "", *self.remarks])

    __str__ = render
