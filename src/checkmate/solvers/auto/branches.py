"""The phase of the default solver that branches on what is live at the tightest event."""

from __future__ import annotations

import math

import numpy as np

from checkmate.solvers.auto import phases
from checkmate.solvers.auto.phases import Phase
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.refine import code_of, first_bytes, longest_chain, separated_peaks
from checkmate.solvers.bounds.tight_event import TightEvent
from checkmate.solvers.evict.reorder import first_computations
from checkmate.solvers.evict.search import Search
from checkmate.solvers.local_search import suggested_decodes


def branch(run: Run, searches: list[Search], event: int) -> None:
    """Prove by branches of the event, and search in the weakest of them.

    Args:
        run: The run.
        searches: Searches with their plans, the cheapest first; that one is replaced if a better plan is found.
        event: The event that proves most alone.
    """
    session = run.session
    if not math.isfinite(searches[0].best_cost):
        return
    order = searches[0].order()
    chain = set(longest_chain(run.any_order))
    held = {o: size for o, size in first_bytes(run.graph, order).items() if o in chain}
    apart = max(1, len(run.graph.ops) // phases.PARAMETERS.event_spacing)
    peaks = separated_peaks(held, {o: o for o in held}, phases.PARAMETERS.branch_peaks, apart)
    until = run.until(Phase.TIGHT_EVENT)

    def left_s() -> float:
        return 0.0 if session.done else until - session.elapsed_s()

    with session.within(until):
        tight = TightEvent(run.any_order, event, peaks, session.time_up, lambda: left_s() <= 0)
    if not tight.divides or left_s() <= 0:
        return
    branches = tight.bound(lambda share: run.prove(searches[0], share, True), run.best_share, left_s)
    until = run.until(Phase.BRANCH_SEARCH)
    decodes = suggested_decodes(len(run.graph.ops)) // phases.PARAMETERS.round_divisor
    alone = run.any_order.build([event])
    for weak in branches[: phases.PARAMETERS.branch_starts]:
        if left_s() <= 0:
            break
        seed = run.random.randrange(1 << 32)
        search = Search(run.folded, frozenset(), seed, first_computations(order), session.time_up)
        live = np.zeros(len(alone.program.cost))
        columns = alone.live[0, tight.live(weak)]
        live[columns[columns >= 0]] = 1.0
        if search.start_from(code_of(alone, live, run.any_order, search)):
            run.improve(search, decodes, phases.PARAMETERS.temperature, until)
            run.offer(search.order())
            if search.best_cost < searches[0].best_cost:
                searches[0] = search
