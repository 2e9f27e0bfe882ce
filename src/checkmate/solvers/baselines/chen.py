"""Segment checkpointing: keep some forward values, compute the rest again segment by segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.result import Termination
from checkmate.solvers.baselines.forward_pass import NEVER, Drops, ForwardPass, Points, check_points, sweep
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True)
class ChenSqrtN:
    """Segments of equally many points, from one segment to as many as there are points.

    Chen et al. (2016), section 4.1, which takes the square root of the number of layers; here the number
    is swept and the cheapest plan within the budget kept. ``points`` are the generalisations of Jain et
    al. (2020), table 1, to graphs that are not chains.

    Attributes:
        points: Where the forward pass may be cut: at its ``"articulation"`` points, or anywhere in its
            order, as if it were a chain (``"linearized"``).
    """

    points: Points = "articulation"

    def __post_init__(self) -> None:
        check_points(self.points)

    def run(self, problem: Problem, session: Session) -> Termination:
        """Try every number of segments."""
        return sweep(problem, session, self._choices)

    def _choices(self, forward: ForwardPass) -> Iterator[Drops]:
        points = forward.points(self.points)
        for segments in range(1, len(points) + 2):
            ends = [points[round(k * (len(points) + 1) / segments) - 1] for k in range(1, segments)]
            yield drops_between(forward, ends)


@dataclass(frozen=True, slots=True)
class ChenGreedy:
    """Segments of about equally many bytes: a point is kept once more than b bytes have been made since the last.

    Chen et al. (2016), algorithm 3; b is swept over the values that cut the pass into 1, 2, 3, ... parts,
    and the cheapest plan within the budget is kept. ``points`` as in `ChenSqrtN`.

    Attributes:
        points: ``"articulation"`` or ``"linearized"``.
    """

    points: Points = "articulation"

    def __post_init__(self) -> None:
        check_points(self.points)

    def run(self, problem: Problem, session: Session) -> Termination:
        """Try every threshold."""
        return sweep(problem, session, self._choices)

    def _choices(self, forward: ForwardPass) -> Iterator[Drops]:
        points = set(forward.points(self.points))
        total = sum(forward.size_bytes(o) for o in forward.ops)
        tried: set[tuple[int, ...]] = set()
        for parts in range(1, len(points) + 2):
            ends = tuple(_greedy_ends(forward, points, total // parts))
            if ends not in tried:
                tried.add(ends)
                yield drops_between(forward, ends)


def _greedy_ends(forward: ForwardPass, points: set[int], threshold_bytes: int) -> Iterator[int]:
    """Points after which more than so many bytes have been made since the last one."""
    made = 0
    for o in forward.ops:
        made += forward.size_bytes(o)
        if o in points and made > threshold_bytes:
            made = 0
            yield o


def drops_between(forward: ForwardPass, ends: Sequence[int]) -> Drops:
    """Drops that keep only the points at the ends of segments.

    A segment is held again from the first backward stage that reads any of it. The last one is never
    dropped: its backward comes next.

    Args:
        forward: The forward pass.
        ends: Last op of each segment but the last one.
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
