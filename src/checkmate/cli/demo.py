"""``checkmate demo``: train a network within half the memory it needs, and check every guarantee."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.status import Status

from checkmate.cli import amounts, files, terminal
from checkmate.cli.extras import needs
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.units import format_bytes
from checkmate.solvers.solve import solve

if TYPE_CHECKING:
    from checkmate.cli.digits import Run, Trained

_TOLERANCE = 0.01
_CHAIN = 8


def demo(*, out: Path = Path(), budget: str = "50%", time_limit: float = 10.0, json: terminal.Json = False) -> int:
    """Train a network on scikit-learn's digits within half the memory it needs, and check every guarantee.

    A second training with all activations kept runs for comparison. The exit code is 0 only if the measured peak is within
    the budget and within 1% of the planned one, and all losses and parameters are bitwise equal.

    Args:
        out: Folder for report.html, created if it does not exist.
        budget: Total such as 30MiB, or a share such as 50% of what keeping everything needs above what no plan can change.
        time_limit: Time limit of planning, in seconds.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    for module in ("torch", "sklearn"):
        needs(module, "demo")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot create {out}: {error.strerror or error}", hint="choose another folder with --out") from error
    report = out / "report.html"
    outputs = files.Outputs()
    outputs.check(report)
    from checkmate.cli import digits
    from checkmate.cli.demo_page import demo_page

    began = time.perf_counter()
    with _status() as status:
        status.update("compiling the solver, once after installation")
        _compile_solver()
        compiled = time.perf_counter() - began
        trained = digits.train(budget, epochs=digits.EPOCHS, time_limit_s=time_limit, say=status.update)
        checks = _checks(trained)
        outcome = _outcome(trained, checks, time.perf_counter() - began, compiled)
        outputs.save((demo_page(trained, outcome).encode(), report))
    if json:
        terminal.emit({**outcome, "report": str(report)})
    else:
        _show(trained, checks, outcome)
        terminal.closing([report], "plan your own model: `checkmate capture FILE.py:FUNCTION`, see examples/language_model.py")
    return 0 if outcome["holds"] else 1


def _compile_solver() -> None:
    """Solve a small chain, so that the one-time compilation of the solver does not count as planning time."""
    chain = [(i, i + 1) for i in range(2 * _CHAIN - 1)]
    skips = [(_CHAIN - 2 - i, _CHAIN + i) for i in range(_CHAIN - 1)]
    ones = [1] * (2 * _CHAIN)
    solve(Problem(Graph.from_dag(cost=ones, size_bytes=ones, edges=chain + skips), _CHAIN - 2))


def _checks(trained: Trained) -> dict[str, bool]:
    """Whether each guarantee was kept."""
    return {
        "within_budget": trained.planned.measured_bytes <= trained.planned.result.budget_bytes,
        "as_planned": abs(_error(trained.planned)) <= _TOLERANCE,
        "identical": trained.identical,
    }


def _error(run: Run) -> float:
    planned = run.result.peak_bytes or 0
    return (run.measured_bytes - planned) / planned if planned else 0.0


def _outcome(trained: Trained, checks: dict[str, bool], seconds: float, compiling: float) -> dict[str, Any]:
    planned, keep_all = trained.planned, trained.keep_all
    return {
        "holds": all(checks.values()),
        **checks,
        "budget_bytes": planned.result.budget_bytes,
        "planned_peak_bytes": planned.result.peak_bytes,
        "measured_peak_bytes": planned.measured_bytes,
        "keep_all_planned_peak_bytes": keep_all.result.peak_bytes,
        "keep_all_measured_peak_bytes": keep_all.measured_bytes,
        "resident_bytes": planned.graph.resident_bytes,
        "gap": planned.result.gap,
        "overhead": planned.result.overhead,
        "time_ratio": trained.time_ratio,
        "accuracy": planned.accuracy,
        "keep_all_accuracy": keep_all.accuracy,
        "steps": trained.steps,
        "loss": planned.losses[-1],
        "status": planned.result.termination.reason.value,
        "solver": planned.result.solver,
        "compiling_s": round(compiling, 1),
        "planning_s": round(planned.result.elapsed_s, 1),
        "elapsed_s": round(seconds, 1),
    }


def _show(trained: Trained, checks: dict[str, bool], outcome: dict[str, Any]) -> None:
    planned, keep_all = trained.planned, trained.keep_all
    assert keep_all.result.peak_bytes is not None
    ops = len(planned.graph.ops)
    terminal.facts(
        [
            ("network", f"residual CNN, {trained.parameters:,} parameters, BatchNorm and dropout; {ops} ops a step"),
            ("data", f"scikit-learn's digits, {trained.steps} steps, trained twice side by side on the CPU"),
            ("budget", amounts.describe_budget(planned.result.budget_bytes, keep_all.result.peak_bytes)),
        ]
    )
    header = [("training", False), *((name, True) for name in ("planned", "measured", "overhead", "gap", "time", "accuracy"))]
    terminal.table(header, [_row("keep-all", keep_all, 1.0), _row("plan", planned, trained.time_ratio)])
    kept, measured = _kept(checks), format_bytes(planned.measured_bytes)
    tensors = len(planned.model.state_dict())
    share = amounts.format_share(planned.result.gap, 2)
    terminal.say(
        f"within budget:  {kept['within_budget']}, {measured} measured of {format_bytes(planned.result.budget_bytes)}",
        f"as planned:     {kept['as_planned']}, measured is {100 * _error(planned):+.2f}% off the planned peak",
        f"loss identical: {kept['identical']}, {trained.steps} losses and {tensors} tensors of the model compared bit by bit",
        f"proof:          no plan within the budget is more than {share} cheaper (in op costs as measured)",
        f"in all:         {outcome['elapsed_s']:.0f} s: {outcome['planning_s']:.0f} s for planning, "
        f"{outcome['compiling_s']:.0f} s for compiling the solver (once after installation)",
    )


def _kept(checks: dict[str, bool]) -> dict[str, str]:
    return {name: "yes" if kept else "NO" for name, kept in checks.items()}


def _row(name: str, run: Run, ratio: float) -> list[str]:
    return [
        name,
        format_bytes(run.result.peak_bytes or 0),
        format_bytes(run.measured_bytes),
        f"{run.result.overhead:.3f}x",
        amounts.format_share(run.result.gap, 2),
        f"{ratio:.3f}x",
        amounts.format_share(run.accuracy),
    ]


@contextmanager
def _status() -> Iterator[Status]:
    console = terminal.messages()
    with Status("starting", console=console) as status:
        yield status
