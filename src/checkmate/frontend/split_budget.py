"""Split one budget over several graphs: choose a plan for each, so that the whole step keeps the budget at the least cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.step_memory import StepMemory
from checkmate.studies.min_budget import min_budget
from checkmate.studies.pareto import pareto

Moment = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int]
"""A time at which a step may peak: the graphs that hold saved tensors, those that left gradients (masks over the forwards), and
the peak in bytes of the graph that runs."""

_POINTS = 8
"""Plans of each graph on its curve of cost against budget. More of them leave less of the time limit for each."""

_LEAST_S = 3.0
"""Least seconds for each of these plans: small graphs need less, and for large ones a search finds little in less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFootprint:
    """One plan of one graph, its cost and the memory of its step.

    Attributes:
        plan: The plan.
        cost: Its cost.
        memory: Its memory above what is resident, measured or predicted.
    """

    plan: Plan
    cost: int
    memory: StepMemory

    @classmethod
    def of(cls, graph: Graph, plan: Plan, transient_gradient_bytes: int = 0) -> PlanFootprint:
        """The footprint of a plan by `simulate`; see `StepMemory.of`."""
        return cls(plan=plan, cost=simulate(graph, plan).cost, memory=StepMemory.of(graph, plan, transient_gradient_bytes))


def candidates(graph: Graph, time_s: float, transient_gradient_bytes: int = 0) -> list[PlanFootprint]:
    """Plans of a graph between its smallest peak and keeping everything.

    Args:
        graph: The graph.
        time_s: Seconds of wall time for all of them; approximate.
        transient_gradient_bytes: Bytes of gradients that the backward frees.

    Returns:
        The plans with their predicted memory; the first is that of `min_budget`.
    """
    # The smallest peak decides whether any split keeps the budget, so that it gets as much time as all other plans together.
    smallest = min_budget(graph, limits=Limits(time_s=max(4 * _LEAST_S, time_s / 2)))
    curve = pareto(graph, points=_POINTS, limits=Limits(time_s=max(_LEAST_S, time_s / 2 / _POINTS)))
    plans = [smallest.plan, *[point.plan for point in curve.points]]
    return [PlanFootprint.of(graph, plan, transient_gradient_bytes) for plan in plans]


def step_peak_bytes(sequence: Sequence[int], picked: Sequence[PlanFootprint]) -> int:
    """Peak of a step above what is resident: forwards in order, then backwards from the last to the first.

    Args:
        sequence: Index of the graph of each forward, in order.
        picked: Chosen plan of each graph.
    """
    return max(
        int(before @ _held(sequence, picked) + after @ _gradients(sequence, picked)) + peak
        for before, after, peak in _peak_moments(sequence, picked)
    )


def divide(sequence: Sequence[int], offers: Sequence[Sequence[PlanFootprint]], room_bytes: int) -> list[int] | None:
    """Choose one plan for each graph, so that a step costs least and its peak is within the room.

    A multiple-choice knapsack with one constraint for every time at which a step may peak, solved exactly as a mixed-integer
    program. A graph that runs several times in a step has the same plan each time.

    Args:
        sequence: Index of the graph of each forward, in order.
        offers: Candidate plans of each graph.
        room_bytes: Largest peak of the step above the resident bytes.

    Returns:
        Index of the chosen candidate of each graph, or None if no choice is within the room.
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
        held = earlier[graph_of] * np.array([c.memory.saved_bytes for c in flat], dtype=float)
        rows.append(held + mine * np.array([c.memory.forward_peak_bytes for c in flat]))
        gradients = later[graph_of] * np.array([c.memory.gradient_bytes for c in flat])
        rows.append(held + gradients + mine * np.array([c.memory.backward_peak_bytes for c in flat]))
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
    # The solver satisfies constraints up to a tolerance; the budget is kept to the byte.
    return found if step_peak_bytes(sequence, [offers[g][c] for g, c in enumerate(found)]) <= room_bytes else None


def _held(sequence: Sequence[int], picked: Sequence[PlanFootprint]) -> npt.NDArray[np.int64]:
    return np.array([picked[g].memory.saved_bytes for g in sequence])


def _gradients(sequence: Sequence[int], picked: Sequence[PlanFootprint]) -> npt.NDArray[np.int64]:
    return np.array([picked[g].memory.gradient_bytes for g in sequence])


def _peak_moments(sequence: Sequence[int], picked: Sequence[PlanFootprint]) -> list[Moment]:
    """Every time at which a step may peak: in the forward and in the backward of each graph."""
    index = np.arange(len(sequence))
    found: list[Moment] = []
    for i, g in enumerate(sequence):
        found.append((index < i, np.zeros(len(sequence), dtype=np.bool_), picked[g].memory.forward_peak_bytes))
        found.append((index < i, index > i, picked[g].memory.backward_peak_bytes))
    return found
