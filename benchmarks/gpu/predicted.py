"""What PyTorch's allocator would reserve for plans of the eight models at full size, by its model: no GPU is needed.

    python benchmarks/gpu/predicted.py [MODEL ...]

The steps are traced from shapes for an H100, and planned for budgets between the smallest peak and keeping everything. Figures of
each plan: the peak of its live bytes and of the blocks, what the allocator reserves with a segment for each large request, and
what it reserves with one arena made before the first step (`budget_of="reserved"`). Results go to `predicted.json`; `page.py`
shows them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]
RESULTS = HERE / "predicted.json"
FRACTIONS = (None, 0.5, 0.25)


def main(models: list[str]) -> int:
    """Predict for some models; others keep their rows."""
    import measure
    from run import MODELS

    known: dict[str, Any] = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    for name in models or MODELS:
        began = time.perf_counter()
        known[name] = rows(name)
        report = {"hardware": measure.machine("cpu"), "versions": measure.software(), "device": "H100"}
        RESULTS.write_text(json.dumps({**report, "models": {n: known[n] for n in MODELS if n in known}}, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", *known[name], sep="\n  ", flush=True)
    return 0


def rows(name: str) -> list[dict[str, Any]]:
    """Figures of the plans of a model."""
    from cases import build

    import checkmate.torch
    from checkmate import Limits, Problem, min_budget, solve
    from checkmate.frontend.planner import keep_everything
    from checkmate.studies.reserved import allocator_peaks, smallest_arena

    case = build(name, "meta", tiny=False)
    graph = checkmate.torch.capture(case.model, example=case.batch, device="H100")
    found: list[dict[str, Any]] = []
    sizes = [p.untyped_storage().nbytes() for p in case.model.parameters()]
    smallest = min_budget(graph, limits=Limits(time_s=30.0))
    keep = keep_everything(graph)
    for fraction in FRACTIONS:
        result = keep
        if fraction is not None:
            budget = smallest.peak_bytes + int(fraction * (keep.peak_bytes - smallest.peak_bytes))
            result = solve(Problem(graph, budget), limits=Limits(time_s=20.0), initial=smallest.plan)
        alone, arena = allocator_peaks(graph, result.plan, sizes), smallest_arena(graph, result.plan, sizes)
        found.append(
            {
                "budget": "keep all" if fraction is None else f"{fraction:.0%}",
                "planned_bytes": result.peak_bytes,
                "allocated_bytes": alone.allocated_bytes,
                "reserved_bytes": alone.reserved_bytes,
                "arena_bytes": arena.size_bytes,
                "reserved_with_arena_bytes": arena.reserved_bytes,
                "overhead": result.overhead,
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
