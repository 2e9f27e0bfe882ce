"""How often an op runs so that its time is known, and what its readings say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from checkmate.torch.graph.op_properties import PIECES, Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingEffort:
    """How many times an op is run to measure its time; the fastest run counts.

    The minimum, because everything else that a machine does only adds time. A run that seems slow is given more chances:
    stored costs live long, and one reading of 50 ms on a busy machine was a tenth of a MobileNet's step (docs/decisions/0009).

    Attributes:
        repeats: Most runs of an op. Readings of one op spread over about a tenth, so one run is not enough.
        limit_ns: No further run once runs took so long together.
        slow_factor: A reading above so many times the roofline estimate is suspected to be disturbed. A slow kernel may be
            suspected wrongly, which costs only the additional runs.
        slow_ns: Ops faster than this are never suspected: in them the fixed cost of a call dominates, which no roofline has.
        agreement: As many readings as `repeats` within this factor of the fastest lift the suspicion: what disturbs runs makes
            them differ, and a slow kernel takes as long each time.
        slow_repeats: Most runs of a suspected op.
        slow_limit_ns: No further run of a suspected op once its runs took so long together.
        once_ns: No further run after one that took longer, unless it is suspected. What disturbs a run is small beside so long a
            time, and each matrix product in the head of a language model takes up to a second.
        block: Random numbers that are drawn for an input. They are repeated to fill it: drawing 200 MB takes 0.2 s, copying a
            quarter of that.
        again_ns: Ops that take longer are measured in several passes over all of them.
        least_passes: How often they are measured at least; the fastest run of all passes counts. A machine can be a fifth slower
            for a second, and all readings of an op that is measured then.
        converged: No further pass after one that made them faster, all together, by less than this share.
        references: So many ops that were measured before are measured beside new ones, which are stated in the same unit.
        reference_ns: Longest op among these.
        matters_ns: Ops that take less together have no more than the least number of passes, and no references.
        most_s: No further pass once passes took so many seconds: a machine may stay slow.
        later_repeats: Most runs of an op in each pass after the first.
        between_bytes: Bytes that are read between two runs of an op on a CPU, about a last-level cache, as the other ops of a
            step read theirs. What an op reads in a step is partly in the cache and partly not, its code too; an op that runs
            over and over finds all of it there (docs/decisions/0009).
    """

    repeats: int = 5
    limit_ns: int = 50_000_000
    slow_factor: float = 4.0
    slow_ns: int = 1_000_000
    agreement: float = 1.1
    slow_repeats: int = 25
    slow_limit_ns: int = 500_000_000
    once_ns: int = 250_000_000
    block: int = 1 << 18
    again_ns: int = 100_000
    least_passes: int = 3
    converged: float = 0.004
    references: int = 5
    reference_ns: int = 30_000_000
    matters_ns: int = 20_000_000
    most_s: float = 4.0
    later_repeats: int = 2
    between_bytes: int = 32 << 20


EFFORT: Final = TimingEffort()


class LeastTimes:
    """The least time of each part of an op on a CPU, over all its runs.

    An op is one part, unless it runs piece by piece: then each piece is one, and what it does after the last is another. Equal
    pieces count as runs of one part, but for the first, which finds nothing of what they share in the cache. A long run is seldom
    undisturbed from its beginning to its end: by the least of a few long readings an op in pieces would look slower than the ops
    that it replaces, of which each is short (docs/decisions/0009).

    Args:
        node: The op.
    """

    def __init__(self, node: fx.Node) -> None:
        pieces: Pieces | None = node.meta.get(PIECES)
        self._parts: list[object] = ["op"] if pieces is None else ["first piece", *pieces.graphs[1:], "end"]
        self._least_ns: dict[object, int] = {}

    def measure(self, run: Callable[[], Iterator[Any]]) -> int:
        """Run the op on the CPU once, and count the run.

        Args:
            run: Runs it, and yields at the end of each part.

        Returns:
            Nanoseconds of the run.
        """
        now = clock()
        took, began = list[int](), now()
        for _ in run():
            ended = now()
            took.append(ended - began)
            began = ended
        self.add(took)
        return sum(took)

    def add(self, reading_ns: Sequence[int]) -> None:
        """Count one run.

        Args:
            reading_ns: Time of each part.
        """
        for part, took_ns in zip(self._parts, reading_ns, strict=True):
            self._least_ns[part] = min(took_ns, self._least_ns.get(part, took_ns))

    @property
    def total_ns(self) -> int:
        """The time of the op."""
        return sum(self._least_ns[part] for part in self._parts)


def clock() -> Callable[[], int]:
    """The clock for an op on the CPU.

    On one thread, the process's CPU time excludes other processes. On several threads wall time has to be used, and a run waits
    for any worker thread that the scheduler preempted, tens of milliseconds: a slow reading is repeated.
    """
    return time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
