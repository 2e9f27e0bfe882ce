"""What a step over several graphs took, and how its budget is divided from then on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkmate.core.units import parse_budget
from checkmate.studies.split_budget import choices, divide, together
from checkmate.torch.compilation.planned_graph import Account

_TIME_S = 30.0  # for the plans to choose from, where there is no limit


class Took(msgspec.Struct, frozen=True):
    """What a step took.

    Attributes:
        keys: Keys of its graphs, in the order in which they came.
        sequence: Graph of each forward.
        most_bytes: What a moment of it was to take.
        resident_bytes: What is resident beside its graphs.
    """

    keys: tuple[str, ...]
    sequence: tuple[int, ...]
    most_bytes: int
    resident_bytes: int


class Division(msgspec.Struct, frozen=True):
    """A budget over the graphs of a step.

    Attributes:
        budget_bytes: The budget of all of them together.
        most_bytes: What a moment of the step took before.
        peak_bytes: What one takes with the orders.
        orders: Order of each graph; None if no division keeps the budget, empty if none is needed.
    """

    budget_bytes: int
    most_bytes: int
    peak_bytes: int = 0
    orders: tuple[tuple[int, ...], ...] | None = ()


_READ_TOOK = msgspec.msgpack.Decoder(Took)
_READ_DIVISION = msgspec.msgpack.Decoder(Division)


def division(took: Took, accounts: Sequence[Account]) -> Division:
    """The budget of a step divided over its graphs.

    Args:
        took: The step.
        accounts: Its graphs, as in ``took.keys``.
    """
    budget = max(a.budget_bytes for a in accounts)
    if took.most_bytes <= budget and all(a.choice.cost == a.graph.cost for a in accounts):
        return Division(budget, took.most_bytes)
    first = accounts[0]
    time_s = (first.time_limit_s or _TIME_S) / len(accounts)
    offers = [[a.choice, *choices(a.graph, time_s, a.passing_bytes)] for a in accounts]
    if isinstance(first.budget, str) and first.budget.strip().endswith("%"):
        freest = [min(offer, key=lambda c: c.cost) for offer in offers]
        keep_all = took.resident_bytes + together(took.sequence, freest)
        budget = parse_budget(first.budget, resident_bytes=took.resident_bytes, keep_all_bytes=keep_all)
    picked = divide(took.sequence, offers, budget - took.resident_bytes)
    if picked is None:
        return Division(budget, took.most_bytes, orders=None)
    chosen = [offer[c] for offer, c in zip(offers, picked, strict=True)]
    peak = took.resident_bytes + together(took.sequence, chosen)
    return Division(budget, took.most_bytes, peak, tuple(tuple(c.plan.order) for c in chosen))


def divide_together(took: Took, accounts: Sequence[Account]) -> Division:
    """The division that every rank runs: that of rank 0, for the most that any of them took.

    Raises:
        RankError: A rank failed, or the ranks ran different steps.
    """
    ranks = accounts[0].ranks
    if ranks is None:
        return division(took, accounts)

    def decide(said: Sequence[bytes]) -> bytes:
        all_took = [_READ_TOOK.decode(each) for each in said]
        most = msgspec.structs.replace(
            took,
            most_bytes=max(t.most_bytes for t in all_took),
            resident_bytes=max(t.resident_bytes for t in all_took),
        )
        return msgspec.msgpack.encode(division(most, accounts))

    # Steps of other graphs differ in their topics.
    topic = f"a division over the graphs {took.sequence}"
    return _READ_DIVISION.decode(ranks.decide(topic, msgspec.msgpack.encode(took), decide))
