"""What a plan asks of an allocator, in order."""

from __future__ import annotations

from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.studies.lives import lives, replays


class Request(NamedTuple):
    """One request of an allocator.

    Attributes:
        step: Step of the plan that makes it.
        block: Number of the block that is asked for or given back.
        size_bytes: Bytes that are asked for; 0 gives the block back.
        name: What it is for.
    """

    step: int
    block: int
    size_bytes: int
    name: str


def requests(graph: Graph, plan: Plan) -> list[Request]:
    """Every storage, workspace and replay state of a plan: asked for in the step that makes it, given back after its last.

    What a step asks for comes before what it gives back. Nothing is asked for empty storages, nor for what is resident.

    Args:
        graph: The graph.
        plan: A plan that can be run (`checkmate.simulate` says whether).

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> [(r.step, r.block, r.size_bytes) for r in requests(graph, Plan.from_order(graph, [0, 1]))]
        [(0, 0, 4), (1, 1, 2), (1, 0, 0)]
    """
    blocks = [
        (
            life.made_at,
            life.gone_at - 1,
            graph.values[life.value].size_bytes,
            f"{graph.values[life.value].name} [{life.category}]",
        )
        for life in lives(graph, plan)
    ]
    for replay in replays(graph, plan):
        op = graph.ops[replay.op]
        blocks.append((replay.first, replay.last, op.replay_bytes, f"{op.name} [replay]"))
    for p, step in enumerate(plan.steps):
        if isinstance(step, Compute) and graph.ops[step.op].workspace_bytes:
            op = graph.ops[step.op]
            blocks.append((p, p, op.workspace_bytes, f"{op.name} [workspace]"))
    found = [Request(made, k, size, name) for k, (made, _, size, name) in enumerate(blocks) if size]
    found += [Request(gone, k, 0, name) for k, (_, gone, size, name) in enumerate(blocks) if size and gone < len(plan.steps)]
    return sorted(found, key=lambda r: (r.step, not r.size_bytes))
