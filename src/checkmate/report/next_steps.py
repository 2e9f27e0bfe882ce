"""Advice on a plan: how to run it, and the budget to try next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from checkmate.core.curve import Curve
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_at_least, format_bytes
from checkmate.report.markup import Markup
from checkmate.solvers.bounds.floor import floor

_CHEAP, _EXPENSIVE, _LOOSE = 1.05, 1.2, 0.01
"""Overhead up to which less memory is worth a try, overhead from which more memory is, and gap above which a longer search is."""


class Sources(NamedTuple):
    """Files that a reader of the page can use in commands.

    Attributes:
        graph: Graph file.
        plan: Plan or result file.
    """

    graph: str = "model.graph.json"
    plan: str = "model.plan.json"


def next_steps(
    graph: Graph, timeline: Timeline, keep_all_bytes: int, result: Result | None, curve: Curve | None, sources: Sources
) -> Markup:
    """Advice on a plan, from its numbers: how to run it, which budget to try, what else would help.

    Args:
        graph: The graph.
        timeline: The plan's memory and cost.
        keep_all_bytes: Peak of the plan that computes every op once.
        result: Result of the solve, if there is one.
        curve: Plans by budget, if they were computed.
        sources: Files to name in commands.
    """
    advice = [*_run(graph, timeline, sources), *_budget(graph, timeline, keep_all_bytes, result, curve, sources)]
    return Markup('<ul id="next">\n{}\n</ul>').format(Markup("\n").join(Markup("<li>{}</li>").format(item) for item in advice))


def _run(graph: Graph, timeline: Timeline, sources: Sources) -> Iterator[Markup]:
    kinds = {op.kind for op in graph.ops}
    whole = any(op.phase == "optimizer" for op in graph.ops)
    if any(kind.startswith("aten.") for kind in kinds):
        optimizer = " optimizer," if whole else ""
        step = f"step = checkmate.torch.compile(model, loss,{optimizer} example=(x, y), plan={sources.plan!r})"
        loop = f'model.compile(backend="checkmate", options={{"budget": "{format_at_least(timeline.peak_bytes)}"}})'
        yield Markup(
            "Run this plan in PyTorch, for the same model, shapes and options: <pre>{}</pre> Or keep your training loop and let "
            "it be planned within the same memory: <pre>{}</pre>"
        ).format(step, loop)
    elif any(kinds):
        step = f"step = checkmate.tf2.compile(model, loss, optimizer, x, y, plan={sources.plan!r})"
        yield Markup("Run this plan in TensorFlow, for the same model, shapes and optimizer: <pre>{}</pre>").format(step)


def _budget(
    graph: Graph, timeline: Timeline, keep_all_bytes: int, result: Result | None, curve: Curve | None, sources: Sources
) -> Iterable[Markup]:
    least, peak = floor(graph), timeline.peak_bytes
    overhead = timeline.cost / graph.cost if graph.cost else 1.0
    lower = [] if curve is None else [point for point in curve.points if point.peak_bytes < peak]
    if peak >= keep_all_bytes:
        yield Markup("This plan saves no memory. Try a smaller budget: {}").format(_plan("50%", sources))
    elif lower and overhead < _EXPENSIVE:
        point = next((point for point in lower if point.overhead <= _EXPENSIVE), lower[-1])
        yield Markup("The curve above has a plan in {} for {:.3f} times the cost of computing every op once: {}").format(
            format_bytes(point.peak_bytes), point.overhead, _plan(format_at_least(point.budget_bytes), sources)
        )
    elif overhead <= _CHEAP and peak > least.peak_bytes:
        middle = format_at_least((peak + least.peak_bytes) // 2)
        yield Markup("This plan costs only {:.1%} more than keeping everything. Try a smaller budget: {}").format(
            overhead - 1, _plan(middle, sources)
        )
    elif overhead >= _EXPENSIVE:
        middle = format_at_least((peak + keep_all_bytes) // 2)
        yield Markup("This plan takes {:.2f} times the cost of computing every op once. A larger budget costs less: {}").format(
            overhead, _plan(middle, sources)
        )
    yield Markup("No plan of this step needs less than {}: {}. Below that, only a smaller batch or model helps.").format(
        format_bytes(least.peak_bytes), least.why
    )
    if 2 * graph.resident_bytes > peak:
        yield Markup(
            "{:.0%} of the peak are parameters and other resident memory, which no plan changes. Parameters of a smaller type, "
            "an optimizer with less state, or more ranks that share them save more here than recomputation."
        ).format(graph.resident_bytes / peak)
    if result is not None and result.gap > _LOOSE:
        yield Markup("A cheaper plan may exist: at most {:.1%} of the cost is left to gain. Search longer: {}").format(
            result.gap, _plan(format_at_least(result.budget_bytes), sources, "--time-limit 600")
        )
    if curve is None:
        yield Markup("See what each budget costs, and add that figure here with <code>--curve</code>: {}").format(
            _command("pareto", sources.graph, "--out curve.json")
        )


def _plan(budget: str, sources: Sources, more: str = "") -> Markup:
    return _command("plan", sources.graph, f"--budget {budget} {more}".rstrip())


def _command(verb: str, file: str, options: str) -> Markup:
    return Markup("<pre>checkmate {} {} {}</pre>").format(verb, shlex.quote(file), options)
