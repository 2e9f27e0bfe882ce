"""Advice on a plan: how to run it, and the budget to try next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from checkmate.core.graph import Graph
from checkmate.core.result import Curve, Result
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_at_least, format_bytes
from checkmate.report.tables import Markup
from checkmate.solvers.bounds.floor import floor


def how_to_run(graph: Graph, peak_bytes: int, plan_file: str) -> Iterator[Markup]:
    """The call that runs a plan in the framework of its graph."""
    kinds = {op.kind for op in graph.ops}
    if any(kind.startswith("aten.") for kind in kinds):
        optimizer = " optimizer," if any(op.phase == "optimizer" for op in graph.ops) else ""
        step = f"step = checkmate.torch.compile(model, loss,{optimizer} example=(x, y), plan={plan_file!r})"
        loop = f'model.compile(backend="checkmate", options={{"budget": "{format_at_least(peak_bytes)}"}})'
        yield Markup(
            "Run this plan in PyTorch, for the same model, shapes and options: <pre>{}</pre> Or keep your training loop and let "
            "it be planned within the same memory: <pre>{}</pre>"
        ).format(step, loop)
    elif any(kinds):
        step = f"step = checkmate.tf2.compile(model, loss, optimizer, x, y, plan={plan_file!r})"
        yield Markup("Run this plan in TensorFlow, for the same model, shapes and optimizer: <pre>{}</pre>").format(step)


def next_budgets(
    timeline: Timeline, keep_all_bytes: int, result: Result | None, curve: Curve | None, graph_file: str
) -> Iterator[Markup]:
    """The budget to try next and other advice, from the numbers of a plan."""
    graph, peak, file = timeline.graph, timeline.peak_bytes, shlex.quote(graph_file)

    def plan(budget: str, more: str = "") -> Markup:
        return Markup("<pre>checkmate plan {} --budget {}{}</pre>").format(file, budget, more)

    least, overhead = floor(graph), graph.overhead(timeline.cost)
    expensive = 1.2  # overhead above which to try more memory
    lower = [] if curve is None else [point for point in curve.points if point.peak_bytes < peak]
    if peak >= keep_all_bytes:
        yield Markup("This plan saves no memory. Try a smaller budget: {}").format(plan("50%"))
    elif lower and overhead < expensive:
        point = next((point for point in lower if point.overhead <= expensive), lower[-1])
        yield Markup("The curve above has a plan in {} for {:.3f} times the cost of computing every op once: {}").format(
            format_bytes(point.peak_bytes), point.overhead, plan(format_at_least(point.budget_bytes))
        )
    elif overhead >= expensive:
        more = format_at_least((peak + keep_all_bytes) // 2)
        yield Markup("This plan takes {:.2f} times the cost of computing every op once. A larger budget costs less: {}").format(
            overhead, plan(more)
        )
    elif overhead <= 1.05 and peak > least.peak_bytes:
        less = format_at_least((peak + least.peak_bytes) // 2)
        yield Markup("This plan costs only {:.1%} more than keeping everything. Try a smaller budget: {}").format(
            overhead - 1, plan(less)
        )
    yield Markup("No plan of this step needs less than {}: {}. Below that, only a smaller batch or model helps.").format(
        format_bytes(least.peak_bytes), least.why
    )
    if 2 * graph.resident_bytes > peak:
        yield Markup(
            "{:.0%} of the peak are parameters and other resident memory, which no plan changes. Parameters of a smaller type, "
            "an optimizer with less state, or more ranks that share them save more here than recomputation."
        ).format(graph.resident_bytes / peak)
    if result is not None and result.gap > 0.01:
        yield Markup("A cheaper plan may exist: at most {:.1%} of the cost is left to gain. Search longer: {}").format(
            result.gap, plan(format_at_least(result.budget_bytes), " --time-limit 600")
        )
    if curve is None:
        yield Markup(
            "See what each budget costs, and add that figure here with <code>--curve</code>: "
            "<pre>checkmate pareto {} --out curve.json</pre>"
        ).format(file)
