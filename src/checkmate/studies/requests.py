"""The sequence of allocations and frees that a plan makes."""

from __future__ import annotations

from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.studies.lifetimes import replays, storage_lifetimes


class Request(NamedTuple):
    """One request to an allocator.

    Attributes:
        step: Step of the plan that makes it.
        block: Number of the block that is allocated or freed.
        size_bytes: Bytes to allocate; 0 frees the block.
        name: Name of the value or op, and the kind of memory.
    """

    step: int
    block: int
    size_bytes: int
    name: str


def requests(graph: Graph, plan: Plan) -> list[Request]:
    """Requests for all storages, workspaces and replay states of a plan, in the order in which they are made.

    A block is allocated in the step that makes it and freed in its last one; within a step allocations come before frees,
    as an op's inputs are freed after it has run. Empty storages and resident bytes make no requests.

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
            lifetime.made_at,
            lifetime.gone_at - 1,
            graph.values[lifetime.value].size_bytes,
            f"{graph.values[lifetime.value].name} [{lifetime.category}]",
        )
        for lifetime in storage_lifetimes(graph, plan)
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
