"""The outcome of a check as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkmate.core.errors import CheckmateError

_REPORT = "report this with the output of `checkmate doctor --json`"


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check: its subject, the finding, and the cure.

    A note is information and no fault. A skipped check could not be made; its detail has the reason.
    """

    name: str
    verdict: Literal["ok", "note", "failed", "skipped"]
    detail: str
    cure: str = ""  # an imperative, which a failed check always has
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])  # measured values, for the JSON and the table

    def __post_init__(self) -> None:
        if self.verdict == "failed" and not self.cure:
            raise ValueError(f"the check of {self.name} failed and says not what to do")


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The outcome of a check; a check that raises has failed."""
    try:
        return check()
    except CheckmateError as error:
        return Check(name, "failed", f"{type(error).__name__}: {error.message}", error.hint or _REPORT)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is what is looked for
        first = next(iter(str(error).strip().splitlines()), "")
        return Check(name, "failed", f"{type(error).__name__}: {first}", _REPORT, {"error": str(error)})
