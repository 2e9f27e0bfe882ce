"""The first phase of the default solver: greedy plans from each start, and the first proof."""

from __future__ import annotations

import math

from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.events.refine import highest_events
from checkmate.solvers.evict.smallest import smallest_peak
from checkmate.solvers.evict.starts import starts
from checkmate.solvers.tunables import TUNABLES


def greedy_starts(run: Run) -> bool:
    """Make a search for each start (`starts`); returns whether more search could gain only a part of the gap, or is unwanted."""
    session = run.session
    seed = session.limits.seed
    proven = slow = False
    for start in starts(run.folded, seed, session.time_up):
        if run.searches and run.out_of_time():
            break
        search = start.search(run.folded, seed, session.time_up)
        run.searches.append(search)
        attempts_until_s = run.until("greedy plans", TUNABLES.greedy_share)
        # The greedy plans of one start have only a part of the time left.
        until_s = session.elapsed_s() + 0.4 * session.left_s()
        with session.within(until_s):
            for only_first in (True, False):
                before = search.best_cost
                search.first(stop_at_first=only_first, out_of_time=lambda end=attempts_until_s: session.elapsed_s() > end)
                if search.best_cost < before:
                    run.offer(search.order())
                elif only_first:
                    break
        if session.done and not proven:
            return True
        if session.plan is not None and not proven:
            _first_proof(run)
            proven = True
        if _clearly_done(run):
            return True
        slow = session.plan is None and session.elapsed_s() >= until_s
        if slow:
            break
    if session.plan is None:
        _tight_budget(run, slow)
        if session.plan is not None:
            _first_proof(run)
    return _clearly_done(run)


def _first_proof(run: Run) -> None:
    """Bound the events at which keeping everything holds most bytes.

    These are a few linear programs: often the first plan is within the gap, and the proof takes a tenth of a second.
    """
    events, model = highest_events(run.graph, 4, range(len(run.graph.ops))), run.any_order
    until_s = run.until("bounds of events of the first plans", 0.02)
    run.single_cuts(model, events, run.searches[0], lambda: _clearly_done(run) or run.session.elapsed_s() > until_s)


def _clearly_done(run: Run) -> bool:
    session = run.session
    return session.done and (session.gap <= 0.2 * session.limits.gap or session.gap > session.limits.gap or session.decided)


def _tight_budget(run: Run, slow: bool) -> None:
    """Look for a plan within a budget that few plans keep.

    The greedy search has fewer ways to go wrong if only forward ops may be computed again: on ResNet-50 above batch 860
    it then finds plans in 0.5 s, and with all ops none in 20 s. The search for the smallest peak starts from plans for
    larger budgets, and meets plans that a search for this budget misses. If greedy plans were too slow, later phases would not
    end without a plan either. The search for the smallest peak then has all the time left, and a refusal names the peak that
    it found.
    """
    session, share = run.session, 0.3
    until_s = run.until("plans for a tight budget", share)
    forward = Problem(run.graph, run.folded.budget_bytes, "forward", run.folded.reorder)
    for start in starts(forward, session.limits.seed, session.time_up):
        if run.out_of_time() or session.elapsed_s() > until_s:
            break
        search = start.search(forward, session.limits.seed, session.time_up)
        with session.within(until_s):
            found = search.first(out_of_time=lambda: session.elapsed_s() > until_s, stop_at_first=True)
        if found and run.offer(search.order()):
            return
    if run.out_of_time():  # `Limits` refuses a time of zero
        return
    limits = Limits(time_s=session.left_s() if slow else run.seconds_of(share), seed=session.limits.seed)
    session.smallest = smallest_peak(session.problem, limits, enough=session.problem.budget_bytes)
    session.offer(session.smallest.plan.order)
    if session.smallest.floor_bytes > session.problem.budget_bytes:
        session.prove(math.inf)
