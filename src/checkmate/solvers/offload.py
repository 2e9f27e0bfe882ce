"""The joint search over recomputations and copies to the host.

A round chooses a set of values to copy, places their copies by the times of the best plan so far, and the
search over evictions (`evict`) finds the recomputations that are still needed; `simulate` times the plan with its copies.
The first sets come from the linear programs of the joint bound, whose z selects the values worth their time on the bus.
Later sets exchange a few values of the best set. If no plan without copies was found, the set of all values comes first.
Hidden copies are tried first: placed for the speed of the bus, they cost nothing. Copies placed for a faster bus than the
real one hold fewer bytes, and the step waits for them.

Times come from a reference, a sequence of computations without copies. A computation that is added later only delays the
steps after it: the time between the step that issues a copy and the step that waits for it can only grow. Copies that are
hidden in the reference therefore stay hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np

from checkmate.core.errors import PlanError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, HostMemory, Offload, Step, with_frees
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.bounds.events.copy_cuts import build_with_host, proven_ns
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import promising_events
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.starts import starts
from checkmate.solvers.flat_graph import Move
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import needed_steps
from checkmate.solvers.session import Session, Solver, searched
from checkmate.solvers.tunables import TUNABLES


def run_with_host(problem: Problem, session: Session, alone: Solver) -> Termination:
    """Find the plan whose step ends first; never later than without copies, since `alone` first offers plans without."""
    alone_ns = _solve_alone(problem, session, alone)
    if session.cost == problem.graph.cost:
        session.remark("offload does not pay: the budget holds every value, so nothing is computed again or copied")
        return Termination(Reason.FEASIBLE)
    _Joint(problem, session).run()
    if session.plan is not None and session.plan.host is None:
        session.remark("offload does not pay here: no plan with copies was found that ends earlier")
    elif session.plan is not None and alone_ns is not None:
        gain = (alone_ns - (session.cost or 0)) / alone_ns
        session.remark(f"copies to the host end the step {gain:.1%} earlier than the best plan without them")
    return searched(session, "no copies were found that fit")


def _solve_alone(problem: Problem, session: Session, solver: Solver) -> int | None:
    """The cost of the best plan without copies, in three tenths of the time."""
    left = session.left_s()
    if session.plan is not None and session.plan.host is None:  # the caller gave an initial plan
        return session.cost
    without = problem.without_host()
    if left <= 0 or floor(without.graph).peak_bytes > without.budget_bytes:
        return None
    inner = Session(without, replace(session.limits, time_s=left * 0.3 if math.isfinite(left) else None))
    try:
        solver.run(without, inner)
    finally:  # also if the user interrupts
        inner.close()
        if inner.plan is not None:
            session.offer_plan(inner.plan)
    return inner.cost


@dataclass(frozen=True, slots=True)
class _Tried:
    """A set of values to copy and the best plan found with it."""

    chosen: frozenset[int]
    cost: int
    order: tuple[int, ...]


class _Joint:
    def __init__(self, problem: Problem, session: Session) -> None:
        assert problem.host is not None
        self.problem, self.session = problem, session
        self.host: HostMemory = problem.host
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.folded = self.fold.apply(problem.without_host())
        self.graph = self.folded.graph
        self.size = [value.size_bytes for value in self.graph.values]
        self.random = Random(session.limits.seed)
        self.best: _Tried | None = None

    def run(self) -> None:
        if self.session.plan is not None and self.session.cost is not None:
            known = tuple(self.fold.apply_order(self.session.plan.order))
            self.best = _Tried(frozenset(), self.session.cost, known)
        references = self._references()
        everything = frozenset(references[0].gaps)
        if self.session.plan is None:  # a first plan comes before any bound
            self._try(everything, references[0], 60)
            if self.session.done:
                return
        for chosen in dict.fromkeys([*self._prove_and_choose(references[0]), everything]):
            for reference in references:
                self._try(chosen, reference, 60)
                if self.session.done:
                    return
        self._improve()

    def _references(self) -> list[Reference]:
        """Times of the best plan so far, and of orders that compute every op once."""
        plan, orders = self.session.plan, list[tuple[int, ...]]()
        if plan is not None:
            known = tuple(self.fold.apply_order(plan.order))
            orders = [*([known] if plan.host is None else []), tuple(dict.fromkeys(known))]
        every = starts(self.folded, self.session.limits.seed, self.session.time_up)
        orders += (start.order for start in every if not start.on_demand)
        return [Reference.of(self.graph, order) for order in dict.fromkeys(orders)]

    def _prove_and_choose(self, reference: Reference) -> list[frozenset[int]]:
        """Bounds from single events, and the values that their linear programs copy, the best bound first."""
        from checkmate.solvers.backends.highs import solve_linear

        session = self.session
        plain = FoldViews.of(self.problem.graph)
        model = CutModel(plain.apply(self.problem))
        until = session.elapsed_s() + 0.3 * min(TUNABLES.horizon_s, session.left_s())
        found: list[tuple[float, frozenset[int]]] = []
        for event in promising_events(plain.folded, [reference.targets]):
            cut = build_with_host(model, event, self.host, self.problem.graph.cost)
            if cut.impossible:
                session.prove(math.inf)
                return []
            solved = solve_linear(cut.program, time_s=min(5.0, session.left_s()))
            session.prove(proven_ns(solved.bound, model, self.problem.graph.cost))
            if solved.solution is not None:
                columns = np.flatnonzero(cut.fetched >= 0)
                away = columns[solved.solution[cut.fetched[columns]] >= 0.5]
                found.append((solved.bound, frozenset(int(v) for v in away)))
            if session.done or session.elapsed_s() > until:
                break
        found.sort(key=lambda pair: -pair[0])
        return [chosen for _, chosen in found[:3] if chosen]

    def _improve(self) -> None:
        """Exchange some values of the best set until many sets in a row gain nothing."""
        without_gain = 0
        while self.best is not None and without_gain < 200 and not self.session.done:
            best = self.best
            reference = Reference.of(self.graph, best.order)
            chosen = set(best.chosen)
            others = sorted(set(reference.gaps) - chosen)
            times = Counter(best.order)  # copies can replace recomputations
            again = {v for o, count in times.items() if count > 1 for v in self.graph.ops[o].outputs}
            if self.random.random() < 0.7 and not again.isdisjoint(others):
                others = [v for v in others if v in again]
            if self.random.random() < 0.7 and others:
                chosen.update(self.random.sample(others, min(len(others), self.random.randint(1, 4))))
            if self.random.random() < 0.5 and chosen:
                members = sorted(chosen)
                chosen.difference_update(self.random.sample(members, min(len(members), self.random.randint(1, 4))))
            self._try(frozenset(chosen), reference, 60)
            without_gain = 0 if self.best.cost < best.cost else without_gain + 1

    def _try(self, chosen: frozenset[int], reference: Reference, decodes: int) -> None:
        """Search with the copies of a set placed for each speed of the bus, hidden copies first."""
        before: list[Placed] = []
        for speed in (1.0, 1.3, 2.0, 4.0, 1e9):
            if self.session.done:
                return
            placed = place(reference, chosen, self.host, self.size, speed)
            if placed == before:  # no copies, or the same places again
                continue
            before = placed
            cost = self._search(frozenset(p.value for p in placed), placed, reference, decodes)
            if cost is not None and speed > 1 and (self.best is None or cost > self.best.cost):
                return

    def _search(self, chosen: frozenset[int], placed: list[Placed], reference: Reference, decodes: int) -> int | None:
        end = len(self.graph.ops)
        moves: list[Move] = []
        at: dict[int, list[int]] = {}
        for p in sorted(placed, key=lambda p: p.gone_at):
            moves.append(Move(p.value, False))
            at.setdefault(p.gone_at, []).append(end + len(moves))
        for p in placed:
            moves.append(Move(p.value, True))
            at.setdefault(p.fetch_at, []).append(end + len(moves))
        order = [o for stage, target in enumerate(reference.targets) for o in (*at.get(stage, ()), target)]
        order += at.get(len(reference.targets), [])
        search = Search(self.folded, frozenset(), self.session.limits.seed, order, self.session.time_up, moves=moves)
        if len(reference.sequence) > len(reference.targets):
            search.start_from_order(self._with_moves(reference, at, moves))
        search.first(8, lambda: self.session.left_s() <= 0)
        if not math.isfinite(search.best_cost):
            return None
        best: int | None = None
        for effort in (0, decodes, 400):
            if effort and not search.improve(effort, TUNABLES.temperature, lambda: self.session.left_s() <= 0):
                break
            with self.session.checking():
                cost = self._offer(search.order(), moves, chosen)
            if cost is None or (best is not None and cost >= best):
                break
            best = cost
            if self.best is None or cost > self.best.cost * 1.01:
                break
        return best

    def _with_moves(self, reference: Reference, at: dict[int, list[int]], moves: Sequence[Move]) -> list[int]:
        """The sequence of a reference with moves in their stages, without recomputations that the moves make needless."""
        end = len(self.graph.ops)
        sent, back = {m.value for m in moves if m.fetches}, set[int]()
        ids = {(move.value, move.fetches): end + 1 + m for m, move in enumerate(moves)}
        steps: list[Step] = []
        done: set[int] = set()

        def begin(stage: int) -> None:
            for o in at.get(stage, ()):
                move = moves[o - end - 1]
                steps.append(Fetch(move.value) if move.fetches else Free(move.value))
                if move.fetches:
                    back.add(move.value)

        begin(0)
        for o in reference.sequence:
            outputs = self.graph.ops[o].outputs
            if o in done and back.issuperset(outputs):
                continue
            steps.append(Compute(o))
            if o not in done:
                steps += [Offload(v) for v in outputs if v in sent]
                done.add(o)
                begin(len(done))
        order: list[int] = []
        for step in needed_steps(self.folded, steps):
            if isinstance(step, Compute):
                order.append(step.op)
            elif not isinstance(step, Offload):
                order.append(ids[step.value, isinstance(step, Fetch)])
        return order

    def _offer(self, order: list[int], moves: Sequence[Move], chosen: frozenset[int]) -> int | None:
        """Make the plan, time it and offer it; returns its cost if it keeps the budget."""
        end = len(self.graph.ops)
        steps: list[Step] = []
        sent: dict[int, list[int]] = {}
        for v in sorted(chosen):
            sent.setdefault(self.graph.producer[v], []).append(v)
        for o in order:
            if o > end:
                move = moves[o - end - 1]
                steps.append(Fetch(move.value) if move.fetches else Free(move.value))
                continue
            steps.append(Compute(o))
            steps += [Offload(v) for v in sent.pop(o, ())]
        plan = with_frees(self.problem.graph, needed_steps(self.problem, self.fold.invert_steps(steps)), self.problem.host)
        try:
            cost = self.session.offer_plan(plan)
        except PlanError as error:
            raise AssertionError(f"a plan with copies cannot run: {error}") from error
        if cost is not None and (self.best is None or cost < self.best.cost):
            self.best = _Tried(chosen, cost, tuple(o for o in order if o < end))
        return cost


class Gap(NamedTuple):
    """The longest time between two uses of a value."""

    value: int
    made_ns: int  # end of the value's first computation; copies can begin then
    left_ns: int  # end of the last use before the gap
    needed_ns: int  # begin of the first use after the gap
    stage: int  # stage that needs the value again


class Placed(NamedTuple):
    """A value that is away for some stages."""

    value: int
    gone_at: int  # first stage before which its copy to the host is done and it can be freed
    fetch_at: int  # stage before which its copy back is issued


@dataclass(frozen=True, slots=True)
class Reference:
    """A sequence of computations with its times."""

    sequence: tuple[int, ...]
    targets: tuple[int, ...]  # ops in the order of their first computations, one for each stage
    begins: tuple[int, ...]  # time at which each stage begins, and the end; shape [stage + 1]
    gaps: dict[int, Gap]  # longest gap of each value that can be copied

    @classmethod
    def of(cls, graph: Graph, sequence: Sequence[int]) -> Reference:
        """The reference of a sequence of a graph whose views are folded."""
        now = 0
        done: set[int] = set()
        targets: list[int] = []
        begins = [0]  # a stage ends with the first computation of its target
        made: dict[int, int] = {}
        last: dict[int, int] = {}  # value -> end of its last use
        best: dict[int, Gap] = {}
        # A view that folding left is tied to its place and keeps its base's storage.
        viewed = {graph.root[v] for v, value in enumerate(graph.values) if value.base is not None}
        free = {v for v, value in enumerate(graph.values) if value.base is None and value.size_bytes and v not in viewed}

        def use(v: int, begin: int, end: int) -> None:
            if v not in free:
                return
            if v in last:
                gap = Gap(v, made[v], last[v], begin, len(targets))
                if v not in best or gap.needed_ns - gap.left_ns > best[v].needed_ns - best[v].left_ns:
                    best[v] = gap
            made.setdefault(v, end)
            last[v] = end

        for o in sequence:
            op = graph.ops[o]
            end = now + op.cost
            for v in dict.fromkeys(op.inputs):
                use(v, now, end)
            for v in op.outputs:
                use(v, now, end)
            now = end
            if o not in done:
                done.add(o)
                targets.append(o)
                begins.append(now)
        for v, value in enumerate(graph.values):
            if value.kept:
                use(v, now, now)
        return cls(tuple(sequence), tuple(targets), tuple(begins), best)


def place(reference: Reference, chosen: Iterable[int], host: HostMemory, size: Sequence[int], speed: float) -> list[Placed]:
    """Places of the copies of some values: copies to the host as early, copies back as late as the bus allows.

    Copies to the host are made in the order in which the values are computed, copies back in the order in which they are needed.
    Values that would be away for no stage are left out. At a `speed` above 1 fewer bytes are held, and steps wait for copies.
    """
    gaps = [reference.gaps[v] for v in chosen if v in reference.gaps]
    begins = reference.begins
    gone: dict[int, int] = {}
    engine = 0
    for gap in sorted(gaps, key=lambda gap: (gap.made_ns, gap.value)):
        engine = max(engine, gap.made_ns) + int(host.out_ns(size[gap.value]) / speed)
        gone[gap.value] = bisect_left(begins, max(engine, gap.left_ns))
    placed: list[Placed] = []
    latest = begins[-1]
    for gap in sorted(gaps, key=lambda gap: (-gap.needed_ns, -gap.stage, gap.value)):
        begin = min(latest, gap.needed_ns) - int(host.in_ns(size[gap.value]) / speed)
        fetch_at = min(gap.stage, bisect_right(begins, begin) - 1)
        if gone[gap.value] < fetch_at:
            placed.append(Placed(gap.value, gone[gap.value], fetch_at))
            latest = begin
    return placed[::-1]
