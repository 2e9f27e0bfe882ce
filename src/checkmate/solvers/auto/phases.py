"""Phases of the default solver, the share of the time that each may take, and its other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Parts of a run, in the order in which they begin first. Each that begins is logged at level DEBUG with its seconds."""

    FIRST_PLANS = "greedy plans"
    TIGHT_BUDGET = "plans for a tight budget"
    FIRST_EVENTS = "bounds of events of the first plans"
    PROVEN_SEARCH = "search within the gap"
    FIRST_SEARCH = "first search"
    SINGLE_EVENTS = "bounds of single events"
    FIRST_STATES = "search over states"
    CHAINS = "bounds of chains of events"
    SEQUENCES = "plans annealed as sequences"
    ANY_ORDER = "event cuts for any order"
    OWN_ORDER = "event cuts for the order of the search"
    ROUND_SEARCH = "search after event cuts"
    ANY_ORDER_AGAIN = "event cuts for any order, again"
    STATES = "search over states, continued"


PHASES: Mapping[Phase, float] = {
    # From each start (`evict.starts.starts`). The first plan is offered at once; the other attempts may fail slowly.
    Phase.FIRST_PLANS: 0.05,
    # Only if there is no plan. Twice: for plans that recompute forward ops alone, and for the smallest peak.
    Phase.TIGHT_BUDGET: 0.3,
    # A few linear programs: often the first plan is within the gap already, and the proof takes a tenth of a second.
    Phase.FIRST_EVENTS: 0.02,
    # From each start, if the first plans are proven within the gap, but not by far: most of what a search gains it gains at once.
    Phase.PROVEN_SEARCH: 0.0125,
    # From each start that has a plan, so that the events are taken from good plans.
    Phase.FIRST_SEARCH: 0.05,
    # Linear programs of one event each; at moderate budgets they close the gap, which ends the run.
    Phase.SINGLE_EVENTS: 0.2,
    # A* on a graph that is small enough: it finds plans that no search finds, such as those of 31 fused ops at a tight budget.
    Phase.FIRST_STATES: 0.05,
    # Cuts between the events that prove most, and linear programs of those that bind together.
    Phase.CHAINS: 0.25,
    # Orders and recomputations together: on random layered graphs it gains 2 to 9 %, on training steps 0.4 % at most.
    Phase.SEQUENCES: 0.3,
    # Integer programs of a few events. They end where the gap is met; what they prove beyond the chains takes them seconds.
    Phase.ANY_ORDER: 0.8,
    # Their programs are easier, and their solutions make the best starts for the search.
    Phase.OWN_ORDER: 0.25,
    # Local search; after it, for the same share, search in other orders.
    Phase.ROUND_SEARCH: 0.25,
    # In later rounds, from the better events of the two kinds of cuts: the search has had its part.
    Phase.ANY_ORDER_AGAIN: 0.6,
    # After one round, because it is all or nothing.
    Phase.STATES: 0.8,
}
"""Share of the time left, and of a minute at most (`AutoParameters.horizon_s`), that a phase may take when it begins.

Most phases end earlier, by the work that they are given. Chosen on the graphs of ``benchmarks/solvers.py``. The final search
takes what they leave.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoParameters:
    """Parameters of `Auto` beside `PHASES`.

    Attributes:
        patience: Orders, or final searches, without gain after which to stop. Gains get rarer, and the time is the user's.
        order_decodes: Sequences to try in each order of `rounds.search_orders`: many orders for a moment each, since an order
            that comes near the best does so early.
        rooms: Shares of the budget that a plan may fill at no penalty when it is put in another order, one drawn for each.
            Less than all leaves the search something to spend on cheaper plans.
        few_ops: Graphs on which the final search also tries new orders. On larger ones a search from a new order seldom
            comes near the best.
        first_divisor: The first search takes one part in so many of `suggested_decodes`.
        round_divisor: The same for the search in each round and in the final search.
        least_round_decodes: Sequences in a round's search on the largest graphs.
        temperature: Start of the temperature of a search, as a share of the cost: that of less than one op in a thousand.
        final_temperature: The same in the final search on large graphs, where the best plan has been searched around already.
        gap_divisor: Integer programs stop at one part in so many of the session's gap: bounds add up with what the search leaves.
        least_gap: Smallest gap of an integer program, as a share: near the engine's tolerance of 1e-6 nothing is gained.
        first_events: Events to bound before the first search: where keeping everything holds most.
        clear_gap: Share of the session's gap. First plans that are proven within it are not searched any further.
        plans_for_events: Plans, beside keeping everything, whose peaks are candidates for events.
        first_share: Share of the time left in which the greedy plans of one start have to be made.
        max_states: Most states to store in A*, of about 100 bytes each: 400 MB.
        many_ops: Largest graph for programs of several events, and for other orders than those of the starts.
        horizon_s: Shares of `PHASES` are of so many seconds at most, so that a phase that does not help ends in time also
            where the limit is an hour, or there is none.
    """

    patience: int = 6
    order_decodes: int = 750
    rooms: tuple[float, ...] = (0.85, 0.9, 0.95, 0.97, 1.0)
    few_ops: int = 500
    first_divisor: int = 10
    round_divisor: int = 4
    least_round_decodes: int = 200
    temperature: float = 6e-4
    final_temperature: float = 3e-3
    gap_divisor: float = 10.0
    least_gap: float = 1e-5
    first_events: int = 4
    clear_gap: float = 0.2
    plans_for_events: int = 2
    first_share: float = 0.4
    max_states: int = 1 << 22
    many_ops: int = 30_000
    horizon_s: float = 60.0


PARAMETERS = AutoParameters()
