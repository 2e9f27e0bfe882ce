"""Binomial checkpointing (revolve) of Griewank and Walther (2000)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from checkmate.solvers.baselines.forward_pass import Drops, ForwardPass, Heuristic
from checkmate.solvers.flat_graph import NEVER


@dataclass(frozen=True, slots=True)
class Griewank(Heuristic):
    """Binomial checkpointing of a chain of steps with c states held at once; c is swept.

    Griewank and Walther (2000), algorithm 799 (revolve): the fewest forward steps for reversing a chain of
    equal steps. A step consists of the ops between two points of the forward pass. In graphs that are
    not chains the points are articulation points, or all ops in order, the generalisations of Jain et
    al. (2020), table 1. Steps count as equal, whatever their cost and bytes.

    Attributes:
        points: ``"articulation"`` or ``"linearized"``.
    """

    def choices(self, forward: ForwardPass) -> Iterator[Drops]:
        """Keeping everything, then every number of states."""
        steps = _steps(forward, forward.points(self.points))
        yield {}
        for states in range(len(steps) - 1, -1, -1):
            held_from = held_states(len(steps), states)
            for early in (False, True):
                yield _drops(forward, steps, held_from, early=early)


def first_state(steps: int, states: int) -> int:
    """Step after which to hold the first state, in addition to the state before the chain, for the fewest forward steps.

    Several splits are optimal. With c slots and r repetitions this split is at most binomial(c + r - 1, c), the longest chain
    that r - 1 repetitions can reverse, and leaves at least binomial(c + r - 2, c - 1) steps to the rest (Griewank and Walther
    2000). Their c counts the state before the chain; r is the least number with binomial(c + r, c) >= ``steps``.
    """
    slots, repetitions = states + 1, 0
    while comb(slots + repetitions, slots) < steps:
        repetitions += 1
    return max(1, min(comb(slots + repetitions - 1, slots), steps - comb(slots + repetitions - 2, slots - 1)))


def held_states(steps: int, states: int) -> dict[int, int]:
    """Map from i in 1..``steps`` - 1 to the step whose reversal first holds the state after step i.

    Steps are reversed from the last to the first; a state first held at the last step's reversal
    is held since the forward pass.

    Examples:
        >>> held_states(4, 1)
        {2: 4, 1: 2}
    """
    held: dict[int, int] = {}
    parts = [(0, steps, states)]
    while parts:
        low, high, left = parts.pop()
        if high - low < 2 or not left:
            continue
        middle = low + first_state(high - low, left)
        held[middle] = high
        parts += [(middle, high, left - 1), (low, middle, left)]
    return held


def _steps(forward: ForwardPass, points: list[int]) -> list[list[int]]:
    """Ops of each step; a step ends with its point."""
    ends = set(points)
    steps: list[list[int]] = [[]]
    for o in forward.ops:
        steps[-1].append(o)
        if o in ends:
            steps.append([])
    return steps if steps[-1] else steps[:-1]


def _drops(forward: ForwardPass, steps: list[list[int]], held_from: dict[int, int], *, early: bool) -> Drops:
    """Drops for the ops of each step and `held_states`.

    If early, another state is held from the reversal of the step after it, which starts from the state, and not only from the
    reversal of the step that made it. Which is cheaper depends on the inputs of the step's ops.
    """
    count = len(steps)
    begins = [NEVER] * (count + 1)  # stage at which the reversal of step 1..count begins
    earliest = 0
    for j in range(count, 0, -1):
        inside = steps[j - 1][:-1] or steps[j - 1]
        first_read = min(forward.first_backward_read[o] for o in inside)
        if first_read < NEVER:
            earliest = max(earliest, first_read)
        begins[j] = earliest
    until: dict[int, int] = {}
    for j, step in enumerate(steps[:-1], start=1):
        until.update(dict.fromkeys(step[:-1], begins[j]))
        held = held_from.get(j, j + early)
        if held < count:
            until[step[-1]] = begins[held]
    return until
