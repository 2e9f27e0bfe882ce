"""The phases of the default solver and the run that they share; each phase ends when the run is done."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from random import Random

from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.solvers.a_star import Exploration
from checkmate.solvers.bounds.events.chains import EventChains
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import (
    Chain,
    Refinement,
    chain_of,
    highest_events,
    promising_events,
    quick_bound,
    single_cuts,
)
from checkmate.solvers.bounds.row import row_bound
from checkmate.solvers.evict.anneal import anneal_order, anneal_sequence
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.smallest import smallest_peak
from checkmate.solvers.evict.starts import starts
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES, suggested_decodes

_log = logging.getLogger("checkmate.solvers.auto")


class Run:
    """One run of `Auto` on a problem whose views are folded.

    Bounds and gaps are handled as *shares*: extra cost divided by `once`, the cost of computing each op of the folded graph once.
    These numbers are near 1, as engines need, and do not depend on the cost unit.
    """

    def __init__(self, problem: Problem, session: Session) -> None:
        self.session = session
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.folded = self.fold.apply(problem)
        self.graph = self.folded.graph
        self.once = max(1, self.graph.cost)
        self.few = len(self.graph.ops) <= TUNABLES.many_ops
        self.random = Random(session.limits.seed)
        self.searches: list[Search] = []

    @cached_property
    def any_order(self) -> CutModel:
        """The cuts' model for any order; made after the first plan, because it takes a second on 100,000 ops."""
        return CutModel(self.folded)

    def offer(self, order: list[int]) -> bool:
        """Give the session a plan of the folded graph, as an order of computations; returns whether it is the best so far."""
        return self.session.offer(self.fold.invert(order))

    def prove(self, search: Search, share: float, any_order: bool) -> None:
        """Take a bound; a bound that holds only for a search's order is kept with the search, to be reported by name."""
        if any_order or not self.folded.reorder:
            self.session.prove(self.fold.original.cost + self.once * max(0.0, share))
        elif share < math.inf:
            search.order_bound = max(search.order_bound, share)

    def best_share(self) -> float:
        """Cost of the best plan beyond computing every op once, as a share; infinite without a plan."""
        return math.inf if self.session.cost is None else (self.session.cost - self.fold.original.cost) / self.once

    def enough_share(self) -> float:
        """The least bound that meets the gap; at a gap of 0 the share of the best plan."""
        if self.session.cost is None:
            return math.inf
        enough = self.session.cost * (1 - self.session.limits.gap)
        # With ten times an engine's tolerance in addition.
        return min(self.best_share(), (enough - self.fold.original.cost) / self.once + 1e-5)

    def known_share(self) -> float:
        """The best bound for any order, as a share."""
        return (self.session.bound - self.fold.original.cost) / self.once

    def out_of_time(self) -> bool:
        """Whether the session's time is up."""
        return self.session.left_s() <= 0

    def until(self, work: str, share: float) -> float:
        """Log the beginning of some work; returns the moment on the session's clock when it must end."""
        now, seconds = self.session.elapsed_s(), self.seconds_of(share)
        cost, bound = self.session.cost, self.session.bound
        _log.debug("%.2f s: %s, for %.2f s at most; cost %s, bound %.0f", now, work, seconds, cost, bound)
        return now + seconds

    def seconds_of(self, share: float) -> float:
        """Seconds of a share of the time left."""
        return share * min(TUNABLES.horizon_s, self.session.left_s())

    def seconds_to(self, until_s: float) -> Callable[[], float]:
        """A function for the seconds left up to a moment of the session's clock; none once the session is done."""
        return lambda: 0.0 if self.session.done else until_s - self.session.elapsed_s()

    def single_cuts(self, model: CutModel, events: Sequence[int], search: Search, out_of_time: Callable[[], bool]) -> int | None:
        """`bounds.events.refine.single_cuts` with the session's limits."""
        return single_cuts(model, events, partial(self.prove, search), out_of_time, time_up=self.session.time_up)

    def improve(self, search: Search, decodes: int, until_s: float, temperature: float = TUNABLES.temperature) -> bool:
        """`Search.improve` up to a moment of the session's clock; returns whether it found the best plan so far."""
        with self.session.within(until_s):
            cheaper = search.improve(decodes, temperature, lambda: self.session.elapsed_s() > until_s)
        return cheaper and self.offer(search.order())


def solve_in_phases(problem: Problem, session: Session, rounds: int) -> None:
    """All phases, one after another, until the session is done."""
    run = Run(problem, session)
    if greedy_starts(run):
        return
    search_from_starts(run)
    if session.done:
        return
    event = single_events(run)
    if session.done or event is None:
        return
    exploration = explore(run)
    if session.done:
        return
    chain = chains(run, event)
    if session.done:
        return
    # A* may still close the gap; one round gives it a better plan, and thereby a lower limit.
    integer_programs(run, chain, rounds if exploration is None else 1)
    if exploration is not None and not session.done:
        explore(run, exploration)
    final_search(run)


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


def search_from_starts(run: Run) -> None:
    """Ruin and recreate from every start, with the best known plan instead of only the start's own."""
    session = run.session
    # A search gains most at its beginning, and within the gap that is enough.
    share = TUNABLES.search_share * (0.25 if session.gap <= session.limits.gap else 1.0)
    proven = session.done
    for search in run.searches:
        if run.out_of_time():
            break
        until_s = run.until("search", share)
        if session.plan is not None:
            with session.within(until_s):
                if search.start_from_order(run.fold.apply_order(session.plan.order)):
                    run.offer(search.order())
        if math.isfinite(search.best_cost) and (proven or not session.done):
            run.improve(search, suggested_decodes(len(run.graph.ops)) // 10, until_s)
    run.searches.sort(key=lambda search: search.best_cost)


def single_events(run: Run) -> int | None:
    """Bound by single rows and single events; returns the event that proves most, or None if the run is done."""
    run.session.prove(run.fold.original.cost + row_bound(run.folded))
    return None if run.session.done else _best_single(run, run.any_order, run.searches)


def chains(run: Run, event: int) -> Chain:
    """Bound by chains of events; returns the chain for integer programs: the given event alone if no chain proves more."""
    if not (run.folded.reorder and run.few):
        return Chain([event])
    until_s = run.until("bounds of chains of events", TUNABLES.chains_share)
    left_s = run.seconds_to(until_s)
    with run.session.within(until_s):
        found = EventChains(run.any_order, run.session.time_up, lambda: left_s() <= 0)
        bound, events = found.longest(lambda: left_s() <= 0)
    prove = partial(run.prove, run.searches[0], any_order=True)
    prove(bound)
    sharpest = found.sharpen(events, prove, run.best_share, left_s, run.known_share)
    return sharpest if sharpest.first else Chain([event])


def integer_programs(run: Run, chain: Chain, rounds: int) -> None:
    """Rounds of event cuts for any order, event cuts for a search's own order, and search; the next from the better events.

    Rounds take the searches in turn. Each replaces its search by the cheapest search in another order.
    """
    if not run.few:
        return
    session, searches = run.session, run.searches
    searches[0] = _search_orders(run, searches[0], run.until("plans annealed as sequences", TUNABLES.sequences_share))
    quick = cache(partial(_quick_bound, run, searches[0]))
    first = events = chain.first
    share = TUNABLES.any_order_share
    ended: set[tuple[int, ...]] = set()  # chains whose program has had its time
    least_s = 0.0  # seconds of a program that proves more
    for k in range(rounds):
        before, place = (session.cost, session.bound), k % len(searches)
        search = searches[place]
        # Without reordering the given order is the only one, and the second kind of cuts below is stronger.
        if not session.done and run.folded.reorder and tuple(events) not in ended and run.seconds_of(share) >= least_s:
            floating = quick(tuple(events))[1]
            program = chain._replace(first=events), run.any_order, share
            events, next_s = _refine(run, search, *program, floating=floating, known=run.known_share())
            ended.add(tuple(events))
            least_s = max(least_s, next_s)
        if session.done:
            return
        model = CutModel(run.folded, tuple(search.targets))
        event = _best_single(run, model, [search])
        if event is not None and not session.done:
            # Ops on demand always float: without variables for them, a solution may drop a value that one of them still needs,
            # and is no plan. If a program of all events would not end in time, one of few events still gives a start.
            own_share = TUNABLES.own_order_share
            some = all(o in search.stage for o in first) and run.seconds_of(own_share) >= least_s
            cuts, _ = _refine(run, search, Chain(first if some else [event]), model, own_share, floating=True)
            # The events from the given order are good for any order too, as far as the DAG makes them a chain.
            other = chain_of(run.any_order, [*cuts, *first])
            if not session.done:
                events = max(events, other, key=lambda chain: quick(tuple(chain))[0])
            share = 0.75 * TUNABLES.any_order_share  # from now on less, since the search has had its time
        if session.done:
            return
        decodes = max(200, suggested_decodes(len(run.graph.ops)) // 4)
        run.improve(search, decodes, run.until("search after event cuts", TUNABLES.own_order_share))
        searches[place] = _search_orders(run, search, run.until("search in other orders", TUNABLES.own_order_share))
        if (session.cost, session.bound) == before and k >= len(searches):
            session.remark(f"no gain in round {k + 1} of refinement")
            return


def final_search(run: Run) -> None:
    """Continue from the best plan, and on a small graph from new orders, until nothing is gained or time is up."""
    work = suggested_decodes(len(run.graph.ops))
    best = min(run.searches, key=_cost)
    without_gain = 0
    while math.isfinite(best.best_cost) and without_gain < TUNABLES.patience and not run.session.done:
        others = [_search_orders(run, best)]
        if len(run.graph.ops) <= 500 and run.folded.reorder:  # on larger graphs a search from a new order is seldom near the best
            others.append(_search_orders(run, _from_new_order(run)))
        else:
            run.improve(best, work // 4, math.inf, temperature=5 * TUNABLES.temperature)
        other = min(*others, best, key=_cost)
        without_gain = 0 if other.best_cost < best.best_cost else without_gain + 1
        best = other
    best = min(*run.searches, best, key=_cost)
    if best.order_bound > 0 and run.folded.reorder:
        least = 1 + best.order_bound
        run.session.remark(
            f"given-order bound: no plan with its first computations, each of them read, has an overhead below {least:.5f}"
        )


def explore(run: Run, exploration: Exploration | None = None) -> Exploration | None:
    """A* on a small graph: first for a moment, a given exploration for most of the time left. Returns None if it has ended.

    It finds plans that no local search finds, for example for 31 fused ops at a tight budget.
    """
    share = 0.8
    if exploration is None:
        exploration, share = Exploration(run.fold, run.folded, run.session, max_states=1 << 20), 0.05
    until_s = run.until("search over states", share)
    exploration.run(lambda: run.session.elapsed_s() > until_s)
    return exploration if exploration.ended is None else None


def _best_single(run: Run, model: CutModel, searches: list[Search]) -> int | None:
    """Bound by the single events at which the plans hold most; returns the event that proves most."""
    # On a large graph it takes seconds to count the bytes of a plan, and the events of keeping everything are good enough.
    plans = [search.order() for search in searches if run.few and math.isfinite(search.best_cost)]
    events = promising_events(run.graph, [range(len(run.graph.ops)), *plans[:2]])
    until_s = run.until("bounds of single events", TUNABLES.single_events_share)
    return run.single_cuts(model, events, searches[0], lambda: run.session.done or run.session.elapsed_s() > until_s)


def _quick_bound(run: Run, search: Search, events: tuple[int, ...]) -> tuple[float, bool]:
    """`bounds.events.refine.quick_bound` for any order; the session takes the bound."""
    bound, floating = quick_bound(run.any_order, events, run.session.left_s)
    run.prove(search, bound, True)
    return bound, floating


def _refine(
    run: Run, search: Search, chain: Chain, model: CutModel, share: float, *, floating: bool, known: float = -math.inf
) -> tuple[list[int], float]:
    """The final events of a refinement in a share of the time left, and the seconds that one more event would take."""
    limits = run.session.limits
    work = "event cuts for any order" if model is run.any_order else "event cuts for one order"
    left_s = run.seconds_to(run.until(work, share))
    # Integer programs stop at a part of the session's gap, because the search leaves a gap too. Near the engine's tolerance of
    # 1e-6 nothing is gained.
    gap = max(1e-5, limits.gap / 10)
    refinement = Refinement(
        model=model,
        search=search,
        prove=partial(run.prove, search),
        offer=run.offer,
        enough=run.enough_share,
        left_s=left_s,
        gap=gap,
        threads=limits.threads,
    )
    return refinement.run(chain, floating=floating, known=known), refinement.next_s


def _search_orders(run: Run, search: Search, until_s: float = math.inf) -> Search:
    """Alternate annealing of the plan's sequence and local search until several sequences in a row gain nothing.

    Returns the search with the cheapest plan; the newest among equals, because equal plans in other orders can lead to better
    ones. Graphs of over 3,000 ops are skipped: an annealing of a second makes too few moves.
    """
    session, ops = run.session, len(run.graph.ops)
    without_gain = 0 if run.folded.reorder and math.isfinite(search.best_cost) and ops <= 3000 else TUNABLES.patience
    while without_gain < TUNABLES.patience and not (session.done or session.elapsed_s() > until_s):
        before = search.best_cost
        seed = run.random.randrange(1 << 32)
        with session.within(until_s):
            found = anneal_sequence(run.folded, search.order(), seed, session.time_up)
            orders = [found.last, *([found.best] if found.best and found.best != found.last else [])]
            other = min((search.in_order_of(order, seed) for order in orders), key=_cost)
        if other.best_cost < before:
            run.offer(other.order())
        # Many orders for a moment each: a good order comes near the best plan early.
        run.improve(other, min(750, suggested_decodes(ops)), until_s)
        without_gain = 0 if other.best_cost < before else without_gain + 1
        # Even at equal cost: the new order has a lower peak, and the next search starts from it.
        if other.best_cost <= before:
            search = other
    return search


def _from_new_order(run: Run) -> Search:
    """A search in the graph's own order after one more annealing of it, with greedy plans."""
    seed = run.random.randrange(1 << 32)
    # A room below the budget leaves bytes that the search can spend on cheaper plans.
    room = run.random.choice((0.85, 0.9, 0.95, 0.97, 1.0)) * (run.folded.budget_bytes - run.graph.resident_bytes)
    order = anneal_order(run.folded, range(len(run.graph.ops)), room, seed, run.session.time_up)
    search = Search(run.folded, frozenset(), seed, order, run.session.time_up)
    search.first(out_of_time=run.out_of_time)
    return search


def _cost(search: Search) -> float:
    return search.best_cost
