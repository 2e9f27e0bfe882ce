"""``checkmate plan``, ``verify`` and ``min-budget``: plans of a graph, found or checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from msgspec import structs

from checkmate.cli import files, terminal
from checkmate.cli.options import Amounts, Copies, Rules, Search, format_share, one_word
from checkmate.core.errors import PlanError
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_at_least, format_bytes
from checkmate.core.validate import Violation, validate
from checkmate.studies.min_budget import min_budget as smallest_budget


def plan(
    graph: Path,
    /,
    *,
    budget: str,
    search: Search = Search(),
    rules: Rules = Rules(),
    copies: Copies = Copies(),
    out: Path | None = None,
    result: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the cheapest plan of a graph within a memory budget. Ctrl-C keeps the best plan so far.

    Args:
        graph: Graph file from `checkmate capture`.
        budget: Total such as 8GiB, or a share such as 50% of the memory that a plan can change.
        search: The solver, and when it stops.
        rules: Rules for the plan.
        copies: The host that values are copied to.
        out: Plan file to write; by default the name comes from graph and budget.
        result: Result file to write as well, with the plan, its lower bound and how the solve ended; `checkmate report` reads it.
        json: Print one JSON object on stdout.
    """
    amounts = Amounts.of(graph)
    target = amounts.graph
    problem = Problem(target, budget, rules.recompute, rules.reorder, copies.memory())
    where = out or files.beside(graph, f"-{one_word(budget).replace('%', 'pct')}.plan.json")
    outputs = files.Outputs(graph)
    outputs.check(where, result)
    solved = search.solve_drawn(problem)
    found = structs.replace(solved.plan, graph_digest=f"{target.digest}+{target.structure}")
    outputs.save((found, where), (structs.replace(solved, plan=found), result))
    keep_all, timeline = simulate(target, Plan.from_order(target, range(len(target.ops)))), simulate(target, found)
    name, gap = search.solver.lower(), format_share(search.gap)
    status = "fits" if keep_all.peak_bytes <= problem.budget_bytes else "over budget"
    check = terminal.command("verify", graph, where, "--budget", one_word(budget))
    return terminal.VerbOutput(
        data=_plan_data(amounts, keep_all, timeline, solved, where),
        facts=[
            ("graph", str(amounts)),
            ("budget", amounts.budget(problem.budget_bytes, problem.budget)),
            ("solver", f"{name}, {search.time_limit:g} s limit, stops at a gap of {gap}"),
        ],
        header=("<plan", "peak", "cost", "overhead", "remats", "gap", "time", "<status"),
        rows=[
            ["keep-all", format_bytes(keep_all.peak_bytes), amounts.cost(keep_all.cost), "1.000x", "0", "-", "-", status],
            [name, *_plan_cells(amounts, found, solved)],
        ],
        lines=[_conclusion(name, solved), *(_copies_told(amounts, timeline, solved) if problem.host is not None else ())],
        wrote=[where, result],
        hint=f"check the plan with {check}, draw it with {terminal.command('report', graph, result or where)}",
    ).show(json)


def _plan_cells(amounts: Amounts, found: Plan, result: Result) -> list[str]:
    return [
        format_bytes(result.peak_bytes),
        amounts.cost(result.cost),
        f"{result.overhead:.3f}x",
        str(len(found.order) - len(amounts.graph.ops)),
        format_share(result.gap),
        f"{result.elapsed_s:.1f} s",
        result.termination.reason.value,
    ]


def _conclusion(name: str, result: Result) -> str:
    if result.termination.reason.value == "optimal":
        return f"{name} proved that no plan within the budget is cheaper"
    stopped = {"interrupt": "was interrupted;", "time": "stopped at its time limit;"}
    how = stopped.get(result.termination.limit or "", "stopped:")
    return f"{name} {how} the bound proves that at most {format_share(result.gap, 2)} is left to gain"


def _copies(amounts: Amounts, timeline: Timeline) -> dict[str, Any]:
    """Number and bytes of the copies to the host and back, for JSON."""
    both = {"offloaded_bytes": timeline.copied_bytes("out"), "fetched_bytes": timeline.copied_bytes("in")}
    return {"copies": len(timeline.copies), **both, **terminal.picked(timeline, "host_peak_bytes", "waited")}


def _copies_told(amounts: Amounts, timeline: Timeline, result: Result) -> list[str]:
    told = [remark for remark in result.remarks if remark.startswith(("offload", "copies"))]
    if not timeline.copies:
        return told
    copied = _copies(amounts, timeline)
    out, back, held = (format_bytes(copied[name]) for name in ("offloaded_bytes", "fetched_bytes", "host_peak_bytes"))
    waits = amounts.cost(timeline.waited)
    return [f"copies {out} to the host and {back} from it, holds {held} there at most, and waits {waits} for copies", *told]


def _plan_data(amounts: Amounts, keep_all: Timeline, timeline: Timeline, result: Result, where: Path) -> dict[str, Any]:
    graph = amounts.graph
    return {
        **amounts.data(),
        **terminal.picked(result, "budget_bytes", "peak_bytes", "cost", "overhead", "bound", "gap", "solver"),
        "plan": str(where),
        "recomputations": len(result.plan.order) - len(graph.ops),
        "status": result.termination.reason.value,
        **terminal.picked(result.termination, "limit", "detail"),
        "elapsed_s": round(result.elapsed_s, 3),
        "remarks": list(result.remarks),
        "keep_all": terminal.picked(keep_all, "peak_bytes", "cost"),
        "host": _copies(amounts, timeline) if timeline.copies else None,
    }


def verify(graph: Path, plan: Path, /, *, budget: str | None = None, rules: Rules = Rules(), json: terminal.Json = False) -> int:
    """Check a plan against its graph and a budget: exit code 0 if it holds, 1 if not.

    Two accounts of memory that share no code have to agree.

    Args:
        graph: Graph file.
        plan: Plan file.
        budget: Total such as 8GiB, or a share such as 50%; without it only the plan's own rules are checked.
        rules: Rules for the plan.
        json: Print one JSON object on stdout.
    """
    amounts, steps = Amounts.of(graph), files.load_planned(plan)[0]
    target = amounts.graph
    problem = None if budget is None else Problem(target, budget, rules.recompute, rules.reorder)
    budget_bytes = None if problem is None else problem.budget_bytes
    try:
        timeline = simulate(target, steps)
    except PlanError:  # `validate` gives the reasons
        timeline = None
    peak_bytes, cost = (None, None) if timeline is None else (timeline.peak_bytes, timeline.cost)
    broken = list(validate(target, steps, budget_bytes, recompute=rules.recompute, reorder=rules.reorder, cost=cost))
    if timeline is not None and budget_bytes is not None:
        is_over = any(violation.rule == "budget" for violation in broken)
        if (timeline.peak_bytes > budget_bytes) != is_over:
            broken.append(
                Violation("budget", timeline.peak_step, "the two accounts of memory disagree, which is a bug of Checkmate")
            )
    overhead = cost / target.cost if cost is not None and target.cost else None
    again = len(steps.order) - len(set(steps.order))
    facts = [("graph", str(amounts)), ("plan", f"{plan}  {len(steps.steps)} steps, {again} of them recomputations")]
    if problem is not None:
        facts.append(("budget", amounts.budget(problem.budget_bytes, problem.budget)))
    if timeline is not None:
        facts.append(("peak", f"{format_bytes(timeline.peak_bytes)}, at step {timeline.peak_step}"))
        facts.append(("cost", f"{amounts.cost(timeline.cost)}, {overhead or 1.0:.3f}x"))
    return terminal.VerbOutput(
        data={
            "holds": not broken,
            "graph": str(graph),
            "plan": str(plan),
            "budget_bytes": budget_bytes,
            "peak_bytes": peak_bytes,
            "cost": cost,
            "cost_unit": target.cost_unit,
            "overhead": overhead,
            "recomputations": len(steps.order) - len(target.ops),
            "violations": [violation._asdict() for violation in broken],
        },
        facts=facts,
        **_verdict(broken, graph, budget),
    ).show(json)


def _verdict(violations: list[Violation], graph: Path, budget: str | None) -> dict[str, Any]:
    """The parts of the output about the validity of a plan."""
    if not violations:
        return {"lines": ["", "holds" if budget is None else "holds, within the budget at every step"]}
    most = 20
    rest = f", of which {most} are shown" if len(violations) > most else ""
    valid = terminal.command("plan", graph, "--budget", one_word(budget or "50%"))
    return {
        "code": 1,
        "header": ("step", "<rule", "<violation"),
        "rows": [(str(v.step), v.rule, v.message) for v in violations[:most]],
        "lines": [f"does not hold: {len(violations)} violation{'s' * (len(violations) > 1)}{rest}"],
        "hint": f"find a valid plan with {valid}",
    }


def min_budget(
    graph: Path,
    /,
    *,
    time_limit: float = 20.0,
    seed: int = 0,
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    copies: Copies = Copies(),
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the smallest budget in which a graph can run, and the op that sets it.

    Args:
        graph: Graph file from `checkmate capture`.
        time_limit: Time limit in seconds of wall time.
        seed: Seed of all randomness.
        reorder: Whether a plan can change the order of the graph.
        copies: The host that values are copied to.
        out: Plan file to write; by default the name comes from the graph.
        json: Print one JSON object on stdout.
    """
    amounts = Amounts.of(graph)
    where = out or files.beside(graph, "-min.plan.json")
    outputs = files.Outputs(graph)
    outputs.check(where)
    with terminal.drawn("looking for the smallest peak"):
        limits = Limits(time_s=time_limit, seed=seed)
        found = smallest_budget(amounts.graph, limits=limits, reorder=reorder, host=copies.memory())
    outputs.save((found.plan, where))
    unproven = "the smallest possible peak lies between the floor and this one"
    host = () if copies.host is None else ("--host", copies.host, "--device", copies.device)
    cheapest = terminal.command("plan", graph, "--budget", format_at_least(found.peak_bytes), *host)
    hint = f"find the cheapest plan within it with {cheapest}"
    return terminal.VerbOutput(
        data={
            **amounts.data(),
            "plan": str(where),
            "smallest_bytes": found.peak_bytes,
            "elapsed_s": round(found.elapsed_s, 3),
            **terminal.picked(found, "floor_bytes", "proven", "why", "cost", "overhead"),
        },
        facts=[
            ("graph", str(amounts)),
            ("smallest", amounts.budget(found.peak_bytes)),
            ("floor", f"{format_bytes(found.floor_bytes)}: {found.why}"),
            ("cost", f"{amounts.cost(found.cost)}, {found.overhead:.3f}x: the first found"),
        ],
        lines=["", "no plan in any order needs less" if found.proven else unproven],
        wrote=[where],
        hint=hint,
    ).show(json)
