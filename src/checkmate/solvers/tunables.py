"""The numbers of the solvers that were chosen by measurement, on the graphs of ``benchmarks/solvers.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunables:
    """Shares are shares of the time left when a part begins; most parts end earlier, because their work is limited too."""

    # Most seconds of which shares are taken: a part that does not help ends in time even if the limit is an hour.
    horizon_s: float = 60.0
    # From each start. The first plan is offered at once; the other attempts may fail slowly.
    greedy_share: float = 0.05
    # From each start that has a plan, to take the events from good plans.
    search_share: float = 0.05
    # Linear programs of one event each; at moderate budgets they close the gap and end the run.
    single_events_share: float = 0.2
    # Cuts between the events that prove most, and linear programs of those that bind together.
    chains_share: float = 0.25
    # Orders and recomputations together: on random layered graphs it gains 2 to 9 %, on training steps 0.4 % at most.
    sequences_share: float = 0.3
    # Integer programs of a few events. They end when the gap is met, and take seconds to prove more than the chains.
    any_order_share: float = 0.8
    # Programs of a search's own order are easier, and their solutions are its best starts; the search then has the same share.
    own_order_share: float = 0.25
    # Orders, or final searches, without gain after which to stop. Gains get rarer, and the user waits.
    patience: int = 6
    # Initial temperature of a search, as a share of the cost: the cost of less than one op in a thousand.
    temperature: float = 6e-4
    # Sequences times ops that are worth trying, about ten seconds of one core: decoding takes about a microsecond an op, and on
    # the graphs of 70 to 9,000 ops first tried, a search came to its final cost in 0.5 to 3 s.
    search_work: int = 12_000_000
    # Largest graph for programs of several events, and for steps that lower a peak: a step takes half a second there.
    many_ops: int = 30_000


TUNABLES: Final = Tunables()


def suggested_decodes(ops: int) -> int:
    """Sequences worth trying for a graph of some number of ops, views not counted."""
    return max(400, min(60_000, TUNABLES.search_work // max(1, ops)))
