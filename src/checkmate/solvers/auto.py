"""The default solver: local search and event cuts take turns until the gap is met.

Neither is enough alone. Search finds no proof, and its plans can be far off: ResNet-50 at half of its memory stayed at an
overhead of 1.249 until the solution of an integer program with a few event cuts gave a start at 1.131. The cuts find no
plan where memory binds between events. Each round of `_Run.run` gives one what the other found; ``docs/decisions/0004``
and ``0005`` have the measurements behind the order of the phases.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from random import Random
from typing import TYPE_CHECKING, ClassVar

from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Termination
from checkmate.solvers.evict.starts import load_kernels
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session

if TYPE_CHECKING:
    from checkmate.solvers.bounds.event_cuts import CutModel
    from checkmate.solvers.evict.search import Search
    from checkmate.solvers.states.exploration import Exploration

_log = logging.getLogger(__name__)


class Phase(StrEnum):
    """Parts of a run, in the order in which they begin first. Each that begins is logged at level DEBUG with its seconds."""

    FIRST_PLANS = "greedy plans"
    TIGHT_BUDGET = "plans for a tight budget"
    FIRST_EVENTS = "bounds of events of the first plans"
    PROVEN_SEARCH = "search within the gap"
    FIRST_SEARCH = "first search"
    SINGLE_EVENTS = "bounds of single events"
    STATES = "search over states"
    ANY_ORDER = "event cuts for any order"
    ANY_ORDER_CLOSE = "event cuts for any order, close to the proof"
    OWN_ORDER = "event cuts for the order of the search"
    ROUND_SEARCH = "search after event cuts"
    ANY_ORDER_AGAIN = "event cuts for any order, again"
    STATES_AGAIN = "search over states, continued"


PHASES: Mapping[Phase, float] = {
    # From each start (`targets.starts`). The first plan is offered at once; the other attempts may fail slowly.
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
    # A* on a graph that is small enough: where it ends, it ends at once.
    Phase.STATES: 0.05,
    # Integer programs of a few events. Little where the plan may be what lacks ...
    Phase.ANY_ORDER: 0.2,
    # ... and more where the proof is (`AutoParameters.close_share`).
    Phase.ANY_ORDER_CLOSE: 0.5,
    # Their programs are easier, and their solutions make the best starts for the search.
    Phase.OWN_ORDER: 0.35,
    # Local search; after it, for the same share, search in other orders.
    Phase.ROUND_SEARCH: 0.15,
    # In later rounds, from the better events of the two kinds of cuts: the search has had its part.
    Phase.ANY_ORDER_AGAIN: 0.6,
    # After one round, because it is all or nothing.
    Phase.STATES_AGAIN: 0.8,
}
"""Share of the time left, and of a minute at most (`AutoParameters.horizon_s`), that a phase may take when it begins.

Most phases end earlier, by the work that they are given. Chosen on the graphs of ``docs/benchmarks/solvers.md``; how much each
matters is in ``docs/benchmarks/solver_parameters.md``. The final search takes what they leave.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoParameters:
    """Parameters of `Auto` beside `PHASES`. How much each matters: ``docs/benchmarks/solver_parameters.md``.

    Attributes:
        close_share: Share of what the best plan costs beyond computing every op once that one event has to prove for
            the proof to count as close.
        patience: Orders, or final searches, without gain after which to stop. Gains get rarer, and the time is the user's.
        order_decodes: Sequences to try in each order of `_Run._reorder_search`: many orders for a moment each, since an order
            that comes near the best does so early.
        rooms: Shares of the budget that a plan may fill at no penalty when it is put in another order, one drawn for each.
            Less than all leaves the search something to spend on cheaper plans.
        few_ops: Graphs on which the final search also tries new orders. On larger ones a search from a new order seldom
            comes near the best.
        max_states: Most states to store in A*, of about 100 bytes each: 400 MB.
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
        many_ops: Largest graph for programs of several events, and for other orders than those of the starts.
        horizon_s: Shares of `PHASES` are of so many seconds at most, so that a phase that does not help ends in time also
            where the limit is an hour, or there is none.
    """

    close_share: float = 0.75
    patience: int = 4
    order_decodes: int = 750
    rooms: tuple[float, ...] = (0.85, 0.9, 0.95, 0.97, 1.0)
    few_ops: int = 500
    max_states: int = 1 << 22
    first_divisor: int = 10
    round_divisor: int = 4
    least_round_decodes: int = 200
    temperature: float = 6e-4
    final_temperature: float = 3e-3
    gap_divisor: float = 4.0
    least_gap: float = 2e-5
    first_events: int = 4
    clear_gap: float = 0.2
    plans_for_events: int = 2
    first_share: float = 0.4
    many_ops: int = 30_000
    horizon_s: float = 60.0


PARAMETERS = AutoParameters()


@dataclass(frozen=True, slots=True)
class Auto:
    """Local search for plans and event cuts for the proof, each started from what the other found.

    Small graphs are also searched over states (`AStar`), and plans are put in other orders. Which phases run, and for how
    long, is in `PHASES`; set the logger ``checkmate.solvers.auto`` to DEBUG to see it.

    Attributes:
        rounds: Most rounds of refinement; each costs some seconds on a thousand ops.
    """

    rounds: int = 6

    copies: ClassVar[bool] = True
    """Whether it plans copies to a host."""

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search and prove until a limit of the session is met."""
        if problem.host is not None:
            session.prepare(_load_engines)
            from checkmate.solvers.offload.joint import run_with_host

            return run_with_host(problem, session, self)
        session.offer(range(len(problem.graph.ops)))
        if session.done:
            return Termination(Reason.FEASIBLE)
        session.prepare(load_kernels)
        _Run(problem, session).run(self.rounds)
        if session.plan is None:
            return Termination(
                Reason.NOT_FOUND, limit="time" if session.left_s() <= 0 else "", detail="search and cuts found none"
            )
        return Termination(Reason.FEASIBLE)


def _load_engines() -> None:
    """Import the engine and numba, which takes a second, and the compiled kernels."""
    for module in ("backends.highs", "offload.joint"):
        importlib.import_module(f"checkmate.solvers.{module}")
    load_kernels()


class _Run:
    """One run of `Auto` on a folded problem.

    Bounds and gaps are handled as *shares*: extra cost over that of computing each op of the folded graph once. So numbers are
    near 1, as engines want them, and do not depend on the cost unit.
    """

    def __init__(self, problem: Problem, session: Session) -> None:
        self.session = session
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.folded = self.fold.apply(problem)
        self.graph = self.folded.graph
        self.once = max(1, self.graph.cost)
        self.random = Random(session.limits.seed)

    @cached_property
    def any_order(self) -> CutModel:
        """The cuts' model for any order; made after the first plan, since it takes a second on 100,000 ops."""
        from checkmate.solvers.bounds.event_cuts import CutModel

        return CutModel(self.folded)

    def run(self, rounds: int) -> None:
        searches = self._first_plans()
        if self.session.done:
            return
        event = self._best_single(self.any_order, searches)
        if self.session.done or event is None:
            return
        exploration = self._explore()
        if self.session.done:
            return
        # A* may still close the gap; one round gives it a better plan, and so a lower limit.
        under_way = exploration is not None and exploration.ended is None
        if len(self.graph.ops) <= PARAMETERS.many_ops:
            self._refine(searches, event, 1 if under_way else rounds)
        if exploration is not None and not self.session.done:
            exploration.run(self._begin(Phase.STATES_AGAIN))
        self._final_search(searches)
        best = min(searches, key=lambda search: search.best_cost)
        if best.order_bound > 0 and self.folded.reorder:
            least = 1 + best.order_bound
            self.session.remark(
                f"given-order bound: no plan with its first computations, each of them read, has an overhead below {least:.5f}"
            )

    def offer(self, order: list[int]) -> bool:
        return self.session.offer(self.fold.invert(order))

    def prove(self, search: Search, share: float, any_order: bool) -> None:
        """Take a bound, as extra cost over computing each op of the folded graph once.

        One that holds for the order of a search only is kept with it, to be shown by name.
        """
        if any_order or not self.folded.reorder:
            self.session.prove(self.fold.original.cost + self.once * max(0.0, share))
        elif share < math.inf:
            search.order_bound = max(search.order_bound, share)

    def best_share(self) -> float:
        if self.session.cost is None:
            return math.inf
        return (self.session.cost - self.fold.original.cost) / self.once

    def out_of_time(self) -> bool:
        return self.session.left_s() <= 0

    def _begin(self, phase: Phase) -> Callable[[], bool]:
        """Log a phase; what is returned says whether its time is used up."""
        until = self._until(phase)
        return lambda: self.session.elapsed_s() > until

    def _until(self, phase: Phase) -> float:
        """Log a phase; returns when it has to end, on the session's clock."""
        now = self.session.elapsed_s()
        seconds = PHASES[phase] * min(PARAMETERS.horizon_s, self.session.left_s())
        _log.debug("%.2f s: %s, for %.2f s at most; cost %s, bound %.0f", now, phase, seconds, self.session.cost,
                   self.session.bound)  # fmt: skip
        return now + seconds

    def _first_plans(self) -> list[Search]:
        """A search for each start (`targets.starts`), the cheapest plan first."""
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.evict.starts import starts
        from checkmate.solvers.local_search import suggested_decodes

        session = self.session
        seed = session.limits.seed
        searches: list[Search] = []
        proven = False
        for order, on_demand in starts(self.folded, seed, session.time_up):
            if searches and self.out_of_time():
                break
            search = Search(self.folded, on_demand, seed, order, session.time_up)
            searches.append(search)
            late = self._begin(Phase.FIRST_PLANS)
            with session.within(session.elapsed_s() + PARAMETERS.first_share * session.left_s()):
                found = search.first(out_of_time=late, stop_at_first=True)
                if found:
                    self.offer(search.order())
                    cost = search.best_cost
                    search.first(out_of_time=late)
                    if search.best_cost < cost:
                        self.offer(search.order())
            if session.done and not proven:
                return searches
            if session.plan is not None and not proven:
                self._first_proof(searches)
                proven = True
            if self._clearly_done():
                return searches
        if session.plan is None:
            self._tight_budget_start()
            if session.plan is not None:
                self._first_proof(searches)
        if self._clearly_done():
            return searches
        phase = Phase.PROVEN_SEARCH if session.gap <= session.limits.gap else Phase.FIRST_SEARCH
        # Every search starts from the best plan known, not only the one that found it.
        for search in searches:
            if self.out_of_time():
                break
            until_s, cheaper = self._until(phase), False
            if session.plan is not None:
                with session.within(until_s):
                    cheaper = search.start_from_order(self.fold.apply_order(session.plan.order))
            if math.isfinite(search.best_cost) and (phase is Phase.PROVEN_SEARCH or not session.done):
                decodes = suggested_decodes(len(self.graph.ops)) // PARAMETERS.first_divisor
                if self._improve(search, decodes, PARAMETERS.temperature, until_s) or cheaper:
                    self.offer(search.order())
        return sorted(searches, key=lambda search: search.best_cost)

    def _first_proof(self, searches: list[Search]) -> None:
        """Bound the events that hold most, until a plan is proven clearly within the gap."""
        from checkmate.solvers.bounds.refine import highest_events

        events, model = highest_events(self.graph, PARAMETERS.first_events), self.any_order
        late = self._begin(Phase.FIRST_EVENTS)
        self._single_cuts(model, events, searches[0], lambda: self._clearly_done() or late())

    def _clearly_done(self) -> bool:
        """Whether no search could gain more than a part of the gap, or none is wanted."""
        session = self.session
        return session.done and (
            session.gap <= PARAMETERS.clear_gap * session.limits.gap or session.gap > session.limits.gap or session.decided
        )

    def _tight_budget_start(self) -> None:
        """Look for a plan where there are few.

        The greedy search has fewer ways to go wrong if only forward ops may be computed again: on ResNet-50 above batch 860
        it finds plans in 0.5 s there, and none with all ops in 20 s. And the search for the smallest peak, which starts
        from plans that fit larger budgets, comes by plans that a search for this budget misses.
        """
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.evict.smallest import smallest_peak
        from checkmate.solvers.evict.starts import starts

        session = self.session
        until_s = self._until(Phase.TIGHT_BUDGET)

        def late() -> bool:
            return session.left_s() <= 0 or session.elapsed_s() > until_s

        forward = Problem(self.graph, self.folded.budget_bytes, "forward", self.folded.reorder)
        for order, on_demand in starts(forward, session.limits.seed, session.time_up):
            if late():
                break
            search = Search(forward, on_demand, session.limits.seed, order, session.time_up)
            with session.within(until_s):
                found = search.first(out_of_time=late, stop_at_first=True)
            if found and self.offer(search.order()):
                break
        if session.plan is not None or session.left_s() <= 0:  # `Limits` refuses a time of zero
            return
        most_s = PHASES[Phase.TIGHT_BUDGET] * min(PARAMETERS.horizon_s, session.left_s())
        limits = Limits(time_s=most_s, seed=session.limits.seed)
        smallest = smallest_peak(session.problem, limits, enough=session.problem.budget_bytes)
        session.offer(smallest.plan.order)

    def _best_single(self, model: CutModel, searches: list[Search]) -> int | None:
        """Bound by single events where the plans hold most; returns the event that proves most."""
        from checkmate.solvers.bounds.refine import promising_events

        # On a large graph the bytes of a plan take seconds to count, and the events of keeping everything are good enough.
        few = len(self.graph.ops) <= PARAMETERS.many_ops
        plans = [search.order() for search in searches if few and math.isfinite(search.best_cost)]
        events = promising_events(self.graph, [range(len(self.graph.ops)), *plans[: PARAMETERS.plans_for_events]])
        late = self._begin(Phase.SINGLE_EVENTS)
        return self._single_cuts(model, events, searches[0], lambda: self.session.done or late())

    def _single_cuts(self, model: CutModel, events: list[int], search: Search, out_of_time: Callable[[], bool]) -> int | None:
        """As `bounds.refine.single_cuts`, with the session's limits."""
        from checkmate.solvers.bounds.refine import single_cuts

        session = self.session
        return single_cuts(model, events, partial(self.prove, search), out_of_time, time_up=session.time_up)

    def _explore(self) -> Exploration | None:
        """Search the states of a small graph for a moment; None for graphs that it does not take."""
        from checkmate.solvers.states.exploration import Exploration, load_kernels
        from checkmate.solvers.states.packed_problem import pack

        packed = pack(self.folded)
        if isinstance(packed, str):
            return None
        self.session.prepare(load_kernels)
        exploration = Exploration(self.fold, packed, self.session, PARAMETERS.max_states)
        exploration.run(self._begin(Phase.STATES))
        return exploration

    def _refine(self, searches: list[Search], event: int, rounds: int) -> None:
        """Rounds of refinement: any order; the search's own order; search; and any order again from the better events.

        Args:
            searches: Searches with their plans; a round takes one, the next round the next, and replaces it by where its
                search in other orders ended.
            event: The event that proves most alone.
            rounds: Most rounds.
        """
        from checkmate.solvers.bounds.event_cuts import CutModel
        from checkmate.solvers.bounds.refine import chain_of
        from checkmate.solvers.local_search import suggested_decodes

        session = self.session
        work = suggested_decodes(len(self.graph.ops))
        proven = self.session.bound - self.fold.original.cost
        close = proven > PARAMETERS.close_share * self.once * self.best_share()
        events, phase = [event], Phase.ANY_ORDER_CLOSE if close else Phase.ANY_ORDER
        for k in range(rounds):
            before = (session.cost, session.bound)
            place = k % len(searches)
            search = searches[place]
            # Without reordering the given order is the only one, and the second kind of cuts below is the sharper.
            if self.folded.reorder:
                floating = self._quick_bound(search, events)[1]
                events = self._refine_once(self.any_order, search, events, phase, floating=floating)
                if session.done:
                    return
            model = CutModel(self.folded, tuple(search.targets))
            first = self._best_single(model, [search])
            if session.done:
                return
            if first is not None:
                # Floating ops always: those on demand float, and without variables for them a solution may drop what one of
                # them still needs, and is no plan.
                cuts = self._refine_once(model, search, [first], Phase.OWN_ORDER, floating=True)
                if session.done:
                    return
                # The events that the given order led to are good ones for any order too, as far as the DAG makes them a chain.
                other = chain_of(self.any_order, [*cuts, event])
                events = max(events, other, key=lambda chain: self._quick_bound(search, chain)[0])
                phase = Phase.ANY_ORDER_AGAIN
            decodes = max(PARAMETERS.least_round_decodes, work // PARAMETERS.round_divisor)
            if self._improve(search, decodes, PARAMETERS.temperature, self._until(Phase.ROUND_SEARCH)):
                self.offer(search.order())
            searches[place] = self._reorder_search(search, self._until(Phase.ROUND_SEARCH))
            if session.done:
                return
            if (session.cost, session.bound) == before and k >= len(searches):
                session.remark(f"no gain in round {k + 1} of refinement")
                return

    def _quick_bound(self, search: Search, events: list[int]) -> tuple[float, bool]:
        """As `bounds.refine.quick_bound`, for any order; the bound is kept."""
        from checkmate.solvers.bounds.refine import quick_bound

        bound, floating = quick_bound(self.any_order, events, self.session.left_s)
        self.prove(search, bound, True)
        return bound, floating

    def _improve(self, search: Search, decodes: int, temperature: float, until_s: float) -> bool:
        """`Search.improve` up to a moment of the session's clock."""
        with self.session.within(until_s):
            return search.improve(decodes, temperature, lambda: self.session.elapsed_s() > until_s)

    def _reorder_search(self, search: Search, until_s: float = math.inf) -> Search:
        """Alternate memory-aware reordering and local search until several orders in a row bring no gain.

        Args:
            search: A search with a plan.
            until_s: When to end, on the session's clock; with the session by default.

        Returns:
            The search with the cheapest plan; the newest among equals, as equal plans in other orders lead on.
        """
        from checkmate.solvers.evict.reorder import first_computations, reorder
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.local_search import suggested_decodes

        patience = PARAMETERS.patience
        decodes = min(PARAMETERS.order_decodes, suggested_decodes(len(self.graph.ops)))
        can = self.folded.reorder and math.isfinite(search.best_cost) and len(self.graph.ops) <= PARAMETERS.many_ops
        without_gain = 0 if can else patience
        while without_gain < patience and not (self.session.done or self.session.elapsed_s() > until_s):
            before = search.best_cost
            seed = self.random.randrange(1 << 32)
            order = reorder(self.graph, search.order(), self._room(), seed, self.session.time_up)
            other = Search(self.folded, frozenset(), seed, first_computations(order), self.session.time_up)
            other.start_from_order(order)
            if self._improve(other, decodes, PARAMETERS.temperature, until_s):
                self.offer(other.order())
            # Also at equal cost: the new order is lower, and the next search starts from it.
            if other.best_cost <= before:
                search = other
            without_gain = 0 if search.best_cost < before else without_gain + 1
        return search

    def _final_search(self, searches: list[Search]) -> None:
        """Search on from the best plan, and on a small graph from new orders, until nothing is gained or time is up.

        Args:
            searches: Searches with their plans.
        """
        from checkmate.solvers.local_search import suggested_decodes

        work = suggested_decodes(len(self.graph.ops))
        best = min(searches, key=lambda search: search.best_cost)
        without_gain = 0
        while math.isfinite(best.best_cost) and without_gain < PARAMETERS.patience and not self.session.done:
            others = [self._reorder_search(best)]
            if len(self.graph.ops) <= PARAMETERS.few_ops and self.folded.reorder:
                others.append(self._reorder_search(self._from_new_order()))
            elif self._improve(best, work // PARAMETERS.round_divisor, PARAMETERS.final_temperature, math.inf):
                self.offer(best.order())
            other = min(*others, best, key=lambda search: search.best_cost)
            without_gain += 1
            if other.best_cost < best.best_cost:
                self.offer(other.order())
                without_gain = 0
            best = other

    def _from_new_order(self) -> Search:
        """A search in the graph's own order after one more annealing of it, with greedy plans."""
        from checkmate.solvers.evict.reorder import reorder
        from checkmate.solvers.evict.search import Search

        seed = self.random.randrange(1 << 32)
        order = reorder(self.graph, range(len(self.graph.ops)), self._room(), seed, self.session.time_up)
        search = Search(self.folded, frozenset(), seed, order, self.session.time_up)
        search.first(out_of_time=self.out_of_time)
        return search

    def _room(self) -> float:
        """Bytes that a plan may hold at no penalty when it is put in another order: the budget or a little less, at random."""
        return self.random.choice(PARAMETERS.rooms) * (self.folded.budget_bytes - self.graph.resident_bytes)

    def _refine_once(self, model: CutModel, search: Search, first: list[int], phase: Phase, *, floating: bool) -> list[int]:
        """Refine from some events for the time of a phase; returns the events it came to."""
        from checkmate.solvers.bounds.refine import Refinement

        session = self.session
        until = self._until(phase)
        gap = max(PARAMETERS.least_gap, session.limits.gap / PARAMETERS.gap_divisor)

        def left_s() -> float:
            return 0.0 if session.done else until - session.elapsed_s()

        refinement = Refinement(model, search, partial(self.prove, search), self.offer, gap=gap, threads=session.limits.threads)
        return refinement.run(first, self.best_share, left_s, floating=floating)
