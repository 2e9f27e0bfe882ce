"""Orders of first computations to start from, and the computations that an order can do without."""

from __future__ import annotations

from collections.abc import Sequence

from checkmate.core.graph import Graph
from checkmate.solvers.reductions.unread import ordered_ops


def first_computations(order: Sequence[int]) -> list[int]:
    """Each op of an order once, where it is computed first."""
    return list(dict.fromkeys(order))


def on_demand_ops(graph: Graph) -> frozenset[int]:
    """Forward ops that no loss op depends on: only the backward pass needs them.

    Frameworks run such ops in the forward pass, and their values are then held through it. Computed when the backward pass first
    reads them, they are not. Only ops that no rule ties to a place are among them: recomputable, in no `order`
    pair, without `clobbered_by` and replay bytes, overwriting nothing, and with readers.

    Args:
        graph: A graph whose views are folded; it has none without a loss op.
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
        if not needed[o] and op.phase == "forward" and o not in tied and _is_free(graph, o) and _has_reader(graph, o)
    )


def deferred_weight_gradients(graph: Graph) -> frozenset[int]:
    """Backward ops that are better left to the end: without readers, kept, and with outputs larger than their inputs.

    A weight gradient that is larger than the activations and gradients it is computed from costs less memory as those.
    Whether it pays depends on what else reads them, so that searches start both with and without it.

    Args:
        graph: A graph whose views are folded.
    """
    tied = ordered_ops(graph) | {c for op in graph.ops for c in op.clobbered_by}
    sinks: set[int] = set()
    for o, op in enumerate(graph.ops):
        if o in tied or op.phase != "backward" or not _is_free(graph, o):
            continue
        if any(graph.readers[v] for v in op.outputs) or not all(graph.values[v].kept for v in op.outputs):
            continue
        made = sum(graph.values[v].size_bytes for v in op.outputs)
        read = sum(graph.values[v].size_bytes for v in {graph.root[u] for u in op.inputs})
        if made > read:
            sinks.add(o)
    return frozenset(sinks)


def late_order(graph: Graph, late: frozenset[int] | None = None) -> list[int]:
    """The graph's own order with some ops moved to right before their first reader, or to the end.

    Args:
        graph: The graph.
        late: Ops to move; by default those of `on_demand_ops` and `deferred_weight_gradients`.

    Returns:
        Every op once.
    """
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


def _has_reader(graph: Graph, o: int) -> bool:
    return any(graph.readers[v] for v in graph.ops[o].outputs)
