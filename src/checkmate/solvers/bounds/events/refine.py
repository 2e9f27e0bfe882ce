"""Lazy refinement: bound a problem with few events, turn the solution into a plan, add the events that it violates.

Memory is limited only at the events of a program, so its solution may break the budget in between. These moments are the
events worth adding: the next program cuts the solution off. This is the cutting-plane scheme of integer programming, with
whole events instead of single inequalities; `docs/explanation/event_cuts.md` has the proof for one event. The same
solutions, decoded and repaired, are the search's best starts: on ResNet-50 at half of its memory, search alone stays at an
overhead of 1.249, and it reaches 1.131 from the solution of a cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.problem import Problem
from checkmate.core.simulate import simulate
from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutProgram, NoColumn, build_cuts
from checkmate.solvers.bounds.events.relaxation import relax
from checkmate.solvers.clocks import Flag, no_alarm
from checkmate.solvers.evict.profile import add_interval
from checkmate.solvers.evict.search import Search
from checkmate.solvers.flat_graph import Ints
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session

Prove = Callable[[float, bool], None]
"""Takes a bound as a share (extra cost over the cost of computing every op once), and whether it holds for any order."""


class Chain(NamedTuple):
    """Events of a chain by importance."""

    first: Sequence[int]  # events of the first integer program
    peaks: Sequence[int] = ()  # events that alone prove more than their neighbours; a solution may violate any of them
    prices: Mapping[int, float] = MappingProxyType({})  # gain of the bound for each share of the budget taken from an event


def first_bytes(graph: Graph, order: Iterable[int]) -> dict[int, int]:
    """Bytes held while each op of an order is computed for the first time, resident bytes included."""
    plan = Plan.from_order(graph, order)
    steps = zip(plan.steps, simulate(graph, plan).bytes.tolist(), strict=True)
    return {step.op: held for step, held in reversed([*steps]) if isinstance(step, Compute)}


def promising_events(graph: Graph, orders: Iterable[Iterable[int]]) -> list[int]:
    """Candidates for single events: ops at which plans hold most, and the loss, before which a training step holds most."""
    events: dict[int, None] = {o: None for o, op in enumerate(graph.ops) if op.phase == "loss"}
    for order in orders:
        events.update(dict.fromkeys(highest_events(graph, 14, order)))
    return list(events)


def highest_events(graph: Graph, count: int, order: Iterable[int]) -> list[int]:
    """Events at which the plan of an order holds most, the highest first.

    They are more than a 56th of the graph apart: neighbours of a peak prove nearly the same as the peak.
    """
    held, apart = first_bytes(graph, order), max(1, len(graph.ops) // 56)
    chosen: list[int] = []
    for o in sorted(held, key=lambda op: (-held[op], op)):
        if len(chosen) < count and all(abs(o - c) > apart for c in chosen):
            chosen.append(o)
    return chosen


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
    """Prove each event's own bound by a minimum cut (`min_cut`). Returns the best event, None without candidates.

    The most promising candidates come first: time may end the loop between two candidates, and a raised flag ends a cut.
    """
    from checkmate.solvers.bounds.events.min_cut import single_event

    best, best_event = -math.inf, None
    for event in candidates:
        bound = single_event(model, event, no_alarm() if time_up is None else time_up)
        if bound > best:
            best, best_event = bound, event
            prove(bound, model.any_order([event]))
        if best == math.inf or out_of_time():
            break
    return best_event


def prove_single_events(problem: Problem, session: Session, out_of_time: Callable[[], bool]) -> None:
    """Prove the bounds of the single events at which keeping everything holds most; views count as free."""
    folded = FoldViews.of(problem.graph).apply(problem)
    events = promising_events(folded.graph, [range(len(folded.graph.ops))])

    def prove(share: float, _: bool) -> None:
        session.prove(problem.graph.cost + share * max(1, folded.graph.cost))

    single_cuts(CutModel(folded), events, prove, out_of_time)


def quick_bound(model: CutModel, cuts: Sequence[int], left_s: Callable[[], float] = lambda: math.inf) -> tuple[float, bool]:
    """The linear bound of a chain of events, and whether ops off the chain improve it.

    If they do not, their columns only slow the integer program. Transformers have few of these ops; convolutional networks have
    many, their weight gradients. If time is too short to tell, they count as improving it.
    """
    with_them, without = (
        # Duals give a bound even if the solve stops early.
        relax(build_cuts(model, cuts, floating=floating), time_s=min(5.0, 0.03 * left_s()))
        for floating in (True, False)
    )
    # A smaller gain is within the engine's tolerance.
    pay = with_them.bound > without.bound + 1e-5 or not with_them.finished
    return max(with_them.bound, without.bound), pay


def chain_of(model: CutModel, events: Iterable[int]) -> list[int]:
    """A chain among some events, chosen greedily: an event is taken if it is comparable with all events taken before.

    Pairwise comparable events form a chain. The index order of ops is topological, so sorting puts the chain in order.
    """
    chain: list[int] = []
    for event in events:
        if event not in chain and all(model.comparable(c, event) for c in chain):
            chain.append(event)
    return sorted(chain)


def code_of(cut: CutProgram, live: Floats, model: CutModel, search: Search) -> Ints:
    """Eviction code of a solution: at each event values are held as in S, and between events every live value is kept.

    The program does not constrain the time between events. The code holds too much there rather than too little: the
    search's repair evicts by price, but never undoes an eviction. A value that is live at one event and not at the next is held
    up to the next event's stage, for recomputations before that event that read it. A value that is computed again in the
    stage of an event, but is not live at the event, is dropped after this stage.
    """
    code = search.empty_code()
    # An op that the search computes on demand has no stage at which to hold a value.
    events = [(search.stage[event], cut.live[e]) for e, event in enumerate(cut.cuts) if event in search.stage]
    released = np.full(len(model.size), -1, dtype=np.int64)  # first stage that need not hold a value because of the events so far
    for e, (stage, columns) in enumerate(events):
        held = columns == NoColumn.ALWAYS_LIVE
        modelled = columns >= 0
        held[modelled] = live[columns[modelled]] >= 0.5
        for v in np.flatnonzero(modelled & ~held).tolist():
            touches = [search.stage[o] for o in model.problem.graph.readers[v] if o in search.stage and search.stage[o] < stage]
            touched = max(touches) if touches else search.stage.get(int(model.producer[v]), -1)
            add_interval(code, v, max(touched + 1, int(released[v])), stage + 1)
        if e + 1 < len(events):
            released[held] = events[e + 1][0] + 1
    return code


_GROWTH: Final = 2.2
"""Factor by which one more event prolongs an integer program."""


@dataclass(slots=True, kw_only=True)
class Refinement:
    """Bound with few events; turn the solution into a plan; add the events at which the plan breaks the budget; repeat."""

    model: CutModel
    search: Search
    prove: Prove
    offer: Callable[[list[int]], bool]
    enough: Callable[[], float]
    """Bound that is enough, as a share: the cost of the best plan so far, or the bound that closes the gap."""
    left_s: Callable[[], float]
    gap: float
    threads: int
    next_s: float = 0.0
    """Estimated seconds of an integer program with one event more than the longest so far."""

    def run(self, chain: Chain, *, floating: bool, known: float = -math.inf) -> list[int]:
        """Refine from first events until the bound is enough, no event is violated, or time is up.

        With ``floating`` the programs model ops off the chain: a sharper bound from larger programs. If the first integer program
        proves less than larger relaxations did (``known``), more events are worth more than integers, and no other integer
        program is started. Returns the events of the last program.
        """
        first = chain.first
        # In a given order any targets form a chain; in any order only ops that the DAG orders do.
        among = {*(longest_chain(self.model) if self.model.targets is None else self.model.targets), *first}
        among = {o for o in among if all(self.model.comparable(f, o) for f in first)}
        cuts = sorted(set(first), key=self._before)
        while self.left_s() > 0.2:
            realised = self._bound_and_realise(cuts, floating, known)
            if realised is None:
                break
            order, took_s = realised
            # As many as there is time for, and at least two if there is any time: a larger program proves more even unfinished.
            times = self.left_s() / max(took_s, 1e-9)
            count = min(4, max(2, int(math.log(times, _GROWTH)))) if times > 1 else 0
            added = self._violated(order, among.difference(cuts), chain, cuts, count)
            if not added:
                break
            cuts = sorted({*cuts, *added}, key=self._before)
        return cuts

    def _bound_and_realise(self, cuts: list[int], floating: bool, known: float) -> tuple[list[int], float] | None:
        """One round: the plan of an integer solution and the seconds of its program; None if another round is not worth it."""
        from checkmate.solvers.backends.highs import solve_integer

        cut = build_cuts(self.model, cuts, floating=floating, all_segments=True)
        any_order = self.model.any_order(cuts)
        if cut.impossible:
            self.prove(math.inf, any_order)
            return None
        # The bound by duals holds whatever the engine's tolerances; it stays if the integer program runs out of time.
        # `single_cuts` has proven the bound of one event.
        program = cut.program
        if len(cuts) > 1:
            relaxed = relax(cut, time_s=min(10.0, 0.3 * self.left_s()), enough=self.enough())
            self.prove(relaxed.bound, any_order)
            program = cut.without_slack(relaxed.row_prices)
        begin = self.left_s()
        if begin <= 0:
            return None
        # A program that ends early leaves more time to its successors. If it does not end, the search has the rest.
        limit_s = 0.93 * begin
        solved = solve_integer(program, time_s=limit_s, absolute_gap=self.gap, threads=self.threads, cutoff=self.enough())
        took_s = begin - self.left_s()
        self.next_s = max(self.next_s, _GROWTH * took_s)
        self.prove(solved.bound, any_order)
        if solved.solution is None or solved.bound >= self.enough() - self.gap:
            return None
        code = code_of(cut, solved.solution, self.model, self.search)
        # Decoded without repair, this plan breaks the budget at the events to add. Repaired, it is a start for the search.
        # There is no order if an op that may run only once would have to run twice, which S alone does not rule out.
        order = self.search.order_and_peak(code)[0]
        if order:
            self.offer(order)
            if self.search.start_from(code):
                self.offer(self.search.order())
        # A solution from a program that ran out of time may break the budget at events at which the optimum keeps it.
        return (order, took_s) if order and solved.finished and solved.bound >= known else None

    def _before(self, op: int) -> int:
        """Rank of an event on its chain; for an op that is not a target its index, which is also a topological rank."""
        return self.model.position.get(op, op)

    def _violated(self, order: list[int], among: set[int], chain: Chain, cuts: list[int], most: int) -> list[int]:
        """Events to add: ops at which a plan breaks the budget.

        They are apart from each other and form one chain with the present events; if possible they are apart from those too.
        They are ranked by the gain if a solution kept the budget there. A peak without a known price counts as the mean of the
        peaks that are not events yet. A peak with a price given the present events may be near them.
        """
        prices, budget = chain.prices, self.model.problem.budget_bytes
        excess = {o: b - budget for o, b in first_bytes(self.model.problem.graph, order).items() if o in among and b > budget}
        left_out = [prices[o] for o in prices if o not in cuts]
        unknown = sum(left_out) / max(1, len(left_out))
        broken = sorted(excess, key=lambda o: (o not in chain.peaks, -prices.get(o, unknown) * excess[o], -excess[o], o))
        apart = max(1, (len(self.model.position) or self.model.end) // 64)
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
