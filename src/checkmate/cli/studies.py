"""``checkmate pareto``, ``max-batch`` and ``regions``: questions that take several solves."""

from __future__ import annotations

import json as json_format
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from checkmate.cli import files, terminal
from checkmate.cli.options import Amounts, Copies, Count, Search, format_share
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Curve, CurvePoint, Limits
from checkmate.core.units import format_bytes
from checkmate.regions import choose_policy
from checkmate.solvers.registry import by_name
from checkmate.solvers.solve import solve
from checkmate.studies.affine import AffineGraph
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch
from checkmate.studies.max_batch import max_batch as largest_batch
from checkmate.studies.pareto import pareto as curve_of


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PointSearch(Search):
    """The solver of each point, and when it stops.

    Attributes:
        time_limit: Time limit of each point, in seconds of wall time.
        gap: Optimality gap at which the solve of a point stops.
    """

    time_limit: float = 10.0
    threads: Annotated[int, Parameter(parse=False)] = 1


def pareto(
    graph: Path,
    /,
    *,
    points: int = 12,
    search: PointSearch = PointSearch(),
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the cheapest plan for each budget from the smallest to keeping everything. Ctrl-C keeps the solved points.

    Args:
        graph: Graph file from `checkmate capture`.
        points: Number of budgets, evenly spaced.
        search: The solver of each point, and when it stops.
        reorder: Whether a plan can change the order of the graph.
        out: Curve file to write, plans included; by default the name comes from the graph.
        json: Print one JSON object on stdout.
    """
    amounts, solver = Amounts.of(graph), by_name(search.solver)
    where = out or files.beside(graph, ".curve.json")
    outputs = files.Outputs(graph)
    outputs.check(where)
    with terminal.drawn("looking for the smallest peak") as say:
        curve = curve_of(
            amounts.graph,
            points=points,
            limits=search.limits(),
            solver=solver,
            reorder=reorder,
            on_progress=lambda done, of: say(f"{done} of {of} budgets"),
        )
        outputs.save((curve, where))
    return _curve_found(amounts, search, curve, where).show(json)


def _curve_found(amounts: Amounts, search: PointSearch, curve: Curve, where: Path) -> terminal.VerbOutput:
    solver, gap = f"{search.solver.lower()}, {search.time_limit:g} s limit a point", format_share(search.gap)
    middle = curve.points[len(curve.points) // 2].budget_bytes
    drawn = terminal.command("report", amounts.path, "PLAN", "--curve", where)
    numbers = ("budget_bytes", "peak_bytes", "cost", "overhead", "bound", "gap")
    return terminal.VerbOutput(
        data={
            **amounts.data(),
            "curve": str(where),
            **terminal.picked(curve, "floor_bytes", "solver"),
            "points": [{**terminal.picked(p, *numbers), "elapsed_s": round(p.elapsed_s, 3)} for p in curve.points],
        },
        facts=[
            ("graph", str(amounts)),
            ("floor", f"{format_bytes(curve.floor_bytes)}: no plan in any order needs less"),
            ("solver", f"{solver}, stops at a gap of {gap}"),
        ],
        header=("budget", "peak", "cost", "overhead", "bound", "gap", "time"),
        rows=[_point(amounts, point) for point in curve.points],
        wrote=[where],
        hint=f"draw the curve with {drawn}; make PLAN with --budget {middle}",
    )


def _point(amounts: Amounts, point: CurvePoint) -> list[str]:
    return [
        format_bytes(point.budget_bytes),
        format_bytes(point.peak_bytes),
        amounts.cost(point.cost),
        f"{point.overhead:.4f}x",
        f"{amounts.graph.overhead(point.bound):.4f}x",
        format_share(point.gap, 2),
        f"{point.elapsed_s:.1f} s",
    ]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Batches:
    """The captured batches, and the limits of the plan at the largest one.

    Attributes:
        budget: Total such as 16GB, resident memory included.
        batch: Batch size of the first graph.
        large_batch: Batch size of the second graph.
        max_overhead: Limit on the cost of the plan: a factor such as 1.3 over computing each op once, or "one extra forward".
    """

    budget: str
    batch: Count
    large_batch: Count | None = None
    max_overhead: float | Literal["one extra forward"] = ONE_EXTRA_FORWARD

    def graphs(self, small: Path, large: Path | None) -> AffineGraph:
        """The step at any batch size."""
        if (large is None) != (self.large_batch is None):
            raise OptionError(
                "a second graph and --large-batch go together",
                hint="give both, or neither if sizes are proportional to the batch",
            )
        first = files.load(small, Graph)
        if large is not None and self.large_batch is not None:
            return AffineGraph(first, self.batch, files.load(large, Graph), self.large_batch)
        return AffineGraph.proportional(first, self.batch)


def max_batch(
    small: Path,
    large: Path | None = None,
    /,
    *,
    batches: Batches,
    search: Search = Search(),
    copies: Copies = Copies(),
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the largest batch that fits a budget, with a proven upper bound. Ctrl-C keeps the largest so far.

    Sizes and costs are linear in the batch, determined by two captures of the same step. With one capture they are
    proportional to the batch, and the resident memory is constant.

    Args:
        small: Graph file of the step at one batch size.
        large: Graph file of the same step at a larger batch size.
        batches: The captured batches, and the limits of the plan at the largest one.
        search: The solver, and when it stops.
        copies: The host that values are copied to.
        out: Plan file to write, with the graph at that batch next to it; by default the name comes from graph and batch.
        json: Print one JSON object on stdout.
    """
    graph_at = batches.graphs(small, large)
    outputs = files.Outputs(small, large)
    outputs.check(*_written(out, small, batches.batch))
    with terminal.drawn("looking for the largest batch") as say:
        found = largest_batch(
            graph_at,
            budget_bytes=batches.budget,
            max_overhead=batches.max_overhead,
            limits=search.limits(),
            solver=by_name(search.solver),
            host=copies.memory(),
            on_progress=lambda batch, upper: say(f"{batch} fits, none above {upper} does"),
        )
    paths = _written(out, small, found.batch)
    outputs.save((graph_at(found.batch), paths[0]), (found.plan, paths[1]))
    return _batch_found(Amounts(small, graph_at.small), batches, search, found, graph_at(found.batch), paths).show(json)


def _batch_found(
    amounts: Amounts, batches: Batches, search: Search, found: MaxBatch, graph: Graph, paths: tuple[Path, Path]
) -> terminal.VerbOutput:
    result, proven, keep_all = found.result, found.batch == found.upper_bound, keep_all_bytes(graph)
    limit = batches.max_overhead
    row = [str(found.batch), format_bytes(result.peak_bytes), f"{result.overhead:.3f}x", str(found.upper_bound)]
    exact = "this is the largest" if proven else f"none above {found.upper_bound} is possible"
    return terminal.VerbOutput(
        data={
            **terminal.picked(found, "batch", "upper_bound"),
            "proven": proven,
            "why": found.why,
            "graph": str(paths[0]),
            "plan": str(paths[1]),
            **terminal.picked(result, "budget_bytes", "peak_bytes"),
            "keep_all_bytes": keep_all,
            "overhead": result.overhead,
            "elapsed_s": round(found.elapsed_s, 3),
        },
        facts=[
            ("graph", str(amounts)),
            ("budget", format_bytes(result.budget_bytes)),
            ("keep-all", f"{format_bytes(keep_all)} at batch {found.batch}"),
            ("limit", f"{limit if isinstance(limit, str) else f'{limit:g}x'} at most, {search.time_limit:g} s"),
        ],
        header=("batch", "peak", "overhead", "proven limit", "time"),
        rows=[[*row, f"{found.elapsed_s:.1f} s"]],
        lines=[f"{exact}: {found.why}"],
        wrote=paths,
        hint=f"draw the plan with {terminal.command('report', *paths)}",
    )


def _written(out: Path | None, small: Path, batch: int) -> tuple[Path, Path]:
    """The graph file next to a plan file, and the plan file."""
    plan = out or files.beside(small, f"-batch{batch}.plan.json")
    return plan.with_name(plan.name.removesuffix(".json").removesuffix(".plan") + ".graph.json"), plan


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The modules to choose from, what they save, and when the search stops.

    Attributes:
        save: What checkpointed modules save: single ops, the same submodules in all of them, or nothing.
        modules: Path of modules to checkpoint, with * and ?, such as "layers.*"; can be given several times. By default the
            outermost modules that have a number for a name.
        time_limit: Time limit in seconds of wall time.
        seed: Seed of all randomness.
        threads: Maximum number of threads of the solver.
    """

    save: Literal["ops", "modules", "nothing"] = "ops"
    modules: list[str] | None = None
    time_limit: float = 60.0
    seed: int = 0
    threads: int = 1


def regions(
    graph: Path,
    plan: Path | None = None,
    /,
    *,
    budget: str,
    choice: Choice = Choice(),
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Choose modules for activation checkpointing, and what they save, within a budget; for loops that cannot run a plan.

    Args:
        graph: Graph file of a PyTorch step without its optimizer, as `checkmate capture` writes it.
        plan: Plan file of that graph, to compare with; by default half of the time is used to look for one.
        budget: Total such as 8GiB, or a share such as 50%.
        choice: The modules to choose from, what they save, and when the search stops.
        out: JSON file to write the policy to; none by default.
        json: Print one JSON object on stdout.
    """
    began = time.perf_counter()
    outputs = files.Outputs(graph, plan)
    outputs.check(out)
    amounts = Amounts.of(graph)
    problem = Problem(amounts.graph, budget)
    with terminal.drawn("choosing regions to checkpoint"):
        if plan is not None:
            planned = evaluate(amounts.graph, files.load_planned(plan)[0])
        else:
            limits = Limits(time_s=choice.time_limit / 2, seed=choice.seed, threads=choice.threads)
            planned = solve(problem, limits=limits, raise_on_failure=False)
        left_s = max(0.1, choice.time_limit - (time.perf_counter() - began))
        policy = choose_policy(
            amounts.graph, problem.budget_bytes, planned, save=choice.save, regions=choice.modules, time_limit_s=left_s
        )
    outputs.save((json_format.dumps(policy.as_dict(), indent=1).encode(), out))
    rows = [(name, problem.describe_budget() if name == "budget" else text) for name, text in policy.rows()]
    return terminal.VerbOutput(
        data={**policy.as_dict(), "graph": str(graph), "out": None if out is None else str(out)},
        facts=[("graph", str(amounts)), *rows],
        wrote=[out],
    ).show(json)
