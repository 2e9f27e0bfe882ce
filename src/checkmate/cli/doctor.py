"""``checkmate doctor``: check an installation on this machine, up to small training steps through every path."""

from __future__ import annotations

import json as json_module
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.status import Status

from checkmate.cli import files, terminal
from checkmate.core.units import format_bytes

if TYPE_CHECKING:
    from checkmate.doctor import Check, Report

_WIDTH = 80
_INDENT = 25
_MARKS = {"ok": "ok", "note": "note", "failed": "FAILED", "skipped": "skipped"}


def doctor(
    *, device: Literal["cpu", "cuda"] | None = None, quick: bool = False, out: Path | None = None, json: terminal.Json = False
) -> int:
    """Check versions, compilers, caches and solvers, and run small training steps through every path.

    Each step runs with a plan and keeping everything: its measured peak is compared with the planned one and the budget, and its
    bits with those of keeping everything. The exit code is 0 if no check failed.

    Args:
        device: Where the steps run; the first GPU if PyTorch finds one, else the CPU.
        quick: Leave out the steps that Inductor compiles, which take most of the time.
        out: File for the report as JSON, to attach to a bug report.
        json: Print the report as one JSON object on stdout.

    Returns:
        The exit code.
    """
    outputs = files.Outputs()
    if out is not None:
        outputs.check(out)
    from checkmate.doctor import examine

    with _status() as status:
        report = examine(device, quick=quick, on_check=None if json else _line, on_start=status.update)
    if out is not None:
        outputs.save((json_module.dumps(report.as_json(), indent=1).encode() + b"\n", out))
    if json:
        terminal.emit(report.as_json())
    else:
        _show(report)
        terminal.closing([] if out is None else [out], _hint(report, out))
    return 0 if report.holds else 1


def _line(check: Check) -> None:
    """Print a check: a line with its verdict, and what to do where something is to be done."""
    head = f"{_MARKS[check.verdict]:<9}{check.name:<{_INDENT - 10}} "
    text = [check.detail] + ([f"do: {check.cure}"] if check.cure else [])
    wrapped = [line for part in text for line in textwrap.wrap(part, _WIDTH - _INDENT, break_on_hyphens=False)]
    terminal.say(*(f"{head if k == 0 else ' ' * _INDENT}{line}" for k, line in enumerate(wrapped)))


def _show(report: Report) -> None:
    """Print the table of the steps, and the conclusion."""
    rows = [_row(check) for check in report.checks if "measured_bytes" in check.figures]
    if rows:
        header = [("step", False)] + [(name, True) for name in ("budget", "planned", "measured", "reserved", "bits", "time")]
        terminal.table(header, rows)
        terminal.say("peaks with everything that is allocated; time is relative to keeping everything")
    else:
        terminal.say("")
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in _MARKS}
    said = ", ".join(f"{count} {_MARKS[verdict].lower()}" for verdict, count in counts.items() if count)
    terminal.say(f"{len(report.checks)} checks in {report.elapsed_s:.0f} s: {said}")


def _row(check: Check) -> list[str]:
    figures = check.figures
    return [
        check.name,
        format_bytes(figures["budget_bytes"]),
        _amount(figures["planned_bytes"]),
        format_bytes(figures["measured_bytes"]),
        _amount(figures["reserved_bytes"]),
        {True: "equal", False: "DIFFER", None: "-"}[figures["identical"]],
        f"{figures['time_ratio']:.2f}x",
    ]


def _amount(size_bytes: Any) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _hint(report: Report, out: Path | None) -> str:
    if report.holds:
        return "" if out is not None else "keep the report with `checkmate doctor --out doctor.json`"
    return "cure what failed, from the first to the last" + ("" if out else "; attach `--out doctor.json` to a bug report")


@contextmanager
def _status() -> Iterator[Status]:
    with Status("starting", console=terminal.messages()) as status:
        yield status
