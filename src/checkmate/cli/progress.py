"""A solve, drawn while it runs."""

from __future__ import annotations

from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from checkmate.cli import amounts, terminal
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Progress, Result
from checkmate.core.units import format_cost
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve


def solve_drawn(problem: Problem, solver: Solver, limits: Limits) -> Result:
    """As `solve`, with its progress on stderr where that is a terminal."""
    console = terminal.talk()
    if not console.is_terminal:
        return solve(problem, solver, limits=limits)
    unit = problem.graph.cost_unit
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking for a plan")

        def draw(progress: Progress) -> None:
            bar.update(task, description=_line(progress, unit))

        return solve(problem, solver, limits=limits, on_progress=draw)


def _line(progress: Progress, unit: str) -> str:
    bound = format_cost(progress.bound, unit) if progress.bound < float("inf") else "none"
    if progress.cost is None:
        return f"no plan yet, bound {bound}"
    gap = max(0.0, 1 - progress.bound / progress.cost) if progress.cost else 0.0
    return f"best {format_cost(progress.cost, unit)}, bound {bound}, gap {amounts.format_share(gap, 2)}"
