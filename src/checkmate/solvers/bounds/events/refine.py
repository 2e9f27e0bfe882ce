"""Lazy refinement: bound a problem with few events, turn the solution into a plan, add the events that it violates.

Memory is limited only at the events of a program, so its solution may break the budget in between. Such moments are the
events worth adding: the next program cuts the solution off. This is the cutting-plane scheme of integer programming, with
whole events in place of single inequalities; `docs/explanation/event_cuts.md` proves what one event says. The same
solutions, decoded and repaired, are the best starts that the search has: where search alone stays at an overhead of 1.249
(ResNet-50 at half of its memory), it reaches 1.131 from the solution of a cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutProgram, NoColumn, build_cuts
from checkmate.solvers.bounds.events.relaxation import relax
from checkmate.solvers.evict.profile import Code, add_interval
from checkmate.solvers.evict.search import Search

Prove = Callable[[float, bool], None]
"""Takes a bound as a share, extra cost over the cost of computing every op once, and whether it holds for any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinementParameters:
    """Parameters of the choice of events and of the programs' limits.

    Attributes:
        candidates: Events of each plan that are tried alone. A linear program of one event takes from milliseconds to 1.7 s
            (9,000 ops), and which event proves most is not known before.
        candidate_spacing: The graph is divided into so many parts, and two candidates are further apart than one of them:
            neighbours of a peak prove nearly the same as the peak.
        linear_time_s: Seconds for a linear program whose bound is compared with another's. Its duals give a bound at any moment.
        linear_share: Share of the time left that it may take.
        chain_linear_time_s: The same for several events; larger programs, solved once a round.
        chain_linear_share: Share of the time left that it may take, which keeps the rest for the integer program.
        integer_share: Share of the time left that one integer program may take. Programs that end leave their successors more;
            of one that does not, the search has the rest.
        floating_gain: Share by which floating ops must raise the linear bound to be modelled in the integer program. Below it
            the difference is the engine's tolerance.
        least_time_s: Seconds left below which no round begins. Chosen by hand.
        added_events: Fewest and most events added in a round.
        growth: How many times longer a program takes with one event more.
        added_spacing: As ``candidate_spacing``, for the events added in one round.
        share_tolerance: Value from which a column of S in an integer solution counts as one.
    """

    candidates: int = 14
    candidate_spacing: int = 56
    linear_time_s: float = 5.0
    linear_share: float = 0.03
    chain_linear_time_s: float = 10.0
    chain_linear_share: float = 0.3
    integer_share: float = 0.93
    floating_gain: float = 1e-5
    least_time_s: float = 0.2
    added_events: tuple[int, int] = (2, 4)
    growth: float = 2.2
    added_spacing: int = 64
    share_tolerance: float = 0.5


PARAMETERS = RefinementParameters()


def first_bytes(graph: Graph, order: Iterable[int]) -> dict[int, int]:
    """Bytes held while each op of an order is computed for the first time, resident bytes included.

    Returns:
        Op -> bytes.
    """
    plan = Plan.from_order(graph, order)
    timeline = simulate(graph, plan)
    first: dict[int, int] = {}
    for step, held in zip(plan.steps, timeline.bytes.tolist(), strict=True):
        if isinstance(step, Compute):
            first.setdefault(step.op, held)
    return first


def separated_peaks(held: dict[int, int], rank: dict[int, int], count: int, apart: int) -> list[int]:
    """Ops with the most bytes held, no two closer than ``apart`` in ``rank``; highest first.

    Args:
        held: Op -> bytes.
        rank: Op -> position on a line.
        count: Most ops to return.
        apart: Distance in rank that two ops must exceed.
    """
    chosen: list[int] = []
    for o in sorted(held, key=lambda op: (-held[op], op)):
        if all(abs(rank[o] - rank[c]) > apart for c in chosen):
            chosen.append(o)
            if len(chosen) >= count:
                break
    return chosen


def promising_events(graph: Graph, orders: Iterable[Iterable[int]]) -> list[int]:
    """Candidates for single events: where plans hold most, and the loss, before which a training step holds most."""
    count = len(graph.ops)
    rank = {o: o for o in range(count)}
    events: dict[int, None] = {o: None for o, op in enumerate(graph.ops) if op.phase == "loss"}
    apart = max(1, count // PARAMETERS.candidate_spacing)
    for order in orders:
        held = first_bytes(graph, order)
        events.update(dict.fromkeys(separated_peaks(held, rank, PARAMETERS.candidates, apart)))
    return list(events)


def highest_events(graph: Graph, count: int, order: Sequence[int] | None = None, among: Iterable[int] | None = None) -> list[int]:
    """Events where a plan holds most, apart from each other.

    Args:
        graph: The graph, its views folded.
        count: Most events to return.
        order: The plan as an order of computations; keeping everything by default.
        among: Ops to choose among; all by default.
    """
    ops = range(len(graph.ops))
    held = first_bytes(graph, ops if order is None else order)
    if among is not None:
        held = {o: held[o] for o in among if o in held}
    return separated_peaks(held, {o: o for o in ops}, count, max(1, len(ops) // PARAMETERS.candidate_spacing))


def longest_chain(model: CutModel) -> list[int]:
    """Ops of a longest path of the DAG, END left out: the widest choice of events that come one after another."""
    depth = [0] * (model.end + 1)
    above = [-1] * (model.end + 1)
    for o in range(model.end):
        for p in model.parents[o]:
            if depth[p] + 1 > depth[o]:
                depth[o], above[o] = depth[p] + 1, p
    o = max(range(model.end), key=lambda op: depth[op], default=-1)
    chain: list[int] = []
    while o >= 0:
        chain.append(o)
        o = above[o]
    return chain[::-1]


def single_cuts(
    model: CutModel,
    candidates: Sequence[int],
    prove: Prove,
    out_of_time: Callable[[], bool],
    *,
    time_up: Flag | None = None,
) -> int | None:
    """Prove the bound of each event alone, by a minimum cut (`min_cut`).

    Args:
        model: The problem's model.
        candidates: Events, the most promising first: time may end the loop early.
        prove: Takes every bound that is better than those before it.
        out_of_time: Called between events.
        time_up: Ends a cut when it is raised; by default nothing does.

    Returns:
        The event with the best bound, or None without candidates.
    """
    from checkmate.solvers.bounds.events.min_cut import single_event

    best, best_event = -math.inf, None
    for event in candidates:
        bound = single_event(model, event, no_alarm() if time_up is None else time_up)
        if bound > best:
            best, best_event = bound, event
            prove(bound, model.any_order([event]))
        if math.isinf(best) and best > 0:
            return best_event
        if out_of_time():
            break
    return best_event


def quick_bound(model: CutModel, cuts: Sequence[int], left_s: Callable[[], float] = lambda: math.inf) -> tuple[float, bool]:
    """The linear bound of a chain of events, and whether ops beside the chain add to it.

    If they do not, their columns only slow the integer program: transformers have few such ops, convolutional networks with
    their weight gradients have many.

    Returns:
        The bound as a share, and whether to build the integer program with ``floating=True``, which is also the answer where time
        was too short to tell.
    """
    with_them, without = (
        relax(
            build_cuts(model, cuts, floating=floating),
            time_s=min(PARAMETERS.linear_time_s, PARAMETERS.linear_share * left_s()),
        )
        for floating in (True, False)
    )
    pay = with_them.bound > without.bound + PARAMETERS.floating_gain or not with_them.finished
    return max(with_them.bound, without.bound), pay


def chain_of(model: CutModel, events: Iterable[int]) -> list[int]:
    """A chain among some events, chosen greedily: each is taken if it is comparable with all taken before it.

    Comparable pairwise is a chain, and the index order of ops is a topological order, so sorting puts it in its order.
    """
    chain: list[int] = []
    for event in events:
        if event not in chain and all(model.comparable(c, event) for c in chain):
            chain.append(event)
    return sorted(chain)


def code_of(cut: CutProgram, live: Floats, model: CutModel, search: Search) -> Code:
    """Eviction code of a solution: at each event a value is held as S says, and between events whatever is there is kept.

    The program says nothing about the time between events, and the code holds too much rather than too little there: the
    search's repair evicts by price, but never undoes an eviction. A value that is live at one event and not at the next is held
    up to the stage of the next, so that what is computed again before it can read the value. One that is computed again in the
    stage of an event at which it is not live is dropped after this stage.

    Args:
        cut: The program.
        live: Its solution. Shape ``[column]``.
        model: The model it was built from.
        search: The search whose stages the code refers to.
    """
    code = search.empty_code()
    # An op that the search computes on demand has no stage to hold anything at.
    events = [(search.stage[event], cut.live[e]) for e, event in enumerate(cut.cuts) if event in search.stage]
    released = np.full(len(model.size), -1, dtype=np.int64)  # first stage that need not hold a value because of the events so far
    for e, (stage, columns) in enumerate(events):
        held = columns == NoColumn.ALWAYS_LIVE
        modelled = columns >= 0
        held[modelled] = live[columns[modelled]] >= PARAMETERS.share_tolerance
        for v in np.flatnonzero(modelled & ~held).tolist():
            touches = [search.stage[o] for o in model.readers_of(v) if o in search.stage and search.stage[o] < stage]
            touched = max(touches) if touches else search.stage.get(int(model.producer[v]), -1)
            add_interval(code, v, max(touched + 1, int(released[v])), stage + 1)
        if e + 1 < len(events):
            released[held] = events[e + 1][0] + 1
    return code


class Refinement:
    """Bound with few events first; realise the solution as a plan, add events where that plan breaks the budget, repeat.

    Attributes:
        next_s: Seconds that an integer program of one event more than the longest takes.
    """

    def __init__(
        self, model: CutModel, search: Search, prove: Prove, offer: Callable[[list[int]], bool], *, gap: float, threads: int
    ) -> None:
        self.model = model
        self.search = search
        self.prove = prove
        self.offer = offer
        self.gap = gap
        self.threads = threads
        self.next_s = 0.0
        graph = model.problem.graph
        self.rank = {o: i for i, o in enumerate(model.targets or range(len(graph.ops)))}
        # In a given order any targets form a chain; in any order only what the DAG orders does.
        self.chain = set(self.rank) if model.targets is not None else set(longest_chain(model))

    def run(
        self,
        first: Sequence[int],
        enough: Callable[[], float],
        left_s: Callable[[], float],
        *,
        floating: bool,
        peaks: Sequence[int] = (),
        prices: Mapping[int, float] | None = None,
        known: float = -math.inf,
    ) -> list[int]:
        """Refine from some first events until the bound is enough, nothing is violated, or time is up.

        Args:
            first: Events to begin with.
            enough: Bound beyond which more is of no use: the cost of the best plan so far, or what meets the gap, as a share.
            left_s: Seconds left for this refinement.
            floating: Whether ops beside the chain are modelled: a sharper bound from a larger program.
            peaks: Ops that prove more than their neighbours; those of them that are violated are added before others.
            prices: What the bound gains for each share of the budget that an event has less, as far as it is known.
            known: Bound that larger relaxations have proven. If the first integer program proves less, more events
                are worth more than integers, and no other is begun.

        Returns:
            The events of the last program.
        """
        from checkmate.solvers.backends.highs import solve_integer

        chain = {o for o in self.chain | set(first) if all(self.model.comparable(f, o) for f in first)}
        cuts = sorted(set(first), key=self._before)
        while left_s() > PARAMETERS.least_time_s:
            cut = build_cuts(self.model, cuts, floating=floating, segments="all")
            any_order = self.model.any_order(cuts)
            if cut.impossible:
                self.prove(math.inf, any_order)
                break
            # The bound by duals holds whatever the engine's tolerances; it stays if the integer program runs out of time.
            # That of one event was proven by `single_cuts`.
            program = cut.program
            if len(cuts) > 1:
                limit_s = min(PARAMETERS.chain_linear_time_s, PARAMETERS.chain_linear_share * left_s())
                relaxed = relax(cut, time_s=limit_s, enough=enough())
                self.prove(relaxed.bound, any_order)
                program = cut.without_slack(relaxed.row_prices)
            if left_s() <= 0:
                break
            # The cutoff and no restarts together took a third off an integer program of six events.
            begin = left_s()
            limit_s = PARAMETERS.integer_share * begin
            solved = solve_integer(program, time_s=limit_s, absolute_gap=self.gap, threads=self.threads, cutoff=enough())
            took_s = begin - left_s()
            self.next_s = max(self.next_s, PARAMETERS.growth * took_s)
            self.prove(solved.bound, any_order)
            if solved.solution is None or solved.bound >= enough() - self.gap:
                break
            code = code_of(cut, solved.solution, self.model, self.search)
            # Decoded without repair: where this plan breaks the budget are the events to add. Repaired, it is a start for
            # the search. No order: an op that may run once would have to run twice, which S alone does not rule out.
            order = self.search.realise(code)
            if order:
                self.offer(order)
                self._continue_from(code)
            # A solution that time cut short may break the budget where the optimum does not.
            if not solved.finished or solved.bound < known:
                break
            # As many as there is time for. Two at least where there is any: a larger program proves more also unfinished.
            times = left_s() / max(took_s, 1e-9)
            least, most = PARAMETERS.added_events
            count = min(most, max(least, int(math.log(times, PARAMETERS.growth)))) if times > 1 else 0
            added = self._violated(order, chain.difference(cuts), peaks, prices or {}, cuts, count)
            if not added:
                break
            cuts = sorted({*cuts, *added}, key=self._before)
        return cuts

    def _continue_from(self, code: Code) -> None:
        if self.search.start_from(code):
            self.offer(self.search.order())

    def _before(self, op: int) -> int:
        """Rank of an event on its chain; the index of an op that is no target, which is a topological rank as well."""
        return self.rank.get(op, op)

    def _violated(
        self, order: list[int], among: set[int], peaks: Sequence[int], prices: Mapping[int, float], cuts: list[int], most: int
    ) -> list[int]:
        """Events to add: apart from each other and in one chain with the others, and where there are such apart from those too.

        By what each would gain if a solution kept its budget; a peak whose price is not known counts as the mean of those that
        are no events yet. One that has a price beside the events so far may be near them.

        Args:
            order: The realised plan; none to add if it is empty.
            among: Ops to choose among: those that break the budget.
            peaks: Those of them that come before the others.
            prices: What is gained for each share of the budget.
            cuts: Events so far.
            most: Most events to add.
        """
        held = first_bytes(self.model.problem.graph, order) if order else {}
        excess = {o: b - self.model.problem.budget_bytes for o, b in held.items() if o in among}
        broken = [o for o in excess if excess[o] > 0]
        left_out = [prices[o] for o in prices if o not in cuts]
        unknown = sum(left_out) / max(1, len(left_out))
        broken.sort(key=lambda o: (o not in peaks, -prices.get(o, unknown) * excess[o], -excess[o], o))
        apart = max(1, len(self.rank) // PARAMETERS.added_spacing)
        added: list[int] = []
        for others in (cuts, []) if most else ():
            for o in broken:
                beside = added if prices.get(o, 0.0) > 0 else (*others, *added)
                near = any(abs(self._before(o) - self._before(c)) <= apart for c in beside)
                if not near and all(self.model.comparable(o, c) for c in (*cuts, *added)):
                    added.append(o)
                    if len(added) >= most:
                        return added
            if added:
                break
        return added
