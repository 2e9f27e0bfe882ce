"""How long an op takes, and its workspace: the fastest run counts, because everything else that a machine does only adds time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from checkmate.torch._compat.profiler import keep_busy, memory_trace
from checkmate.torch.graph.op_properties import PIECES, Pieces
from checkmate.torch.measure.single_op import new_bytes, ready_to_run

Clock = Callable[[], int]
Memory = npt.NDArray[np.uint8]

LONG_NS = 250_000_000
"""An op that takes longer runs once: disturbances are small against it, and heads of language models have many long ops."""


class LeastTimes:
    """The least time of each part of an op on a CPU, over all its runs.

    An op is one part, unless it runs piece by piece: then each piece is a part, and so is the rest after the last piece. Equal
    pieces count as runs of one part, except the first, which finds no shared operands in the cache. A long run is rarely free of
    disturbances. By the least of a few long readings, an op in pieces would therefore look slower than the short ops that it
    replaces (docs/decisions/0009).
    """

    def __init__(self, node: fx.Node, clock: Clock | None = None) -> None:
        pieces: Pieces | None = node.meta.get(PIECES)
        self._parts: list[object] = ["op"] if pieces is None else ["first piece", *pieces.graphs[1:], "end"]
        self._least_ns: dict[object, int] = {}
        # On one thread, the process's CPU time excludes other processes. Several threads need wall time: a run then waits tens of
        # milliseconds for any worker thread that the scheduler preempted.
        alone = torch.get_num_threads() == 1
        self._clock = clock or (time.process_time_ns if alone else time.perf_counter_ns)

    def measure(self, run: Callable[[], Iterator[Any]]) -> int:
        """Run the op once; ``run`` yields at the end of each part. Returns the nanoseconds of the run."""
        now, total_ns = self._clock, 0
        parts, began = iter(self._parts), now()
        for _ in run():
            took_ns, part = now() - began, next(parts)
            self._least_ns[part] = min(took_ns, self._least_ns.get(part, took_ns))
            total_ns += took_ns
            began = now()
        return total_ns

    @property
    def total_ns(self) -> int:
        """The time of the op."""
        return sum(self._least_ns[part] for part in self._parts)


def other_memory() -> Memory:
    """Memory to read between two runs of an op on a CPU, about a last-level cache: the other ops of a step read as much.

    In a step, the operands of an op are partly in the cache; an op that runs repeatedly finds all of them there
    (docs/decisions/0009). The memory is a part of the file of PyTorch's library: a budget may leave no room for a tensor.
    """
    files = [path for path in (Path(torch.__file__).parent / "lib").iterdir() if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    return np.asarray(np.memmap(largest, np.uint8, "r", shape=(min(32 << 20, largest.stat().st_size),)))


def measure_on_cpu(node: fx.Node, other: Memory, times: LeastTimes) -> tuple[int, int]:
    """Nanoseconds of an op on the CPU, from up to six runs, and its workspace: its peak less its results."""
    run = ready_to_run(node)
    other.max()
    with memory_trace() as trace:
        first_ns = times.measure(run)
    if first_ns <= LONG_NS:
        _run(run, other, times, most=5)
    return times.total_ns, max(0, trace.peak() - new_bytes(node))


def run_again(node: fx.Node, other: Memory, times: LeastTimes) -> None:
    """Run an op on the CPU in a later pass over all ops, once or twice."""
    _run(ready_to_run(node), other, times, most=2)


def _run(run: Callable[[], Iterator[Any]], other: Memory, times: LeastTimes, most: int) -> None:
    """Run an op until its runs took 50 ms; readings of one op vary by about a tenth."""
    took_ns = 0
    for _ in range(most):
        other.max()
        took_ns += times.measure(run)
        if took_ns > 50_000_000:
            break


def passes(run: Callable[[], None], total_ns: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
    """Repeat a pass over ops that were measured once, because a machine can be a fifth slower for a second.

    There are two more passes at least, and others until one makes all ops together faster by less than 0.4 %, or for 4 s: a
    machine may stay slow. Ops that take less than 20 ms have two.
    """
    began = clock()
    for number in itertools.count(2):
        before_ns = total_ns()
        run()
        converged = before_ns - total_ns() <= 0.004 * before_ns
        if number >= 3 and (converged or before_ns < 20_000_000 or clock() - began > 4.0):
            break


def measure_on_cuda(node: fx.Node) -> tuple[float, int]:
    """Nanoseconds and workspace of an op on a CUDA device."""
    run = ready_to_run(node)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    *_, out = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best_ns = float("inf")
    for _ in range(5):
        # The GPU is busy for half a millisecond while the op is launched, so only its kernels are timed, not launches.
        keep_busy(1_000_000)
        begin.record()
        *_, out = run()
        end.record()
        end.synchronize()
        del out
        best_ns = min(best_ns, begin.elapsed_time(end) * 1e6)
    return best_ns, max(0, peak - new_bytes(node))
