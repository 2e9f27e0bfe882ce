"""Private names for profiling torch: a trace of the CPU allocator, and a kernel that only waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig

ResultT = TypeVar("ResultT")


def keep_busy(cycles: int) -> None:
    """Keep the current stream of the GPU busy for a number of cycles of its clock."""
    torch.cuda._sleep(cycles)


def profiler_running() -> bool:
    """Whether a torch profiler is active in this thread; profilers of one thread cannot be nested."""
    return torch.autograd._profiler_enabled()


def outside_of_profilers(run: Callable[[], ResultT]) -> ResultT:
    """The result of a function that is called without an active profiler: in another thread if there is one in this thread.

    A profiler of the user does not see the call, and does not change the measurements of `memory_trace`.
    """
    if not profiler_running():
        return run()
    with ThreadPoolExecutor(1, "measure") as other:
        return other.submit(copy_context().run, run).result()


@dataclass(slots=True)
class MemoryTrace:
    """Events of the CPU allocator, in order."""

    events: list[tuple[str, int | str]] = field(default_factory=list)  # ``("alloc", bytes)``, negative for a free
    changes: list[tuple[float, int]] = field(default_factory=list)  # share of the trace's time that had passed, and bytes

    def peak(self) -> int:
        """Peak of allocated bytes above those allocated when the trace began."""
        held = peak = 0
        for what, amount in self.events:
            if what == "alloc":
                held += amount  # type: ignore[operator]
                peak = max(peak, held)
        return peak


@contextmanager
def memory_trace() -> Iterator[MemoryTrace]:
    """Record the events of the CPU allocator; the trace is filled when the context closes.

    This is the older of torch's two profilers: it starts within a millisecond and is silent. Kineto takes longer and writes to
    the terminal.
    """
    state, nothing = torch.autograd.ProfilerState.CPU, _ExperimentalConfig()
    trace = MemoryTrace()
    torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(state, False, True, False, False, False, nothing))
    try:
        yield trace
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        records = [r for thread in threads for r in thread]
        start = next(r for r in records if r.name() == "__start_profile")
        if len(threads) > 1:  # one list per thread, each ordered by time; the peak needs a single order
            records.sort(key=start.cpu_elapsed_us)
        whole_us = start.cpu_elapsed_us(records[-1]) or 1.0
        for r in records:
            kind = r.kind()
            if kind == "memory_alloc":
                trace.events.append(("alloc", r.cpu_memory_usage()))
                trace.changes.append((start.cpu_elapsed_us(r) / whole_us, r.cpu_memory_usage()))
            elif kind in ("push", "pop"):
                trace.events.append((kind, r.name()))
