"""Starts of a search: the order of first computations, and the ops that are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.solvers.alarm import Flag
from checkmate.solvers.reductions.fold_views import may_run_again
from checkmate.solvers.reductions.unread import ordered_ops

if TYPE_CHECKING:
    from checkmate.solvers.evict.search import Search


class Start(NamedTuple):
    """Every op in the order of first computations, and those that are computed when another op needs them instead.

    An op that is listed again has another stage there (`Search`).
    """

    order: tuple[int, ...]
    on_demand: frozenset[int]

    def search(self, problem: Problem, seed: int, time_up: Flag | None = None) -> Search:
        """A search of the problem from here."""
        from checkmate.solvers.evict.search import Search

        return Search(problem, self.on_demand, seed, self.order, time_up)


def target_lists(problem: Problem) -> list[frozenset[int]]:
    """Sets of ops to compute on demand, the most promising first; one empty set without reordering."""
    if not problem.reorder:
        return [frozenset()]
    on_demand = on_demand_ops(problem.graph)
    deferred = deferred_weight_gradients(problem.graph)
    return [on_demand | deferred, on_demand] if deferred else [on_demand]


def ops_of_kept(problem: Problem) -> tuple[int, ...]:
    """Ops of kept values that may be computed again, those first that need most bytes beside the values.

    At the end the values that were made are held while the others are made. The sum of what is held and what an op needs is
    lowest at its highest if the ops that need most come first: the exchange argument of scheduling.
    """
    graph = problem.graph

    def beside(o: int) -> int:
        op = graph.ops[o]
        others = {v for v in (*op.inputs, *op.outputs) if v not in op.outputs or not graph.values[v].kept}
        return op.workspace_bytes + sum(graph.values[v].size_bytes for v in others)

    ops = {graph.producer[v] for v, x in enumerate(graph.values) if x.kept and x.size_bytes}
    return tuple(sorted((o for o in ops if may_run_again(problem, o)), key=lambda o: (-beside(o), o)))


def starts(problem: Problem, seed: int, time_up: Flag | None = None) -> Iterator[Start]:
    """Starts of searches, each made when the one before it has been used.

    The given order first. Where kept values take a quarter of the budget, it once more, with their ops listed again at its end:
    below that there is room for all of them, whenever they are made. Then the lower of it and one of list scheduling, annealed
    to hold less above the budget; on a graph of over 3,000 ops, where annealing takes seconds, the scheduled one as it is, if
    it is lower.
    """
    graph = problem.graph
    given = tuple(range(len(graph.ops)))
    late_ops = target_lists(problem)
    yield from (Start(given, late) for late in late_ops)
    room = problem.budget_bytes - graph.resident_bytes
    again = ops_of_kept(problem)
    kept_bytes = sum(graph.values[v].size_bytes for o in again for v in graph.ops[o].outputs if graph.values[v].kept)
    if kept_bytes > 0.25 * room:
        yield Start((*given, *again), late_ops[0])
    if not problem.reorder:
        return
    from checkmate.solvers.evict.anneal import anneal_order
    from checkmate.solvers.evict.schedule import low_order

    low = low_order(problem, seed, time_up)
    if len(given) <= 3000:
        yield Start(tuple(anneal_order(problem, low, room, seed, time_up)), frozenset())
    elif low != list(given):
        yield Start(tuple(low), frozenset())


def on_demand_ops(graph: Graph) -> frozenset[int]:
    """Forward ops that no loss op depends on: only the backward pass needs them.

    Frameworks run such ops in the forward pass, and their values are then held through it. Computed when the backward pass first
    reads them, they are not. Only ops that no rule ties to a place are among them: recomputable, in no `order`
    pair, without `clobbered_by` and replay bytes, overwriting nothing, and with readers.
    """
    tied = ordered_ops(graph) | {c for op in graph.ops for c in op.clobbered_by}
    needed = [op.phase == "loss" for op in graph.ops]
    if not any(needed):
        return frozenset()
    for o in range(len(graph.ops) - 1, -1, -1):
        needed[o] = needed[o] or any(needed[r] for v in graph.ops[o].outputs for r in graph.readers[v])
    return frozenset(
        o
        for o, op in enumerate(graph.ops)
        if not needed[o] and op.phase == "forward" and o not in tied and _is_free(graph, o)
        if any(graph.readers[v] for v in op.outputs)
    )


def movable_to_end(graph: Graph) -> frozenset[int]:
    """Ops that nothing keeps from being computed last: tied to no place, and all that they make is kept and unread."""
    tied = ordered_ops(graph) | {c for op in graph.ops for c in op.clobbered_by}
    return frozenset(
        o
        for o, op in enumerate(graph.ops)
        if o not in tied and _is_free(graph, o) and all(graph.values[v].kept and not graph.readers[v] for v in op.outputs)
    )


def deferred_weight_gradients(graph: Graph) -> frozenset[int]:
    """Backward ops that are better left to the end: without readers, kept, and with outputs larger than their inputs.

    A weight gradient that is larger than the activations and gradients it is computed from costs less memory as those.
    Whether it pays depends on what else reads them, so that searches start both with and without it.
    """

    def made_less_read(o: int) -> int:
        op = graph.ops[o]
        made = sum(graph.values[v].size_bytes for v in op.outputs)
        return made - sum(graph.values[v].size_bytes for v in {graph.root[u] for u in op.inputs})

    return frozenset(o for o in movable_to_end(graph) if graph.ops[o].phase == "backward" and made_less_read(o) > 0)


def late_order(graph: Graph, late: frozenset[int] | None = None) -> list[int]:
    """The graph's own order with some ops moved to right before their first reader, or to the end."""
    late = on_demand_ops(graph) | deferred_weight_gradients(graph) if late is None else late
    out: list[int] = []
    done = [False] * len(graph.ops)
    # Depth first from the targets, with an explicit stack: whatever a target needs and was moved comes right before it.
    for target in [*(o for o in range(len(graph.ops)) if o not in late), *sorted(late)]:
        stack = [target]
        while stack:
            o = stack[-1]
            if done[o]:
                stack.pop()
                continue
            waiting = [p for p in (graph.producer[v] for v in graph.ops[o].inputs) if not done[p]]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            done[o] = True
            out.append(o)
    return out


def _is_free(graph: Graph, o: int) -> bool:
    op = graph.ops[o]
    return op.recomputable and not op.clobbered_by and not op.replay_bytes
