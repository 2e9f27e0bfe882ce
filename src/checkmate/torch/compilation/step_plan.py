"""Plans a step from what was recorded of it: one problem over all of its graphs, one order for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from checkmate.core.budget import Budget
from checkmate.core.errors import PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.planner import planner_for, result_of_order
from checkmate.frontend.step_graph import StepGraph, step_graph
from checkmate.torch.compilation.observation import observed_step
from checkmate.torch.compilation.program import PlannedGraph, Program
from checkmate.torch.compilation.recorder import StepRecorder
from checkmate.torch.distributed.plan_on_rank0 import plan_on_rank0

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of a step.

    Attributes:
        graphs: The graph of each forward.
        programs: The program of each forward; None for one whose backward does not run.
        result: Plan of the whole step, with its cost, peak and their bounds.
        graph: The graph of the whole step.
    """

    graphs: tuple[PlannedGraph, ...]
    programs: tuple[Program | None, ...]
    result: Result
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Parameters of planning a step.

    Attributes:
        most: The most times that a step is planned. A plan whose computations had to be moved into the windows of their graphs
            may take more than before; the next one has that much less. In the steps that were tried only views were moved.
    """

    most: int = 3


_ATTEMPTS = Attempts()


def plan_step(
    recorder: StepRecorder,
    gradient_bytes: int,
    existing: frozenset[tuple[int, int]],
    accumulated: Sequence[frozenset[int]],
    carried: Sequence[int] = (),
) -> StepPlan:
    """Plan a step that was recorded.

    Args:
        recorder: The step.
        gradient_bytes: Gradients that exist before it.
        existing: Run and input of the leaves that have a gradient before it.
        accumulated: Inputs to whose gradients the backward adds, for each run.
        carried: Bytes besides what the graphs are given and make, at each gap: tensors of earlier steps, and what no graph reads.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: No plan was found in time.
        RankError: The ranks ran different steps, or planning failed on rank 0.
    """
    graphs = tuple(run.planned for run in recorder.runs)
    first = max(graphs, key=lambda g: g.budget.total_bytes or 0)
    # What a graph does not read another one may: those that none reads are among `carried`.
    extra = max(g.resident.total_bytes - g.resident.gradients_bytes - g.unread_bytes for g in graphs)
    extra += sum(run.planned.random_state_bytes for run in recorder.runs if run.undefined)
    whole = step_graph(observed_step(recorder, extra + gradient_bytes, existing, accumulated, carried))

    def plan(graph: Graph) -> Result:
        return _plan(first, graph, whole, recorder.searched_s)

    if first.ranks is None:
        graph, result = whole.graph, plan(whole.graph)
    else:
        agreed = plan_on_rank0(first.ranks, whole.graph, f"a budget of {first.budget} for a step", plan)
        graph, result = agreed.graph, agreed.result
    orders = whole.cut(result.plan.order)
    programs = {
        run: run.planned.program(run.undefined, added, order)
        for run, added, order in zip(recorder.runs, accumulated, orders, strict=True)
    }
    forwards = recorder.forwards
    return StepPlan(tuple(f.planned for f in forwards), tuple(programs.get(f) for f in forwards), result, graph)


def _plan(first: PlannedGraph, graph: Graph, whole: StepGraph, spent_s: float) -> Result:
    """A plan in which every computation runs in a window of the graph that it belongs to.

    Args:
        first: The graph whose budget and time limit hold.
        graph: The graph of the step.
        whole: The same with its windows.
        spent_s: Seconds of the time limit that searches for plans of the single graphs have used.
    """
    limit = target = first.budget.resolve(graph)
    for _ in range(_ATTEMPTS.most):
        options = replace(first.options, budget=Budget(str(first.budget), total_bytes=target))
        result = planner_for(options, spent_s)(graph)
        spent_s += result.elapsed_s
        moved = result_of_order(graph, whole.within_windows(result.plan.order))
        if moved.peak_bytes <= limit:
            return msgspec.structs.replace(
                result,
                plan=moved.plan,
                cost=moved.cost,
                overhead=moved.overhead,
                peak_bytes=moved.peak_bytes,
                budget_bytes=limit,
                gap=max(0.0, 1 - result.bound / moved.cost) if moved.cost else 0.0,
            )
        _log.info("computations moved to the windows of their graphs take %s too much", format_bytes(moved.peak_bytes - limit))
        target -= moved.peak_bytes - limit
    raise PlanNotFoundError(
        f"no plan of the step within {format_bytes(limit)} was found whose computations run where their graphs do",
        hint=f"raise the budget to at least {format_at_least(limit + (limit - target))}, or find the graph breaks with "
        "torch.compile(..., fullgraph=True)",
    )
