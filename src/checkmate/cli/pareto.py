"""``checkmate pareto``: cost and lower bound against budget."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import drawn
from checkmate.cli.solvers import solver_named
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Curve, CurvePoint, Limits
from checkmate.core.units import format_bytes, format_cost
from checkmate.studies.pareto import pareto as curve_of


def pareto(
    graph: Path,
    /,
    *,
    points: int = 12,
    solver: str = "auto",
    time_limit: float = 10.0,
    gap: float = 0.005,
    seed: int = 0,
    jobs: int = 1,
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the cheapest plan for each budget from the smallest to keeping everything. Ctrl-C keeps the solved points.

    Args:
        graph: Graph file from `checkmate capture`.
        points: Number of budgets, evenly spaced.
        solver: Name of the solver; `checkmate solvers` lists them.
        time_limit: Time limit of each point, in seconds of wall time.
        gap: Optimality gap at which the solve of a point stops.
        seed: Seed of all randomness.
        jobs: Number of processes.
        reorder: Whether a plan can change the order of the graph.
        out: Curve file to write, plans included; by default the name comes from the graph.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    if jobs < 1:
        raise OptionError(f"--jobs {jobs} must be one or more", hint="give the number of processes, such as --jobs 4")
    target, chosen = files.load(graph, Graph), solver_named(solver)
    limits = Limits(time_s=time_limit, gap=gap, seed=seed)
    where = out or files.beside(graph, ".curve.json")
    outputs = files.Outputs(graph)
    outputs.check(where)
    with ExitStack() as stack:
        executor = None
        if jobs > 1:
            executor = stack.enter_context(_isolated_processes(jobs))
        say = stack.enter_context(drawn("looking for the smallest peak"))
        curve = curve_of(
            target,
            points=points,
            limits=limits,
            solver=chosen,
            executor=executor,
            reorder=reorder,
            on_progress=lambda done, of: say(f"{done} of {of} budgets"),
        )
        outputs.save((curve, where))
    if json:
        terminal.emit(_as_json(graph, curve, where))
        return 0
    terminal.facts(
        [
            ("graph", amounts.describe_graph(target, graph)),
            ("floor", f"{format_bytes(curve.floor_bytes)}: no plan in any order needs less"),
            ("solver", f"{solver.lower()}, {time_limit:g} s limit a point, stops at a gap of {amounts.format_share(gap)}"),
        ]
    )
    header = [(name, True) for name in ("budget", "peak", "cost", "overhead", "bound", "gap", "time")]
    terminal.table(header, [_row(target, point) for point in curve.points])
    middle = curve.points[len(curve.points) // 2].budget_bytes
    terminal.closing(
        [where],
        f"draw the curve with {terminal.command('report', graph, 'PLAN', '--curve', where)}; make PLAN with --budget {middle}",
    )
    return 0


@contextmanager
def _isolated_processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes import nothing from the current folder."""
    before, others = os.environ.get("PYTHONSAFEPATH"), set(multiprocessing.active_children())
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as executor:
            try:
                yield executor
            finally:  # an interrupted curve does not wait for what is still solved
                executor.shutdown(wait=False, cancel_futures=True)
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _row(graph: Graph, point: CurvePoint) -> list[str]:
    return [
        format_bytes(point.budget_bytes),
        format_bytes(point.peak_bytes),
        format_cost(point.cost, graph.cost_unit),
        f"{point.overhead:.4f}x",
        f"{point.bound / graph.cost if graph.cost else 1.0:.4f}x",
        amounts.format_share(point.gap, 2),
        f"{point.elapsed_s:.1f} s",
    ]


def _as_json(path: Path, curve: Curve, where: Path) -> dict[str, Any]:
    names = ("budget_bytes", "peak_bytes", "cost", "overhead", "bound", "gap")
    return {
        "graph": str(path),
        "graph_digest": curve.graph_digest,
        "curve": str(where),
        "floor_bytes": curve.floor_bytes,
        "cost_unit": curve.cost_unit,
        "solver": curve.solver,
        "points": [{**{name: getattr(p, name) for name in names}, "elapsed_s": round(p.elapsed_s, 3)} for p in curve.points],
    }
