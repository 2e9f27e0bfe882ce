"""``checkmate demo``: train a network within half the memory it needs, and check every guarantee."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from checkmate.cli import files, terminal
from checkmate.cli.options import format_share
from checkmate.cli.targets import needs
from checkmate.core.errors import OptionError
from checkmate.core.result import Measured
from checkmate.core.units import format_bytes, seconds
from checkmate.report import PageText, html_report

if TYPE_CHECKING:
    from checkmate.doctor.digits import DigitsTraining
    from checkmate.doctor.training import Trained

_PROMISES = {
    "within_budget": "measured peak within the budget",
    "as_planned": "measured peak as planned, to 1%",
    "identical": "losses and parameters bitwise equal",
}


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
    with terminal.drawn("training") as say:
        made = digits.train(budget, time_limit_s=time_limit, say=say)
        outcome = outcome_of(made) | {"elapsed_s": round(time.perf_counter() - began, 1)}
        outputs.save((_page(made, outcome).encode(), report))
    planned = made.planned.result
    share = format_share(planned.budget_bytes / made.keep_all.result.peak_bytes)
    return terminal.VerbOutput(
        data={**outcome, "report": str(report)},
        facts=[
            ("network", f"residual CNN with BatchNorm and dropout, {len(made.planned.graph.ops)} ops a step"),
            ("data", f"scikit-learn's digits, {outcome['steps']} steps, trained twice in {outcome['elapsed_s']:.0f} s"),
            ("budget", f"{format_bytes(planned.budget_bytes)}, {share} of what keeping everything needs"),
        ],
        header=("<training", "planned", "measured", "overhead", "gap", "time", "accuracy"),
        rows=_rows(made, outcome),
        lines=[
            *(f"{'yes' if outcome[name] else 'NO':<5}{words}" for name, words in _PROMISES.items()),
            f"{'yes':<5}no plan within the budget is more than {format_share(planned.gap, 2)} cheaper in op costs",
            f"{'':<5}{_measured(made.planned)}",
        ],
        wrote=[report],
        hint="plan your own model: `checkmate capture FILE.py:FUNCTION`, see examples/language_model.py",
        code=0 if outcome["holds"] else 1,
    ).show(json)


def outcome_of(made: DigitsTraining) -> dict[str, Any]:
    """Whether each promise was kept, and the figures."""
    from checkmate.doctor.training import promises

    planned, keep_all = made.planned.result, made.keep_all.result
    kept = promises(made.planned, made.keep_all, planned.peak_bytes)
    return {
        "holds": all(kept.values()),
        **kept,
        "budget_bytes": planned.budget_bytes,
        "planned_peak_bytes": planned.peak_bytes,
        "measured_peak_bytes": made.planned.peak_bytes,
        "keep_all_planned_peak_bytes": keep_all.peak_bytes,
        "keep_all_measured_peak_bytes": made.keep_all.peak_bytes,
        "resident_bytes": made.planned.graph.resident_bytes,
        **terminal.picked(planned, "gap", "overhead", "solver"),
        "time_ratio": sum(made.planned.seconds) / sum(made.keep_all.seconds),
        "planned_over_measured_time": _measured(made.planned).planned_over_measured,
        "accuracy": made.accuracy[0],
        "keep_all_accuracy": made.accuracy[1],
        "steps": len(made.planned.losses),
        "loss": made.planned.losses[-1],
        "status": planned.termination.reason.value,
    }


def _measured(training: Trained) -> Measured:
    planned_s, times = seconds(training.result.cost, training.graph.cost_unit), training.seconds
    return Measured(peak_bytes=training.peak_bytes, seconds=sum(times) / len(times), planned_s=planned_s)


def _rows(made: DigitsTraining, outcome: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            format_bytes(training.result.peak_bytes),
            format_bytes(training.peak_bytes),
            f"{training.result.overhead:.3f}x",
            format_share(training.result.gap, 2),
            f"{time_ratio:.3f}x",
            format_share(accuracy),
        ]
        for name, training, time_ratio, accuracy in (
            ("keep-all", made.keep_all, 1.0, made.accuracy[1]),
            ("plan", made.planned, outcome["time_ratio"], made.accuracy[0]),
        )
    ]


def _page(made: DigitsTraining, outcome: dict[str, Any]) -> str:
    """The page of the plan, with the measured figures next to the planned ones."""
    keep_all, plan = _rows(made, outcome)
    verdict = "Every guarantee was kept." if outcome["holds"] else "NOT every guarantee was kept."
    text = PageText(
        summary=f"A residual CNN was trained for {outcome['steps']} steps on scikit-learn's digits, once with the plan and once "
        f"with all activations kept, on the same batches. {verdict}",
        facts=[
            *([f"{name}, measured", keep_all[k], plan[k]] for name, k in (("peak", 2), ("time", 5), ("accuracy", 6))),
            *([words, "", "yes" if outcome[name] else "NO"] for name, words in _PROMISES.items()),
        ],
    )
    result = structs.replace(made.planned.result, measured=_measured(made.planned))
    title = f"A training step within {format_bytes(result.budget_bytes)}"
    return html_report(made.planned.graph, result.plan, result=result, title=title, text=text)
