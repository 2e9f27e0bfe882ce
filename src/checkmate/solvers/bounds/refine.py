"""Search and bound feed each other: cut where the plan is tight, turn the cuts' solution into a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.event_cuts import CutModel, CutProgram
from checkmate.solvers.evict.search import Code, Search

Prove = Callable[[float, bool], None]
"""Takes a bound as a share, extra cost over the cost of computing every op once, and whether it holds for any order."""


def first_bytes(graph: Graph, order: Iterable[int]) -> dict[int, int]:
    """Bytes held while each op of an order is computed for the first time."""
    plan = Plan.from_order(graph, order)
    timeline = simulate(graph, plan)
    first: dict[int, int] = {}
    for step, held in zip(plan.steps, timeline.bytes.tolist(), strict=True):
        if isinstance(step, Compute):
            first.setdefault(step.op, held)
    return first


def separated_peaks(held: dict[int, int], rank: dict[int, int], count: int, apart: int) -> list[int]:
    """Ops with the most bytes held, no two closer than ``apart`` in ``rank``; highest first."""
    chosen: list[int] = []
    for o in sorted(held, key=lambda op: (-held[op], op)):
        if all(abs(rank[o] - rank[c]) > apart for c in chosen):
            chosen.append(o)
            if len(chosen) >= count:
                break
    return chosen


def promising_events(graph: Graph, orders: Iterable[Iterable[int]]) -> list[int]:
    """Events where plans are fullest, and the loss, before which a training step holds most."""
    count = len(graph.ops)
    rank = {o: o for o in range(count)}
    events: dict[int, None] = {o: None for o, op in enumerate(graph.ops) if op.phase == "loss"}
    for order in orders:
        held = first_bytes(graph, order)
        events.update(dict.fromkeys(separated_peaks(held, rank, 14, max(1, count // 56))))
    return list(events)


def longest_chain(model: CutModel) -> list[int]:
    """A longest path of the DAG, END left out: the widest choice of events that come one after another."""
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


def single_cuts(model: CutModel, candidates: Sequence[int], prove: Prove, out_of_time: Callable[[], bool]) -> int | None:
    """Prove what each event alone proves, by its linear program; returns the best event."""
    from checkmate.solvers.backends.highs import solve_linear

    best, best_event = -math.inf, None
    for event in candidates:
        cut = model.build([event])
        bound = math.inf if cut.impossible else solve_linear(cut.program, time_s=5.0).bound
        if bound > best:
            best, best_event = bound, event
            prove(bound, model.any_order([event]))
        if math.isinf(best) and best > 0:
            return best_event
        if out_of_time():
            break
    return best_event


def quick_bound(model: CutModel, cuts: Sequence[int]) -> tuple[float, bool]:
    """What events prove by their linear program, and whether ops beside the chain add to it.

    If they do not, their columns only slow the engine.
    """
    from checkmate.solvers.backends.highs import solve_linear

    with_them, without = (
        solve_linear(model.build(cuts, floating=floating).program, time_s=5.0).bound for floating in (True, False)
    )
    return max(with_them, without), with_them > without + 1e-5


def chain_of(model: CutModel, events: Iterable[int]) -> list[int]:
    """The events that come one after another in every plan: each is taken if it is comparable with all before it."""
    chain: list[int] = []
    for event in events:
        if event not in chain and all(model.comparable(c, event) for c in chain):
            chain.append(event)
    return sorted(chain)


def code_of(cut: CutProgram, live: Floats, model: CutModel, search: Search) -> Code:
    """Eviction code that holds at each event what a solution says is live, and everything between."""
    code = search.empty_code()
    for e, event in enumerate(cut.cuts):
        stage = search.stage.get(event)
        if stage is None:
            continue
        columns = cut.live[e]
        for v in np.flatnonzero(columns >= 0).tolist():
            if live[columns[v]] >= 0.5:
                continue
            touches = [search.stage[o] for o in model.readers_of(v) if o in search.stage and search.stage[o] < stage]
            start = max(touches) + 1 if touches else search.stage.get(int(model.producer[v]), -1) + 1
            search.evict(code, v, start, stage)
    return code


class Refinement:
    """Few cuts first; solve, make the solution a plan, cut where that plan breaks the budget; again.

    Args:
        model: The cuts' model, for any order or for the search's targets.
        search: Where realised plans are repaired and improved.
        prove: Takes bounds, as shares.
        offer: Takes orders of the folded graph.
        gap: Distance of share at which an integer program may stop.
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
        graph = model.problem.graph
        self.rank = {o: i for i, o in enumerate(model.targets or range(len(graph.ops)))}
        self.chain = set(self.rank) if model.targets is not None else set(longest_chain(model))

    def run(
        self, first: Sequence[int], best_share: Callable[[], float], left_s: Callable[[], float], *, floating: bool
    ) -> list[int]:
        """Refine from some first events until the bound meets the best plan, nothing is violated, or time is up.

        Args:
            first: Events to begin with.
            floating: Whether ops beside the chain are modelled: a sharper bound from a larger program.
            best_share: Extra cost of the best plan so far, as a share.
            left_s: Seconds left for this refinement.

        Returns:
            The events of the last program.
        """
        from checkmate.solvers.backends.highs import solve_integer, solve_linear

        chain = {o for o in self.chain | set(first) if all(self.model.comparable(f, o) for f in first)}
        cuts = sorted(set(first), key=self._before)
        budget = self.model.problem.budget_bytes
        while left_s() > 0.2:
            cut = self.model.build(cuts, floating=floating)
            any_order = self.model.any_order(cuts)
            if cut.impossible:
                self.prove(math.inf, any_order)
                break
            if len(cuts) > 1:
                self.prove(solve_linear(cut.program, time_s=min(10.0, 0.3 * left_s())).bound, any_order)
            if left_s() <= 0:
                break
            solved = solve_integer(cut.program, time_s=left_s(), absolute_gap=self.gap, threads=self.threads, cutoff=best_share())
            self.prove(solved.bound, any_order)
            if solved.solution is None or solved.bound >= best_share() - self.gap:
                break
            code = code_of(cut, solved.solution, self.model, self.search)
            order = self.search.realise(code)
            if not order:
                break
            self.offer(order)
            self._continue_from(code)
            held = first_bytes(self.model.problem.graph, order)
            broken = {o: h for o, h in held.items() if h > budget and o in chain and o not in cuts}
            added = self._separated(broken, cuts) if solved.finished else []
            if not added:
                break
            cuts = sorted({*cuts, *added}, key=self._before)
        return cuts

    def _continue_from(self, code: Code) -> None:
        if self.search.start_from(code):
            self.offer(self.search.order())

    def _before(self, op: int) -> int:
        """Rank of an event on its chain."""
        return self.rank.get(op, op)

    def _separated(self, broken: dict[int, int], cuts: list[int]) -> list[int]:
        apart = max(1, len(self.rank) // 64)
        added: list[int] = []
        for o in sorted(broken, key=lambda op: (-broken[op], op)):
            near = any(abs(self._before(o) - self._before(c)) <= apart for c in added)
            if not near and all(self.model.comparable(o, c) for c in (*cuts, *added)):
                added.append(o)
                if len(added) >= 3:
                    break
        return added
