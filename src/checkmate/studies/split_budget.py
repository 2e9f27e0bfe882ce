"""One budget over several graphs: for each the plan, among those of its curve, that makes the step cheapest together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.studies.min_budget import min_budget
from checkmate.studies.pareto import pareto

Moment = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]

_POINTS = 8
"""Plans that a graph can choose from."""

_LEAST_S = 3.0
"""Seconds for each of them at least: small graphs need less, and no graph finds much in less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One plan of one graph, and what it takes above what is resident.

    Attributes:
        plan: The plan.
        cost: Its cost.
        forward_peak_bytes: Peak of the forward.
        held_bytes: What is held from the forward's end to the backward.
        backward_peak_bytes: Peak from the boundary on.
        gradient_bytes: What the backward leaves behind when it is over.
    """

    plan: Plan
    cost: int
    forward_peak_bytes: int
    held_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, graph: Graph, plan: Plan, passing_bytes: int = 0) -> Choice:
        """What a plan of a graph with a boundary takes; ``passing_bytes`` of its gradients are gone when the backward is over."""
        boundary = graph.boundary
        assert boundary is not None
        timeline = simulate(graph, plan)
        above = timeline.bytes - graph.resident_bytes
        at = plan.steps.index(Compute(boundary))
        made = {v for op in graph.ops if op.phase == "backward" for v in op.outputs if graph.values[v].kept}
        tangents = sum(graph.values[v].size_bytes for v in graph.ops[boundary].outputs)
        return cls(
            plan=plan,
            cost=timeline.cost,
            forward_peak_bytes=int(above[: at + 1].max()),
            held_bytes=int(above[at]) - tangents,
            backward_peak_bytes=int(above[at:].max()),
            gradient_bytes=max(0, sum(graph.values[v].size_bytes for v in {graph.root[v] for v in made}) - passing_bytes),
        )


def choices(graph: Graph, time_s: float, passing_bytes: int = 0) -> list[Choice]:
    """Plans of a graph between its smallest peak and keeping everything.

    Args:
        graph: The graph.
        time_s: Seconds that finding them may take, about.
        passing_bytes: Gradients that are gone when the backward is over.
    """
    # The end of the curve decides whether a division exists at all: it gets as much time as all the rest.
    smallest = min_budget(graph, limits=Limits(time_s=max(4 * _LEAST_S, time_s / 2)))
    curve = pareto(graph, points=_POINTS, limits=Limits(time_s=max(_LEAST_S, time_s / 2 / _POINTS)))
    plans = [*([smallest.plan] if smallest.plan else []), *[point.plan for point in curve.points]]
    return [Choice.of(graph, plan, passing_bytes) for plan in plans]


def together(sequence: Sequence[int], picked: Sequence[Choice]) -> int:
    """Peak of a step above what is resident: forwards in order, then backwards from the last to the first.

    Args:
        sequence: Graph of each forward.
        picked: Choice of each graph.
    """
    return max(
        int(before @ _held(sequence, picked) + after @ _born(sequence, picked)) + peak
        for before, after, peak in _moments(sequence, picked)
    )


def divide(sequence: Sequence[int], offers: Sequence[Sequence[Choice]], room_bytes: int) -> list[int] | None:
    """The choice of each graph that makes a step cheapest within a room, or None if none fits.

    A multiple-choice knapsack with one row for every moment at which a step may peak, solved exactly as a
    mixed-integer program: a graph that comes several times in a step has one plan for all.

    Args:
        sequence: Graph of each forward, in order.
        offers: Choices of each graph.
        room_bytes: What the step may take above what is resident.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    at = np.cumsum([0, *map(len, offers)])
    flat = [c for offer in offers for c in offer]
    columns = len(flat)
    graph_of = np.repeat(np.arange(len(offers)), [len(offer) for offer in offers])
    counts = np.bincount(np.asarray(sequence), minlength=len(offers))
    rows: list[npt.NDArray[np.float64]] = []
    for position, graph in enumerate(sequence):
        earlier = np.bincount(np.asarray(sequence[:position], dtype=int), minlength=len(offers))
        later = np.bincount(np.asarray(sequence[position + 1 :], dtype=int), minlength=len(offers))
        mine = graph_of == graph
        held = earlier[graph_of] * np.array([c.held_bytes for c in flat], dtype=float)
        rows.append(held + mine * np.array([c.forward_peak_bytes for c in flat]))
        born = later[graph_of] * np.array([c.gradient_bytes for c in flat])
        rows.append(held + born + mine * np.array([c.backward_peak_bytes for c in flat]))
    pick = np.array([[float(at[g] <= j < at[g + 1]) for j in range(columns)] for g in range(len(offers))])
    scale = max(1.0, float(room_bytes))
    cost = counts[graph_of] * np.array([c.cost for c in flat], dtype=float)
    solved: Any = milp(
        cost / max(1.0, cost.max()),
        integrality=np.ones(columns),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(np.array(rows) / scale, ub=room_bytes / scale), LinearConstraint(pick, 1, 1)],
    )
    if solved.x is None:
        return None
    found = [int(np.argmax(solved.x[at[g] : at[g + 1]])) for g in range(len(offers))]
    # The solver works to a tolerance; bytes are exact.
    return found if together(sequence, [offers[g][c] for g, c in enumerate(found)]) <= room_bytes else None


def _held(sequence: Sequence[int], picked: Sequence[Choice]) -> npt.NDArray[np.int64]:
    return np.array([picked[g].held_bytes for g in sequence])


def _born(sequence: Sequence[int], picked: Sequence[Choice]) -> npt.NDArray[np.int64]:
    return np.array([picked[g].gradient_bytes for g in sequence])


def _moments(sequence: Sequence[int], picked: Sequence[Choice]) -> list[Moment]:
    """(earlier forwards, later backwards, peak) of every moment at which a step may peak."""
    index = np.arange(len(sequence))
    found: list[Moment] = []
    for i, g in enumerate(sequence):
        found.append((index < i, np.zeros(len(sequence), dtype=np.bool_), picked[g].forward_peak_bytes))
        found.append((index < i, index > i, picked[g].backward_peak_bytes))
    return found
