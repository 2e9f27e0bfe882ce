"""Advice on the next step with a plan: lines to paste into the user's own program, and commands, with numbers of the plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from checkmate.core.graph import BOUNDARY, Graph
from checkmate.core.result import Curve, Result
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_at_least, format_bytes
from checkmate.report.tables import Markup
from checkmate.solvers.bounds.floor import floor
from checkmate.studies.explain import held_at
from checkmate.studies.lifetimes import CATEGORIES, by_category


def advice(
    timeline: Timeline, keep_all_bytes: int, result: Result | None, curve: Curve | None, files: tuple[str, str]
) -> Iterator[Markup]:
    """Items of the list "What to do next"; ``files`` are those of the graph and of the plan."""
    graph, file, plan_file = timeline.graph, shlex.quote(files[0]), files[1] or "model.plan.json"
    if not files[1]:
        lines = f'checkmate.write(step.graph, "{files[0]}")\ncheckmate.write(step.plan, "{plan_file}")'
        yield Markup("For what follows, write the graph and the plan: <pre>{}</pre>").format(lines)
    yield from _run(graph, timeline.peak_bytes, plan_file)
    yield from _more_memory(timeline, keep_all_bytes, curve, file)
    yield from _less_memory(timeline, keep_all_bytes, curve, file)
    yield from _other_means(timeline)
    if result is not None and result.gap > 0.01:
        yield Markup("A cheaper plan may exist: at most {:.1%} of the cost is left to gain. Search longer: {}").format(
            result.gap, _command(file, result.budget_bytes, " --time-limit 600")
        )
    if curve is None:
        yield Markup(
            "See what each budget costs, and add that figure here with <code>--curve</code>: "
            "<pre>checkmate pareto {} --out curve.json</pre>"
        ).format(file)


def front_end(graph: Graph) -> str:
    """The front end of a graph, by the names of its ops: "torch", "tf2" or "jax"; "" for a graph of none."""
    kinds = {op.kind for op in graph.ops if op.kind} - {BOUNDARY}
    if any(kind.startswith("aten.") for kind in kinds):
        return "torch"
    return "" if not kinds else "tf2" if any(kind[0].isupper() for kind in kinds) else "jax"


def compile_line(graph: Graph, option: str) -> str:
    """The line that compiles the step of a graph with an option such as ``budget='8GiB'``; "" for a graph of no front end."""
    where = front_end(graph)
    if where == "torch":
        optimizer = " optimizer," if _updates(graph) else ""
        return f"step = checkmate.torch.compile(model, loss,{optimizer} example=(x, y), {option})"
    if where == "tf2":
        return f"step = checkmate.tf2.compile(model, loss, optimizer, x, y, {option})"
    if where == "jax" and any(op.kind == BOUNDARY for op in graph.ops):
        return f"loss = checkmate.jax.remat(loss_fn, {option})"
    return f"step = checkmate.jax.plan(step_fn, *arguments, {option})" if where else ""


def _updates(graph: Graph) -> bool:
    """Whether the optimizer's updates are in a graph."""
    return any(op.phase == "optimizer" for op in graph.ops)


def _command(file: str, budget_bytes: int, more: str = "") -> Markup:
    return Markup("<pre>checkmate plan {} --budget {}{}</pre>").format(file, format_at_least(budget_bytes), more)


def _within(graph: Graph, file: str, budget_bytes: int) -> Markup:
    """The line for a budget in the user's program, or the command for a graph of no front end."""
    line = compile_line(graph, f'budget="{format_at_least(budget_bytes)}"')
    return Markup("<pre>{}</pre>").format(line) if line else _command(file, budget_bytes)


def _run(graph: Graph, peak_bytes: int, plan_file: str) -> Iterator[Markup]:
    line, budget = compile_line(graph, f"plan={plan_file!r}"), format_at_least(peak_bytes)
    if line:
        more = ", options and optimizer" if _updates(graph) or front_end(graph) == "tf2" else " and options"
        yield Markup("Run this plan, for the same model, shapes{}: <pre>{}</pre>").format(more, line)
    if front_end(graph) == "torch" and not _updates(graph):
        loop = f'model.compile(backend="checkmate", options={{"budget": "{budget}"}})'
        yield Markup(
            "Or keep your training loop, and let it be planned within the same memory: <pre>{}</pre> If this graph "
            "was captured without an optimizer, add the bytes of the optimizer's state."
        ).format(loop)


def _more_memory(timeline: Timeline, keep_all_bytes: int, curve: Curve | None, file: str) -> Iterator[Markup]:
    graph, overhead = timeline.graph, timeline.graph.overhead(timeline.cost)
    cheaper = [] if curve is None else [p for p in curve.points if timeline.peak_bytes < p.peak_bytes and p.cost < timeline.cost]
    if cheaper and cheaper[0].peak_bytes < keep_all_bytes:
        point = cheaper[0]
        yield Markup("More memory: in {} the curve has a plan for {:.3f} times the cost of each op once, not {:.3f}: {}").format(
            format_bytes(point.peak_bytes), point.overhead, overhead, _within(graph, file, point.peak_bytes)
        )
    if timeline.peak_bytes < keep_all_bytes and overhead > 1:
        yield Markup("Most memory: in {} nothing is computed twice, which saves {:.1%} of the cost of this plan: {}").format(
            format_bytes(keep_all_bytes), 1 - 1 / overhead, _within(graph, file, keep_all_bytes)
        )


def _less_memory(timeline: Timeline, keep_all_bytes: int, curve: Curve | None, file: str) -> Iterator[Markup]:
    graph, least = timeline.graph, floor(timeline.graph)
    lower = [] if curve is None else [point for point in curve.points if point.peak_bytes < timeline.peak_bytes]
    if lower:
        point = lower[-1]
        yield Markup("Less memory: in {} the curve has a plan for {:.3f} times the cost of each op once: {}").format(
            format_bytes(point.peak_bytes), point.overhead, _within(graph, file, point.peak_bytes)
        )
    elif timeline.peak_bytes >= keep_all_bytes:
        middle = (least.peak_bytes + keep_all_bytes) // 2
        yield Markup("This plan saves no memory. Try less: {}").format(_within(graph, file, middle))
    elif graph.overhead(timeline.cost) <= 1.05 and timeline.peak_bytes > least.peak_bytes:
        yield Markup("This plan costs only {:.1%} more than keeping everything. Try less memory: {}").format(
            graph.overhead(timeline.cost) - 1, _within(graph, file, (timeline.peak_bytes + least.peak_bytes) // 2)
        )
    yield Markup("No plan of this step needs less than {}: {}. Below that, only another step helps.").format(
        format_bytes(least.peak_bytes), least.why
    )


def _other_means(timeline: Timeline) -> Iterator[Markup]:
    """Other means to save memory than recomputation: the host, ops in pieces, less resident memory."""
    graph, plan, peak = timeline.graph, timeline.plan, timeline.peak_bytes
    torch, budget = front_end(graph) == "torch", f'budget="{format_at_least(peak)}"'
    frozen = sum(value.size_bytes for value in graph.values if value.on_host)
    if torch and plan.host is None and (frozen or _updates(graph)):
        moved = frozen or max(1, int(by_category(graph, plan)[CATEGORIES.index("activations")].max()))
        told = "{} of frozen weights" if frozen else "On a GPU, copies of the {} of activations that are kept"
        yield Markup(told + " can {} on the host: <pre>{}</pre>").format(
            format_bytes(moved), "stay" if frozen else "be", compile_line(graph, f'{budget}, host="{format_at_least(moved)}"')
        )
    if torch:
        line = compile_line(graph, budget)
        line = line.replace("step = checkmate.torch.compile", "found = checkmate.torch.largest_batch")
        yield Markup("Find the largest batch within the memory of this plan: <pre>{}</pre>").format(line)
    values = [entry for entry in held_at(graph, plan, timeline.peak_step) if entry.kind == "value"]
    if torch and values and 4 * values[0].size_bytes >= peak - graph.resident_bytes:
        largest = values[0]
        yield Markup(
            "One tensor, {}, is {:.0%} of what this plan holds besides resident memory. Its ops may run in pieces: <pre>{}</pre>"
        ).format(
            largest.name,
            largest.size_bytes / (peak - graph.resident_bytes),
            compile_line(graph, f'{budget}, chunking="auto"'),
        )
    if 2 * graph.resident_bytes > peak:
        yield Markup(
            "{:.0%} of the peak are parameters and other resident memory, which no plan changes. Parameters of a smaller type, "
            "an optimizer with less state, or more ranks that share them save more here than recomputation."
        ).format(graph.resident_bytes / peak)
