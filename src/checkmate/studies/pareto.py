"""Cost and bound against budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass, replace
from typing import NamedTuple

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Curve, CurvePoint, Limits, NoPlan, Result
from checkmate.core.simulate import simulate
from checkmate.solvers.auto import Auto
from checkmate.solvers.evict.smallest import smallest_peak
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve

_log = logging.getLogger("checkmate.studies")


def pareto(
    graph: Graph,
    *,
    points: int = 12,
    limits: Limits | None = None,
    solver: Solver | None = None,
    executor: Executor | None = None,
    reorder: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> Curve:
    """Cost and bound against budget, from the smallest budget found to the peak of keeping everything.

    Neither rises with the budget, by construction: a plan within a smaller budget is a plan within
    every larger one. A bound for a larger budget is a bound for every smaller one, because all plans
    of a smaller budget keep the larger one. Every other budget is solved first; then those between,
    each from the plan of the budget below it, unless its neighbours have already closed its gap.

    Args:
        graph: The graph.
        points: Number of budgets, evenly spaced; fewer if two would be equal.
        limits: Limits of each solve, and of the search for the smallest budget; ten seconds by default.
        solver: The solver and its options; `Auto` by default.
        executor: Runs the solves, like a `concurrent.futures.ProcessPoolExecutor` or Dask's
            ``client.get_executor()``; by default they run in this process, one after another. The curve does not depend
            on the executor, as long as no solve ends at its time limit.
        reorder: Whether first computations may leave the graph's own order.
        on_progress: Called with the number of finished budgets and the number of all, whenever the first changes.

    Returns:
        The curve. Ctrl-C, or the end of a killed process of the executor, ends the solves early; then budgets that are not
        solved have the best plan of the smaller ones.

    Raises:
        OptionError: There are fewer than two points.

    Examples:
        >>> chain = Graph.from_dag(cost=[1] * 5, size_bytes=[4] * 5, edges=[(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)])
        >>> [(point.budget_bytes, point.cost) for point in pareto(chain, points=2).points]
        [(12, 5)]
    """
    if points < 2:
        raise OptionError(f"points={points!r} must be two or more")
    limits = Limits(time_s=10.0) if limits is None else limits
    solver = Auto() if solver is None else solver
    smallest = smallest_peak(Problem(graph, graph.resident_bytes, reorder=reorder), limits)
    high = keep_all_bytes(graph)
    low = min(high, smallest.peak_bytes)
    budgets = sorted({low + (high - low) * k // (points - 1) for k in range(points)})
    keep_all = _Known.of(graph, Plan.from_order(graph, range(len(graph.ops))))
    start = _Known.of(graph, smallest.plan)
    known = [*(start for _ in budgets[:-1]), keep_all]
    _spread(known)
    run: Callable[[Iterable[_Task]], Iterator[Result | NoPlan]] = (
        _serial if executor is None else lambda tasks: executor.map(_solve, tasks)
    )
    say: Callable[[int, int], None] = on_progress or (lambda _done, _of: None)
    done = 0
    for wave in (range(0, len(budgets), 2), range(1, len(budgets), 2)):
        wanted = [k for k in wave if known[k].gap > limits.gap]
        tasks = [_Task(Problem(graph, budgets[k], reorder=reorder), solver, limits, known[k].plan) for k in wanted]
        done += len(wave) - len(wanted)
        say(done, len(budgets))
        try:
            for k, result in zip(wanted, run(tasks), strict=True):
                known[k] = known[k].improved(result)
                done += 1
                say(done, len(budgets))
        except KeyboardInterrupt:
            break
        except BrokenExecutor as error:
            _log.warning("a process that solves budgets was ended (%s): those not solved have the plan of a smaller one", error)
            break
        finally:
            _spread(known)
    return Curve(
        points=tuple(k.point(graph, budget) for k, budget in zip(known, budgets, strict=True)),
        graph_digest=graph.digest,
        cost_unit=graph.cost_unit,
        floor_bytes=smallest.floor_bytes,
        solver=repr(solver),
    )


class _Task(NamedTuple):
    """One solve, as it is sent to an executor."""

    problem: Problem
    solver: Solver
    limits: Limits
    initial: Plan


def _solve(task: _Task) -> Result | NoPlan:
    return solve(task.problem, task.solver, limits=task.limits, initial=task.initial, raise_on_failure=False)


def _serial(tasks: Iterable[_Task]) -> Iterator[Result | NoPlan]:
    """Solve one task after another until the user interrupts."""
    for task in tasks:
        result = _solve(task)
        yield result
        if result.termination.limit == "interrupt":
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Known:
    """The best plan and bound of a budget so far."""

    plan: Plan
    cost: int
    peak_bytes: int
    bound: float
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> _Known:
        timeline = simulate(graph, plan)
        return cls(plan, timeline.cost, timeline.peak_bytes, float(graph.cost))

    @property
    def gap(self) -> float:
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0

    def improved(self, result: Result | NoPlan) -> _Known:
        """This plan and bound, improved by a solve; it started from this plan, so it found one."""
        known = replace(self, bound=max(self.bound, result.bound), elapsed_s=result.elapsed_s)
        if isinstance(result, NoPlan) or result.cost >= self.cost:
            return known
        return replace(known, plan=result.plan, cost=result.cost, peak_bytes=result.peak_bytes)

    def point(self, graph: Graph, budget_bytes: int) -> CurvePoint:
        return CurvePoint(
            budget_bytes=budget_bytes,
            cost=self.cost,
            overhead=graph.overhead(self.cost),
            bound=self.bound,
            gap=self.gap,
            peak_bytes=self.peak_bytes,
            plan=self.plan,
            elapsed_s=self.elapsed_s,
        )


def _spread(known: list[_Known]) -> None:
    """Pass plans on to larger budgets and bounds to smaller ones."""
    for k in range(1, len(known)):
        if known[k - 1].cost < known[k].cost:
            cheaper = known[k - 1]
            known[k] = replace(known[k], plan=cheaper.plan, cost=cheaper.cost, peak_bytes=cheaper.peak_bytes)
    for k in range(len(known) - 2, -1, -1):
        known[k] = replace(known[k], bound=max(known[k].bound, known[k + 1].bound))
