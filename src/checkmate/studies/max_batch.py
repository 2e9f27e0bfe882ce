"""The largest batch that fits a budget without becoming too slow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Final, Literal

import msgspec

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import GraphError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory, Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes
from checkmate.solvers.auto import Auto
from checkmate.solvers.bounds.floor import Floor, floor
from checkmate.solvers.session import Session, Solver
from checkmate.solvers.solve import solve
from checkmate.studies.affine import check_growing, check_same_structure

MaxOverhead = float | Literal["one extra forward"]
"""Limit on the cost of a plan: a factor over computing each op once, or one extra computation of the forward."""

ONE_EXTRA_FORWARD: Final[Literal["one extra forward"]] = "one extra forward"


_LEAST_S: Final = 0.05
"""Shortest time of a solve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch:
    """The largest batch.

    Attributes:
        batch: The largest batch with a plan found.
        plan: That plan, within the budget and the limit on its cost.
        result: The solve at that batch; its bound and gap are those of the batch's own problem.
        upper_bound: Proven: no larger batch than this has a plan within both. If it equals ``batch``, that batch is optimal.
        why: The reason for the upper bound, in words.
        elapsed_s: Wall seconds.
    """

    batch: int
    plan: Plan
    result: Result
    upper_bound: int
    why: str
    elapsed_s: float


def max_batch(
    graph_at: Callable[[int], Graph],
    *,
    budget_bytes: Amount,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
    limits: Limits | None = None,
    solver: Solver | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    size_name: str = "batch",
    host: HostMemory | None = None,
) -> MaxBatch:
    """The largest batch with a plan within a budget whose cost is within a limit, and a proof that none is much larger.

    Batches are bisected, the largest that is not excluded first. A search that fails proves nothing:
    bisections are repeated with more time and other seeds until the time is up.

    **The upper bound holds for every larger batch**, because graphs of one step differ only in sizes, none of which falls
    as the batch grows, and in costs, which are affine in the batch. Let batch b be excluded and b' be larger. A plan that
    keeps the budget at b' also keeps it at b, because no value is larger at b. So, if no plan keeps the budget at b, none
    does at b'. Otherwise let every plan that keeps the budget at b have a cost c(b) above its limit l(b). Costs and limits
    are affine, with slopes c' and l': if c' is at least l' for all these plans, c(b') = c(b) + (b' - b) c' is above
    l(b') too. The condition on c' is proven like the one on c(b), by a bound with the slopes as costs; if costs are
    proportional to the batch, it is the same bound. Structure and sizes are checked at every batch that is examined;
    affine costs are checked at b, 2b and 3b. With a host only bounds from memory exclude a batch: copies of weights take as long
    at any batch, so that a step may be too slow at a small batch and not at a larger one.

    Args:
        graph_at: The graph at a batch size, like an `AffineGraph`. Sizes may not fall as the batch grows; costs must be affine
            in the batch, else only bounds from memory hold.
        budget_bytes: Bytes, or text such as ``"16GB"``; resident bytes included.
        max_overhead: The most that a plan may cost: a factor over computing each op once; or
            ``"one extra forward"``, computing every forward and loss op once more.
        limits: Time of the whole study, sixty seconds by default; gap, threads and seed of each solve.
        solver: The solver and its options; `Auto` by default.
        on_progress: Called with the largest batch found and the smallest upper bound proven, before each solve.
        size_name: Name of the dimension in the reason for the upper bound, if it is not the batch.
        host: Memory of the host to which values may be copied, and from which weights may be fetched.

    Returns:
        The largest batch found and the smallest upper bound proven; after Ctrl-C, those so far.

    Raises:
        InfeasibleBudgetError: Proven: not even a batch of one keeps the budget.
        PlanNotFoundError: No plan was found for any batch.
        GraphError: Graphs at two batches differ in more than sizes and costs, a size falls, or none grows.
        OptionError: ``max_overhead`` is not a number of one or more.

    Examples:
        >>> from checkmate import AffineGraph
        >>> chain = Graph.from_dag(cost=[1] * 5, size_bytes=[4] * 5, edges=[(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)])
        >>> largest = max_batch(AffineGraph.proportional(chain), budget_bytes=100)
        >>> largest.batch, largest.upper_bound
        (8, 8)
    """
    limits = Limits() if limits is None else limits
    problems = _BatchProblem(graph_at, parse_bytes(budget_bytes), _factor(max_overhead), host)
    return _BatchSearch(
        problems, limits, Auto() if solver is None else solver, on_progress or (lambda _batch, _upper: None), size_name
    ).run()


def _factor(max_overhead: float | str) -> Fraction | None:
    """Limit on the overhead, or None for one extra forward pass."""
    if max_overhead == ONE_EXTRA_FORWARD:
        return None
    if isinstance(max_overhead, str) or not 1 <= max_overhead < math.inf:
        raise OptionError(
            f"max_overhead={max_overhead!r} is neither {ONE_EXTRA_FORWARD!r} nor a number of one or more",
            hint=f"give a number such as 1.25, a quarter more than computing each op once, or {ONE_EXTRA_FORWARD!r}",
        )
    return Fraction(max_overhead)


class _BatchProblem:
    """Graphs by batch, checked against each other, and the limits on memory and cost."""

    def __init__(
        self, graph_at: Callable[[int], Graph], budget_bytes: int, factor: Fraction | None, host: HostMemory | None
    ) -> None:
        self.graph_at = graph_at
        self.budget_bytes = budget_bytes
        self.factor = factor
        self.host = host
        self._seen: dict[int, Graph] = {}

    def graph(self, batch: int) -> Graph:
        if batch not in self._seen:
            graphs = self._seen | {batch: self.graph_at(batch)}
            batches = sorted(graphs)
            at = batches.index(batch)
            for small, large in pairwise(batches[max(0, at - 1) : at + 2]):
                check_same_structure(graphs[small], small, graphs[large], large)
                check_growing(graphs[small], small, graphs[large], large)
            self._seen = graphs
        return self._seen[batch]

    def problem(self, batch: int) -> Problem:
        return Problem(self.graph(batch), self.budget_bytes, host=self.host)

    def floor(self, batch: int) -> Floor:
        """Proven lower bound on the peak of every plan at a batch."""
        return floor(self.graph(batch), copies=self.host is not None)

    def most(self, batch: int) -> int:
        """The limit on the cost of a plan at a batch."""
        return math.floor(self.limit(self.graph(batch)))

    def limit(self, graph: Graph) -> Fraction:
        """The limit on the cost of a plan of a graph, not rounded."""
        if self.factor is None:
            return Fraction(graph.cost + sum(op.cost for op in graph.ops if op.phase in ("forward", "loss")))
        return self.factor * graph.cost

    def fits(self, batch: int) -> bool:
        return self.floor(batch).peak_bytes <= self.budget_bytes

    def rising(self, batch: int) -> Graph | None:
        """The graph at a batch; in place of each cost it has the rise of the cost to twice the batch.

        None if a cost falls, or is not affine at one, two and three times the batch.
        """
        now, twice, thrice = (self.graph(k * batch) for k in (1, 2, 3))
        rise = [b.cost - a.cost for a, b in zip(now.ops, twice.ops, strict=True)]
        more = [b.cost - a.cost for a, b in zip(twice.ops, thrice.ops, strict=True)]
        if rise != more or min(rise, default=0) < 0:
            return None
        ops = tuple(msgspec.structs.replace(op, cost=cost) for op, cost in zip(now.ops, rise, strict=True))
        return msgspec.structs.replace(now, ops=ops)


class _BatchSearch:
    """One search for the largest batch: the best batch found, the upper bound, and the clock."""

    def __init__(
        self, problems: _BatchProblem, limits: Limits, solver: Solver, say: Callable[[int, int], None], size_name: str
    ) -> None:
        self.say = say
        self.size_name = size_name
        self.problems = problems
        self.limits = limits
        self.solver = solver
        self.clock = Session(problems.problem(1), limits)
        self.batch = 0
        self.plan: Plan | None = None
        self.upper, self.why = self._memory_bound()
        self.slice_s = math.inf if limits.time_s is None else limits.time_s / 20  # two bisections of 1,000 batches
        self.seed = limits.seed

    def run(self) -> MaxBatch:
        self._keep_everything()
        try:
            self._rounds()
        except KeyboardInterrupt:
            if self.plan is None:
                raise
            self.slice_s = 0.0
        if self.plan is None:
            self._refuse()
        last_s = None if math.isinf(self.slice_s) else max(_LEAST_S, min(self.slice_s, self.clock.left_s()))
        last_limits = replace(self.limits, time_s=last_s)
        last = solve(self.problems.problem(self.batch), self.solver, limits=last_limits, initial=self.plan)
        return MaxBatch(
            batch=self.batch,
            plan=last.plan,
            result=last,
            upper_bound=self.upper,
            why=self.why,
            elapsed_s=self.clock.elapsed_s(),
        )

    def _keep_everything(self) -> None:
        """Begin with the largest batch at which keeping everything keeps the budget: every search then has a result."""
        if self._keeps(1):
            self.batch = bisect_left(range(self.upper + 1), True, 2, key=lambda batch: not self._keeps(batch)) - 1
            graph = self.problems.graph(self.batch)
            self.plan = Plan.from_order(graph, range(len(graph.ops)))

    def _keeps(self, batch: int) -> bool:
        graph = self.problems.graph(batch)
        return keep_all_bytes(graph) <= self.problems.budget_bytes and graph.cost <= self.problems.most(batch)

    def _rounds(self) -> None:
        # A search that finds no plan proves nothing, and another seed with more time may find one. Nor does it say with a host on
        # which side of its batch others fit: each bisection begins elsewhere.
        for share in (1.0, 0.75, 0.5, 0.875, 0.625):
            self._bisect(self.batch + math.ceil(share * (self.upper - self.batch)))
            if self.batch == self.upper or self.left_s() <= 0:
                break
            self.slice_s *= 2
            self.seed += 1

    def left_s(self) -> float:
        """Seconds left for the search, without those reserved for the last solve."""
        return self.clock.left_s() - (0.0 if self.limits.time_s is None else self.limits.time_s / 20)

    def _memory_bound(self) -> tuple[int, str]:
        """The largest batch at which no op and no kept values alone exceed the budget."""
        problems = self.problems
        if not problems.fits(1):
            raise self._infeasible()
        low, high = 1, 2
        while problems.fits(high):
            low, high = high, 2 * high
            if high > 1 << 40:
                raise GraphError(
                    "the memory of the largest op does not grow with the batch, so no batch is the largest",
                    hint="let `graph_at` return graphs whose sizes grow with the batch",
                )
        high = bisect_left(range(high), True, low + 1, key=lambda batch: not problems.fits(batch))
        return high - 1, f"at {self.size_name} {high}, {problems.floor(high).why}"

    def _bisect(self, guess: int) -> None:
        low, high = self.batch, self.upper
        while low < high and self.left_s() > 0:
            if self._find(guess):
                low = self.batch
            else:
                self._exclude(guess)
                high = min(guess - 1, self.upper)
            guess = (low + high + 1) // 2

    def _find(self, batch: int) -> bool:
        """Look for a plan."""
        most = self.problems.most(batch)
        self.say(self.batch, self.upper)
        result = solve(self.problems.problem(batch), self.solver, limits=self._limits(most), raise_on_failure=False)
        found = isinstance(result, Result) and result.cost <= most
        if found:
            self.batch, self.plan = batch, result.plan
        if result.termination.limit == "interrupt":
            raise KeyboardInterrupt
        if not found and result.bound > most and self._holds_above(batch, result.bound):
            self._prove(batch, result.bound)
        return found

    def _exclude(self, batch: int) -> None:
        """Try to prove that a batch, and every larger one, is too large."""
        if batch > self.upper or self.problems.host is not None:  # these cuts are for plans without copies
            return
        most = self.problems.most(batch)
        bound = self._cut_bound(self.problems.problem(batch), self._limits(most))
        if bound > most and self._holds_above(batch, bound):
            self._prove(batch, bound)

    def _holds_above(self, batch: int, bound: float) -> bool:
        """Whether a bound above the limit at a batch excludes every larger batch too."""
        if math.isinf(bound) or self.problems.host is not None:
            return math.isinf(bound)
        graph, rising = self.problems.graph(batch), self.problems.rising(batch)
        if rising is None:
            return False
        most = math.ceil(self.problems.limit(rising))
        if most <= bound and all(a.cost == b.cost for a, b in zip(graph.ops, rising.ops, strict=True)):
            return True
        problem = Problem(rising, self.problems.budget_bytes)
        return self._cut_bound(problem, self._limits(most)) >= most

    def _prove(self, batch: int, bound: float) -> None:
        self.upper = batch - 1
        if math.isinf(bound):
            self.why = f"no plan keeps the budget at {self.size_name} {batch}"
        else:
            share = bound / max(1, self.problems.graph(batch).cost)
            self.why = f"at {self.size_name} {batch} every plan within the budget has an overhead of {share:.4f} or more"

    def _cut_bound(self, problem: Problem, limits: Limits) -> float:
        from checkmate.solvers.bounds.events.refine import prove_single_events

        session = Session(problem, limits)
        prove_single_events(problem, session, lambda: session.done)
        return session.bound

    def _limits(self, most: int) -> Limits:
        time_s = None if self.limits.time_s is None else max(_LEAST_S, min(self.slice_s, self.left_s()))
        return replace(self.limits, time_s=time_s, seed=self.seed, target_cost=most)

    def _infeasible(self) -> InfeasibleBudgetError:
        lowest = self.problems.floor(1)
        budget = format_bytes(self.problems.budget_bytes)
        return InfeasibleBudgetError(
            f"not even a batch of one keeps {budget}: no plan of any order takes less than {format_bytes(lowest.peak_bytes)}: "
            f"{lowest.why}",
            hint=f"raise the budget to at least {format_at_least(lowest.peak_bytes)}",
            budget_bytes=self.problems.budget_bytes,
            floor_bytes=lowest.peak_bytes,
            binding_op="" if lowest.op is None else self.problems.graph(1).ops[lowest.op].name,
        )

    def _refuse(self) -> None:
        if self.upper < 1:
            raise InfeasibleBudgetError(
                f"not even a batch of one has a plan within {format_bytes(self.problems.budget_bytes)} and the limit on its "
                f"cost: {self.why}",
                hint="raise the budget or `max_overhead`",
                budget_bytes=self.problems.budget_bytes,
            )
        raise PlanNotFoundError(
            f"no plan was found for any batch from 1 to {self.upper} within {format_bytes(self.problems.budget_bytes)} and the "
            f"limit on its cost",
            hint="raise the budget, `max_overhead` or the time limit",
        )
