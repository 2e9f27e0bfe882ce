"""Checks and reports as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from checkmate.core.errors import CheckmateError

Verdict = Literal["ok", "note", "failed", "skipped"]
"""``"note"`` is worth knowing and no fault; ``"skipped"`` could not be looked at, for the reason given."""

FORMAT: Final = "checkmate.doctor/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: What was looked at.
        verdict: The outcome.
        detail: What was found, in words.
        cure: What to do about it, as an imperative; a failed check always has one.
        figures: Measured values by name, for the JSON and the table.
    """

    name: str
    verdict: Verdict
    detail: str
    cure: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.verdict == "failed" and not self.cure:
            raise ValueError(f"the check of {self.name} failed and says not what to do")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one examination.

    Attributes:
        device: Type of the device that the steps ran on.
        machine: Hardware and operating system, by name.
        versions: Versions of Python, Checkmate and the packages that matter, by name.
        checks: The checks, in the order in which they were made.
        warnings: Warnings that Checkmate logged meanwhile.
        elapsed_s: Wall seconds.
    """

    device: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]
    elapsed_s: float

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "failed" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The report as an object of JSON."""
        return {
            "format": FORMAT,
            "holds": self.holds,
            "device": self.device,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "checks": [
                {"name": c.name, "verdict": c.verdict, "detail": c.detail, "cure": c.cure, "figures": dict(c.figures)}
                for c in self.checks
            ],
            "warnings": list(self.warnings),
            "elapsed_s": round(self.elapsed_s, 1),
        }


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The outcome of a check; one that raises has failed.

    Args:
        name: Name of a check that raises.
        check: Makes the check.
    """
    try:
        return check()
    except CheckmateError as error:
        cure = error.hint or "report this with the output of `checkmate doctor --json`"
        return Check(name=name, verdict="failed", detail=f"{type(error).__name__}: {error.message}", cure=cure)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is what is looked for
        first = next(iter(str(error).strip().splitlines()), "")
        return Check(
            name=name,
            verdict="failed",
            detail=f"{type(error).__name__}: {first}",
            cure="report this with the output of `checkmate doctor --json`",
            figures={"error": str(error)},
        )
