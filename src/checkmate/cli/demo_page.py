"""The report of the demo: the page of its plan, with the measured figures next to the planned ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkmate.cli import amounts
from checkmate.core.units import format_bytes
from checkmate.report import html_report

if TYPE_CHECKING:
    from checkmate.cli.digits import Trained


def demo_page(trained: Trained, outcome: dict[str, Any]) -> str:
    """HTML report of a demo run."""
    planned = trained.planned
    return html_report(
        planned.graph,
        planned.plan,
        result=planned.result,
        title=f"A training step within {format_bytes(planned.result.budget_bytes)}",
        summary=_summary(trained, outcome),
        facts=_measured(outcome),
    )


def _summary(trained: Trained, outcome: dict[str, Any]) -> str:
    verdict = "Every guarantee was kept." if outcome["holds"] else "NOT every guarantee was kept."
    return (
        f"A residual CNN was trained for {trained.steps} steps on scikit-learn's digits, once with the plan and once with all "
        f"activations kept, on the same batches. {verdict}"
    )


def _measured(outcome: dict[str, Any]) -> list[list[str]]:
    """Rows of measured figures: a name, then the values for keep-all and for the plan."""
    yes = {True: "yes", False: "NO"}
    peaks = [format_bytes(outcome[name]) for name in ("keep_all_measured_peak_bytes", "measured_peak_bytes")]
    shares = [amounts.format_share(outcome[name]) for name in ("keep_all_accuracy", "accuracy")]
    return [
        ["peak, measured", *peaks],
        ["time, measured", "1.000x", f"{outcome['time_ratio']:.3f}x"],
        ["accuracy", *shares],
        ["measured peak within budget", "", yes[outcome["within_budget"]]],
        ["measured peak as planned, to 1%", "", yes[outcome["as_planned"]]],
        ["losses and parameters bitwise equal", "", yes[outcome["identical"]]],
    ]
