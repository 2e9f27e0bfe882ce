"""What a planned graph takes while it is in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.units import Amount
from checkmate.studies.split_budget import Choice
from checkmate.torch.distributed.consensus import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Account:
    """What one planned graph takes above what is resident, and what it takes to plan it anew.

    Attributes:
        graph: The graph.
        choice: Its plan, and what that takes.
        budget: The budget as it was asked for.
        budget_bytes: The budget it was planned for.
        resident_bytes: What it was planned beside, but for what was in flight then.
        planned_gradient_bytes: Gradients among that: there when it was planned, or expected.
        passing_bytes: Gradients that are gone when its backward is over.
        time_limit_s: Seconds that planning may take.
        forget: Makes torch compile it anew; None if nothing can.
        ranks: Those that plan together, if there are several.
        key: See `key_of`.
    """

    graph: Graph
    choice: Choice
    budget: Amount
    budget_bytes: int
    resident_bytes: int
    planned_gradient_bytes: int
    passing_bytes: int
    time_limit_s: float | None
    forget: Callable[[], None] | None
    ranks: Ranks | None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.graph, self.budget))


def key_of(graph: Graph, budget: Amount) -> str:
    """What is divided: a graph, whatever is resident beside it, and a budget as it was asked for."""
    return f"{budget} {msgspec.structs.replace(graph, resident_bytes=0).digest}"
