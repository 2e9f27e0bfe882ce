"""Data of the report page, as one compact JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, Step
from checkmate.core.simulate import Timeline
from checkmate.report.tables import Markup
from checkmate.studies.lifetimes import CATEGORIES, replays, storage_lifetimes

_PHASES = ("forward", "loss", "backward", "optimizer")


class NamedPlan(NamedTuple):
    """A plan with its name on the page and its memory."""

    name: str
    timeline: Timeline


def embedded(graph: Graph, runs: Sequence[NamedPlan], budget_bytes: int | None) -> Markup:
    """Encode the graph and its plans as JSON that is safe inside a script element; repeated text is stored once."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    content = {
        "name": graph.name,
        "cost_unit": graph.cost_unit,
        "resident": graph.resident_bytes,
        "budget": budget_bytes,
        "categories": CATEGORIES,
        "phases": _PHASES,
        "ops": {
            "name": [op.name for op in graph.ops],
            "kind": [number(op.kind) for op in graph.ops],
            "source": [number(op.source) for op in graph.ops],
            "phase": [_PHASES.index(op.phase) for op in graph.ops],
            "cost": [op.cost for op in graph.ops],
            "workspace": [op.workspace_bytes for op in graph.ops],
            "replay": [op.replay_bytes for op in graph.ops],
            "inputs": [op.inputs for op in graph.ops],
            "outputs": [op.outputs for op in graph.ops],
        },
        "values": {
            "name": [value.name for value in graph.values],
            "size": [value.size_bytes for value in graph.values],
            "root": graph.root,
            "kept": [int(value.kept) for value in graph.values],
        },
        "runs": [_run(graph, run) for run in runs],
        "strings": list(strings),
    }
    return Markup(msgspec.json.encode(content).decode().replace("<", "\\u003c"))


def _code(graph: Graph, step: Step) -> int:
    """A step as a number.

    With n values: o for a computation of op o, -1 - v for a free of value v, -2 - n - v for a fetch of v, and -1 - n for any
    other copy.
    """
    if isinstance(step, Compute):
        return step.op
    if isinstance(step, Free):
        return -1 - step.value
    return -1 - len(graph.values) - (1 + step.value if isinstance(step, Fetch) else 0)


def _run(graph: Graph, run: NamedPlan) -> dict[str, Any]:
    timeline, plan = run.timeline, run.timeline.plan
    made = storage_lifetimes(graph, plan)
    return {
        "name": run.name,
        "peak": timeline.peak_bytes,
        "peak_step": timeline.peak_step,
        "cost": timeline.cost,
        "steps": [_code(graph, step) for step in plan.steps],
        "lives": {
            "value": [life.value for life in made],
            "made": [life.made_at for life in made],
            "gone": [life.gone_at for life in made],
            "category": [CATEGORIES.index(life.category) for life in made],
        },
        "replays": replays(graph, plan),
    }
