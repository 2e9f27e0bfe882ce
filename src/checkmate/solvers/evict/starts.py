"""Starts of a search: the order of first computations, and the ops that are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.solvers.clocks import Flag
from checkmate.solvers.reductions.fold_views import may_run_again
from checkmate.solvers.reductions.unread import ordered_ops
from checkmate.solvers.walks import after_needs

if TYPE_CHECKING:
    from checkmate.solvers.evict.search import Search


class Start(NamedTuple):
    """Every op in the order of first computations, and the ops that are computed on demand instead.

    An op that is listed again has another stage there (`Search`).
    """

    order: tuple[int, ...]
    on_demand: frozenset[int]

    def search(self, problem: Problem, seed: int, time_up: Flag | None = None) -> Search:
        """A search of the problem from this start."""
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
    """Recomputable ops of kept values, in descending order of the bytes that they need in addition to the kept values.

    At the end, kept values are held while later ones are computed. The peak of held bytes plus the bytes that an op needs is
    lowest if the ops that need most come first: the exchange argument of scheduling.
    """
    graph = problem.graph

    def beside(o: int) -> int:
        op = graph.ops[o]
        others = {v for v in (*op.inputs, *op.outputs) if v not in op.outputs or not graph.values[v].kept}
        return op.workspace_bytes + sum(graph.values[v].size_bytes for v in others)

    ops = {graph.producer[v] for v, x in enumerate(graph.values) if x.kept and x.size_bytes}
    return tuple(sorted((o for o in ops if may_run_again(problem, o)), key=lambda o: (-beside(o), o)))


def starts(problem: Problem, seed: int, time_up: Flag | None = None) -> Iterator[Start]:
    """Starts of searches, each made when the previous one has been used.

    First the given order. If kept values take over a quarter of the budget, the given order again, with their ops listed again
    at its end: smaller kept values fit whenever they are made. Then the lower of the given and a list-scheduled order, annealed
    to hold fewer bytes over the budget. On graphs of over 3,000 ops annealing takes seconds: there it is the list-scheduled
    order itself, if it is lower.
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

    Frameworks run these ops in the forward pass and hold their values to its end. A plan that computes them when the backward
    pass first reads them does not. Only ops that no rule ties to a place are included: recomputable, in no `order`
    pair, without `clobbered_by` and replay bytes, overwriting nothing, and with readers.
    """
    needed = [op.phase == "loss" for op in graph.ops]
    if not any(needed):
        return frozenset()
    for o in range(len(graph.ops) - 1, -1, -1):
        needed[o] = needed[o] or any(needed[r] for v in graph.ops[o].outputs for r in graph.readers[v])
    late = [o for o in _untied(graph) if not needed[o] and graph.ops[o].phase == "forward"]
    return frozenset(o for o in late if any(graph.readers[v] for v in graph.ops[o].outputs))


def movable_to_end(graph: Graph) -> frozenset[int]:
    """Ops that can be computed last: no rule ties them to a place, and all their outputs are kept and unread."""
    return frozenset(
        o for o in _untied(graph) if all(graph.values[v].kept and not graph.readers[v] for v in graph.ops[o].outputs)
    )


def deferred_weight_gradients(graph: Graph) -> frozenset[int]:
    """Backward ops to try at the end: their outputs are kept, unread, and larger than their inputs.

    If a weight gradient is larger than the activations and gradients that it is computed from, holding these takes less memory.
    Whether that pays depends on the other readers of these inputs, so searches start both with and without it.
    """

    def made_less_read(o: int) -> int:
        op = graph.ops[o]
        made = sum(graph.values[v].size_bytes for v in op.outputs)
        return made - sum(graph.values[v].size_bytes for v in {graph.root[u] for u in op.inputs})

    return frozenset(o for o in movable_to_end(graph) if graph.ops[o].phase == "backward" and made_less_read(o) > 0)


def late_order(graph: Graph) -> list[int]:
    """The graph's own order with some ops moved right before their first reader, or to the end."""
    late = on_demand_ops(graph) | deferred_weight_gradients(graph)
    targets = sorted(range(len(graph.ops)), key=lambda o: (o in late, o))
    return after_needs(targets, lambda o: (graph.producer[v] for v in graph.ops[o].inputs))


def _untied(graph: Graph) -> list[int]:
    """Ops that no rule ties to a place."""
    tied = ordered_ops(graph) | {c for op in graph.ops for c in op.clobbered_by}
    free = (op.recomputable and not op.clobbered_by and not op.replay_bytes for op in graph.ops)
    return [o for o, is_free in enumerate(free) if is_free and o not in tied]
