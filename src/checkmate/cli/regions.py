"""``checkmate regions``: which modules to checkpoint and what to save in them, within a budget."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import Literal

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import drawn
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.regions import choose_policy
from checkmate.solvers.solve import solve


def regions(
    graph: Path,
    plan: Path | None = None,
    /,
    *,
    budget: str,
    save: Literal["ops", "modules", "nothing"] = "ops",
    modules: list[str] | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    threads: int = 1,
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Choose modules for activation checkpointing, and what they save, within a budget; for loops that cannot run a plan.

    Args:
        graph: Graph file of a PyTorch step without its optimizer, as `checkmate capture` writes it.
        plan: Plan file of that graph, to compare with; by default half of the time is used to look for one.
        budget: Total such as 8GiB, or a share such as 50%.
        save: What checkpointed modules save: single ops, the same submodules in all of them, or nothing.
        modules: Path of modules to checkpoint, with * and ?, such as "layers.*"; can be given several times. By default the
            outermost modules that have a number for a name.
        time_limit: Time limit in seconds of wall time.
        seed: Seed of all randomness.
        threads: Maximum number of threads of the solver.
        out: JSON file to write the policy to; none by default.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    began = time.perf_counter()
    outputs = files.Outputs(graph, plan)
    outputs.check(out)
    target = files.load(graph, Graph)
    problem = Problem(target, budget)
    outputs = files.Outputs(graph, plan)
    outputs.check(out)
    with drawn("choosing regions to checkpoint"):
        if plan is not None:
            planned = evaluate(target, files.load_plan(plan))
        else:
            limits = Limits(time_s=time_limit / 2, seed=seed, threads=threads)
            planned = solve(problem, limits=limits, raise_on_failure=False)
        left_s = max(0.1, time_limit - (time.perf_counter() - began))
        policy = choose_policy(target, problem.budget_bytes, planned, save=save, regions=modules, time_limit_s=left_s)
    if out is not None:
        outputs.save((json_format.dumps(policy.as_dict(), indent=1).encode(), out))
    if json:
        terminal.emit({**policy.as_dict(), "graph": str(graph), "out": None if out is None else str(out)})
        return 0
    rows = [(name, problem.describe_budget() if name == "budget" else text) for name, text in policy.rows()]
    terminal.facts([("graph", amounts.describe_graph(target, graph)), *rows])
    terminal.closing([] if out is None else [out])
    return 0
