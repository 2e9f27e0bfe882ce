"""Updates of a whole step in groups: one call of the optimizer for several parameters, where a plan has room for their gradients.

A graph has one update for each parameter, and a plan runs it as soon as the gradient is complete. A call of the optimizer takes
time that does not depend on the number of its parameters: Python code, and on a GPU a dozen launches. An update can run later
than planned, together with others, if their gradients fit into the budget until then. The budget of a step without one is its
peak. Under Inductor updates stay single: their ops are compiled, without a call, and fused with the ops of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from torch import fx

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Discard, Free, Plan, with_frees
from checkmate.core.result import Result
from checkmate.core.simulate import Timeline, simulate
from checkmate.frontend.counted_memory import Counted, counted_bytes
from checkmate.studies.lifetimes import StorageLifetime, storage_lifetimes
from checkmate.torch.graph.optimizer_ops import UPDATE, update_parameters

WORKSPACE = "checkmate_workspace"
"""Key in a node's metadata: bytes of workspace of a call that is no op of a captured graph."""


class Update(NamedTuple):
    """An update in a plan: its op and step, its workspace, the storages it reads, and the first step that has to follow it."""

    op: int
    at: int
    workspace_bytes: int
    reads: tuple[StorageLifetime, ...]
    deadline: int


Group = Sequence[Update]  # runs in one call: ``foreach`` then has the temporary tensors of all its parameters at once


def group_updates(
    graph: Graph, result: Result, budget_bytes: int, counted: Counted | None, most_workspace_bytes: int
) -> tuple[Result, list[Group]]:
    """The result with updates postponed into as few groups as possible within a budget, and the groups in its order.

    Its peak is that of the calls; it does not rise if that saves none. ``counted`` gives the bytes of a plan that count against
    the budget, if these are more. A call for several updates has at most ``most_workspace_bytes`` of temporary tensors.
    """
    timeline, least = simulate(graph, result.plan), counted_bytes(graph, result, counted)
    updates, most = _updates(graph, timeline), max(least, budget_bytes)
    limit = timeline.peak_bytes + most - least
    for _ in range(4 if updates else 0):
        limits = min(limit, timeline.peak_bytes), limit
        groups = min((_groups(timeline, updates, n, most_workspace_bytes) for n in limits), key=len)
        postponed = _postponed(graph, result.plan, groups)
        ops, workspace = [*graph.ops], {group[0]: sum(u.workspace_bytes for u in group) for group in groups}
        for u in updates:
            ops[u.op] = msgspec.structs.replace(ops[u.op], workspace_bytes=workspace.get(u, 0))
        as_run = msgspec.structs.replace(graph, ops=ops), msgspec.structs.replace(postponed, graph_digest="")
        after = simulate(*as_run)
        excess = (after.peak_bytes if counted is None else counted(*as_run)) - most
        if excess <= 0 and after.cost == timeline.cost:  # no longer waits for copies
            return msgspec.structs.replace(result, plan=postponed, peak_bytes=after.peak_bytes), groups
        limit = limit - excess if excess > 0 else timeline.peak_bytes
    return result, [[update] for update in updates]


def call_in_groups(module: fx.GraphModule, groups: Sequence[Group]) -> None:
    """Replace the updates of a module that runs a plan by one call for each optimizer of a group, in place."""
    updates = iter(module.graph.find_nodes(op="call_function", target=UPDATE, sort=True))
    for group in groups:
        nodes = [next(updates) for _ in group]
        for key in dict.fromkeys(node.args[2] for node in nodes):
            mine = [k for k, node in enumerate(nodes) if node.args[2] == key]
            _, gradients, _, which = zip(*(nodes[k].args for k in mine), strict=True)
            with module.graph.inserting_before(nodes[-1]):
                call = module.graph.call_function(update_parameters, (list(gradients), key, which))
            call.meta = {**nodes[-1].meta, WORKSPACE: sum(group[k].workspace_bytes for k in mine)}
        for node in nodes:
            module.graph.erase_node(node)
    module.recompile()


def _updates(graph: Graph, timeline: Timeline) -> list[Update]:
    first = {step.op: p for p, step in reversed([*enumerate(timeline.plan.steps)]) if isinstance(step, Compute)}
    later = {o: {*op.clobbered_by} for o, op in enumerate(graph.ops) if op.phase == "optimizer"}
    for a, b in graph.order:
        later.get(a, set()).add(b)
    lives, end = storage_lifetimes(graph, timeline.plan), len(timeline.bytes)
    return [
        Update(o, p, op.workspace_bytes, tuple(s for s in lives if p in s.reads), min((first[b] for b in later[o]), default=end))
        for p, o, op in sorted((first[o], o, graph.ops[o]) for o in later)
    ]


def _groups(timeline: Timeline, updates: Group, limit: int, most_workspace_bytes: int) -> list[Group]:
    """The fewest groups of consecutive updates, each of which runs in the place of its last one.

    A group that is possible is also possible without its first updates: the longest group at each place makes the fewest.
    """
    groups, k = list[Group](), 0
    while k < len(updates):
        held, end, waiting, deadline = timeline.bytes.copy(), k + 1, set[StorageLifetime](), len(timeline.bytes)
        for j, update in enumerate(updates[k:], k):
            before = sum(u.workspace_bytes for u in updates[k:j])
            if held[update.at] + before <= limit and before + update.workspace_bytes <= most_workspace_bytes:
                end = max(end, j + 1)
            for storage in {*update.reads} - waiting:
                held[storage.gone_at :] += timeline.graph.values[storage.value].size_bytes
            waiting.update(update.reads)
            deadline = min(deadline, update.deadline)
            following = updates[j + 1].at if j + 1 < len(updates) else deadline
            # Within the peak of the plan, an update that has it is not postponed: the peak stays, and is known to the byte.
            has_peak = timeline.bytes[update.at] == timeline.peak_bytes >= limit
            if has_peak or following >= deadline or held[update.at + 1 : following].max(initial=0) > limit:
                break
        groups.append(updates[k:end])
        k = end
    return groups


def _postponed(graph: Graph, plan: Plan, groups: Sequence[Group]) -> Plan:
    """The plan with the updates of a group in the place of its last one; a gradient is freed after the update that reads it."""
    members = {u.op: [Compute(u.op) for u in group] if u is group[-1] else [] for group in groups for u in group}
    made = {v for o in members for v in graph.ops[o].outputs}
    steps = [s for s in plan.steps if not isinstance(s, Discard) and not (isinstance(s, Free) and s.value in made)]
    return with_frees(graph, (n for s in steps for n in (members.get(s.op, [s]) if isinstance(s, Compute) else [s])), plan.host)
