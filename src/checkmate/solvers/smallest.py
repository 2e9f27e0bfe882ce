"""The smallest peak of a graph: a plan, a proven lower bound, and the op that sets it."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget
from checkmate.core.simulate import simulate
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.evict.orders import late_order
from checkmate.solvers.evict.starts import load_kernels, starts
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import without_unread
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestParameters:
    """Parameters of `smallest_peak`.

    Attributes:
        tries: Attempts at a budget in each bisection. One that fails takes a second on a thousand ops, and near the floor
            most fail, so that the first bisection comes near with one attempt each, and later ones go on from there.
        time_s: Seconds without a limit from the caller.
        precision: A bisection ends when its interval is below one part in so many of the peak: 0.1 %, less than allocators
            round.
    """

    tries: tuple[int, ...] = (1, 5, 40)
    time_s: float = 20.0
    precision: int = 1000


PARAMETERS = SmallestParameters()


def smallest_peak(problem: Problem, limits: Limits | None = None, *, enough: int = 0) -> MinBudget:
    """Bisect the budget down to the proven floor with the greedy plans of the local search.

    The search is a heuristic, so that a budget without a plan proves nothing, and feasibility is not monotone under it: each
    bisection starts again at the floor, with more attempts.

    Args:
        problem: Graph and what a plan may do; its budget is ignored.
        limits: Time and seed; `SmallestParameters.time_s` by default.
        enough: A peak that is low enough, resident bytes included; the bisection ends there.
    """
    from checkmate.solvers.evict.search import Search

    limits = Limits(time_s=PARAMETERS.time_s) if limits is None else limits
    graph = problem.graph
    lowest = floor(graph)
    orders = [list(range(len(graph.ops)))]
    if problem.reorder:
        orders.append(late_order(graph))
    plans = [Plan.from_order(graph, order) for order in orders]
    best = min(plans, key=lambda plan: simulate(graph, plan).peak_bytes)
    peak = simulate(graph, best).peak_bytes
    clock = Session(problem, limits)
    clock.prepare(load_kernels)
    fold = FoldViews.of(graph)
    folded = fold.apply(problem.replace_budget(peak))
    searches = [Search(folded, late, limits.seed, order) for order, late in starts(folded, limits.seed)]
    for tries in PARAMETERS.tries:
        # The floor itself first: many graphs have a plan there, which ends the search at once.
        guess = low = lowest.peak_bytes
        while max(low, enough) < peak and clock.left_s() > 0:
            reached = None
            for search in searches:
                search.set_budget(guess)
                if search.first(tries, lambda: clock.left_s() <= 0, stop_at_first=True):
                    plan = Plan.from_order(graph, without_unread(problem, fold.invert(search.order())))
                    reached = simulate(graph, plan).peak_bytes
                    if reached < peak:
                        best, peak = plan, reached
                    break
            if reached is None:
                low = guess  # not found proves nothing; it only ends this bisection
            if peak - low <= max(1, (peak - graph.resident_bytes) // PARAMETERS.precision):
                break
            guess = (low + peak) // 2
    cost = simulate(graph, best).cost
    return MinBudget(
        plan=best,
        cost=cost,
        overhead=cost / graph.cost if graph.cost else 1.0,
        peak_bytes=peak,
        floor_bytes=lowest.peak_bytes,
        binding_op="" if lowest.op is None else graph.ops[lowest.op].name,
        why=lowest.why,
        elapsed_s=clock.elapsed_s(),
    )
