"""The quick bound: single event cuts where the graph's own order is fullest."""

from __future__ import annotations

from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session


def prove_any_order(folded: Problem, fold: FoldViews, session: Session) -> None:
    """Prove what single events prove for plans of any order, in a few seconds at most.

    Args:
        folded: The problem with its views folded.
        fold: How they were folded.
        session: Takes the bound.
    """
    from checkmate.solvers.bounds.event_cuts import CutModel
    from checkmate.solvers.bounds.refine import first_bytes, separated_peaks, single_cuts

    graph = folded.graph
    count = len(graph.ops)
    once = max(1, graph.cost)
    held = first_bytes(graph, range(count))
    events = separated_peaks(held, {o: o for o in range(count)}, 14, max(1, count // 56))
    until = session.elapsed_s() + 5.0
    single_cuts(
        CutModel(folded),
        events,
        lambda share: session.prove(fold.original.cost + once * share) if share >= 0 else None,
        lambda: session.elapsed_s() > until,
    )
