"""A planned graph that is ready to run, with the data to check its runs and to plan it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from checkmate.core.budget import Budget
from checkmate.core.graph import Graph
from checkmate.frontend.split_budget import PlanFootprint
from checkmate.torch.distributed.consensus import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedGraph:
    """One planned graph, the memory of its plan and the memory that it was planned beside.

    Attributes:
        graph: The graph.
        footprint: Its plan, with cost and memory.
        budget: The budget as the user gave it.
        budget_bytes: The budget that its plan keeps, in bytes.
        resident_bytes: Resident bytes of the graph, less those that other graphs in flight held when it was planned.
        planned_gradient_bytes: Gradients among the resident bytes: they existed when it was planned, or were expected.
        transient_gradient_bytes: Gradients that its backward frees, such as those that FSDP shards.
        time_limit_s: Seconds that planning may take.
        recompile: Makes torch compile it again at its next call; None where Dynamo did not compile it.
        ranks: The ranks that plan together, or None.
        key: See `key_of`.
    """

    graph: Graph
    footprint: PlanFootprint
    budget: Budget
    budget_bytes: int
    resident_bytes: int
    planned_gradient_bytes: int
    transient_gradient_bytes: int
    time_limit_s: float | None
    recompile: Callable[[], None] | None
    ranks: Ranks | None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.graph, self.budget))


def key_of(graph: Graph, budget: Budget) -> str:
    """Key of a graph and the budget that was asked for; resident bytes are ignored."""
    return f"{budget} {msgspec.structs.replace(graph, resident_bytes=0).digest}"
