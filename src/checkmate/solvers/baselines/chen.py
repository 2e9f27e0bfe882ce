"""Segment checkpointing: keep some forward values, compute the rest again segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkmate.solvers.baselines.forward_pass import Drops, ForwardPass, Heuristic
from checkmate.solvers.flat_graph import NEVER


@dataclass(frozen=True, slots=True)
class ChenSqrtN(Heuristic):
    """Segments of equally many points, from one segment to as many as there are points.

    Chen et al. (2016), section 4.1, take the square root of the number of layers. Here every number
    is tried and the cheapest plan within the budget kept. ``points`` are the generalisations of Jain et
    al. (2020), table 1, to graphs that are not chains.

    Attributes:
        points: The places to cut the forward pass: its ``"articulation"`` points, or any place in its
            order, as if it were a chain (``"linearized"``).
    """

    def choices(self, forward: ForwardPass) -> Iterator[Drops]:
        """Every number of segments."""
        points = forward.points(self.points)
        for segments in range(1, len(points) + 2):
            ends = [points[round(k * (len(points) + 1) / segments) - 1] for k in range(1, segments)]
            yield _drops_between(forward, ends)


@dataclass(frozen=True, slots=True)
class ChenGreedy(Heuristic):
    """Segments of about equally many bytes: a point is kept once more than b bytes have been made since the last.

    Chen et al. (2016), algorithm 3; b takes all values that cut the pass into 1, 2, 3, ... parts,
    and the cheapest plan within the budget is kept. ``points`` as in `ChenSqrtN`.

    Attributes:
        points: ``"articulation"`` or ``"linearized"``.
    """

    def choices(self, forward: ForwardPass) -> Iterator[Drops]:
        """Every threshold."""
        points = set(forward.points(self.points))
        total = sum(map(forward.size_bytes, forward.ops))
        tried: set[tuple[int, ...]] = set()
        for parts in range(1, len(points) + 2):
            ends: list[int] = []
            made_bytes = 0
            for o in forward.ops:
                made_bytes += forward.size_bytes(o)
                if o in points and made_bytes > total // parts:
                    made_bytes = 0
                    ends.append(o)
            if tuple(ends) not in tried:
                tried.add(tuple(ends))
                yield _drops_between(forward, ends)


def _drops_between(forward: ForwardPass, ends: Sequence[int]) -> Drops:
    """Drops that keep only the last op of each segment, except the last segment.

    A segment is held again from the first backward stage that reads a value of it. The last segment is
    never dropped: its backward comes next.
    """
    kept = set(ends)
    segments: list[list[int]] = [[]]
    for o in forward.ops:
        if o in kept:
            segments.append([])
        else:
            segments[-1].append(o)
    until: dict[int, int] = {}
    for segment in segments[:-1]:
        first_read = min((forward.first_backward_read[o] for o in segment), default=NEVER)
        until.update(dict.fromkeys(segment, first_read))
    return until
