"""Planned against measured peaks of real PyTorch training steps, each in a fresh process.

For every model of `models.py`: the smallest feasible budget, five budgets from there towards keeping
everything, and `torch.utils.checkpoint` on every block. The promises checked are: the measured peak
keeps the budget; planned and measured differ by at most 1 %; loss, every gradient, every buffer and the
random state are equal to the bit to keeping everything; a smaller budget never peaks higher; the smallest
feasible peak is at most that of per-block checkpointing. Exit status 1 if one breaks.

    python benchmarks/torch_peaks.py [--models gpt2 unet] [--time-limit 30]

Models that are not named keep their rows of the last run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import steps
from fresh import answer, child, digest, earlier, mib, parser, ran, save
from models import MODELS, build

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Budgets: this share of the way from the smallest feasible peak to keeping everything."""


def main() -> int:
    """Run the benchmark, or one child of it."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=MODELS)
    command.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve may take")
    command.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.child:
        kind, *arguments = options.child
        answer({"plan": plan_points, "run": run_point}[kind](*arguments))
        return 0
    rows = earlier(__file__)
    for name in options.models:
        rows[name] = run_model(name, str(options.time_limit))
        print(name, rows[name], flush=True)
        save(__file__, {**ran("torch", "transformers"), "fractions": FRACTIONS, "models": rows})
    broken = [line for name in MODELS for line in (verdict(name, rows[name]) if name in rows else [f"{name}: not run"])]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def run_model(name: str, time_limit_s: str) -> dict[str, Any]:
    """All runs of a model."""
    with tempfile.TemporaryDirectory() as folder:
        planned = child(__file__, "plan", name, folder, time_limit_s)
        keep = child(__file__, "run", name, "keep all")
        for point in planned["points"]:
            point.update(child(__file__, "run", name, point.pop("plan")))
            point["time_ratio"] = point["time_s"] / keep["time_s"]
            point["identical"] = point["digests"] == keep["digests"]
    others = {how: child(__file__, "run", name, how) for how in ("eager", "checkpoint_per_block")}
    return {**planned, "keep_all": keep, **others}


def plan_points(name: str, folder: str, time_limit_s: str) -> dict[str, Any]:
    """Child: capture once, find the smallest budget, and plan for every budget."""
    import checkmate.torch
    from checkmate import Limits, PlanNotFoundError, Problem, evaluate, min_budget, solve, write
    from checkmate.core.budget import keep_all_bytes

    case = build(name)
    began = time.perf_counter()
    graph = checkmate.torch.capture(case.model, example=case.batch)
    captured = time.perf_counter() - began
    limits = Limits(time_s=float(time_limit_s))
    smallest = min_budget(graph, limits=Limits(time_s=2 * float(time_limit_s)))
    assert smallest.plan is not None
    top = keep_all_bytes(graph)
    points: list[dict[str, Any]] = []
    above: Any = None
    for fraction in reversed(FRACTIONS):
        budget = smallest.peak_bytes + int(fraction * (top - smallest.peak_bytes))
        try:
            result = solve(Problem(graph, budget), limits=limits)
        except PlanNotFoundError:
            result = evaluate(graph, smallest.plan)
        # A plan for a larger budget that also keeps this one is a candidate: so peaks are monotone.
        if above is not None and above.peak_bytes <= budget and above.cost <= result.cost:
            result = above
        above = result
        path = f"{folder}/{fraction}.plan.json"
        write(result.plan, path)
        row = {
            "fraction": fraction,
            "budget_bytes": budget - graph.resident_bytes,
            "planned_bytes": result.peak_bytes - graph.resident_bytes,
            "overhead": result.overhead,
            "bound_overhead": result.bound / graph.cost,
            "gap": result.gap,
            "solve_s": result.elapsed_s,
            "plan": path,
        }
        points.insert(0, row)
    return {
        "ops": len(graph.ops),
        "resident_bytes": graph.resident_bytes,
        "planned_keep_all_bytes": top - graph.resident_bytes,
        "floor_bytes": smallest.floor_bytes - graph.resident_bytes,
        "capture_s": captured,
        "points": points,
    }


def run_point(name: str, how: str) -> dict[str, Any]:
    """Child: a step by a plan or one of the other ways; peak, time and digests of what it computed."""
    import torch

    import checkmate.torch

    case = build(name)
    if how == "eager":
        step: Callable[[], Any] = steps.eager(case)
    elif how == "checkpoint_per_block":
        step = steps.checkpointed(case)
    else:
        compiled = checkmate.torch.compile(case.model, example=case.batch, plan=None if how == "keep all" else how)
        step = lambda: compiled(**case.batch)[1]  # noqa: E731
    torch.manual_seed(1)
    loss = step()
    digests = {
        "loss": digest(loss),
        "gradients": digest(*[p.grad for p in case.model.parameters()]),
        "buffers": digest(*case.model.buffers()),
        "random_state": digest(torch.get_rng_state()),
    }
    times = []
    for _ in range(3):
        case.model.zero_grad(set_to_none=True)
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    case.model.zero_grad(set_to_none=True)
    peak = checkmate.torch.measure_peak(step)
    return {"measured_bytes": peak, "time_s": min(times), "loss": loss.item(), "digests": digests}


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a model's rows break, in words."""
    broken = []
    for point in row["points"]:
        label = f"{name} at {mib(point['budget_bytes'])}"
        if point["measured_bytes"] > point["budget_bytes"]:
            broken.append(f"{label}: measured {point['measured_bytes']} bytes, budget {point['budget_bytes']}")
        if abs(point["measured_bytes"] - point["planned_bytes"]) > 0.01 * point["planned_bytes"]:
            broken.append(f"{label}: measured {point['measured_bytes']} bytes, planned {point['planned_bytes']}")
        if not point["identical"]:
            broken.append(f"{label}: not equal to the bit to keeping everything")
    peaks = [point["measured_bytes"] for point in row["points"]] + [row["keep_all"]["measured_bytes"]]
    if peaks != sorted(peaks):
        broken.append(f"{name}: peaks are not monotone in the budget: {peaks}")
    if peaks[0] > row["checkpoint_per_block"]["measured_bytes"]:
        broken.append(f"{name}: smallest peak {peaks[0]}, checkpoint per block {row['checkpoint_per_block']['measured_bytes']}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
