"""The trace of the CPU allocator, by torch's legacy profiler.

Seen and tested in torch 2.13.0; 2.11 is the declared floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._profiler import _ExperimentalConfig

__all__ = ["MemoryTrace", "memory_trace", "profiler_running"]


def profiler_running() -> bool:
    """Whether a torch profiler is on in this process; it cannot be nested."""
    return torch.autograd._profiler_enabled()


@dataclass(slots=True)
class MemoryTrace:
    """What the CPU allocator did, in order.

    Attributes:
        events: ``("alloc", bytes)``, negative where freed; ``("push", name)`` and ``("pop", "")`` of ops and ranges.
    """

    events: list[tuple[str, int | str]] = field(default_factory=list)

    def peak(self) -> int:
        """The most bytes held beyond what was there when the trace began."""
        held = peak = 0
        for what, amount in self.events:
            if what == "alloc":
                held += amount  # type: ignore[operator]
                peak = max(peak, held)
        return peak

    def peaks_within(self, name: str) -> list[int]:
        """Peak within each range of a name, beyond what was there when it began."""
        peaks: list[int] = []
        depth = held = peak = 0
        for what, detail in self.events:
            if what == "push" and (depth or detail == name):
                if not depth:
                    held = peak = 0
                depth += 1
            elif what == "pop" and depth:
                depth -= 1
                if not depth:
                    peaks.append(peak)
            elif what == "alloc" and depth:
                held += detail  # type: ignore[operator]
                peak = max(peak, held)
        return peaks


@contextmanager
def memory_trace() -> Iterator[MemoryTrace]:
    """Record what the CPU allocator does; the trace is filled on leaving.

    By the older of torch's two profilers: it starts in a millisecond and is silent, where Kineto takes
    more and writes to the terminal.
    """
    state, nothing = torch.autograd.ProfilerState.CPU, _ExperimentalConfig()
    trace = MemoryTrace()
    torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(state, False, True, False, False, False, nothing))
    try:
        yield trace
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        records = [r for thread in threads for r in thread]
        if len(threads) > 1:
            start = next(r for r in records if r.name() == "__start_profile")
            records.sort(key=start.cpu_elapsed_us)
        for r in records:
            kind = r.kind()
            if kind == "memory_alloc":
                trace.events.append(("alloc", r.cpu_memory_usage()))
            elif kind in ("push", "pop"):
                trace.events.append((kind, r.name()))
