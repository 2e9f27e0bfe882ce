"""Chooses the next plan to compile; only measuring shows the memory of a compiled plan.

Monotone bounds. A larger budget should never give a slower step, nor a smaller budget a larger peak. Measured peaks do not have
that property by themselves, since each budget is answered from a few trials. Therefore the answers of earlier runs are stored
(`PlanStore`). The plan for a budget must have a measured peak between the largest answer to a smaller budget and the smallest
answer to a larger one; a plan outside of that range is returned only if no trial is inside.

Partitions of PyTorch. Where bits need not be those of keeping everything, on a GPU, the code of a partition of stock Inductor is
counted beside that of our plans: the one of the largest ``activation_memory_budget`` that fits. Then costs are those of the code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TypeVar

import msgspec
import numpy as np

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.core.validate import validate
from checkmate.frontend.calibration import AIM, Calibration, Proportional, Trial, gain
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything, result_of_order
from checkmate.frontend.step_memory import StepMemory
from checkmate.solvers.reductions.contract_chains import ContractChains
from checkmate.solvers.walks import after_needs
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.inductor.fusion import contract_fusible_chains, predicted_peak
from checkmate.torch.inductor.stock import Partitions
from checkmate.torch.steps.program import StepAllotment

_log = logging.getLogger("checkmate.torch")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan that was compiled."""

    order: tuple[int, ...]  # ops of the contracted graph; of the captured one in a partition
    memory: StepMemory  # measured, or counted in its code
    cost: int | None  # of its code, if known
    partition: bool  # whether it is a partition of PyTorch


class CalibratedSearch:
    """The plans of one graph that are compiled until a measured peak keeps the budget.

    The compiler calls `plan`, and `choose` has it compile again. If several ranks plan together, rank 0 chooses for all of them,
    from the largest memory of any rank; every rank then makes the same calls in the same order.
    """

    chains: ContractChains  # the graph with its chains contracted, once `plan` has seen it

    def __init__(self, compilation: Compilation, compiler_fingerprint: str) -> None:
        self.trials: list[Trial[CompiledPlan]] = []  # in the order in which they were compiled
        self.budget_bytes, self.limit_bytes = 0, sys.maxsize  # the limit is above the resident bytes
        self._compilation = compilation
        self._options, self._ranks = compilation.options.planning, compilation.ranks
        self.measures = self._options.budget is not None  # whether steps have to be measured
        self._leads = self._ranks is None or self._ranks.rank == 0
        self._fingerprint, self._digest = compiler_fingerprint, ""  # of the captured graph
        self._fixed = False  # only one plan is compiled: a given one, the part of a step's plan, or keeping everything
        self._share: StepAllotment | None = None  # the allotment whose order is compiled
        self._order: tuple[int, ...] = ()  # of the next plan to compile, or of the newest compiled one
        self._ended = False  # no other plan is worth a compilation, partitions apart
        self._partitions: Partitions | None = None
        # Tenths of an `activation_memory_budget`: to try, and of the order, if it is one of a partition: of the captured graph.
        self._budgets, self._tenths = iter(range(10, 0, -1)), 0
        self._cost_of: Callable[[int], int | None] = lambda index: None
        self._target_bytes = 0
        # The answer to a smaller budget, and the least answer to a larger one; see the module on monotone bounds.
        self._least_bytes, self._most_bytes = 0, sys.maxsize

    def plan(
        self, graph: Graph, trailing: frozenset[int] = frozenset(), partitions: Partitions | None = None
    ) -> tuple[Graph, Result]:
        """The captured graph, with the figures that the ranks agreed on, and the plan to compile now.

        ``trailing`` has the ops that reduce trailing dimensions, and ``partitions`` are PyTorch's own. A step must trace to the
        same graph at every compilation.
        """
        self._partitions = None if self._options.plan is not None or self._ranks is not None else partitions
        graph, result = self._compilation.planner.agreed(graph, lambda agreed: self._current_plan(agreed, trailing))
        if not self._leads:  # rank 0 chose the order of the trial
            if not self._digest:
                self._contract(graph, trailing)
            given = self._options.plan is not None
            self._order = self._keeps_everything() if given else self.chains.apply_order(result.plan.order)
        return graph, result

    def _current_plan(self, graph: Graph, trailing: frozenset[int]) -> Result:
        if not self._digest:
            self._contract(graph, trailing)
            self._begin(graph)
        if graph.digest != self._digest:
            raise GraphError(
                "the step traces to another graph at each compilation",
                hint="make the traced program deterministic: no Python control flow that depends on data or on random numbers",
            )
        if self._options.plan is not None:
            return GivenPlan(self._options.plan)(graph)
        if not self._tenths:
            return result_of_order(graph, self.chains.invert(self._order))
        result = result_of_order(graph, self._order)
        remark = f"PyTorch's own partition for activation_memory_budget={self._tenths / 10}"
        return msgspec.structs.replace(result, remarks=(*result.remarks, remark))

    def _contract(self, graph: Graph, trailing: frozenset[int]) -> None:
        self._digest = graph.digest
        self._graph, self.chains = graph, contract_fusible_chains(graph, trailing)
        contracted, budget = self.chains.contracted, self._options.budget
        if budget is not None:
            self.budget_bytes = budget.resolve(contracted)
            self.limit_bytes = self._most_bytes = self.budget_bytes - contracted.resident_bytes

    def _begin(self, graph: Graph) -> None:
        """Choose the first plan to compile."""
        contracted = self.chains.contracted
        self._store = PlanStore(f"{msgspec.structs.replace(contracted, resident_bytes=0).digest} {self._fingerprint}")
        if self._options.budget is None or self._options.plan is not None:
            self._fixed, self._order = True, self._keeps_everything()
            return
        # The cost of fused code is not known to less than a gap of 1 %, and a minute of search is as long as a compilation.
        self._replanner = Replanner(contracted, self._options, gap=0.01)
        self._policy = Proportional(least_cost=contracted.cost)
        share = self._compilation.planner.allotment(graph)
        if share is not None:
            self.limit_bytes = share.limit.peak_bytes
        self._least_bytes, self._most_bytes = self._store.monotone_bounds(self.limit_bytes)
        if share is not None and share.order is not None:
            self._fixed, self._share, self._order = True, share, self.chains.apply_order(share.order)
        else:
            order = self._remembered() or self._next_order()
            assert order is not None
            self._order = order

    def _keeps_everything(self) -> tuple[int, ...]:
        return keep_everything(self.chains.contracted).plan.order

    def _remembered(self) -> tuple[int, ...] | None:
        """The cheapest plan that an earlier run measured within the bounds."""
        graph, known = self.chains.contracted, list[tuple[int, tuple[int, ...]]]()
        for plan in self._store.all():
            if self._least_bytes <= plan.memory.peak_bytes <= self._most_bytes:
                try:
                    known.append((_simulated(graph, plan.order)[1], plan.order))
                except (CheckmateError, IndexError):
                    _log.warning("a plan in the store of measured plans is not valid for its graph and is not used")
        return min(known, default=(0, None))[1]

    def choose(
        self,
        counted: StepMemory | None,
        compile_again: Callable[[], StepMemory | None],
        measure: Callable[[int], StepMemory],
        cost_of: Callable[[int], int | None] = lambda index: None,
    ) -> int | None:
        """Index of the cheapest compilation whose measured memory keeps the budget; None if none does.

        The code of a compilation may tell its counted memory, and ``cost_of`` its cost. Without a budget nothing is measured.
        """
        self._cost_of = cost_of
        while True:
            if counted is None and not self.measures:
                return 0
            # Inductor generates no code for a graph in its cache: an earlier run has measured it. Several ranks always measure: a
            # rank that had the code in its cache, and measured alone, would wait in its collectives for the others.
            counted = None if self._ranks is not None else counted
            memory = counted or self._measured_before() or measure(len(self.trials))
            self._record(memory, measured=counted is None or not self.measures)
            if not self._from_rank0("whether to compile again", self._another):
                while (chosen := self._from_rank0("which compilation runs", self._best)) is not None:
                    if self.trials[chosen].measured:
                        return chosen
                    self._correct(chosen, measure(chosen))
                if not self._from_rank0("whether to compile again", self._another):
                    return None
            counted = compile_again()

    def _measured_before(self) -> StepMemory | None:
        """Memory of the newest compiled plan as an earlier run measured it; None if it is not known on every rank."""
        if self._ranks is not None or self._fixed or self._tenths:
            return None
        return next((plan.memory for plan in self._store.all() if plan.order == self._order), None)

    def _record(self, memory: StepMemory, *, measured: bool) -> None:
        """Record the memory of the newest compiled plan: the largest of any rank."""
        memory, measured = self._largest(memory, measured)
        graph = self._graph if self._tenths else self.chains.contracted
        planned, cost = _simulated(graph, self._order)
        trial = Trial(
            target_bytes=self._target_bytes,
            planned_bytes=planned,
            needed_bytes=memory.peak_bytes,
            cost=cost,
            measured=measured,
            outcome=CompiledPlan(self._order, memory, self._cost_of(len(self.trials)), bool(self._tenths)),
        )
        self.trials.append(trial)
        how = "measured" if measured else "counted in its code"
        _log.info("compiled: planned %s, %s %s", format_bytes(planned), how, format_bytes(memory.peak_bytes))
        self._remember(trial)

    def _correct(self, index: int, memory: StepMemory) -> None:
        """Replace the counted memory of a plan by the measured one, the largest of any rank."""
        memory, _ = self._largest(memory, measured=True)
        trial = self.trials[index]
        _log.info("measured %s, counted %s", *map(format_bytes, (memory.peak_bytes, trial.outcome.memory.peak_bytes)))
        outcome, self._ended = replace(trial.outcome, memory=memory), False
        trial = self.trials[index] = replace(trial, needed_bytes=memory.peak_bytes, measured=True, outcome=outcome)
        self._remember(trial)

    def _remember(self, trial: Trial[CompiledPlan]) -> None:
        mine = self._leads and self.measures and self._options.plan is None and not trial.outcome.partition
        if mine and trial.measured:
            self._store.add(MeasuredPlan(trial.outcome.order, trial.outcome.memory))

    def _another(self) -> bool:
        """Whether another plan is worth compiling; if so, `plan` returns it from now on."""
        order = None if self._ended or self._fixed else self._next_order()
        self._ended = order is None or any(order == t.outcome.order for t in self._own)
        if order is None or self._ended:
            return self._next_partition()
        self._order, self._tenths = order, 0
        return True

    def _next_partition(self) -> bool:
        """Whether the code of another partition of PyTorch is worth generating: the first that fits is the cheapest one."""
        tried = [t for t in self.trials if t.outcome.partition]
        if self._partitions is None or any(t.outcome.cost is None for t in self.trials) or any(map(self._fits, tried)):
            return False
        costs = [t.outcome.cost or 0 for t in self.trials if self._fits(t)]
        if costs and any((t.outcome.cost or 0) >= min(costs) for t in tried):
            return False
        for tenths in self._budgets:
            order = self._partitions(tenths / 10)
            if order is None or (tried and order == tried[-1].outcome.order):
                continue
            if StepMemory.of(self._graph, Plan.from_order(self._graph, order)).saved_bytes <= self._most_bytes:
                self._order, self._tenths = order, tenths
                return True
        return False

    @property
    def _own(self) -> list[Trial[CompiledPlan]]:
        """The trials of plans that are no partitions of PyTorch."""
        return [t for t in self.trials if not t.outcome.partition]

    def _fits(self, trial: Trial[CompiledPlan]) -> bool:
        """Whether a trial keeps the budget; the part of a step leaves room for the rest of it."""
        return trial.within(self.limit_bytes) if self._share is None else trial.outcome.memory.within(self._share.limit)

    def _best(self) -> int | None:
        """Index of the cheapest trial whose peak keeps the budget; a measured trial is stored as the answer."""
        fitting = [i for i, t in enumerate(self.trials) if self._fits(t)]
        peaks = [t.outcome.memory.peak_bytes for t in self.trials]
        costs = [t.outcome.cost for t in self.trials]
        monotone = [i for i in fitting if self._least_bytes <= peaks[i] <= self._most_bytes]
        if self._partitions is None or None in costs:
            costs = [t.cost for t in self.trials]
        found = min(monotone or fitting, key=lambda i: (costs[i], peaks[i], i), default=None)
        if found is not None and self.trials[found].measured and not self._fixed:
            self._store.record_answer(self.limit_bytes, peaks[found])
        return found

    def _from_rank0(self, topic: str, answer: Callable[[], _T]) -> _T:
        """The answer of rank 0, on every rank."""
        if self._ranks is None:
            return answer()
        return msgspec.msgpack.decode(self._ranks.decide(topic, b"", lambda said: msgspec.msgpack.encode(answer())))

    def _largest(self, memory: StepMemory, measured: bool) -> tuple[StepMemory, bool]:
        """The largest memory of any rank, and whether every rank measured it."""
        if self._ranks is None:
            return memory, measured

        def decide(said: Sequence[bytes]) -> bytes:
            steps, known = zip(*(msgspec.msgpack.decode(each) for each in said), strict=True)
            return msgspec.msgpack.encode(({key: max(s[key] for s in steps) for key in steps[0]}, all(known)))

        body = self._ranks.decide("what a compiled step takes", msgspec.msgpack.encode((asdict(memory), measured)), decide)
        largest, known = msgspec.msgpack.decode(body)
        return StepMemory(**largest), known

    def _next_order(self) -> tuple[int, ...] | None:
        """The order of the next plan to compile; None if no other is worth a compilation."""
        limit, policy, own = self._most_bytes, self._policy, self._own
        if policy.next_target(own, limit) is None:
            return None
        last = own[-1].outcome if own and own[-1].within(limit) else None
        if last is not None and last.memory.peak_bytes >= AIM * self._predicted(last.order):
            return None  # as predicted: another search would choose the same plan
        found = self._predicted_to_fit(limit)
        if found is None or found.cost > policy.worthwhile_cost(own, limit):
            return None
        self._target_bytes = found.target_bytes
        return found.outcome

    def _predicted_to_fit(self, limit_bytes: int) -> Trial[tuple[int, ...]] | None:
        """The cheapest plan whose code is predicted to keep the limit, or the plan closest to that; None if none is found."""
        graph, policy = self.chains.contracted, replace(self._policy, most_trials=6)
        predictions = Calibration[tuple[int, ...]](limit_bytes, policy)
        while (target := predictions.next_target()) is not None:
            try:
                found = self._replanner(graph.resident_bytes + target)
            except (InfeasibleBudgetError, PlanNotFoundError):
                if predictions.best() is not None or any(t.within(limit_bytes) for t in self.trials):
                    break
                # No plan is known to fit and none is found within the target: the smallest plan is the last one worth a trial.
                found = self._replanner.smallest()
                target = 0
            order = in_graph_order(graph, found.plan.order, max(found.peak_bytes, graph.resident_bytes + target))
            if any(order == t.outcome for t in predictions.trials):
                break
            predictions.record(
                Trial(
                    target_bytes=target,
                    planned_bytes=_simulated(graph, order)[0],
                    needed_bytes=self._corrected(self._predicted(order)),
                    cost=found.cost,
                    measured=False,
                    outcome=order,
                )
            )
            if not target:
                break
        return predictions.best() or min(predictions.trials, key=lambda t: t.needed_bytes or 0, default=None)

    def _corrected(self, predicted_bytes: int) -> int:
        """A predicted peak, corrected: a trial tells what the compiler adds, and two tell how much of a byte less is left."""
        known = [(self._predicted(t.outcome.order), t.outcome.memory.peak_bytes) for t in self._own]
        if not known:
            return predicted_bytes
        at, needed = known[-1]
        shrinks = gain(*known[-2:]) if len(known) > 1 and known[-2][0] != at else 1.0
        return max(0, needed + round(shrinks * (predicted_bytes - at)))

    def _predicted(self, order: tuple[int, ...]) -> int:
        return predicted_peak(self.chains, order)


def _simulated(graph: Graph, order: Sequence[int]) -> tuple[int, int]:
    """Peak above the resident bytes, and cost, of the plan of an order."""
    timeline = simulate(graph, Plan.from_order(graph, order))
    return timeline.peak_bytes - graph.resident_bytes, timeline.cost


def in_graph_order(graph: Graph, order: Sequence[int], limit_bytes: int) -> tuple[int, ...]:
    """The computations of a plan in the order of the graph, except near computations for which that exceeds a limit.

    Inductor compiles layers once that are equal op for op (see `repeats`); a search may order their ops differently. Every op is
    computed first at its place in the graph, and again just before it is read. If that takes more than the limit, the
    computations around keep their order.

    Examples:
        >>> from checkmate.core.graph import Op, Value
        >>> ops = (Op("a", (), (0,), 1), Op("b", (0,), (1,), 1), Op("c", (0,), (2,), 1), Op("d", (1, 2), (3,), 1))
        >>> graph = Graph(ops, (Value("a", 4), Value("b", 4), Value("c", 4), Value("d", 4, kept=True)))
        >>> in_graph_order(graph, (0, 2, 1, 3), 12)
        (0, 1, 2, 3)
    """
    order = tuple(order)
    places = _on_demand(graph, order)  # of the computations in the given order
    if len(places) < len(order):
        return order
    over: set[int] = set()
    reach = 4  # at first, so far around a computation that takes too much, the old order stays
    while reach < 2 * len(order):
        near = {q for p in over for q in range(p - reach, p + reach + 1)}
        mixed: list[int] = []
        for kept, run in groupby(range(len(order)), near.__contains__):
            chosen = [places[q] for q in run]
            mixed += sorted(chosen) if kept else chosen
        found = tuple(order[p] for p in mixed)
        plan = Plan.from_order(graph, found)
        if found == order or validate(graph, plan):
            return order
        computations = [p for p, step in enumerate(plan.steps) if isinstance(step, Compute)]
        held = np.maximum.reduceat(simulate(graph, plan).bytes, computations)  # the most until the next computation
        still = set(np.flatnonzero(held > limit_bytes).tolist())
        if not still:
            return found
        over |= still
        reach *= 2
    return order


def _on_demand(graph: Graph, order: Sequence[int]) -> list[int]:
    """Places in an order: first computations in the order of the graph, and all others before their first reader."""
    newest, first, sources = dict[int, int](), dict[int, int](), list[list[int]]()
    for p, o in enumerate(order):
        made_by = {graph.producer[v] for v in graph.ops[o].inputs}
        sources.append(sorted((newest[m] for m in made_by if m in newest), key=lambda s: (order[s], s), reverse=True))
        newest[o] = p
        first.setdefault(o, p)
    return after_needs((p for _, p in sorted(first.items())), sources.__getitem__)
