"""Rounds of the default solver, in which event cuts and local search take turns, and its final search."""

from __future__ import annotations

import math
from functools import cache, partial

from checkmate.solvers.auto import phases
from checkmate.solvers.auto.phases import Phase
from checkmate.solvers.auto.run import Run
from checkmate.solvers.bounds.events.chains import Chain, EventChains
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import Refinement, chain_of, promising_events, quick_bound
from checkmate.solvers.evict.anneal import anneal_order, anneal_sequence
from checkmate.solvers.evict.search import Search
from checkmate.solvers.local_search import suggested_decodes


def refine(run: Run, searches: list[Search], chain: Chain, rounds: int) -> None:
    """Rounds of refinement: any order; the search's own order; search; and any order again from the better events.

    Args:
        run: The run.
        searches: Searches with their plans; a round takes one, the next round the next, and replaces it by the search in another
            order that ended cheapest.
        chain: Events of any order.
        rounds: Most rounds.
    """
    session = run.session
    quick = cache(partial(_quick_bound, run, searches[0]))
    first = chain.first
    events, phase = first, Phase.ANY_ORDER
    ended: set[tuple[int, ...]] = set()  # chains whose program has had its time
    least_s = 0.0  # what a program takes that proves more
    for k in range(rounds):
        before = (session.cost, session.bound)
        place = k % len(searches)
        search = searches[place]
        # Without reordering the given order is the only one, and the second kind of cuts below is the sharper.
        if run.folded.reorder and tuple(events) not in ended and run.seconds_of(phase) >= least_s:
            floating = quick(tuple(events))[1]
            known = run.known_share()
            events, refined = _refine_once(
                run, run.any_order, search, chain._replace(first=events), phase, floating=floating, known=known
            )
            ended.add(tuple(events))
            least_s = max(least_s, refined.next_s)
            if session.done:
                return
        model = CutModel(run.folded, tuple(search.targets))
        event = best_single(run, model, [search])
        if session.done:
            return
        if event is not None:
            # Floating ops always: those on demand float, and without variables for them a solution may drop what one of
            # them still needs, and is no plan. A program of all events that would not end gives no start; one of few does.
            some = all(o in search.stage for o in first) and run.seconds_of(Phase.OWN_ORDER) >= least_s
            cuts, _ = _refine_once(run, model, search, Chain(first if some else [event]), Phase.OWN_ORDER, floating=True)
            if session.done:
                return
            # The events that the given order led to are good ones for any order too, as far as the DAG makes them a chain.
            other = chain_of(run.any_order, [*cuts, *first])
            events = max(events, other, key=lambda chain: quick(tuple(chain))[0])
            phase = Phase.ANY_ORDER_AGAIN
        decodes = suggested_decodes(len(run.graph.ops)) // phases.PARAMETERS.round_divisor
        decodes, until = max(phases.PARAMETERS.least_round_decodes, decodes), run.until(Phase.ROUND_SEARCH)
        if run.improve(search, decodes, phases.PARAMETERS.temperature, until):
            run.offer(search.order())
        searches[place] = search_orders(run, search, run.until(Phase.ROUND_SEARCH))
        if session.done:
            return
        if (session.cost, session.bound) == before and k >= len(searches):
            session.remark(f"no gain in round {k + 1} of refinement")
            return


def _quick_bound(run: Run, search: Search, events: tuple[int, ...]) -> tuple[float, bool]:
    """As `bounds.events.refine.quick_bound`, for any order; the bound is kept."""
    bound, floating = quick_bound(run.any_order, events, run.session.left_s)
    run.prove(search, bound, True)
    return bound, floating


def _refine_once(
    run: Run, model: CutModel, search: Search, chain: Chain, phase: Phase, *, floating: bool, known: float = -math.inf
) -> tuple[list[int], Refinement]:
    """A refinement after the time of a phase, and the events that it came to."""
    session = run.session
    left_s = run.seconds_to(run.until(phase))
    gap = max(phases.PARAMETERS.least_gap, session.limits.gap / phases.PARAMETERS.gap_divisor)
    refinement = Refinement(model, search, partial(run.prove, search), run.offer, gap=gap, threads=session.limits.threads)
    events = refinement.run(
        chain.first, run.enough_share, left_s, floating=floating, peaks=chain.peaks, prices=chain.prices, known=known
    )
    return events, refinement


def best_single(run: Run, model: CutModel, searches: list[Search]) -> int | None:
    """Bound by single events where the plans hold most; returns the event that proves most."""
    # On a large graph the bytes of a plan take seconds to count, and the events of keeping everything are good enough.
    few = len(run.graph.ops) <= phases.PARAMETERS.many_ops
    plans = [search.order() for search in searches if few and math.isfinite(search.best_cost)]
    events = promising_events(run.graph, [range(len(run.graph.ops)), *plans[: phases.PARAMETERS.plans_for_events]])
    late = run.begin(Phase.SINGLE_EVENTS)
    return run.single_cuts(model, events, searches[0], lambda: run.session.done or late())


def best_chain(run: Run, searches: list[Search], event: int) -> Chain:
    """Bound by chains of events; returns the one for integer programs.

    Args:
        run: The run.
        searches: Searches with their plans.
        event: The event that proves most alone.
    """
    until = run.until(Phase.CHAINS)
    left_s = run.seconds_to(until)
    with run.session.within(until):
        chains = EventChains(run.any_order, run.session.time_up, lambda: left_s() <= 0)
        bound, events = chains.longest(lambda: left_s() <= 0)
    prove = partial(run.prove, searches[0], any_order=True)
    prove(bound)
    found = chains.sharpen(events, prove, run.best_share, left_s, run.known_share)
    return found if found.first else Chain([event])


def search_orders(run: Run, search: Search, until_s: float = math.inf) -> Search:
    """Alternate annealing of the plan's sequence and local search until several sequences in a row bring no gain.

    Args:
        run: The run.
        search: A search with a plan.
        until_s: When to end, on the session's clock; with the session by default.

    Returns:
        The search with the cheapest plan; the newest among equals, as equal plans in other orders lead on.
    """
    patience = phases.PARAMETERS.patience
    decodes = min(phases.PARAMETERS.order_decodes, suggested_decodes(len(run.graph.ops)))
    can = run.folded.reorder and math.isfinite(search.best_cost) and len(run.graph.ops) <= 3000
    without_gain = 0 if can else patience
    while without_gain < patience and not (run.session.done or run.session.elapsed_s() > until_s):
        before = search.best_cost
        seed = run.random.randrange(1 << 32)
        with run.session.within(until_s):
            other = min((search.in_order_of(order, seed) for order in _annealed(run, search.order(), seed)), key=_cost)
        if run.improve(other, decodes, phases.PARAMETERS.temperature, until_s) or other.best_cost < before:
            run.offer(other.order())
        # Also at equal cost: the new order is lower, and the next search starts from it.
        if other.best_cost <= before:
            search = other
        without_gain = 0 if search.best_cost < before else without_gain + 1
    return search


def _annealed(run: Run, order: list[int], seed: int) -> list[list[int]]:
    """Sequences near that of a plan to search on from: annealed with its recomputations, or its order alone on a large graph."""
    found = anneal_sequence(run.folded, order, seed, run.session.time_up)
    return [found.last, found.best] if found.best and found.best != found.last else [found.last]


def _cost(search: Search) -> float:
    return search.best_cost


def final_search(run: Run, searches: list[Search]) -> None:
    """Search on from the best plan, and on a small graph from new orders, until nothing is gained or time is up.

    Args:
        run: The run.
        searches: Searches with their plans.
    """
    work = suggested_decodes(len(run.graph.ops))
    best = min(searches, key=_cost)
    without_gain = 0
    while math.isfinite(best.best_cost) and without_gain < phases.PARAMETERS.patience and not run.session.done:
        others = [search_orders(run, best)]
        if len(run.graph.ops) <= phases.PARAMETERS.few_ops and run.folded.reorder:
            others.append(search_orders(run, _from_new_order(run)))
        elif run.improve(best, work // phases.PARAMETERS.round_divisor, phases.PARAMETERS.final_temperature, math.inf):
            run.offer(best.order())
        other = min(*others, best, key=_cost)
        without_gain += 1
        if other.best_cost < best.best_cost:
            run.offer(other.order())
            without_gain = 0
        best = other


def _from_new_order(run: Run) -> Search:
    """A search in the graph's own order after one more annealing of it, with greedy plans."""
    seed = run.random.randrange(1 << 32)
    order = anneal_order(run.folded, range(len(run.graph.ops)), _room(run), seed, run.session.time_up)
    search = Search(run.folded, frozenset(), seed, order, run.session.time_up)
    search.first(out_of_time=run.out_of_time)
    return search


def _room(run: Run) -> float:
    """Bytes that a plan may hold at no penalty when it is put in another order: the budget or a little less, at random."""
    return run.random.choice(phases.PARAMETERS.rooms) * (run.folded.budget_bytes - run.graph.resident_bytes)
