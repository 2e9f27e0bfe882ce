"""The beginning of a run of the default solver: plans from each start, and the first proof."""

from __future__ import annotations

import math

from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.solvers.auto import phases
from checkmate.solvers.auto.phases import Phase
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.events.refine import highest_events
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.smallest import smallest_peak
from checkmate.solvers.evict.starts import starts
from checkmate.solvers.local_search import suggested_decodes


def first_plans(run: Run) -> list[Search]:
    """A search for each start (`evict.starts.starts`), the cheapest plan first."""
    session = run.session
    seed = session.limits.seed
    searches: list[Search] = []
    proven = slow = False
    for start in starts(run.folded, seed, session.time_up):
        if searches and run.out_of_time():
            break
        search = start.search(run.folded, seed, session.time_up)
        searches.append(search)
        late = run.begin(Phase.FIRST_PLANS)
        until_s = session.elapsed_s() + phases.PARAMETERS.first_share * session.left_s()
        with session.within(until_s):
            found = search.first(out_of_time=late, stop_at_first=True)
            if found:
                run.offer(search.order())
                cost = search.best_cost
                search.first(out_of_time=late)
                if search.best_cost < cost:
                    run.offer(search.order())
        if session.done and not proven:
            return searches
        if session.plan is not None and not proven:
            _first_proof(run, searches)
            proven = True
        if _clearly_done(run):
            return searches
        slow = session.plan is None and session.elapsed_s() >= until_s
        if slow:
            break
    if session.plan is None:
        _tight_budget_start(run, slow)
        if session.plan is not None:
            _first_proof(run, searches)
    if _clearly_done(run):
        return searches
    phase = Phase.PROVEN_SEARCH if session.gap <= session.limits.gap else Phase.FIRST_SEARCH
    # Every search starts from the best plan known, not only the one that found it.
    for search in searches:
        if run.out_of_time():
            break
        until_s, cheaper = run.until(phase), False
        if session.plan is not None:
            with session.within(until_s):
                cheaper = search.start_from_order(run.fold.apply_order(session.plan.order))
        if math.isfinite(search.best_cost) and (phase is Phase.PROVEN_SEARCH or not session.done):
            decodes = suggested_decodes(len(run.graph.ops)) // phases.PARAMETERS.first_divisor
            if run.improve(search, decodes, phases.PARAMETERS.temperature, until_s) or cheaper:
                run.offer(search.order())
    return sorted(searches, key=lambda search: search.best_cost)


def _first_proof(run: Run, searches: list[Search]) -> None:
    """Bound the events that hold most, until a plan is proven clearly within the gap."""
    events, model = highest_events(run.graph, phases.PARAMETERS.first_events), run.any_order
    late = run.begin(Phase.FIRST_EVENTS)
    run.single_cuts(model, events, searches[0], lambda: _clearly_done(run) or late())


def _clearly_done(run: Run) -> bool:
    """Whether no search could gain more than a part of the gap, or none is wanted."""
    session = run.session
    return session.done and (
        session.gap <= phases.PARAMETERS.clear_gap * session.limits.gap or session.gap > session.limits.gap or session.decided
    )


def _tight_budget_start(run: Run, slow: bool) -> None:
    """Look for a plan where there are few.

    The greedy search has fewer ways to go wrong if only forward ops may be computed again: on ResNet-50 above batch 860
    it finds plans in 0.5 s there, and none with all ops in 20 s. And the search for the smallest peak, which starts
    from plans that fit larger budgets, comes by plans that a search for this budget misses.

    Args:
        run: The run.
        slow: Whether greedy plans took too long to come to an end. Nothing that follows comes to one without a plan then, so
            that the search for the smallest peak has all the time that is left: a refusal says what it found.
    """
    session = run.session
    until_s = run.until(Phase.TIGHT_BUDGET)

    def late() -> bool:
        return session.left_s() <= 0 or session.elapsed_s() > until_s

    forward = Problem(run.graph, run.folded.budget_bytes, "forward", run.folded.reorder)
    for start in starts(forward, session.limits.seed, session.time_up):
        if late():
            break
        search = start.search(forward, session.limits.seed, session.time_up)
        with session.within(until_s):
            found = search.first(out_of_time=late, stop_at_first=True)
        if found and run.offer(search.order()):
            break
    if session.plan is not None or session.left_s() <= 0:  # `Limits` refuses a time of zero
        return
    limits = Limits(time_s=session.left_s() if slow else run.seconds_of(Phase.TIGHT_BUDGET), seed=session.limits.seed)
    session.smallest = smallest_peak(session.problem, limits, enough=session.problem.budget_bytes)
    session.offer(session.smallest.plan.order)
    if session.smallest.floor_bytes > session.problem.budget_bytes:
        session.prove(math.inf)
