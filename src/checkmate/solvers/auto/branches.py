"""The phase of the default solver that branches on what is live at the tightest event."""

from __future__ import annotations

import math
from functools import partial

from checkmate.solvers.auto import phases
from checkmate.solvers.auto.phases import Phase
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.events.refine import code_of, highest_events, longest_chain
from checkmate.solvers.bounds.events.tight_event import TightEvent
from checkmate.solvers.evict.instance import first_computations
from checkmate.solvers.evict.search import Search
from checkmate.solvers.local_search import suggested_decodes


def branch(run: Run, searches: list[Search], event: int) -> TightEvent | None:
    """Prove by branches of the event, and search in the weakest of them.

    Args:
        run: The run.
        searches: Searches with their plans, the cheapest first; that one is replaced if a better plan is found.
        event: The event that proves most alone.

    Returns:
        The branches, to go on with; None where the event is not divided.
    """
    session = run.session
    if not math.isfinite(searches[0].best_cost):
        return None
    until = run.until(Phase.TIGHT_EVENT)
    left_s = run.seconds_to(until)
    with session.within(until):
        tight = TightEvent(run.any_order, event, session.time_up, lambda: left_s() <= 0)
    if not tight.divides or left_s() <= 0:
        return None
    order = searches[0].order()
    peaks = highest_events(run.graph, phases.PARAMETERS.branch_peaks, order, longest_chain(run.any_order))
    branches = tight.bound(partial(run.prove, searches[0], any_order=True), run.best_share, left_s, peaks)
    until = run.until(Phase.BRANCH_SEARCH)
    left_s = run.seconds_to(until)
    decodes = suggested_decodes(len(run.graph.ops)) // phases.PARAMETERS.round_divisor
    for weak in branches[: phases.PARAMETERS.branch_starts]:
        if left_s() <= 0:
            break
        seed = run.random.randrange(1 << 32)
        search = Search(run.folded, frozenset(), seed, first_computations(order), session.time_up)
        if search.start_from(code_of(*tight.solution(weak), run.any_order, search)):
            run.improve(search, decodes, phases.PARAMETERS.temperature, until)
            run.offer(search.order())
            if search.best_cost < searches[0].best_cost:
                searches[0] = search
    return tight


def branch_on(run: Run, searches: list[Search], tight: TightEvent) -> None:
    """Divide further branches, if the time was up before the bound came to its end.

    Args:
        run: The run.
        searches: Searches with their plans.
        tight: The branches.
    """
    left_s = run.seconds_to(run.until(Phase.TIGHT_EVENT_AGAIN))
    tight.resume(partial(run.prove, searches[0], any_order=True), run.best_share, left_s)
