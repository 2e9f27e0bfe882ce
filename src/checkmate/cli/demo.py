"""``checkmate demo``: train a network within half the memory it needs, and check every guarantee."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate.cli import files, terminal
from checkmate.cli.options import described, format_share
from checkmate.cli.targets import needs
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.units import format_bytes
from checkmate.report import PageText, html_report
from checkmate.solvers.solve import solve

if TYPE_CHECKING:
    from checkmate.doctor.digits import Trained


def demo(*, out: Path = Path(), budget: str = "50%", time_limit: float = 10.0, json: terminal.Json = False) -> int:
    """Train a network on scikit-learn's digits within half the memory it needs, and check every guarantee.

    A second training with all activations kept runs for comparison. The exit code is 0 only if the measured peak is within
    the budget and within 1% of the planned one, and all losses and parameters are bitwise equal.

    Args:
        out: Folder for report.html, created if it does not exist.
        budget: Total such as 30MiB, or a share such as 50% of the memory that a plan can change.
        time_limit: Time limit of planning, in seconds.
        json: Print one JSON object on stdout.
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
    from checkmate.doctor import digits

    began = time.perf_counter()
    with terminal.status() as say:
        say("compiling the solver, once after installation")
        _compile_solver()
        compiled = time.perf_counter() - began
        trained = digits.train(budget, time_limit_s=time_limit, say=say)
        outcome = _outcome(trained) | {
            "compiling_s": round(compiled, 1),
            "planning_s": round(trained.planned.result.elapsed_s, 1),
            "elapsed_s": round(time.perf_counter() - began, 1),
        }
        outputs.save((_page(trained, outcome).encode(), report))
    hint = "plan your own model: `checkmate capture FILE.py:FUNCTION`, see examples/language_model.py"
    return terminal.VerbOutput(
        data={**outcome, "report": str(report)},
        **_text(trained, outcome),
        wrote=[report],
        hint=hint,
        code=0 if outcome["holds"] else 1,
    ).show(json)


def _compile_solver() -> None:
    """Solve a small chain: planning time then excludes the one-time compilation of the solver."""
    half = 8
    chain = [(i, i + 1) for i in range(2 * half - 1)]
    skips = [(half - 2 - i, half + i) for i in range(half - 1)]
    ones = [1] * (2 * half)
    solve(Problem(Graph.from_dag(cost=ones, size_bytes=ones, edges=chain + skips), half - 2))


def _outcome(trained: Trained) -> dict[str, Any]:
    """Whether each guarantee was kept, and the figures."""
    planned, keep_all = trained.planned.result, trained.keep_all.result
    measured, measured_keep_all = trained.measured_bytes
    checks = {
        "within_budget": measured <= planned.budget_bytes,
        "as_planned": abs(measured - planned.peak_bytes) <= 0.01 * planned.peak_bytes,
        "identical": trained.identical,
    }
    return {
        "holds": all(checks.values()),
        **checks,
        "budget_bytes": planned.budget_bytes,
        "planned_peak_bytes": planned.peak_bytes,
        "measured_peak_bytes": measured,
        "keep_all_planned_peak_bytes": keep_all.peak_bytes,
        "keep_all_measured_peak_bytes": measured_keep_all,
        "resident_bytes": trained.planned.graph.resident_bytes,
        **terminal.picked(planned, "gap", "overhead"),
        "time_ratio": trained.time_ratio,
        "accuracy": trained.accuracy[0],
        "keep_all_accuracy": trained.accuracy[1],
        "steps": len(trained.planned.losses),
        "loss": trained.planned.losses[-1],
        "status": planned.termination.reason.value,
        "solver": planned.solver,
    }


def _text(trained: Trained, outcome: dict[str, Any]) -> dict[str, Any]:
    """Facts, table and conclusions of the output."""
    model, planned, keep_all = trained.planned.model, trained.planned.result, trained.keep_all.result
    parameters, ops = sum(parameter.numel() for parameter in model.parameters()), len(trained.planned.graph.ops)
    rows = [
        [
            name,
            format_bytes(result.peak_bytes),
            format_bytes(measured),
            f"{result.overhead:.3f}x",
            format_share(result.gap, 2),
            f"{ratio:.3f}x",
            format_share(accuracy),
        ]
        for name, result, measured, ratio, accuracy in (
            ("keep-all", keep_all, trained.measured_bytes[1], 1.0, trained.accuracy[1]),
            ("plan", planned, trained.measured_bytes[0], trained.time_ratio, trained.accuracy[0]),
        )
    ]
    kept = {name: "yes" if outcome[name] else "NO" for name in ("within_budget", "as_planned", "identical")}
    measured, budget = format_bytes(trained.measured_bytes[0]), format_bytes(planned.budget_bytes)
    error = 100 * (trained.measured_bytes[0] / planned.peak_bytes - 1)
    steps, tensors = outcome["steps"], len(model.state_dict())
    return {
        "facts": [
            ("network", f"residual CNN, {parameters:,} parameters, BatchNorm and dropout; {ops} ops a step"),
            ("data", f"scikit-learn's digits, {steps} steps, trained twice side by side on the CPU"),
            ("budget", described(planned.budget_bytes, keep_all.peak_bytes)),
        ],
        "header": ("<training", "planned", "measured", "overhead", "gap", "time", "accuracy"),
        "rows": rows,
        "lines": [
            f"within budget:  {kept['within_budget']}, {measured} measured of {budget}",
            f"as planned:     {kept['as_planned']}, measured is {error:+.2f}% off the planned peak",
            f"loss identical: {kept['identical']}, {steps} losses and {tensors} tensors of the model compared bit by bit",
            f"proof:          no plan within the budget is more than {format_share(planned.gap, 2)} cheaper "
            "(in op costs as measured)",
            f"in all:         {outcome['elapsed_s']:.0f} s: {outcome['planning_s']:.0f} s for planning, "
            f"{outcome['compiling_s']:.0f} s for compiling the solver (once after installation)",
        ],
    }


def _page(trained: Trained, outcome: dict[str, Any]) -> str:
    """The page of the plan, with the measured figures next to the planned ones."""
    planned = trained.planned
    verdict = "Every guarantee was kept." if outcome["holds"] else "NOT every guarantee was kept."
    yes = {True: "yes", False: "NO"}
    rows = [
        ["peak, measured", *(format_bytes(size) for size in reversed(trained.measured_bytes))],
        ["time, measured", "1.000x", f"{trained.time_ratio:.3f}x"],
        ["accuracy", *(format_share(share) for share in reversed(trained.accuracy))],
        ["measured peak within budget", "", yes[outcome["within_budget"]]],
        ["measured peak as planned, to 1%", "", yes[outcome["as_planned"]]],
        ["losses and parameters bitwise equal", "", yes[outcome["identical"]]],
    ]
    text = PageText(
        summary=f"A residual CNN was trained for {outcome['steps']} steps on scikit-learn's digits, once with the plan and once "
        f"with all activations kept, on the same batches. {verdict}",
        facts=rows,
    )
    title = f"A training step within {format_bytes(planned.result.budget_bytes)}"
    return html_report(planned.graph, planned.result.plan, result=planned.result, title=title, text=text)
