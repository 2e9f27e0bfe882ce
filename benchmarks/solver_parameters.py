"""How much each parameter of the solvers matters: halve it, double it, and compare plans and gaps.

    python benchmarks/solver_parameters.py                    # the whole sweep, about an hour on one core
    python benchmarks/solver_parameters.py --only evict.search   # parameters whose name begins so; the others keep their rows
    python benchmarks/solver_parameters.py --resume           # rows that are not in the JSON yet
    python benchmarks/solver_parameters.py --table            # the Markdown tables from the committed JSON

Parameters of the local search are tried with `LocalSearch` and a fixed number of decoded sequences, those of the bounds and of
`Auto` with `Auto` and a fixed time, and those of the bounds for tight budgets at such budgets. Time is the process's CPU time
in place of the wall clock, so that other jobs on the machine do not change what a solve may do. Each row is the mean over
points and seeds; what chance does is measured by the same points with the default parameters and other seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkmate
from checkmate import Auto, Graph, Limits, LocalSearch, Problem
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers import session
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.session import Solver

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "solver_parameters.json"
TABLE = HERE.parent / "docs" / "benchmarks" / "solver_parameters.md"

SEARCHED = ("evict.search", "evict.reorder", "evict.schedule", "evict.starts")
BOUNDED = ("auto.phases", "bounds.events.refine", "local_search")
TIGHT = (
    "bounds.events.chains",
    "bounds.events.relaxation",
    "bounds.events.tight_event",
    "evict.population",
    "evict.sequences.resequence",
)
DECODES = 300
AUTO_S = 1.0
TIGHT_S = 6.0
SEEDS = (0, 1)
CHANCE_SEEDS = (2, 3, 4, 5, 6, 7)
FIXED = {
    "bounds.events.refine.share_tolerance": "values are 0 or 1 up to the engine's tolerance",
    "auto.phases.max_states": "memory",
}
LARGEST = {
    "evict.search.ruin.batches": 3,  # shares of an excess: the largest is 1
    "evict.search.ruin.batch_step": 0.5,
}
"""Values beyond which a parameter has no meaning; they are not tried."""
HEADINGS = {"local-search": "Local search", "auto": "Auto", "tight": "Auto at tight budgets"}
CLEAR = 2.0
"""A parameter matters if it changes a mean by more than so many standard deviations of what two sets of seeds differ by."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter at one value.

    Attributes:
        solver: ``"local-search"``, ``"auto"``, or ``"tight"`` for `Auto` at tight budgets.
        parameter: Module and field; of `Auto`'s phases their name.
        default: Its default.
        value: What it was set to.
        overhead: Geometric mean of the overheads. Points without a plan count as `FAILED`.
        gap: Mean gap; None for the local search, which proves nothing.
        failed: Solves that found no plan.
    """

    solver: str
    parameter: str
    default: float
    value: float
    overhead: float
    gap: float | None
    failed: int


FAILED = 3.0
"""Overhead that counts for a solve without a plan: beyond any of these points."""


def points(names: Sequence[str]) -> list[Problem]:
    """Problems where search has something to do, from easy to tight, of 65 to 257 ops; of 353 and 1,090 for tight budgets."""
    sys.path.insert(0, str(HERE))
    from generate import layered
    from solvers import read

    known: dict[str, Callable[[], Problem]] = {
        "MobileNet_b512": lambda: Problem(read("MobileNet_b512"), int(8e9)),
        "linear32_b1": lambda: at(read("linear32_b1"), 0.1),
        "unet": lambda: at(read("unet"), 0.3),
        "layered 100": lambda: Problem(layered(100), int(0.8 * keep_all_bytes(layered(100)))),
        "ResNet50_b1": lambda: at(read("ResNet50_b1"), 0.1),
        "bert": lambda: least(read("bert"), 1.03),
    }
    return [known[name]() for name in names]


def at(graph: Graph, share: float) -> Problem:
    """A budget between the proven floor and the peak of keeping everything."""
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    return Problem(graph, int(low + share * (high - low)))


def least(graph: Graph, factor: float) -> Problem:
    """A budget that is a multiple of the proven floor, resident bytes apart."""
    return Problem(graph, graph.resident_bytes + int(factor * (floor(graph).peak_bytes - graph.resident_bytes)))


def solve_all(problems: Sequence[Problem], solver: Solver, seeds: Sequence[int], time_s: float | None) -> dict[str, Any]:
    """Means over problems and seeds."""
    overheads: list[float] = []
    gaps: list[float] = []
    for problem in problems:
        for seed in seeds:
            limits = Limits(time_s=time_s, gap=1e-4, threads=1, seed=seed)
            result = checkmate.solve(problem, solver, limits=limits, raise_on_failure=False)
            overheads.append(FAILED if result.overhead is None else result.overhead)
            gaps.append(1.0 if result.gap is None else result.gap)
    return {
        "overhead": statistics.geometric_mean(overheads),
        "gap": statistics.mean(gaps) if isinstance(solver, Auto) else None,
        "failed": overheads.count(FAILED),
    }


def settings(modules: Sequence[str]) -> Iterator[tuple[str, float, float, Callable[[], None], Callable[[], None]]]:
    """Name, default, other value, and what sets that value and sets the default again, for each number of some modules."""
    for name in modules:
        module = import_module(f"checkmate.solvers.{name}")
        if name == "auto.phases":
            yield from _shares(module)
        yield from _fields(name, module.PARAMETERS, lambda changed, module=module: setattr(module, "PARAMETERS", changed))


def _shares(module: Any) -> Iterator[tuple[str, float, float, Callable[[], None], Callable[[], None]]]:
    original = module.PHASES
    for phase, share in original.items():
        for other in (share / 2, min(1.0, 2 * share)):
            changed = {**original, phase: other}
            name = f"auto.phases.PHASES.{phase.name}"
            yield name, share, other, _setter(module, "PHASES", changed), _setter(module, "PHASES", original)


def _setter(module: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


def _fields(
    prefix: str, parameters: Any, put: Callable[[Any], None]
) -> Iterator[tuple[str, float, float, Callable[[], None], Callable[[], None]]]:
    names = [f.name for f in fields(parameters)] if is_dataclass(parameters) else parameters._fields
    for name in names:
        default = getattr(parameters, name)
        if hasattr(default, "_fields"):  # choices of a kernel
            yield from _fields(f"{prefix}.{name}", default, lambda inner, name=name: put(_with(parameters, name, inner)))
        elif isinstance(default, (int, float)) and not isinstance(default, bool) and f"{prefix}.{name}" not in FIXED:
            for factor in (0.5, 2.0):
                other = type(default)(round(default * factor) if isinstance(default, int) else default * factor)
                if other and other != default and other <= LARGEST.get(f"{prefix}.{name}", math.inf):
                    yield (
                        f"{prefix}.{name}", default, other,
                        lambda name=name, other=other: put(_with(parameters, name, other)),
                        lambda: put(parameters),
                    )  # fmt: skip


def _with(parameters: Any, name: str, value: Any) -> Any:
    if hasattr(parameters, "_replace"):
        return parameters._replace(**{name: value})
    return replace(parameters, **{name: value})


def sweep(only: str, report: dict[str, Any], *, resume: bool) -> None:
    """Solve everything and write each row; rows of other parameters stay as they are."""
    session.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    chance: dict[str, Any] = report["chance"]
    rows: dict[str, list[dict[str, Any]]] = report["rows"]
    plans = {
        "local-search": (
            SEARCHED, LocalSearch(DECODES), None,
            points(["MobileNet_b512", "linear32_b1", "unet", "layered 100"]),
        ),
        "auto": (BOUNDED, Auto(), AUTO_S, points(["MobileNet_b512", "unet", "layered 100"])),
        "tight": (TIGHT, Auto(), TIGHT_S, points(["ResNet50_b1", "bert"])),
    }  # fmt: skip
    for kind, (modules, solver, time_s, problems) in plans.items():
        solve_all(problems[:1], solver, [0], time_s)  # kernels and imports
        if not resume or kind not in chance:
            chance[kind] = [solve_all(problems, solver, [seed], time_s) for seed in (*SEEDS, *CHANCE_SEEDS)]
        for name, default, other, put, restore in settings(modules):
            known = rows.setdefault(name, [])
            if not name.startswith(only) or (resume and any(row["value"] == other for row in known)):
                continue
            put()
            found = Row(kind, name, default, other, **solve_all(problems, solver, SEEDS, time_s))
            restore()
            rows[name] = [*(row for row in known if row["value"] != other), asdict(found)]
            RESULTS.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{name} {default:g} -> {other:g}: {found.overhead:.5f} {found.gap}", file=sys.stderr, flush=True)


def table(report: dict[str, Any]) -> str:
    """The page."""
    seeds = len(SEEDS) + len(CHANCE_SEEDS)
    lines = [
        "# Parameters of the solvers",
        "",
        f"Made by `python benchmarks/solver_parameters.py`. {report['machine']}.",
        "",
        "Every numeric parameter is halved and doubled while the others stay. `LocalSearch` decodes "
        f"{DECODES} sequences from each start,",
        f"`Auto` has {AUTO_S:g} CPU second: far less than the 60 s that it is tuned for, so that the shares of its phases show.",
        f"At tight budgets (ResNet-50 of the paper at f = 0.1, BERT at 3 % above its floor) it has {TIGHT_S:g}.",
        f"{len(SEEDS)} seeds each. Columns: change of the mean overhead (geometric; lower is better), for `Auto` also of the",
        f"mean gap, both in percentage points. A parameter *matters* if a change exceeds {CLEAR:g} standard deviations of what",
        f"two means of the defaults differ by, estimated from {seeds} seeds: chance alone does so in one of twenty rows. Others",
        "mostly limit time or memory on graphs of thousands of ops, which these points, of 65 to 257 ops, and of 353 and 1,090",
        "at tight budgets, do not reach.",
        "",
    ]
    for kind in ("local-search", "auto", "tight"):
        if kind not in report["chance"]:
            continue
        base, spread = means(report["chance"][kind][: len(SEEDS)]), deviations(report["chance"][kind])
        lines += [
            f"## {HEADINGS[kind]}",
            "",
            f"Mean overhead {base['overhead']:.4f}, standard deviation of differences {100 * spread[0]:.3f} percentage points"
            + (f"; mean gap {100 * base['gap']:.2f} %, deviation {100 * spread[1]:.3f}." if spread[1] else "."),
            "",
            "| parameter | default | halved | doubled | matters |",
            "|---|---:|---:|---:|---|",
        ]
        for name, rows in report["rows"].items():
            if not rows or rows[0]["solver"] != kind:
                continue
            cells = {row["value"] < row["default"]: change(row, base) for row in rows}
            clear = [matters(row, base, spread) for row in rows]
            word = "yes" if any(clear) else "no"
            lines.append(f"| {name} | {rows[0]['default']:g} | {cells.get(True, '')} | {cells.get(False, '')} | {word} |")
        lines.append("")
    return "\n".join(lines)


def means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `solve_all` returns for several seeds, of its results for each."""
    return {
        "overhead": statistics.geometric_mean(run["overhead"] for run in runs),
        "gap": None if runs[0]["gap"] is None else statistics.mean(run["gap"] for run in runs),
        "failed": sum(run["failed"] for run in runs),
    }


def deviations(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Standard deviation of the difference of two mean overheads, and of two mean gaps, if only the seeds differ."""
    share = math.sqrt(2 / len(SEEDS))
    overhead = statistics.stdev(run["overhead"] for run in runs) * share
    return overhead, 0.0 if runs[0]["gap"] is None else statistics.stdev(run["gap"] for run in runs) * share


def change(row: dict[str, Any], base: dict[str, Any]) -> str:
    """What a value does, in percentage points."""
    text = f"{100 * (row['overhead'] - base['overhead']):+.2f}"
    if row["gap"] is not None:
        text += f" / {100 * (row['gap'] - base['gap']):+.2f}"
    return text + (f" ({row['failed']} without a plan)" if row["failed"] > base["failed"] else "")


def matters(row: dict[str, Any], base: dict[str, Any], spread: tuple[float, float]) -> bool:
    """Whether a row differs from the defaults by more than chance does."""
    if abs(row["overhead"] - base["overhead"]) > CLEAR * spread[0] or row["failed"] != base["failed"]:
        return True
    return row["gap"] is not None and abs(row["gap"] - base["gap"]) > CLEAR * spread[1]


def main() -> None:
    """Sweep, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parameters whose name begins so")
    parser.add_argument("--resume", action="store_true", help="only rows that are not in the JSON yet")
    parser.add_argument("--table", action="store_true", help="write the tables from the JSON")
    options = parser.parse_args()
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"chance": {}, "rows": {}}
    if not options.table:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, HiGHS {version('highspy')}"
        sweep(options.only, {"machine": machine, **report}, resume=options.resume)
        report = json.loads(RESULTS.read_text())
    TABLE.write_text(table(report).rstrip() + "\n")


if __name__ == "__main__":
    main()
