"""Choose the next plan to compile, where the memory of a compiled plan is known only by measuring it.

Monotone bounds. A larger budget should never give a slower step, nor a smaller budget a larger peak; measured peaks do not have
that property by themselves, since each budget is answered from a few trials. The answers of earlier runs are therefore stored
(`PlanStore`). The plan for a budget has to have a measured peak between the largest answer to a smaller budget and the smallest
answer to a larger one; only if no trial is in that range is a plan outside it returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import msgspec

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.frontend.calibration import Calibration, Proportional, Trial
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything, result_of_order
from checkmate.frontend.step_memory import StepMemory
from checkmate.solvers.reductions.contract_chains import ContractChains
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.inductor.canonical import in_graph_order
from checkmate.torch.inductor.fusion import contract_fusible_chains, predicted_peak
from checkmate.torch.steps.program import StepAllotment

_log = logging.getLogger("checkmate.torch")

_T = TypeVar("_T")

_LEAST_GAIN = 0.25
"""Least number of bytes by which a step is assumed to shrink for each byte less that is predicted."""

_AS_PREDICTED = 0.99
"""A step that takes this share of what was predicted leaves no room that another search would use."""

_GAP = 0.01
"""Gap at which a search may stop: the cost of fused code is not known to less, and a minute of search is a compilation."""

_MOST_PREDICTIONS = 6
"""Plans that are made to choose one for which code is generated."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan of the contracted graph that was compiled.

    Attributes:
        order: Ops of the contracted graph, in the order of their computations.
        memory: Its memory, measured or counted in its code.
    """

    order: tuple[int, ...]
    memory: StepMemory


class CalibratedSearch:
    """The plans of one graph that are compiled until a measured peak keeps the budget.

    One round is `plan` (called by the compiler), `record` and `next_candidate`. Then `best` is measured, and `correct` replaces
    what was counted. Where several ranks plan together, rank 0 chooses for all of them, from the largest memory of any rank;
    each of these methods is then a message to all ranks, so that every rank has to call them in the same order.

    Args:
        compilation: Options, and the ranks that plan together.
        compiler_fingerprint: Hash of everything except the graph that decides on the measured memory of a compiled plan.

    Attributes:
        trials: Plans that were compiled, in order.
        budget_bytes: The budget; 0 without one.
        limit_bytes: The most that the step may take above the resident bytes; 0 without a budget.
    """

    def __init__(self, compilation: Compilation, compiler_fingerprint: str) -> None:
        self.budget_bytes = self.limit_bytes = 0
        self._compilation = compilation
        self._options = compilation.options.planning
        self._ranks = compilation.ranks
        self._fingerprint = compiler_fingerprint
        self._original_digest = ""
        self._fixed = False  # only one plan is compiled: a given one, the part of a step's plan, or keeping everything
        self._share: StepAllotment | None = None  # whose order is compiled
        self._order: tuple[int, ...] = ()  # of the plan that is compiled next, or was compiled last
        self._target_bytes = 0
        self._chains: ContractChains | None = None
        self._least_bytes = 0  # a smaller budget was answered with this peak; see the module on monotone bounds
        self._calibration: Calibration[Compiled] = Calibration(0, Proportional())

    @property
    def chains(self) -> ContractChains:
        """The graph with its chains contracted, once `plan` has seen it."""
        assert self._chains is not None
        return self._chains

    @property
    def trials(self) -> list[Trial[Compiled]]:
        """Plans that were compiled, in order."""
        return self._calibration.trials

    @property
    def measures(self) -> bool:
        """Whether there is a budget, so that steps have to be measured."""
        return self._options.budget is not None

    def plan(self, graph: Graph, trailing: frozenset[int] = frozenset()) -> tuple[Graph, Result]:
        """The plan for the present compilation.

        Args:
            graph: The graph as captured.
            trailing: Its ops that reduce the last dimensions of a tensor.

        Returns:
            The captured graph, with the figures that the ranks agreed on, and its plan; not those of the contracted graph.

        Raises:
            GraphError: The step traces to another graph than at the last compilation.
            WrongGraphError: The given plan was made for another graph.
        """
        graph, result = self._compilation.request.agreed(graph, lambda agreed: self._current_plan(agreed, trailing))
        if not self._leads:
            self._follow(graph, result, trailing)
        return graph, result

    def _current_plan(self, graph: Graph, trailing: frozenset[int]) -> Result:
        if self._chains is None:
            self._begin(graph, trailing)
        if graph.digest != self._original_digest:
            raise GraphError(
                "the step traces to another graph at each compilation",
                hint="make the traced program deterministic: no Python control flow that depends on data or on random numbers",
            )
        if self._options.plan is not None:
            return GivenPlan(self._options.plan)(graph)
        return result_of_order(graph, self.chains.invert(self._order))

    def measured_before(self) -> StepMemory | None:
        """Memory of the plan that was compiled last as an earlier run measured it; None if it is not known on every rank."""
        if self._ranks is not None or self._fixed:
            return None
        return next((plan.memory for plan in self._store.all() if plan.order == self._order), None)

    def record(self, memory: StepMemory, *, measured: bool) -> None:
        """Record the memory of the plan that was compiled last: the largest of any rank.

        Args:
            memory: Memory on this rank.
            measured: Whether it was measured, or counted in the code.
        """
        memory, measured = self._largest(memory, measured)
        graph = self.chains.contracted
        timeline = simulate(graph, Plan.from_order(graph, self._order))
        planned = timeline.peak_bytes - graph.resident_bytes
        trial = Trial(
            target_bytes=self._target_bytes,
            planned_bytes=planned,
            needed_bytes=memory.peak_bytes,
            cost=timeline.cost,
            measured=measured,
            outcome=Compiled(self._order, memory),
        )
        self._calibration.record(trial)
        how = "measured" if measured else "counted in its code"
        _log.info("compiled: planned %s, %s %s", format_bytes(planned), how, format_bytes(memory.peak_bytes))
        self._remember(trial)

    def correct(self, index: int, memory: StepMemory) -> None:
        """Replace the memory that was counted for a plan by the measured one, the largest of any rank.

        Args:
            index: Which trial.
            memory: Memory as measured on this rank.
        """
        memory, _ = self._largest(memory, measured=True)
        trial = self.trials[index]
        _log.info("measured %s, counted %s", *map(format_bytes, (memory.peak_bytes, trial.outcome.memory.peak_bytes)))
        outcome = Compiled(trial.outcome.order, memory)
        trial = self.trials[index] = replace(trial, needed_bytes=memory.peak_bytes, measured=True, outcome=outcome)
        self._remember(trial)

    def _remember(self, trial: Trial[Compiled]) -> None:
        if trial.measured and self._options.plan is None and self._leads:
            self._store.add(MeasuredPlan(trial.outcome.order, trial.outcome.memory))

    def next_candidate(self) -> bool:
        """Whether another plan is worth compiling; if so, `plan` returns it from now on."""
        return self._from_rank0("whether to compile again", self._next_candidate)

    def best(self) -> int | None:
        """Index of the cheapest trial whose measured peak keeps the budget, or None; its peak is stored as the answer."""
        return self._from_rank0("which compilation runs", self._best)

    def _next_candidate(self) -> bool:
        if self._fixed:
            return False
        order = self._next_order()
        if order is None or any(order == t.outcome.order for t in self.trials):
            return False
        self._order = order
        return True

    def _best(self) -> int | None:
        fitting = [i for i, t in enumerate(self.trials) if t.within(self.limit_bytes)]
        if self._share is not None:  # it has to leave room for the rest of its step
            return 0 if self.trials[0].outcome.memory.within(self._share.limit) else None
        if self._fixed:
            return 0 if fitting else None
        peaks = [t.outcome.memory.peak_bytes for t in self.trials]
        monotone = [i for i in fitting if self._least_bytes <= peaks[i] <= self._calibration.limit_bytes]
        found = min(monotone or fitting, key=lambda i: (self.trials[i].cost, i), default=None)
        if found is not None and self.trials[found].measured:
            self._store.record_answer(self.limit_bytes, peaks[found])
        return found

    @property
    def _leads(self) -> bool:
        return self._ranks is None or self._ranks.rank == 0

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

    def _follow(self, graph: Graph, result: Result, trailing: frozenset[int]) -> None:
        """Take the order that rank 0 chose as that of the next trial."""
        chains = self._chains or self._contract(graph, trailing)
        if self._options.plan is None:
            self._order = chains.apply_order(result.plan.order)
        else:
            self._order = keep_everything(chains.contracted).plan.order

    def _contract(self, graph: Graph, trailing: frozenset[int]) -> ContractChains:
        chains = self._chains = contract_fusible_chains(graph, trailing)
        contracted, budget = chains.contracted, self._options.budget
        self.budget_bytes = 0 if budget is None else budget.resolve(contracted)
        self.limit_bytes = self.budget_bytes - contracted.resident_bytes if self.budget_bytes else 0
        self._calibration = Calibration(self.limit_bytes, Proportional(least_cost=contracted.cost))
        return chains

    def _begin(self, graph: Graph, trailing: frozenset[int]) -> None:
        self._original_digest = graph.digest
        contracted = self._contract(graph, trailing).contracted
        alone = msgspec.structs.replace(contracted, resident_bytes=0)
        self._store = PlanStore(f"{alone.digest} {self._fingerprint}")
        if self._options.budget is None or self._options.plan is not None:
            self._fixed, self._order = True, keep_everything(contracted).plan.order
            return
        self._replanner = Replanner(contracted, self._options, gap=_GAP)
        share = self._compilation.planner.allotment(graph)
        if share is not None:
            self.limit_bytes = share.limit.peak_bytes
        self._least_bytes, most_bytes = self._store.monotone_bounds(self.limit_bytes)
        self._calibration = Calibration(most_bytes, Proportional(least_cost=contracted.cost))
        if share is not None and share.order is not None:
            self._fixed, self._share = True, share
            order = self.chains.apply_order(share.order)
        else:
            order = self._remembered() or self._next_order()
        assert order is not None
        self._order = order

    def _remembered(self) -> tuple[int, ...] | None:
        """The cheapest plan that an earlier run measured within the bounds."""
        graph = self.chains.contracted
        known: list[tuple[int, tuple[int, ...]]] = []
        for plan in self._store.all():
            if self._least_bytes <= plan.memory.peak_bytes <= self._calibration.limit_bytes:
                try:
                    known.append((simulate(graph, Plan.from_order(graph, plan.order)).cost, plan.order))
                except (CheckmateError, IndexError):
                    _log.warning("a plan in the store of measured plans is not valid for its graph and is not used")
        return min(known, default=(0, None))[1]

    def _next_order(self) -> tuple[int, ...] | None:
        """The order of the next plan to compile; None if no other is worth a compilation."""
        limit = self._calibration.limit_bytes
        if self._calibration.next_target() is None or self._as_predicted():
            return None
        found = self._predicted_to_fit(limit)
        if found is None:
            return None
        self._target_bytes = found.target_bytes
        policy = Proportional(least_cost=self.chains.contracted.cost)
        return None if found.cost > policy.worthwhile_cost(self.trials, limit) else found.outcome

    def _predicted_to_fit(self, limit_bytes: int) -> Trial[tuple[int, ...]] | None:
        """The cheapest plan whose code is predicted to keep the limit, or the one that comes closest; None if none is found."""
        graph = self.chains.contracted
        policy = Proportional(least_cost=graph.cost, most_trials=_MOST_PREDICTIONS)
        predictions: Calibration[tuple[int, ...]] = Calibration(limit_bytes, policy)
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
                    planned_bytes=simulate(graph, Plan.from_order(graph, order)).peak_bytes - graph.resident_bytes,
                    needed_bytes=self._corrected(self._predicted(order)),
                    cost=found.cost,
                    measured=False,
                    outcome=order,
                )
            )
            if not target:
                break
        return predictions.best() or min(predictions.trials, key=lambda t: t.needed_bytes or 0, default=None)

    def _as_predicted(self) -> bool:
        """Whether the last trial fits and is what was predicted, so that another search would choose the same plan."""
        if not self.trials or not self.trials[-1].within(self._calibration.limit_bytes):
            return False
        last = self.trials[-1].outcome
        return last.memory.peak_bytes >= _AS_PREDICTED * self._predicted(last.order)

    def _corrected(self, predicted_bytes: int) -> int:
        """A predicted peak, corrected by what the trials so far were found to need.

        One trial says what the compiler adds to any plan. What it adds need not shrink with the plan: two say by how much a
        step shrinks for each byte that is predicted.
        """
        known = [(self._predicted(t.outcome.order), t.outcome.memory.peak_bytes) for t in self.trials]
        if not known:
            return predicted_bytes
        (at, needed), gain = known[-1], 1.0
        if len(known) > 1 and known[-2][0] != at:
            gain = (needed - known[-2][1]) / (at - known[-2][0])
        return max(0, needed + round(max(_LEAST_GAIN, min(1.0, gain)) * (predicted_bytes - at)))

    def _predicted(self, order: tuple[int, ...]) -> int:
        return predicted_peak(self.chains, order)
