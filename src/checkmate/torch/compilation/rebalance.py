"""Split one budget over the graphs of a step, from the memory that a finished step needed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkmate.frontend.split_budget import candidates, divide, step_peak_bytes
from checkmate.torch.compilation.planned_graph import PlannedGraph

_TIME_S = 30.0
"""Seconds for all candidate plans where the user set no time limit: the default of `Options.time_limit_s`."""


class StepUsage(msgspec.Struct, frozen=True):
    """Memory of a finished step over several graphs.

    Attributes:
        keys: Keys of its graphs, in the order of their first forwards.
        sequence: Graph of each forward.
        peak_bytes: Predicted peak, resident bytes included.
        resident_bytes: Bytes that are resident beside its graphs.
    """

    keys: tuple[str, ...]
    sequence: tuple[int, ...]
    peak_bytes: int
    resident_bytes: int


class BudgetSplit(msgspec.Struct, frozen=True):
    """One budget split over the graphs of a step.

    Attributes:
        budget_bytes: The budget of all graphs together.
        before_bytes: Predicted peak of the step with the plans that were made for each graph alone.
        peak_bytes: Predicted peak of a step with the new orders; 0 without new orders.
        orders: New order of each graph; None if no choice of plans keeps the budget, empty if the present plans keep it and
            recompute nothing.
    """

    budget_bytes: int
    before_bytes: int
    peak_bytes: int = 0
    orders: tuple[tuple[int, ...], ...] | None = ()


_READ_USAGE = msgspec.msgpack.Decoder(StepUsage)
_READ_SPLIT = msgspec.msgpack.Decoder(BudgetSplit)


def split_budget(usage: StepUsage, graphs: Sequence[PlannedGraph]) -> BudgetSplit:
    """Choose a plan for each graph of a step, so that the step keeps the budget at the least cost.

    Args:
        usage: Memory of the step.
        graphs: Its graphs, in the order of ``usage.keys``.
    """
    limit = max(g.budget_bytes for g in graphs)
    if usage.peak_bytes <= limit and all(g.footprint.cost == g.graph.cost for g in graphs):
        return BudgetSplit(limit, usage.peak_bytes)
    first = graphs[0]
    time_s = (first.time_limit_s or _TIME_S) / len(graphs)
    offers = [[g.footprint, *candidates(g.graph, time_s, g.transient_gradient_bytes)] for g in graphs]
    if first.budget.percentage is not None:
        # Each graph has resolved the percentage for itself; of the whole step it is another amount.
        cheapest = [min(offer, key=lambda c: c.cost) for offer in offers]
        keep_all = usage.resident_bytes + step_peak_bytes(usage.sequence, cheapest)
        fixed = usage.resident_bytes + sum(g.footprint.memory.gradient_bytes for g in graphs)
        limit = first.budget.within(fixed_bytes=fixed, keep_all_bytes=max(fixed, keep_all))
    picked = divide(usage.sequence, offers, limit - usage.resident_bytes)
    if picked is None:
        return BudgetSplit(limit, usage.peak_bytes, orders=None)
    chosen = [offer[c] for offer, c in zip(offers, picked, strict=True)]
    peak = usage.resident_bytes + step_peak_bytes(usage.sequence, chosen)
    return BudgetSplit(limit, usage.peak_bytes, peak, tuple(tuple(c.plan.order) for c in chosen))


def split_on_rank0(usage: StepUsage, graphs: Sequence[PlannedGraph]) -> BudgetSplit:
    """The split that all ranks run: rank 0 makes it, for the largest usage of any rank.

    Args:
        usage: Memory of the step on this rank.
        graphs: Its graphs, in the order of ``usage.keys``.

    Raises:
        RankError: A rank failed, or the ranks ran different steps.
    """
    ranks = graphs[0].ranks
    if ranks is None:
        return split_budget(usage, graphs)

    def decide(said: Sequence[bytes]) -> bytes:
        usages = [_READ_USAGE.decode(each) for each in said]
        largest = msgspec.structs.replace(
            usage,
            peak_bytes=max(u.peak_bytes for u in usages),
            resident_bytes=max(u.resident_bytes for u in usages),
        )
        return msgspec.msgpack.encode(split_budget(largest, graphs))

    # Ranks decide only on equal topics, so that ranks which ran other sequences of graphs are told so.
    topic = f"splitting the budget over the graphs {usage.sequence}"
    return _READ_SPLIT.decode(ranks.decide(topic, msgspec.msgpack.encode(usage), decide))
