"""Progress of long computations, drawn on stderr if it is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from checkmate.cli import amounts, terminal
from checkmate.core.errors import printable
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Progress, Result
from checkmate.core.units import format_cost
from checkmate.frontend.progress import redirected
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve


def solve_drawn(problem: Problem, solver: Solver, limits: Limits) -> Result:
    """Run `solve` with a progress line on stderr, if it is a terminal."""
    unit = problem.graph.cost_unit
    with drawn("looking for a plan") as say:
        return solve(problem, solver, limits=limits, on_progress=lambda progress: say(_line(progress, unit)))


@contextmanager
def drawn(text: str) -> Iterator[Callable[[str], None]]:
    """Draw a spinner, a clock and a line of text during the block; yields a function that replaces the text."""
    console = terminal.messages()
    if not console.is_terminal:
        with redirected(lambda _text: None):
            yield lambda _text: None
        return
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text)

        def say(text: str) -> None:
            bar.update(task, description=printable(text))

        with redirected(say):
            yield say


def _line(progress: Progress, unit: str) -> str:
    bound = format_cost(progress.bound, unit) if progress.bound < float("inf") else "none"
    if progress.cost is None:
        return f"no plan yet, bound {bound}"
    gap = max(0.0, 1 - progress.bound / progress.cost) if progress.cost else 0.0
    return f"best {format_cost(progress.cost, unit)}, bound {bound}, gap {amounts.format_share(gap, 2)}"
