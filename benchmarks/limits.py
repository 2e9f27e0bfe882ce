"""Time limits on graphs of 500 to 100,000 ops, each in a fresh process, with other processes at work beside it.

    python benchmarks/limits.py                     # about half an hour
    python benchmarks/limits.py --only skipping     # these graphs only; the others keep their rows
    python benchmarks/limits.py --only "layered, host" "gpt, host"
    python benchmarks/limits.py --busy 0            # on a machine that does nothing else

Every solve has a gap of 0, so that only the time limit or a proof ends it; one below the floor is refused, with the smallest
budget that was found in the time. `min_budget` looks for that alone. A call has to return within 1.1 times its limit and
one second; loading the solver's kernels, which a process does once, is not counted, as for every limit. Exit status 1 if one
is late.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkmate
from benchmarks.fresh import add_rows, parser
from benchmarks.generate import chain, gpt_of, layered, skipping
from benchmarks.solvers import read
from checkmate import Graph, HostMemory, InfeasibleBudgetError, Limits, PlanNotFoundError, Problem
from checkmate.core.budget import keep_all_bytes
from checkmate.core.result import Progress
from checkmate.solvers.bounds.floor import floor

CAPTURED = ("bert", "gpt2_loss", "resnet50_split")
WITH_HOST = ", host"
"""End of the name of a graph whose values may be copied to a host."""

HOST = HostMemory("64GiB", 25 * 10**9, 25 * 10**9)


def made(kind: str, ops: int) -> Graph:
    """A graph of the list."""
    if kind in CAPTURED:
        return read(kind)
    kinds = {
        "chain": lambda n: chain((n - 1) // 2), "skipping": skipping, "layered": layered, "gpt": gpt_of
    }  # fmt: skip
    return kinds[kind](ops)


CASES: list[tuple[str, int, float | None, float]] = [
    *((kind, 0, share, limit_s) for kind in CAPTURED for share in (0.1, 0.5) for limit_s in (2.0, 10.0)),
    *(("gpt", ops, 0.3, limit_s) for ops, limit_s in ((1000, 2.0), (10_000, 10.0), (100_000, 120.0))),
    *(("layered", ops, 0.8, limit_s) for ops, limit_s in ((500, 2.0), (1000, 5.0), (5000, 5.0), (5000, 20.0))),
    *(("chain", ops, 0.1, limit_s) for ops, limit_s in ((500, 2.0), (20_000, 5.0), (20_000, 20.0))),
    *(
        ("skipping", ops, share, limit_s)
        for ops, share, limit_s in (
            (500, 0.1, 2.0), (5000, 0.1, 5.0), (10_000, 0.5, 10.0), (100_000, 0.5, 20.0), (100_000, 0.5, 120.0),
            (100_000, 0.1, 120.0),
        )
    ),
    *(
        (f"{kind}{WITH_HOST}", ops, share, limit_s)
        for kind, ops, share, limit_s in (
            ("gpt2_loss", 0, 0.1, 2.0), ("gpt", 10_000, 0.3, 10.0), ("layered", 5000, 0.8, 5.0), ("layered", 20_000, 0.8, 10.0),
            ("skipping", 20_000, 0.1, 10.0),
        )
    ),
    *(
        (kind, ops, share, limit_s)
        for kind, ops, limit_s in (
            ("bert", 0, 5.0), ("layered", 5000, 5.0), ("skipping", 10_000, 10.0), ("gpt", 100_000, 10.0),
            ("skipping", 100_000, 20.0),
        )
        for share in (-0.05, 0.0, None)
    ),
]  # fmt: skip
"""Kind, ops, budget as a share of the way from the floor to the peak of keeping everything, None for `min_budget`, and limit."""


def measure(kind: str, ops: int, share: float | None, limit_s: float) -> dict[str, Any]:
    """Call one case in this process."""
    checkmate.solve(Problem(made("chain", 33), 6), limits=Limits(time_s=1.0))  # loads the kernels
    name = kind.removesuffix(WITH_HOST)
    graph = made(name, ops)
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    budget = low if share is None else max(0, int(low + share * (high - low)))
    problem = Problem(graph, budget, host=None if name == kind else HOST)
    began = time.perf_counter()
    called = smallest(graph, limit_s) if share is None else solved(problem, limit_s)
    wall_s = time.perf_counter() - began
    return {
        "graph": kind,
        "ops": len(graph.ops),
        "budget": "smallest" if share is None else f"f = {share}",
        "limit_s": limit_s,
        "wall_s": round(wall_s, 2),
        **called,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def solved(problem: Problem, limit_s: float) -> dict[str, Any]:
    """What a solve gives: seconds to the first plan, overhead, gap, and why it ended."""
    firsts: list[float] = []

    def note(progress: Progress) -> None:
        if progress.cost is not None:
            firsts.append(round(progress.time_s, 2))

    overhead = gap = None
    try:
        result = checkmate.solve(problem, limits=Limits(time_s=limit_s, gap=0.0), on_progress=note)
        reason, overhead, gap = result.termination.reason.value, result.overhead, result.gap
    except InfeasibleBudgetError:
        reason = "refused"
    except PlanNotFoundError:
        reason = "not found"
    return {"first_s": firsts[0] if firsts else None, "overhead": overhead, "gap": gap, "reason": reason}


def smallest(graph: Graph, limit_s: float) -> dict[str, Any]:
    """The same of a search for the smallest budget; its gap is that of the peak to its floor."""
    found = checkmate.min_budget(graph, limits=Limits(time_s=limit_s))
    return {"first_s": None, "overhead": found.overhead, "gap": found.gap, "reason": "smallest"}


def spin(stop: object) -> None:
    """Keep a core busy."""
    while not stop.is_set():  # type: ignore[attr-defined]
        sum(range(100_000))


def rows(only: list[str] | None) -> Iterator[dict[str, Any]]:
    """Each case in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    for case in CASES:
        if only is None or case[0] in only:
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                yield pool.submit(measure, *case).result()


def main() -> int:
    """Run the cases and write the JSON."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="*", help="names of graphs")
    command.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="busy processes beside each solve")
    options = command.parse_args()
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    for _ in range(options.busy):
        spawn.Process(target=spin, args=(stop,), daemon=True).start()
    try:
        found = add_rows(
            __file__, rows(options.only), ("graph", "ops", "budget", "limit_s"), packages=("numba",), busy=options.busy
        )
    finally:
        stop.set()
    late = [row for row in found if row["wall_s"] > 1.1 * row["limit_s"] + 1.0]
    print(*late or ["all in time"], sep="\n")
    return bool(late)


if __name__ == "__main__":
    sys.exit(main())
