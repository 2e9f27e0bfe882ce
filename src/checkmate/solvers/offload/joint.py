"""The joint search over recomputations and copies to the host.

A round chooses a set of values to copy, places their copies by the times of the best plan so far, and the
search over evictions (`evict`) finds the recomputations that are still needed; `simulate` times the plan with its copies.
The first sets come from the linear programs of the joint bound, whose z selects the values worth their time on the bus.
Later sets exchange a few values of the best set. If no plan without copies was found, the set of all values comes first.
Hidden copies are tried first: placed for the speed of the bus, they cost nothing. Copies placed for a faster bus than the
real one hold fewer bytes, and the step waits for them.

If the graph has values that are on the host before the step, the first rounds fetch them and copy nothing else (`streams`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from checkmate.core.errors import PlanError
from checkmate.core.plan import Compute, Fetch, Free, HostMemory, Offload, Step, with_frees
from checkmate.core.problem import Problem
from checkmate.solvers.bounds.events.copy_cuts import build_with_host, proven_ns
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import promising_events
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.starts import starts
from checkmate.solvers.flat_graph import Move
from checkmate.solvers.offload.placement import Placed, Reference, place
from checkmate.solvers.offload.streams import Streams, prefetch
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import needed_steps
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES


@dataclass(frozen=True, slots=True)
class _Tried:
    """A set of values to copy and the best plan found with it."""

    chosen: frozenset[int]
    cost: int
    order: tuple[int, ...]


class Joint:
    """The search; `run` offers its plans and bounds to the session."""

    def __init__(self, problem: Problem, session: Session) -> None:
        assert problem.host is not None
        self.problem, self.session = problem, session
        self.host: HostMemory = problem.host
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.streams = Streams(self.fold.apply(problem.without_host()), self.host)
        self.graph = self.streams.folded.graph
        self.size = [value.size_bytes for value in self.graph.values]
        self.random = Random(session.limits.seed)
        self.best: _Tried | None = None

    def run(self) -> None:
        """Search until nothing is gained or the session is done."""
        if self.session.plan is not None and self.session.cost is not None:
            known = tuple(self.fold.apply_order(self.session.plan.order))
            self.best = _Tried(frozenset(), self.session.cost, known)
        references = self._references()
        if self.streams.ops:
            self._stream(references[0])
            references = self._references()
        everything = frozenset(references[0].gaps)
        if self.session.plan is None:  # a first plan comes before any bound
            self._try(everything, references[0], 60)
            if self.session.done:
                return
        sets = dict.fromkeys([*self._prove_and_choose(references[0]), everything])
        for reference in references:
            for chosen in sets:
                self._try(chosen, reference, 60)
                if self.session.done:
                    return
        self._improve()

    def _references(self) -> list[Reference]:
        """Times of the best plan so far, and of orders that compute every op once; after fetches only of that plan's order."""
        plan, best, orders = self.session.plan, self.best, list[tuple[int, ...]]()
        if plan is not None and best is not None:
            alone = not any(isinstance(step, Offload) for step in plan.steps)
            orders = [*([best.order] if alone else []), tuple(dict.fromkeys(best.order))]
        if not orders or not self.streams.ops:
            every = starts(self.streams.problem, self.session.limits.seed, self.session.time_up)
            orders += (start.order for start in every if not start.on_demand)
        return [self._reference(order) for order in dict.fromkeys(orders)]

    def _reference(self, order: tuple[int, ...]) -> Reference:
        """Times of an order, and the values that may be copied to the host."""
        found = Reference.of(self.graph, order)
        return found if self.host.out_bytes_per_s else replace(found, gaps={})

    def _stream(self, reference: Reference) -> None:
        """Choose the share of values on the device when the step begins, the price of copies and the ring, one by one.

        Half of the time is left for the bound and the other searches.
        """
        grid = {
            "share": (1.0, 0.75, 0.5, 0.25, 0.0),
            "price": (0.02, 0.1, 0.3, 1.0, 3.0, 10.0),
            "ring": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2),
            "last": (False, True),
        }
        found = {self.streams: self._search(frozenset(), [], reference, 60)}
        best, stale, until = self.streams, 0, self.session.elapsed_s() + 0.5 * self.session.left_s()
        while stale < len(grid) and not self.session.done:
            for name, values in grid.items():
                stale += 1
                for near in [replace(best, **{name: value}) for value in values]:
                    if near not in found and self.session.elapsed_s() <= until:
                        self.streams = near
                        found[near] = self._search(frozenset(), [], reference, 60)
                    cost, least = found.get(near), found[best]
                    if cost is not None and (least is None or cost < least):
                        best, stale = near, 0
        self.streams = best

    def _prove_and_choose(self, reference: Reference) -> list[frozenset[int]]:
        """Bounds from single events, and the values that their linear programs copy, the best bound first."""
        from checkmate.solvers.backends.highs import solve_linear

        session = self.session
        plain = FoldViews.of(self.problem.graph)
        model = CutModel(plain.apply(self.problem))
        until = session.elapsed_s() + 0.3 * min(TUNABLES.horizon_s, session.left_s())
        found: list[tuple[float, frozenset[int]]] = []
        events = promising_events(plain.folded, [[*self.streams.ops, *reference.targets]])
        for event in (o for o in events if o not in self.streams.ops):
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
            best, streams = self.best, self.streams
            reference = self._reference(best.order)
            chosen = set(best.chosen)
            if streams.ops and self.random.random() < 0.5:
                self.streams = streams.near(self.random)
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
            if self.best.cost < best.cost:
                without_gain = 0
            else:
                self.streams, without_gain = streams, without_gain + 1

    def _try(self, chosen: frozenset[int], reference: Reference, decodes: int) -> None:
        """Search with the copies of a set placed for each speed of the bus, hidden copies first."""
        chosen, before = self._held(chosen & reference.gaps.keys()), None if self.streams.ops else list[Placed]()
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

    def _held(self, chosen: frozenset[int]) -> frozenset[int]:
        """The values of a set that the host can hold beside the fetched ones, those that take longest for their bytes first."""
        left, held = self.host.bytes - self.streams.fetched_bytes, list[int]()
        for v in sorted(chosen, key=lambda v: (-self.graph.ops[self.graph.producer[v]].cost / self.size[v], v)):
            if self.size[v] <= left:
                held.append(v)
                left -= self.size[v]
        return frozenset(held)

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
        staged = [o for stage, target in enumerate(reference.targets) for o in (*at.get(stage, ()), target)]
        order = [*self.streams.there, *staged, *at.get(len(reference.targets), [])]
        problem, on_demand = self.streams.problem, self.streams.on_demand
        search = Search(problem, on_demand, self.session.limits.seed, order, self.session.time_up, moves=moves)
        if len(reference.sequence) > len(reference.targets) + len(self.streams.ops):
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
        stage = 0

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
                stage += o not in self.streams.ops
                begin(stage)
        order: list[int] = []
        for step in needed_steps(self.streams.problem, steps):
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
        graph, steps = self.problem.graph, self.fold.invert_steps(self.streams.fetched(steps))
        plan = with_frees(graph, needed_steps(self.problem, steps), self.problem.host)
        plan = prefetch(graph, plan, self.problem.budget_bytes)
        try:
            cost = self.session.offer_plan(plan)
        except PlanError as error:
            raise AssertionError(f"a plan with copies cannot run: {error}") from error
        if cost is not None and (self.best is None or cost < self.best.cost):
            self.best = _Tried(chosen, cost, tuple(o for o in order if o < end))
        return cost
