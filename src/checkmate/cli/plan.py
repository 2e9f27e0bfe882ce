"""``checkmate plan``: find the cheapest plan of a graph within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from msgspec import structs

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import solve_drawn
from checkmate.cli.solvers import solver_named
from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_bytes, format_cost


def plan(
    graph: Path,
    /,
    *,
    budget: str,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.005,
    seed: int = 0,
    threads: int = 1,
    recompute: Literal["all", "forward"] = "all",
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    host: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    result: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the cheapest plan of a graph within a memory budget. Ctrl-C keeps the best plan so far.

    Args:
        graph: Graph file from `checkmate capture`.
        budget: Total such as 8GiB, or a share such as 50% of what keeping everything needs above what no plan can change.
        solver: Name of the solver; `checkmate solvers` lists them.
        time_limit: Time limit in seconds of wall time.
        gap: Optimality gap at which the solve stops.
        seed: Seed of all randomness.
        threads: Maximum number of threads of the solver.
        recompute: The ops that a plan can recompute.
        reorder: Whether a plan can change the order of the graph.
        host: Memory of the host that values can be copied to, such as 32GiB; none by default. It needs --device.
        device: Name of a device, or path of a profile, whose bus to the host the copies take.
        out: Plan file to write; by default the name comes from graph and budget.
        result: Result file to write as well, with the plan, its lower bound and how the solve ended; `checkmate report` reads it.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    target = files.load(graph, Graph)
    problem = Problem(target, budget, recompute, reorder, amounts.host_memory(host, device))
    chosen = solver_named(solver)
    where = out or files.beside(graph, f"-{amounts.one_word(budget).replace('%', 'pct')}.plan.json")
    outputs = files.Outputs(graph)
    outputs.check(where, result)
    limits = Limits(time_s=time_limit, gap=gap, seed=seed, threads=threads)
    solved = solve_drawn(problem, chosen, limits)
    found = solved.plan
    if found is None:
        raise CheckmateError("the solve ended without a plan and without an error")
    found = structs.replace(found, graph_digest=f"{target.digest}+{target.structure}")
    outputs.save((found, where), *([] if result is None else [(structs.replace(solved, plan=found), result)]))
    keep_all = simulate(target, Plan.from_order(target, range(len(target.ops))))
    if json:
        terminal.emit(_as_json(target, graph, keep_all, solved, where))
        return 0
    name = solver.lower()
    terminal.facts(
        [
            ("graph", amounts.describe_graph(target, graph)),
            ("budget", amounts.describe_budget(problem.budget_bytes, keep_all.peak_bytes, problem.budget)),
            ("solver", f"{name}, {time_limit:g} s limit, stops at a gap of {amounts.format_share(gap)}"),
        ]
    )
    header = [("plan", False), *((n, True) for n in ("peak", "cost", "overhead", "remats", "gap", "time")), ("status", False)]
    terminal.table(header, [_keep_all_row(target, keep_all, problem.budget_bytes), _plan_row(target, name, found, solved)])
    _conclude(name, solved)
    if problem.host is not None:
        _tell_copies(target, solved)
    wrote = [where] if result is None else [where, result]
    check = terminal.command("verify", graph, where, "--budget", amounts.one_word(budget))
    terminal.closing(wrote, f"check the plan with {check}, draw it with {terminal.command('report', graph, wrote[-1])}")
    return 0


def _keep_all_row(graph: Graph, keep_all: Timeline, budget_bytes: int) -> list[str]:
    status = "fits" if keep_all.peak_bytes <= budget_bytes else "over budget"
    cost = format_cost(keep_all.cost, graph.cost_unit)
    return ["keep-all", format_bytes(keep_all.peak_bytes), cost, "1.000x", "0", "-", "-", status]


def _plan_row(graph: Graph, name: str, plan: Plan, result: Result) -> list[str]:
    return [
        name,
        format_bytes(result.peak_bytes or 0),
        format_cost(result.cost or 0, graph.cost_unit),
        f"{result.overhead:.3f}x",
        str(len(plan.order) - len(graph.ops)),
        amounts.format_share(result.gap),
        f"{result.elapsed_s:.1f} s",
        result.termination.reason.value,
    ]


def _conclude(name: str, result: Result) -> None:
    limit, share = result.termination.limit, amounts.format_share(result.gap, 2)
    if result.termination.reason.value == "optimal":
        text = f"{name} proved that no plan within the budget is cheaper"
    elif limit == "interrupt":
        text = f"{name} was interrupted; the bound proves that at most {share} is left to gain"
    elif limit == "time":
        text = f"{name} stopped at its time limit; the bound proves that at most {share} is left to gain"
    else:
        text = f"{name} stopped: the bound proves that at most {share} is left to gain"
    terminal.say(text)


def _tell_copies(graph: Graph, result: Result) -> None:
    assert result.plan is not None
    timeline = simulate(graph, result.plan)
    moved = sum(graph.values[c.value].size_bytes for c in timeline.copies if c.direction == "out")
    if timeline.copies:
        waits = format_cost(timeline.waited, graph.cost_unit)
        held = format_bytes(timeline.host_peak_bytes)
        terminal.say(f"copies {format_bytes(moved)} to the host, holds {held} there at most, and waits {waits} for copies")
    terminal.say(*(remark for remark in result.remarks if remark.startswith(("offload", "copies"))))


def _as_json(graph: Graph, path: Path, keep_all: Timeline, result: Result, where: Path) -> dict[str, Any]:
    assert result.plan is not None
    timeline = simulate(graph, result.plan)
    copies = {
        "copies": len(timeline.copies),
        "offloaded_bytes": sum(graph.values[c.value].size_bytes for c in timeline.copies if c.direction == "out"),
        "host_peak_bytes": timeline.host_peak_bytes,
        "waited": timeline.waited,
    }
    return {
        "graph": str(path),
        "graph_digest": graph.digest,
        "plan": str(where),
        "budget_bytes": result.budget_bytes,
        "peak_bytes": result.peak_bytes,
        "resident_bytes": graph.resident_bytes,
        "cost": result.cost,
        "cost_unit": graph.cost_unit,
        "overhead": result.overhead,
        "recomputations": len(result.plan.order) - len(graph.ops),
        "bound": result.bound,
        "gap": result.gap,
        "status": result.termination.reason.value,
        "limit": result.termination.limit,
        "detail": result.termination.detail,
        "solver": result.solver,
        "elapsed_s": round(result.elapsed_s, 3),
        "remarks": list(result.remarks),
        "keep_all": {"peak_bytes": keep_all.peak_bytes, "cost": keep_all.cost},
        "host": copies if timeline.copies else None,
    }
